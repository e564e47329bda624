"""What an optimizer of complete matrices does to one parameter: recorded from its own `step`, and cut in three.

    before    on the elements that each rank stores    Muon: momentum, Nesterov's average, the cast to bfloat16
    whole     on the complete matrix, on its owner     Muon: Newton-Schulz
    after     on the elements that each rank stores    Muon: weight decay, the update

The operators are those that `step` has called, with their numbers, and the same kernels run. So nothing of an optimizer
is written a second time, and what an option changes is seen in the next recording. The stand-in for the parameter has
its shape and no memory. A recording that repeats an earlier one, but for numbers such as the learning rate, computes
nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.optim._torch import TorchDispatchMode, of_lists, step_without_hooks, storage_of
from fsdp_compile.optim.program import NotRecordable, Value

State = dict[str, Any]

_ELEMENTWISE = {
    *("abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "clone", "copy", "div", "exp", "lerp"),
    *("log", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "sign", "sqrt"),
    *("sub", "tanh", "where", "_to_copy"),
}
"""Operators whose result has at each index what the operands have there, by their names without `_`."""


class Operation(NamedTuple):
    """One operator; its result is `Value(result)`, which is one of its operands if it works in place."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload, and without the `_` of one that works in place."""
        return operator_name(self.function)


@dataclass(frozen=True, eq=False)
class MatrixProgram:
    """The operators of one step. Values: 0 is the parameter, 1 its gradient, then come its state and results.

    Attributes:
        state: names of the state that has the parameter's shape, with its positions; zeros if the step makes it.
        scalars: state without dimensions, and plain numbers, as the step leaves them.
        sent: what the owner needs of each rank.
        returned: what each rank needs of the owner.
        kept: what `after` reads beside that.
        dtypes: of state, and of what is sent and returned.
        flops: of the matrix products in `whole`.
    """

    shape: tuple[int, ...]
    before: tuple[Operation, ...]
    whole: tuple[Operation, ...]
    after: tuple[Operation, ...]
    state: Mapping[str, int]
    scalars: State
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    kept: tuple[int, ...]
    dtypes: Mapping[int, torch.dtype]
    flops: int
    batches: bool

    @property
    def bytes_sent(self) -> int:
        """Of each element, to the owner; as many return if dtypes are equal."""
        return sum(self.dtypes[position].itemsize for position in self.sent)

    def exchanges_as(self, other: "MatrixProgram") -> bool:
        """Whether it has the state of `other`, and sends and returns the same."""
        mine, its = ((each.state, each.sent, each.returned, each.dtypes, each.scalars) for each in (self, other))
        return mine == its

    def run_whole(self, values: dict[int, Tensor], one_by_one: bool) -> dict[int, Sequence[Tensor]]:
        """What is returned of matrices of this program: for each position one `[*shape]` for each of them.

        Args:
            values: by position what was sent, `[n, *shape]`; overwritten.
            one_by_one: whether each matrix is computed by itself, so that its bits do not depend on the others.
        """
        if self.batches and not one_by_one:
            run(self.whole, values, _batched)
            return {position: values[position].unbind() for position in self.returned}
        found: list[dict[int, Tensor]] = []
        for index in range(len(next(iter(values.values())))):
            own = {position: value[index] for position, value in values.items()}
            run(self.whole, own)
            found.append(own)
        return {position: [own[position] for own in found] for position in self.returned}


def run(
    operations: Iterable[Operation], values: dict[int, Tensor], call: Callable[..., Tensor] | None = None
) -> dict[int, Tensor]:
    """Run `operations` on `values`, by position, to which results are added."""
    for function, args, kwargs, result in operations:
        given = [values[each.position] if type(each) is Value else each for each in args]
        if kwargs:
            named = {key: values[each.position] if type(each) is Value else each for key, each in kwargs.items()}
        else:
            named = kwargs
        values[result] = function(*given, **named) if call is None else call(function, *given, **named)
    return values


# Note [One call for several tensors]
# What is computed from the elements that a rank stores is the same for all parameters of one shape and group, but for
# memory. So each operator is called once, with a list. On the CPU, and where dtypes differ, torch calls the operator's
# own kernel for each tensor then; on an accelerator a kernel for all, which might round otherwise, so not where bits
# count. An operator without such a form is called for each tensor.

_OF_LISTS = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "neg", "abs", "sqrt"}
"""Operators that torch also has as `_foreach_*`, with operands in the same order."""


def run_on_each(operations: Iterable[Operation], values: dict[int, list[Tensor]], one_by_one: bool) -> None:
    """Run `operations` on several tensors at once: `values` has a list of them for each position, all of one length.

    Args:
        values: results are added.
        one_by_one: whether each tensor has the bits of the operator's own kernel, also on an accelerator.
    """
    for function, args, kwargs, result in operations:
        given = [values[each.position] if type(each) is Value else each for each in args]
        name = function.name().partition("::")[2].partition(".")[0]
        at_once = None if one_by_one and not given[0][0].is_cpu else _at_once(name, given, kwargs)
        if at_once is None:
            values[result] = [function(*each, **dict(named)) for each, named in _for_each(given, kwargs, values)]
            continue
        found = at_once(*given, **kwargs)
        values[result] = given[0] if name.endswith("_") else list(found)


def _at_once(name: str, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What runs an operator on lists; None: there is no such form for these operands."""
    if name == "_to_copy" and kwargs.keys() == {"dtype"}:
        return _cast
    has_factor = kwargs.keys() <= {"alpha", "value"} and not any(type(each) is Value for each in kwargs.values())
    if name.rstrip("_") not in _OF_LISTS or not has_factor or type(given[0]) is not list:
        return None
    return None if kwargs and type(given[-1]) is not list else of_lists(name)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of `tensors`, 1-D, in `dtype`: views of one new tensor."""
    sizes = [tensor.numel() for tensor in tensors]
    found = list(tensors[0].new_empty(sum(sizes), dtype=dtype).split(sizes))
    of_lists("copy_")(found, list(tensors))
    return found


def _for_each(
    given: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, Sequence[Tensor]]
) -> Iterator[tuple[list[Any], list[tuple[str, Any]]]]:
    """The operands of each of several calls of one operator."""
    named = {key: values[each.position] if type(each) is Value else each for key, each in kwargs.items()}
    for index in range(len(given[0])):
        own = [(key, each[index] if type(each) is list else each) for key, each in named.items()]
        yield [each[index] if type(each) is list else each for each in given], own


def operator_name(function: Any) -> str:
    """The name of an operator of torch, without namespace, overload and `_`."""
    name: str = function.name()
    return name.partition("::")[2].partition(".")[0].rstrip("_")


# Note [One kernel for several matrices]
# Matrices of one shape are stacked, `[n, rows, columns]`; a number of each is `[n, 1, 1]`. Products become batched
# ones, norms are taken over the last two dimensions, and all else is elementwise. That saves launches on an
# accelerator. A batched product may round otherwise: on the CPU one of 2,000 small matrices differed in one element of
# bfloat16. So each matrix is computed alone on the CPU, where a launch costs little, and where bits count
# (`reduction_order="tree"`).


def _norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True, dtype=dtype)


_OF_BATCHES: dict[str, Callable[..., Tensor]] = {
    "mm": torch.bmm,
    "addmm": torch.baddbmm,
    "t": lambda x: x.transpose(-2, -1),
    "transpose": lambda x, *_: x.transpose(-2, -1),
    "permute": lambda x, *_: x.transpose(-2, -1),
    "linalg_vector_norm": _norm,
}


def _batched(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    of_batches = _OF_BATCHES.get(operator_name(function))
    return (of_batches or function)(*args, **kwargs)


class _Call(NamedTuple):
    """An operator that was recorded, and what its stand-in has returned."""

    operation: Operation
    returned: Tensor


class MatrixRecorder(TorchDispatchMode):
    """Records the step of parameters of one shape and group, whose state is alike.

    Args:
        full_shape: of the parameter.
        shape: of what one rank computes of it: the same, or with ones for the dimensions of a batch.
        dtype: of the parameter and its gradient.
        state: of one parameter: tensors of its shape, of which dtypes count alone; others without dimensions.
    """

    def __init__(self, full_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, state: State) -> None:
        super().__init__()
        self._param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        self._param.grad = torch.empty(shape, dtype=dtype, device="meta")
        self._own: State = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                if value.shape != torch.Size(full_shape):
                    raise NotRecordable(f"state {name!r} of shape {tuple(value.shape)}")
                self._own[name] = torch.empty(shape, dtype=value.dtype, device="meta")
            elif not isinstance(value, (Tensor, int, float)):
                raise NotRecordable(f"state {name!r} of type {type(value).__name__}")
        self._first = [self._param, self._param.grad, *self._own.values()]
        self._known: list[_Call] = []  # by the last recording
        self._calls: list[_Call] = []  # by this one
        self._tensors: list[Tensor] = []
        self._aliases: list[Tensor] = []
        self._positions: dict[int, int] = {}
        self._key: Any = None
        self._program: MatrixProgram | None = None

    def program(
        self, optimizer: Optimizer, group: Mapping[str, Any], options: Any, state: Mapping[str, Any]
    ) -> MatrixProgram:
        """The step of one parameter of `group` with this `state`; changes neither that nor the optimizer.

        Args:
            options: `options_of(group)`, which costs more than all else where nothing is recorded.

        Raises:
            NotRecordable: the step is none of elementwise operators, others on the matrix, and elementwise ones.
        """
        scalars = {name: value for name, value in state.items() if name not in self._own}
        key = (options, exact(scalars) if scalars else None)
        if self._program is None or key != self._key:
            copied = {
                name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in scalars.items()
            }
            self._record(optimizer, group, copied)
            self._key = key
        assert self._program is not None
        return self._program

    def _record(self, optimizer: Optimizer, group: Mapping[str, Any], scalars: State) -> None:
        own = {**self._own, **scalars}
        self._known, self._calls = self._calls, []
        self._aliases = []
        self._tensors = list(self._first)  # alive, so that no id is used again
        self._positions = {id(tensor): position for position, tensor in enumerate(self._tensors)}
        groups, states = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**group, "params": [self._param], "foreach": False, "fused": False}]
            optimizer.state = type(states)(dict, {self._param: own} if own else {})
            with self:
                step_without_hooks(optimizer)
            after: State = optimizer.state.get(self._param, {})
        except NotRecordable:
            raise
        except Exception as error:  # what a tensor without memory cannot do; `step` itself raises what is wrong
            raise NotRecordable(f"its step on a matrix without memory: {error}") from error
        finally:
            optimizer.param_groups, optimizer.state = groups, states
        self._program = self._cut(after)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._reads, (*args, *kwargs.values()))):
            return func(*args, **kwargs)  # of the profiler, or arithmetic with step counts
        if func.namespace == "prim":  # a question, such as for its device
            return func(*args, **kwargs)
        if operator_name(func) == "detach":  # the same value, of which autograd wants another object
            result = func(*args, **kwargs)
            self._aliases.append(result)
            self._positions[id(result)] = self._positions[id(args[0])]
            return result
        given = tuple(map(self._argument, args)), {key: self._argument(each) for key, each in kwargs.items()}
        result = self._repeated(func, *given)
        if result is None:
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise NotRecordable(f"{func}, which returns {type(result).__name__}")
        position = self._positions.setdefault(id(result), len(self._tensors))
        if position == len(self._tensors):
            self._tensors.append(result)
        self._calls.append(_Call(Operation(func, *given, position), result))
        return result

    def _repeated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What the last recording has returned for the same operator with the same operands; numbers may differ."""
        at = len(self._calls)
        if at >= len(self._known):
            return None
        (function, earlier_args, earlier_kwargs, _), returned = self._known[at]
        if function is not func or len(args) != len(earlier_args) or kwargs.keys() != earlier_kwargs.keys():
            return None
        pairs = zip((*args, *kwargs.values()), (*earlier_args, *earlier_kwargs.values()), strict=True)
        if all(_alike(one, other) for one, other in pairs):
            result = self._known[at].operation.result
            if result < len(self._tensors):
                return self._tensors[result]
            return returned.detach()  # autograd wants a new object
        self._known = []  # from here on
        return None

    def _reads(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(map(self._reads, argument))
        return id(argument) in self._positions

    def _argument(self, argument: Any) -> Any:
        if id(argument) in self._positions:
            return Value(self._positions[id(argument)])
        if isinstance(argument, Tensor):
            if argument.dim() or argument.device.type != "cpu":
                raise NotRecordable("a tensor that is neither the parameter's nor a number on the CPU")
            return argument.item()
        if isinstance(argument, (list, tuple)) and self._reads(argument):
            raise NotRecordable("an operator of several tensors")
        return argument

    # --- cutting ------------------------------------------------------------------------------------------------------

    def _cut(self, after: State) -> MatrixProgram:
        """The recorded operators in three parts, and what is sent between them."""
        shape = self._param.shape
        made = {name: value for name, value in after.items() if isinstance(value, Tensor) and value.dim()}
        zeros = {call.operation.result for call in self._calls if call.operation.name == "zeros_like"}
        operations = [call.operation for call in self._calls if call.operation.name != "zeros_like"]
        state: dict[str, int] = {}
        for name, value in made.items():
            position = self._positions.get(id(value), -1)
            if (value is not self._own.get(name) and position not in zeros) or value.shape != shape:
                raise NotRecordable(f"state {name!r}, which the step makes or replaces")
            state[name] = position
        if not self._own.keys() <= state.keys() or zeros - set(state.values()):
            raise NotRecordable("zeros that are no state, or state that the step removes")
        local = [self._is_local(operation) for operation in operations]
        if all(local):
            raise NotRecordable("a step that computes nothing from complete matrices")
        first, last = local.index(False), len(local) - local[::-1].index(False)
        before, whole, rest = operations[:first], operations[first:last], operations[last:]
        computed = {operation.result for operation in whole}
        there = {0, 1, *state.values(), *(operation.result for operation in before)}
        sent = sorted(there & _read_by(whole))
        returned = sorted(computed & _read_by(rest))
        self._check_writes(whole, there)
        if any(self._tensors[position].shape != shape for position in (*sent, *returned)):
            raise NotRecordable("what ranks and owners send each other does not have the parameter's shape")
        return MatrixProgram(
            tuple(shape), tuple(before), tuple(whole), tuple(rest), state,
            {name: value for name, value in after.items() if name not in state},
            tuple(sent), tuple(returned), tuple(sorted(_read_by(rest) - computed)),
            {position: self._tensors[position].dtype for position in (*sent, *returned, *state.values())},
            sum(map(self._flops, whole)), all(map(self._batches, whole)),
        )  # fmt: skip

    def _tensors_of(self, operation: Operation) -> list[Tensor]:
        given = (*operation.args, *operation.kwargs.values(), Value(operation.result))
        return [self._tensors[each.position] for each in given if type(each) is Value]

    def _is_local(self, operation: Operation) -> bool:
        """Whether a rank can run it on the elements that it stores."""
        shapes = {tensor.shape for tensor in self._tensors_of(operation)}
        return operation.name in _ELEMENTWISE and shapes == {self._param.shape}

    def _check_writes(self, whole: Sequence[Operation], there: set[int]) -> None:
        """What the owner computes must change nothing that ranks store: it has copies."""
        stored = {storage_of(self._tensors[position]) for position in there if position in range(len(self._first))}
        for operation in whole:
            is_stored = storage_of(self._tensors[operation.result]) in stored
            if is_stored and operation.function._schema.is_mutable:
                raise NotRecordable(f"{operation.function}, which overwrites a parameter, its gradient or state")

    def _flops(self, operation: Operation) -> int:
        """Of a product of matrices."""
        if operation.name not in ("mm", "addmm", "bmm", "baddbmm"):
            return 0
        factors = self._tensors_of(operation)[-3:-1]
        return 2 * prod(factors[0].shape) * factors[1].shape[-1]

    def _batches(self, operation: Operation) -> bool:
        """Whether it can run on several matrices at once (Note [One kernel for several matrices])."""
        if any(tensor.dim() not in (0, 2) for tensor in self._tensors_of(operation)):
            return False
        if operation.name == "linalg_vector_norm":  # of all elements
            return len(operation.args) < 3 or operation.args[2] is None
        return operation.name in _ELEMENTWISE or operation.name in _OF_BATCHES


def options_of(group: Mapping[str, Any]) -> Any:
    """What is equal where the options of two groups are."""
    return [(name, exact(value)) for name, value in group.items() if name not in ("params", "param_names")]


def exact(value: Any) -> Any:
    """What is equal where values are: numbers of tensors too, of which `repr` shows the first digits."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return [(name, exact(each)) for name, each in value.items()]
    return [exact(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def _alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (type(one) is float or one == other)


def _read_by(operations: Iterable[Operation]) -> set[int]:
    """The positions of the values that `operations` read and that none of them has computed before."""
    read: set[int] = set()
    computed: set[int] = set()
    for _, args, kwargs, result in operations:
        read |= {each.position for each in (*args, *kwargs.values()) if type(each) is Value} - computed
        computed.add(result)
    return read
