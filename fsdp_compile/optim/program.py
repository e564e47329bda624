"""What an optimizer does to each element, recorded from the optimizer itself, as a function that Inductor compiles.

    recorded = record(optimizer, group, state, dtype)    runs the optimizer's own `step` on a stand-in for a parameter
    recorded.program     its operators, the same ones in every step
    recorded.scalars     the floats among their arguments: learning rate, weight decay, bias corrections of this step
    recorded.state       scalars of the state after the step, such as the step count
    fused(programs, ...)    the update of several tensors in one graph, with scalars as inputs

The stand-in has two elements on the CPU. Recording costs the host as much as the step of one parameter, however many
share the scalars; on the meta device it would cost several times that, as torch computes shapes there in Python.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fsdp_compile.optim._torch import TorchDispatchMode, step_without_hooks
from fsdp_compile.optim.traced_numbers import Trace

_NUMEL = 2  # elements of a stand-in: any number but 1, which is broadcast


class Value(NamedTuple):
    """A tensor: 0 is the parameter, 1 its gradient, then come its state and the results in order."""

    position: int


class Scalar(NamedTuple):
    """A float, by its position in `Recorded.scalars`."""

    position: int


class Operation(NamedTuple):
    """One operator; its result is `Value(result)`, which is one of its operands if it works in place."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: int


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """The operators of one step in order. Programs are compared by identity, which costs nothing."""

    names: tuple[str, ...]  # of the state of the parameter's shape: `Value(2)` and following
    operations: tuple[Operation, ...]


class Recorded(NamedTuple):
    """A step of one parameter, see above. Each scalar is a tensor on the CPU, shape `()`, of one of `numbers`."""

    program: UpdateProgram
    scalars: tuple[Tensor, ...]
    state: dict[str, Tensor]
    numbers: tuple[float, ...]


class Count(Tensor):
    """A copy of a 0-d tensor of the state, such as a step count: what a step does with it is noted.

    Attributes:
        added: the number that was added to it.
        only_adds: whether that was done once, and then nothing but to read it.
        value: what it was when it was read.
    """

    added: float
    only_adds: bool
    value: float
    _number: Callable[[float], float]

    @staticmethod
    def of(value: Tensor, name: str, trace: Trace) -> "Count":
        """A copy of `value`, whose numbers in `trace` have this name."""
        found = value.detach().clone().as_subclass(Count)
        found.added, found.only_adds, found.value = 0, True, math.nan
        found._number = lambda value: trace.number(value, frozenset((name,)), operator.itemgetter(name))
        return found

    def item(self) -> Any:
        """The number, which remembers what is made of it."""
        self.value = super().item()
        return self._number(self.value) if type(self.value) is float else self.value

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note that the step calls an operator with it."""
        name = func._schema.name
        is_first = self.added == 0 and math.isnan(self.value)
        if name == "aten::add_" and args[0] is self and type(args[1]) in (int, float) and is_first:
            self.added = args[1]
        elif name != "aten::_local_scalar_dense":
            self.only_adds = False


class NotRecordable(Exception):
    """The optimizer does something that no program expresses."""


def _times(x: Any, factor: Any) -> Any:
    return x if isinstance(factor, int) and factor == 1 else x * factor


# Each operator as arithmetic, in which floats may be 0-d tensors: what changes from step to step is an input.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, alpha=1: x + _times(y, alpha),
    "sub": lambda x, y, alpha=1: x - _times(y, alpha),
    "mul": operator.mul,
    "div": operator.truediv,
    "addcmul": lambda x, y, z, value=1: x + _times(y, value) * z,
    "addcdiv": lambda x, y, z, value=1: x + _times(y, value) / z,
    "lerp": lambda x, y, weight: x + (y - x) * weight,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "neg": operator.neg,
    "reciprocal": torch.reciprocal,
    "maximum": lambda x, y, out=None: torch.maximum(x, y),
    "copy": lambda x, y: y,
    "clone": lambda x, memory_format=None: x,
}


class _Recorder(TorchDispatchMode):
    """Records every operator that reads one of `tensors` or a value computed from them; all operators run."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        self.tensors = list(tensors)  # alive, so that no id is used again
        self.operations: list[Operation] = []
        self.scalars: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_recorded([*args, *kwargs.values()]):
            for each in args:
                if isinstance(each, Count):
                    each.note(func, args)
            return result  # of the profiler, or arithmetic with step counts
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name not in _ARITHMETIC or not isinstance(result, Tensor):  # such as `item`, whose value would mean nothing
            raise NotRecordable(f"{func} in the step")
        given = tuple(map(self._argument, args)), tuple((key, self._argument(each)) for key, each in kwargs.items())
        position = self.positions.setdefault(id(result), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(result)
        self.operations.append(Operation(name, *given, position))
        return result

    def _is_recorded(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(map(self._is_recorded, argument))
        return id(argument) in self.positions

    def _argument(self, argument: Any) -> Any:
        if id(argument) in self.positions:
            return Value(self.positions[id(argument)])
        if isinstance(argument, Tensor):
            if argument.dim() or argument.device.type != "cpu":  # a learning rate may be a tensor
                raise NotRecordable("a tensor that is neither the parameter's nor a scalar on the CPU")
            argument = argument.item()
        if isinstance(argument, float):
            self.scalars.append(argument)
            return Scalar(len(self.scalars) - 1)
        if isinstance(argument, (list, tuple, torch.device)):
            raise NotRecordable(f"an argument {argument!r}")
        return argument


def record(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any], dtype: torch.dtype) -> Recorded:
    """Record a step of one parameter of `group`, with its `state`; changes neither that nor the optimizer.

    Args:
        state: of a parameter; each tensor with dimensions has the parameter's shape. `Count`s are changed.
        dtype: of the parameter and of its gradient.

    Raises:
        NotRecordable: the step makes state, or calls an operator that is not in `_ARITHMETIC`.
    """
    param = nn.Parameter(torch.zeros(_NUMEL, dtype=dtype))
    param.grad = torch.zeros(_NUMEL, dtype=dtype)
    own: dict[str, Any] = dict(state)
    tensors, scalars = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            own[name] = tensors[name] = torch.zeros(_NUMEL, dtype=value.dtype)
        elif isinstance(value, Tensor):
            own[name] = scalars[name] = value if isinstance(value, Count) else value.detach().clone()
    before = dict(own)
    recorder = _Recorder([param, param.grad, *tensors.values()])
    groups, states = optimizer.param_groups, optimizer.state
    try:
        optimizer.param_groups = [{**group, "params": [param], "foreach": False, "fused": False}]
        optimizer.state = type(states)(dict, {param: own} if own else {})
        with recorder:
            step_without_hooks(optimizer)
        after: dict[str, Any] = optimizer.state.get(param, {})
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    if after.keys() != before.keys() or any(after[name] is not before[name] for name in before):
        raise NotRecordable("state that the step makes")
    left = {name: value.as_subclass(Tensor) for name, value in scalars.items()}
    program, numbers = UpdateProgram(tuple(tensors), tuple(recorder.operations)), tuple(recorder.scalars)
    return Recorded(program, scalars_of(numbers, dtype), left, numbers)


def scalars_of(numbers: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The numbers of a step of parameters of `dtype` as tensors, each `()`."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.tensor(numbers, dtype=precise).unbind()


def fused(
    programs: Sequence[tuple[UpdateProgram, int]], scalars: Sequence[int], clips: bool, spans: Sequence[tuple[int, int]]
) -> fx.GraphModule:
    """Build one function that updates several tensors in place.

    Args:
        programs: for each tensor its program, and which set of scalars it takes.
        scalars: the number of scalars of each set.
        clips: whether gradients are multiplied by a coefficient.
        spans: for each tensor where its gradient begins and ends in that of the flat parameter.

    Returns:
        A function of, in this order: for each tensor the parameter and its state, each 1-D; the gradient of the flat
        parameter, 1-D; the coefficient, if any; all scalars, set by set. The coefficient and the scalars have shape
        `()`.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def placeholder(name: str) -> fx.Proxy:
        return fx.Proxy(graph.placeholder(name), tracer)

    stored = [
        [placeholder(f"{name}_{i}") for name in ("param", *program.names)] for i, (program, _) in enumerate(programs)
    ]
    flat_gradient = placeholder("grad")
    coefficient = placeholder("coefficient") if clips else None
    sets = [[placeholder(f"scalar_{i}_{j}") for j in range(count)] for i, count in enumerate(scalars)]
    for (param, *state), (program, chosen), span in zip(stored, programs, spans, strict=True):
        gradient = tracer.create_proxy("call_function", torch.ops.aten.slice.Tensor, (flat_gradient, 0, *span), {})
        tensors = [param, gradient, *state]
        values: dict[int, Any] = dict(enumerate(tensors))
        if coefficient is not None:
            values[1] = values[1] * coefficient
        own = sets[chosen]

        def actual(argument: Any, values: dict[int, Any] = values, own: list[fx.Proxy] = own) -> Any:
            if isinstance(argument, Value):
                return values[argument.position]
            return own[argument.position] if isinstance(argument, Scalar) else argument

        for name, args, kwargs, result in program.operations:
            values[result] = _ARITHMETIC[name](*map(actual, args), **{key: actual(each) for key, each in kwargs})
        for position, tensor in enumerate(tensors):
            if position != 1 and values[position] is not tensor:
                tracer.create_proxy("call_function", torch.ops.aten.copy_.default, (tensor, values[position]), {})
    graph.output(())
    return fx.GraphModule({}, graph)
