"""The order in which ranks communicate, which all of them agree on; a rank that departs from it asks first.

Collectives of a group match by their order alone. If one rank leaves a unit out, what it runs next would meet the
unit's collective on the other ranks: they would wait for each other, or, with units of one size, use each other's
values. So the first forward, and the first backward pass, of each kind records its units, and ranks compare that once.
Later passes follow the record at no cost. A rank that is about to do something else compares that with the other ranks
before it communicates: if all of them do it, training goes on, else all raise. The longest pass becomes the record.

Passes of several models, and compiled graphs, follow each other in an order that ranks foretell (comm/waits.py). In a
graph that no pass of ours has expanded, each gather and each reduce does.
"""

import hashlib
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.agree.root_checks import groups_of
from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.comparison import Subject, compare, exists, follow, timeout_of_checks
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.waits import state_of
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.core.flat_collectives import all_gather_flat, start_average
from fsdp_compile.core.flat_param import flat_param_at
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import ForwardPass, Listener

_ADVICE = {
    "forward": "let forward call the same modules in the same order on all ranks, and write the same values to "
    "parameters",
    "backward": "let the loss depend on the same modules on all ranks: where one has nothing to compute, add 0 times "
    "the output of the module",
}
_NO_MORE = "nothing more"

Event = tuple[str, str]
"""What begins, and the path of its unit."""


class Order:
    """The order of what units communicate in one direction, "forward" or "backward".

    Attributes:
        groups: those of all units with other ranks in them, in one order on all ranks.
    """

    def __init__(self, direction: str) -> None:
        self.groups: Sequence[NamedGroup] = ()
        self._direction = direction
        self._begun: set[NamedGroup | None] = set()  # in which groups the running pass communicates
        self._subject = Subject("order of units", f"the same order in {direction}", _NO_MORE, _ADVICE[direction])
        self._records: dict[Hashable, list[Event]] = {}
        self._record: list[Event] | None = None  # that the running pass follows
        self._at = 0  # where it is there
        self._departed: list[Event] | None = None  # all of a pass that has departed from it
        self._is_new = False

    def begin(self, kind: Hashable) -> None:
        """Begin a pass: those of one `kind` follow one record."""
        self._begun, self._is_new = {None}, kind not in self._records
        self._record, self._at, self._departed = self._records.get(kind, []), 0, None
        self._kind = kind

    def next(self, what: str, unit: Unit, part: str = "") -> None:
        """In a pass, `unit`, or a part of it, is about to communicate. RuntimeError if this rank departs."""
        record, at = self._record, self._at
        if record is None:
            return
        if unit.group not in self._begun or (what == "reduce" and unit.replicas not in self._begun):
            self._begin_in(unit.group, unit.replicas if what == "reduce" else None)
        event = (what, f"{unit.path} at {part}" if part else unit.path)
        if at < len(record) and record[at] == event:
            self._at = at + 1
            if self._departed is not None:
                self._departed.append(event)
        elif self._is_new:
            record.append(event)
            self._at = at + 1
        else:
            self._note_departure(record, event)

    def _begin_in(self, *groups: NamedGroup | None) -> None:
        new = [group for group in groups if group is not None and group not in self._begun]
        self._begun.update(new)
        of, found = f"the {self._direction} of model", filter(exists, (group.find() for group in new))
        follow([(group, f"{of} {_model_number(self, group)}") for group in found], timeout_of_checks(), _PASSES)

    def next_in_backward(self, what: str, unit: Unit, part: str = "") -> None:
        """As `next`, of a backward pass, which this begins if none is running."""
        if self._record is None and (backward := running_backward()) is not None:
            self.begin(unit.syncs)
            backward.at_end(self.end, if_failed=self.drop)
        self.next(what, unit, part)

    def end(self, more: Sequence[str] = ()) -> None:
        """End the pass; compare a new record, and `more` lines. RuntimeError if ranks differ."""
        record, self._record = self._record, None
        if record is None:
            return
        if self._is_new:
            if record:
                self._compare_lines([*map(" of ".join, record), *more])
                self._records[self._kind] = record
        elif 0 < self._at < len(record):  # a forward of parameters that are summoned on one rank begins none
            self._compare_lines([self._place_in_words(record), _NO_MORE, *more])
        elif record and more:
            self._compare_lines([self._place_in_words(record), *more])
        if self._departed is not None and len(self._departed) > len(record):
            self._records[self._kind] = self._departed

    def drop(self) -> None:
        """End the pass, which has failed."""
        self._record = None

    def _note_departure(self, record: list[Event], event: Event) -> None:
        self._compare_lines([self._place_in_words(record), " of ".join(event)])
        self._departed = [*(record[: self._at] if self._departed is None else self._departed), event]
        if event in record[self._at :]:
            self._at = record.index(event, self._at) + 1

    def _place_in_words(self, record: list[Event]) -> str:
        return f"after the {' of '.join(record[self._at - 1])}" if self._at else "at first"

    def _compare_lines(self, lines: list[str]) -> None:
        pairs = [(group.find(), "\n".join(lines)) for group in self.groups]
        compare(pairs, timeout_of_checks(), self._subject)


class RankOrder(Listener):
    """Lets ranks agree on the order in which units communicate in forward and in backward."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._forward, self._backward = Order("forward"), Order("backward")
        root.reduces_in_flight.order = self._backward  # which compiled graphs follow too

    def compare(self, module: Any, settings: str, compiled: bool) -> bool:
        """Number models and their flat parameters alike on all ranks, which have been compared."""
        units, orders = units_gathered_below(module), (self._forward, self._backward)
        orders[0].groups = orders[1].groups = groups_of(units)
        for group in orders[0].groups:
            flats = [flat for unit in units if group in (unit.group, unit.replicas) for flat in unit.flats]
            state_of(group.find()).number_model([*orders, *flats])
        return True

    def begin_forward(self, forward: ForwardPass, module: Any) -> None:
        """Follow the record of its kind."""
        self._forward.begin(forward.kind)

    def complete_forward(self, forward: ForwardPass) -> None:
        """RuntimeError on all ranks if they differ."""
        self._forward.end(forward.lines)

    def end_forward(self) -> None:
        """Record nothing of a forward that has failed."""
        self._forward.drop()

    def before_gather(self, unit: Unit, forward: ForwardPass) -> None:
        """RuntimeError on all ranks if their forwards come to different units."""
        forward.has_communicated |= unit.is_sharded
        if forward.of_root and unit.is_sharded:
            self._forward.next("all-gather", unit)

    def before_backward(self, gathered: Any, backward: BackwardPass, was_prefetched: bool) -> None:
        """RuntimeError on all ranks if their backward passes come to different units.

        With "auto" the last unit may be kept: recorded all the same, so that each pass has one record of the order.
        """
        may_be_kept = gathered.unit.reshard_after_forward is None
        if was_prefetched or may_be_kept or any(buffer.is_free for buffer in gathered.buffers):
            self._backward.next_in_backward("all-gather", gathered.unit)


# --- among models and graphs ------------------------------------------------------------------------------------------

_PASSES = Subject(
    "order of models",
    "the same forwards and backwards in the same order",
    _NO_MORE,
    "let all ranks call the same models in the same order, and backward for all of them",
)
_GRAPH = Subject(
    "compiled graph",
    "the same collectives in the same order",
    "the end of the graph",
    "compile the same model with the same arguments on all ranks, and let all of them run the same modules",
)


def _model_number(part: object | None, group: dist.ProcessGroup) -> int:
    return 0 if part is None else state_of(group).models.get(part, 0)


@torch.library.impl("fsdp_flat::check_ranks", "default")
def _check_ranks(
    shards: list[Tensor], sequence: str, groups: list[str], timeout: float, device: torch.device
) -> Tensor:
    flat = flat_param_at(shards[0]) if shards else None
    begun = list(filter(exists, map(group_named, groups)))
    follow([(group, _graph_of_model(sequence, _model_number(flat, group))) for group in begun], timeout, _GRAPH)
    for state in map(state_of, begun):
        if sequence not in state.agreed:
            first, *others = sequence.splitlines()
            digest = hashlib.sha256(sequence.encode()).hexdigest()[:12]
            state.agreed[sequence] = f"{first} and {len(others)} more collectives ({digest})"
        state.note("compiled graph", state.agreed[sequence])
    return torch.empty(0, device=device)


@cache
def _graph_of_model(sequence: str, number: int) -> str:
    """One object in each step: ranks remember thousands of what they have begun, and the sequence may be long."""
    return f"{sequence}\n{_GRAPH.end} of model {number}"


def _follow_in(groups: Sequence[NamedGroup | None], what: str, shard: Tensor | None, numel: int) -> None:
    flat = None if shard is None else flat_param_at(shard)
    pairs = []
    for group in filter(exists, (group_named(each.name) for each in groups if each is not None)):
        of = f"{flat.path} of model {_model_number(flat, group)}" if flat else f"{numel} elements"
        pairs.append((group, f"the {what} of {of}"))
    follow(pairs, timeout_of_checks(), _GRAPH)


@cache
def _warn_of_other_backend() -> None:
    warn_caller(
        "a graph of a sharded model runs without the passes of fsdp_compile, as with backend='aot_eager' or 'eager': "
        "what its forward gathers stays in memory until backward, and no communication is hidden; to save memory and "
        "time, compile with backend='inductor', the default, or 'fsdp_compile'"
    )


@torch.library.impl("fsdp_flat::unshard", "default")
def _unshard(shard: Tensor, flat_param_id: Tensor | None, deferred: Tensor | None, spec: str) -> Tensor:
    parsed = UnshardSpec.parse(spec)
    if parsed.is_sharded:
        if parsed.reshard_after_forward is not False:
            _warn_of_other_backend()
        _follow_in(parsed.groups, "all-gather", shard, parsed.layout.numel)
        with collectives.waiting_for("all-gather", parsed.layout.numel, "all_gather"):
            return all_gather_flat(shard, parsed.groups, parsed.compute_dtype)
    local = shard.to(parsed.compute_dtype or shard.dtype)
    return local.clone() if local is shard else local  # an operator may not return its input; a pass drops the copy


@torch.library.impl("fsdp_flat::reduce_grads", "default")
def _reduce_grads(packed: Tensor, spec: str) -> Tensor:
    parsed = UnshardSpec.parse(spec)
    reduced_in = parsed.reduce_groups or parsed.groups
    _follow_in((*reduced_in, parsed.replicas), "reduce", None, packed.numel())
    with collectives.waiting_for("reduce", packed.numel(), "reduce"):
        groups = (reduced_in, parsed.is_sharded, parsed.replicas, parsed.divisor)
        mean, finish = start_average(packed.clone(), *groups, at_once=False, same_bits=parsed.same_bits)
        finish()
    return mean
