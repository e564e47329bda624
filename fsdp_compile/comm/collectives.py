"""The collectives, by name: nothing outside of this folder names one.

Eager code calls the functions; graph passes use the operators, which are torch's functional collectives. Code that
Inductor generates calls `DirectCollectives` (direct.py), which sends what an eager step does.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fsdp_compile.comm._torch import (
    OPERATORS,
    broadcast_from,
    group_named,
    in_backward,
    profiler_runs,
    start_all_to_all,
    start_broadcasts,
    start_gather,
    start_in_place,
)
from fsdp_compile.comm.waits import GroupState, names_of, state_of

ALL_GATHER = OPERATORS.all_gather_into_tensor.default
ALL_GATHER_INTO = OPERATORS.all_gather_into_tensor_out.default
REDUCE_SCATTER = OPERATORS.reduce_scatter_tensor.default
ALL_TO_ALL = OPERATORS.all_to_all_single.default
ALL_GATHER_COALESCED = OPERATORS.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER_COALESCED = OPERATORS.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = OPERATORS.all_reduce.default
ALL_REDUCE_IN_PLACE = OPERATORS.all_reduce_.default  # for graphs after autograd, on a buffer that nothing else reads
ALL_REDUCE_COALESCED = OPERATORS.all_reduce_coalesced.default
BROADCAST = OPERATORS.broadcast.default
WAIT = OPERATORS.wait_tensor.default
GROUP_ARGUMENT = {  # of the operators that start a collective: where the group stands
    ALL_GATHER: 2,
    ALL_GATHER_INTO: 2,
    REDUCE_SCATTER: 3,
    ALL_TO_ALL: 3,
    ALL_REDUCE: 2,
    ALL_REDUCE_IN_PLACE: 2,
    ALL_GATHER_COALESCED: 2,
    REDUCE_SCATTER_COALESCED: 3,
    ALL_REDUCE_COALESCED: 2,
    BROADCAST: 2,
}
STARTS = tuple(GROUP_ARGUMENT)
COALESCED = {ALL_GATHER: ALL_GATHER_COALESCED, REDUCE_SCATTER: REDUCE_SCATTER_COALESCED}  # one launch of several


def add_in_pairs(rows: Tensor, dim: int = 0, *, out: Tensor) -> None:
    """Add up `rows`, `[n, ...]` with n a power of two, as a binary tree, which overwrites them; the result is `out`."""
    while len(rows) > 2:
        rows = rows[0::2].add_(rows[1::2])  # new memory for the sums would cost more than the additions
    if len(rows) == 2:
        torch.add(*rows, out=out)
    else:
        out.copy_(rows[0])


REDUCTIONS: dict[str, Callable[..., Any]] = {"avg": torch.mean, "sum": torch.sum, "tree": add_in_pairs}

# Note [What gloo copies]
# Gloo's all-gather copies its input and its output, its reduce-scatter is an all-reduce of a copy of which all but a
# slice is thrown away, and its coalesced calls run one by one. So for tensors on the CPU
#   - an all-gather is one broadcast for each rank's slice, which works in place;
#   - a reduce-scatter is an all-to-all after which each rank reduces what it received: half the bytes on the wire, no
#     copy, and sums in one order;
#   - nothing is coalesced.
# Eager code, graph passes and generated code all ask `copies`, and only this folder and the pass that rewrites
# reduce-scatters know what follows from it. The fake backend, whose ranks do not exist, stands for gloo in tests.
_COPYING_BACKENDS = ("gloo", "fake")
_KNOWN_TO_GLOO = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_KNOWN_TO_GLOO |= {torch.int8, torch.uint8, torch.int32, torch.int64}


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backends of `group` by device type, such as {"cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # cpu:gloo,cuda:nccl


def compiles_as_gloo(group: dist.ProcessGroup) -> bool:
    """Whether graphs on the CPU are compiled for gloo. True without a backend for the CPU, where none can run."""
    return backends(group).get("cpu", "gloo") in _COPYING_BACKENDS


def copies(tensor: Tensor, group: str) -> bool:
    """Whether all-gathers and reduce-scatters of `tensor` in `group` would copy it (Note [What gloo copies])."""
    return tensor.is_cpu and bool(_senders(ranks := group_named(group), state_of(ranks)))


def _senders(group: dist.ProcessGroup, state: GroupState) -> tuple[dist.BroadcastOptions, ...]:
    """For each rank how to broadcast from it, if `group` would copy CPU tensors; else empty."""
    if state.senders is None:
        ranks = range(group.size() if backends(group).get("cpu") in _COPYING_BACKENDS else 0)
        state.senders = tuple(map(broadcast_from, ranks))
    return state.senders


def sendable(tensor: Tensor, group: str) -> Tensor:
    """`tensor`, or a copy on a device that `group` communicates: NCCL takes no host memory."""
    devices = backends(group_named(group))
    return tensor if tensor.device.type != "cpu" or "cpu" in devices else tensor.to(next(iter(devices)))


def movable(tensor: Tensor) -> Tensor:
    """`tensor` in a dtype that every backend moves: as bytes where gloo does not know its own, such as float8."""
    return tensor if tensor.dtype in _KNOWN_TO_GLOO or not tensor.is_cpu else tensor.view(torch.uint8)


class _NoRange:
    __enter__ = __exit__ = staticmethod("".format)  # takes any arguments, returns what is false, and is no Python code


NO_RANGE: Any = _NoRange()


def profiled(phase: str, what: str | int) -> AbstractContextManager[Any]:
    """A range in profiles, such as `fsdp_compile.forward.all_gather layers.0`; 0.5 us while no profiler runs.

    Args:
        phase: as docs/debugging.md lists them.
        what: the unit, or the number of elements of the unsharded tensor, by which the unit is looked up.
    """
    if not profiler_runs():
        return NO_RANGE
    return record_function(f"fsdp_compile.{_forward_or_backward(phase)}.{phase} {names_of(what)}")


def _forward_or_backward(kind: str) -> str:
    return "backward" if in_backward() or "reduce" in kind else "forward"


class waiting_for:  # used like a function; a generator would cost a microsecond per wait
    """Context of a wait for other ranks: a RuntimeError gets a note with unit, stage and direction.
    In profiles it is a range, as `profiled` makes one.

    Args:
        kind: the collective, such as "all-gather".
        what: the unit, or the number of elements of the unsharded tensor, by which the unit is looked up.
        phase: of the range; "wait_all_gather" by default.
    """

    __slots__ = ("_kind", "_range", "_what")

    def __init__(self, kind: str, what: str | int, phase: str = "") -> None:
        self._kind, self._what = kind, what
        self._range = profiled(phase or f"wait_{kind.replace('-', '_')}", what) if profiler_runs() else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        if isinstance(error, RuntimeError):
            note_wait(error, self._kind, self._what)


def note_wait(error: RuntimeError, kind: str, what: str | int) -> None:
    """Add a note to the error of a wait: see `waiting_for`, which costs three calls where nothing fails."""
    error.add_note(f"This was the {kind} of {names_of(what)} in {_forward_or_backward(kind)}.")


class Filling(NamedTuple):
    """A tensor, 1-D, that collectives fill: read it after `wait`. What they send lives until then.
    With a `state`, the host waits for them.
    """

    full: Tensor
    works: Sequence[Any]
    sent: Tensor | None = None
    kind: str = "all-gather"
    state: GroupState | None = None

    def wait(self) -> None:
        """Order what follows after the collectives."""
        if self.state is not None:
            self.state.wait(self.works)
            return
        for work in self.works:
            work.wait()


class WaitTensor(NamedTuple):
    """The wait for collectives that operators have begun and that write `tensor`."""

    tensor: Tensor

    def wait(self) -> None:
        """Order what follows after them."""
        WAIT(self.tensor)


def start_all_gather(full: Tensor, shard: Tensor, group: str, of: torch.Size | None = None) -> Filling:
    """Begin to all-gather `shard`, 1-D `[n]`, cast to the dtype of `full`, into `full`, 1-D `[n * group_size]`.
    `of`: the shape of the sharded tensor that an operator gathers.
    """
    ranks = group_named(group)
    state = state_of(ranks) if full.is_cpu else None
    if state is None or not (senders := _senders(ranks, state)):
        sent = shard.to(full.dtype)
        return Filling(full, (start_gather(ranks, full, sent),), sent)
    moved = movable(full)
    slices = moved.split_with_sizes([moved.numel() // len(senders)] * len(senders))
    mine = slices[ranks.rank()]
    (mine if moved is full else mine.view(full.dtype)).copy_(shard)
    if of is None:
        state.note("all-gather", full.numel())
    else:
        state.note("gather", full.numel(), of)
    return Filling(full, start_broadcasts(ranks, slices, senders), state=state)


def start_exchange(full: Tensor, group: str) -> Filling:
    """Begin to send each rank its slice of `full`, 1-D, all of one size; what is filled is a new tensor like it."""
    ranks, received = group_named(group), torch.empty_like(full)
    state = state_of(ranks) if full.is_cpu else None
    if state is not None:
        state.note("reduce", full.numel())
    return Filling(received, (start_all_to_all(ranks, received, full),), full, "reduce", state)


def start_all_to_all_of_parts(sent: Tensor, send: list[int], receive: list[int], group: str, what: str) -> Filling:
    """Begin to send `send[i]` consecutive elements of `sent`, 1-D, to rank i of the group, for every rank.
    `what` it is, equal on all ranks, for errors.

    What is filled, 1-D `[sum(receive)]`, has `receive[i]` elements from each rank i, in order. One rank sends nothing.
    """
    if len(send) == 1:
        return Filling(sent.clone(), ())
    ranks, moved = group_named(group), movable(sent)
    received = sent.new_empty(sum(receive))
    state = state_of(ranks) if moved.is_cpu else None
    if state is not None:
        state.note("exchange", what)
    if moved is not sent:
        size = sent.element_size()  # bytes that stand for an element
        receive, send = [each * size for each in receive], [each * size for each in send]
    work = start_all_to_all(ranks, movable(received), moved, receive, send)
    return Filling(received, (work,), moved, "exchange", state)


def traceable_all_gather(shard: Tensor, group_size: int, group: str, of: torch.Size) -> Tensor:
    """Concatenate every rank's `shard`, 1-D `[n]`, on any device, to a new 1-D tensor `[n * group_size]` of its dtype:
    of a sharded tensor of shape `of`, for code that users may compile.
    """
    sent = movable(sendable(shard, group))
    if _holds_up_host(sent, group):
        full = sent.new_empty(sent.numel() * group_size)
        start_all_gather(full, sent, group, of).wait()
        return full.view(shard.dtype)
    return WAIT(ALL_GATHER(sent, group_size, group)).view(shard.dtype).to(shard.device)


def start_reduce_scatter(
    full: Tensor, group_size: int, group: str, op: str = "avg"
) -> tuple[Tensor, Callable[[], None]]:
    """Begin to reduce `full`, 1-D `[n * group_size]`; return this rank's slice, 1-D `[n]`, and what completes it.
    `op`: "sum", "avg", or "tree" for a sum that is a binary tree over the ranks.
    """
    if op != "tree" and not copies(full, group):
        reduced = REDUCE_SCATTER(full, op, group_size, group)
        return reduced, WaitTensor(reduced).wait
    exchange = start_exchange(full, group)  # row i: what rank i has for this one
    reduced = full.new_empty(full.numel() // group_size)

    def finish() -> None:
        exchange.wait()
        rows = exchange.full.view(group_size, -1)
        REDUCTIONS[op](rows, 0, out=reduced)

    return reduced, finish


def start_all_reduce(full: Tensor, group: str, op: str = "avg", of: torch.Size | None = None) -> Filling:
    """Begin to reduce `full`, any shape, over the group in place.
    `of`: the shape of the sharded tensor that an operator reduces.
    """
    if not _holds_up_host(full, group):
        ALL_REDUCE_IN_PLACE(full, op, group)
        return Filling(full, (WaitTensor(full),), kind="all-reduce")
    ranks = group_named(group)
    state = state_of(ranks)
    state.note("all-reduce", full.numel(), of or "")
    return Filling(full, (start_in_place(ranks, full, op),), kind="all-reduce", state=state)


def _holds_up_host(tensor: Tensor, group: str) -> bool:
    """Whether the host waits for collectives of `tensor`, and nothing is traced."""
    return type(tensor) is Tensor and copies(tensor, group)


def all_reduce(full: Tensor, group: str, op: str = "avg", of: torch.Size | None = None) -> Tensor:
    """Reduce `full`, of any shape, on any device, over the group; return a new tensor of that shape and device.
    `of`: the shape of the sharded tensor that an operator reduces.
    """
    if _holds_up_host(full, group):
        reduced = full.clone(memory_format=torch.contiguous_format)
        start_all_reduce(reduced, group, op, of).wait()
        return reduced
    return WAIT(ALL_REDUCE(sendable(full, group), op, group)).to(full.device)


def broadcast(message: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite `message`, contiguous, of any shape and dtype, with that of the group's first rank."""
    dist.broadcast(movable(message), group=group, group_src=0)


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of `group` (None: every rank) passes as `mine`, any picklable value, in order of ranks."""
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def broadcast_object(mine: Any, group: dist.ProcessGroup | None) -> Any:
    """What the first rank of `group` (None: of all) passes as `mine`, any picklable value."""
    if not dist.is_initialized():
        return mine
    message = [mine]
    dist.broadcast_object_list(message, group=group, group_src=0)
    return message[0]


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of `group` (None: of all); True without a process group."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def on_first_rank(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Call `work` on the first rank of `group`; return or raise on all ranks what it returns or raises there."""
    result, error = None, None
    if is_first(group):
        try:
            result = work()
        except Exception as caught:
            error = caught
    result, error = broadcast_object((result, error), group)
    if error is not None:
        raise error
    return result


def holds_on_all_ranks(holds: bool, group: str, device: torch.device) -> bool:
    """Whether `holds` is true on every rank: an all-reduce of one number, before a rank leaves out a collective."""
    denials = torch.tensor([not holds], dtype=torch.float32, device=device)
    with waiting_for("comparison", "all-gathers that were started early"):
        start_all_reduce(denials, group, "sum").wait()
    return denials.item() == 0
