"""Records what an optimizer of complete matrices does to one parameter, from its own `step` (matrix_program.py).

    recorder = MatrixRecorder(shape, shape, dtype, state)     for parameters that are alike
    recorder.program(optimizer, group, options, state)        what the step does with the options of now

The stand-in for the parameter has its shape and no memory. A recording that repeats an earlier one, but for numbers,
computes no shapes. Where a schedule has changed a number once, nothing is recorded again (Note [Schedules]).
"""

# Note [Schedules]
# A recording of Muon takes a millisecond or two of the host, for each shape. A schedule of the learning rate would
# need that at every step, and what changes is two numbers. So the step is recorded with options that remember what
# arithmetic makes of them. When some options have changed, two recordings are there, and each number among the
# arguments that differs has to be one that was made of them, the same one in both, and the only such one. Then the
# program follows from other values of these options by the same arithmetic, to the last bit. Anything else, as a
# number that is equal in both though it may come from them, is recorded again. Only Muon is asked: code of users may
# read a float where Python cannot see it.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from fsdp_compile.optim._torch import TorchDispatchMode, step_without_hooks, storage_of
from fsdp_compile.optim.matrix_program import (
    ELEMENTWISE,
    OF_BATCHES,
    MatrixProgram,
    NotRecordable,
    Operation,
    State,
    Value,
    operator_name,
)
from fsdp_compile.optim.traced_numbers import Number, Trace, exact, made_from

Options = list[tuple[str, Any]]  # of `options_of`
_PARTS = ("before", "whole", "beside", "after")


class _Recording(NamedTuple):
    """What a step does with these options, and the numbers that it has made of them."""

    program: MatrixProgram
    options: Options
    trace: Trace


class _Schedule:
    """Programs that differ in numbers which follow from some options (Note [Schedules]).

    Args:
        numbers: by the part, the operator and the argument that they are.
        names: of the options.
        one: such a program.
    """

    def __init__(self, numbers: Mapping[tuple[str, int, int], Number], names: frozenset[str], one: _Recording) -> None:
        self._numbers, self._names, self._program = numbers, names, one.program
        self._others = self._without(one.options)

    @classmethod
    def of(cls, one: _Recording, other: _Recording) -> "_Schedule | None":
        """What two recordings have in common; None if that is not all but such numbers."""
        others = dict(other.options)
        names = frozenset(name for name, value in one.options if value != others.get(name))
        known = made_from(one.trace, other.trace, names)
        if known is None:
            return None
        numbers: dict[tuple[str, int, int], Number] = {}
        for part in _PARTS:
            operations, its_operations = getattr(one.program, part), getattr(other.program, part)
            if len(operations) != len(its_operations):
                return None
            for at, (mine, its) in enumerate(zip(operations, its_operations, strict=True)):
                arguments, its_arguments = ([*each.args, *each.kwargs.values()] for each in (mine, its))
                if mine.function is not its.function or len(arguments) != len(its_arguments):
                    return None
                for slot, (value, its_value) in enumerate(zip(arguments, its_arguments, strict=True)):
                    makers = known.get((value, its_value), []) if type(value) is type(its_value) is float else []
                    if len(makers) != (value != its_value):
                        return None
                    numbers.update(((part, at, slot), maker) for maker in makers)
        return cls(numbers, names, one)

    def _without(self, options: Options) -> Options:
        return [pair for pair in options if pair[0] not in self._names]

    def program(self, group: Mapping[str, Any], options: Options) -> MatrixProgram | None:
        """The program of `group`; None if its options differ in others."""
        if self._without(options) != self._others or any(type(group[name]) is not float for name in self._names):
            return None
        parts = {part: [*getattr(self._program, part)] for part in {part for part, _, _ in self._numbers}}
        for (part, at, slot), number in self._numbers.items():
            operation = parts[part][at]
            args, kwargs, names = [*operation.args], {**operation.kwargs}, [*operation.kwargs]
            if slot < len(args):
                args[slot] = number.of(group)
            else:
                kwargs[names[slot - len(args)]] = number.of(group)
            parts[part][at] = operation._replace(args=tuple(args), kwargs=kwargs)
        changed: dict[str, Any] = {part: tuple(some) for part, some in parts.items()}
        return replace(self._program, **changed)


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
        self._recording: _Recording | None = None  # the last one
        self._schedule: _Schedule | None = None

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
            found = None if self._schedule is None else self._schedule.program(group, options)
            if found is None:
                copied = {
                    name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in scalars.items()
                }
                found = self._record(optimizer, group, options, copied)
            self._program, self._key = found, key
        return self._program

    def _record(
        self, optimizer: Optimizer, group: Mapping[str, Any], options: Options, scalars: State
    ) -> MatrixProgram:
        trace = Trace()
        traced = trace.options(group) if type(optimizer) is Muon else {}
        own = {**self._own, **scalars}
        self._known, self._calls = self._calls, []
        self._aliases = []
        self._tensors = list(self._first)  # alive, so that no id is used again
        self._positions = {id(tensor): position for position, tensor in enumerate(self._tensors)}
        groups, states = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**group, **traced, "params": [self._param], "foreach": False, "fused": False}]
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
        before, self._recording = self._recording, _Recording(self._cut(after), options, trace)
        if traced and before is not None:
            self._schedule = _Schedule.of(before, self._recording)
        return self._recording.program

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
        """The recorded operators in four parts, and what is sent between them."""
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
        at = self._number_beside(rest, computed, {0, *state.values()} - set(sent))
        if any(self._tensors[position].shape != shape for position in (*sent, *returned)):
            raise NotRecordable("what ranks and owners send each other does not have the parameter's shape")
        return MatrixProgram(
            tuple(shape), tuple(before), tuple(whole), tuple(rest[:at]), tuple(rest[at:]), state,
            {name: value for name, value in after.items() if name not in state},
            tuple(sent), tuple(returned), tuple(sorted(_read_by(rest) - computed)),
            {position: self._tensors[position].dtype for position in (*sent, *returned, *state.values())},
            sum(map(self._flops, whole)), all(map(self._batches, whole)),
        )  # fmt: skip

    def _number_beside(self, rest: Sequence[Operation], computed: set[int], stored: set[int]) -> int:
        """How many of the last operators need no results, and change nothing but what is stored and was not sent."""
        for at, operation in enumerate(rest):
            if operation.result not in stored or _read_by([operation]) & computed:
                return at
        return len(rest)

    def _tensors_of(self, operation: Operation) -> list[Tensor]:
        given = (*operation.args, *operation.kwargs.values(), Value(operation.result))
        return [self._tensors[each.position] for each in given if type(each) is Value]

    def _is_local(self, operation: Operation) -> bool:
        """Whether a rank can run it on the elements that it stores."""
        shapes = {tensor.shape for tensor in self._tensors_of(operation)}
        return operation.name in ELEMENTWISE and shapes == {self._param.shape}

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
        return operation.name in ELEMENTWISE or operation.name in OF_BATCHES


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
