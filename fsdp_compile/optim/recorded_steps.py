"""Steps that follow from two recorded ones: a schedule, and step counts, need no new recording.

steps = RecordedSteps(programs)                               for parameters of one group whose state is alike
steps.step(optimizer, group, state, dtype)            what `record` returns (program.py)
"""

# Note [What follows from two recordings]
# A recording of AdamW takes half a millisecond of the host, and what changes from step to step is a few numbers. So a
# step is recorded with options and step counts that remember what arithmetic makes of them. When some of these have
# changed, two recordings are there. Each number among the arguments is then one that was made of them, the same one in
# both, or one that does not change. All that it may be by its values in both is kept; where these come to differ in a
# later step, that is recorded. The arithmetic is that of the step, so what follows is what it would compute, to the
# last bit. A step that compares what changes, or does more with a count than to add a number and to read it, is
# recorded each time. Only torch's own optimizers are asked: code of users may read a float where Python cannot see it.

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_compile.optim.program import Count, Recorded, UpdateProgram, record, scalars_of
from fsdp_compile.optim.traced_numbers import Number, Options, Trace, made_from, options_of


class _Recording(NamedTuple):
    """A recorded step, and what it was recorded with: options, and step counts as it has left them, by their names."""

    recorded: Recorded
    options: list[tuple[str, Any]]
    counts: dict[str, Count]
    trace: Trace


class _Following:
    """Steps that follow from two recordings (Note [What follows from two recordings]).

    Args:
        one: a recording.
        names: of options and counts that change.
        makers: for each number of the step all that it may be.
    """

    def __init__(self, one: _Recording, names: frozenset[str], makers: list[list[Number | float]]) -> None:
        self._one, self._names, self._makers = one, names, makers
        self._others = self._without(one.options)

    @classmethod
    def of(cls, one: _Recording, other: _Recording) -> "_Following | None":
        """What follows from two recordings; None if they differ in more than numbers that were made of what changes."""
        mine, its = one.recorded, other.recorded
        if mine.program is not its.program:
            return None
        its_options = dict(other.options)
        if its_options.keys() & one.counts.keys():
            return None
        names = {name for name, value in one.options if value != its_options.get(name)}
        for name, count in one.counts.items():
            if not (count.only_adds and other.counts[name].only_adds and count.added == other.counts[name].added):
                return None
            names |= {name} if count.value != other.counts[name].value else set()
        known = made_from(one.trace, other.trace, frozenset(names))
        if known is None:
            return None
        makers: list[list[Number | float]] = []
        for value, its_value in zip(mine.numbers, its.numbers, strict=True):
            found: list[Number | float] = [*known.get((value, its_value), ())]
            makers.append([*found, value] if value == its_value else found)
        return cls(one, frozenset(names), makers) if all(makers) else None

    def _without(self, options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [pair for pair in options if pair[0] not in self._names]

    def step(
        self, group: Options, options: list[tuple[str, Any]], state: Mapping[str, Any], dtype: torch.dtype
    ) -> Recorded | None:
        """The step with these options and this state; None if it has to be recorded."""
        if self._without(options) != self._others:
            return None
        left = {name: state[name].detach() + count.added for name, count in self._one.counts.items()}
        given: dict[str, Any] = {**group, **{name: value.item() for name, value in left.items()}}
        if any(type(given[name]) is not float for name in self._names):
            return None
        if any(given[name] != count.value for name, count in self._one.counts.items() if name not in self._names):
            return None
        numbers = list[float]()
        for makers in self._makers:
            values = {maker.of(given) if isinstance(maker, Number) else maker for maker in makers}
            if len(values) > 1:
                return None
            numbers += values
        return Recorded(self._one.recorded.program, scalars_of(numbers, dtype), left, tuple(numbers))


class RecordedSteps:
    """The steps of parameters of one group, whose state is alike.

    Args:
        programs: one for all equal ones, by what they do; what is new is added.
    """

    def __init__(self, programs: dict[Any, UpdateProgram]) -> None:
        self._programs = programs
        self._last: _Recording | None = None
        self._following: _Following | None = None

    def step(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any], dtype: torch.dtype) -> Recorded:
        """What the step does to a parameter of `group` with this `state`; changes neither that nor the optimizer.

        Raises:
            NotRecordable: as `record`.
        """
        options = options_of(group)
        if self._following is not None:
            found = self._following.step(group, options, state, dtype)
            if found is not None:
                return found
        trace = Trace()
        counts = {name: Count.of(value, name, trace) for name, value in state.items()
                  if isinstance(value, Tensor) and not value.dim()}  # fmt: skip
        recorded = record(optimizer, {**group, **trace.options(group)}, {**state, **counts}, dtype)
        program = recorded.program
        recorded = recorded._replace(program=self._programs.setdefault((program.names, program.operations), program))
        before, self._last = self._last, _Recording(recorded, options, counts, trace)
        self._following = None if before is None else _Following.of(before, self._last)
        return recorded
