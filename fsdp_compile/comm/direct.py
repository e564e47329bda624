"""Collectives on process groups themselves: those of generated code, and all-gathers started before they are asked for.

What the dispatcher and torch's own layers put between a compiled graph and the process group costs more than a small
collective: on torch 2.13, 10 us for an all-gather and its wait, 32 us for an all-to-all. Graphs hold torch's operators,
so that Inductor knows what it deals with; `passes/post_grad/lower_collectives.py` gives them these names.

    _c10d_functional.all_gather_into_tensor_out(shard, 8, '0', out=full)  ->  fsdp_collectives.all_gather(...)
    _c10d_functional.all_to_all_single(packed, [...], [...], '0')         ->  fsdp_collectives.all_to_all(...)
    _c10d_functional.wait_tensor(full)                                    ->  fsdp_collectives.wait(full)

The first of a graph is called on `fsdp_collectives.at_start`, for an earlier call of the graph may have failed between
a collective and its wait.

An all-gather can be started before the forward that reads it:

    gather = PrefetchedGather(shard, dtype, groups)     casts the shard and begins to fill a buffer
    with offered({gather: is_usable}) as offer:
        forward()           the first all-gather of that shard takes the buffer, and waits for what fills it
    offer.asked             what the forward has gathered, and the next one will gather too

The forward, eager or compiled, does not know of them: whatever starts an all-gather calls `take` first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import Filling, note_wait, profiled, start_all_gather, start_exchange
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.hops import Waitable, start_gather

# Note [Where a prefetched buffer is taken]
# An operator's body and the code that Inductor generates have the stored shard, as a tensor, and the group's name, and
# no object that could own what was prefetched. So they look it up in what is offered in this thread, which is only
# around the one forward that may use it. In between steps `CompiledStep` owns the buffers, and nothing finds them: no
# evaluation, no other model, no later forward.
# What names a unit there is the address of its stored shard. A path in the graph would not do: blocks of equal layout
# share a graph, whose inputs alone tell them apart. Stored shards live as long as the model, so no other tensor has
# that address. For this all who start an all-gather pass on the shard as it is stored and say by the buffer's dtype to
# what it is cast: the cast belongs to the start of the all-gather, and is not computed where a prefetched buffer is
# taken. (A forward that gathers anything else, such as scaled values, passes on another tensor, and takes nothing.) The
# second of two stages starts from the buffer that the first one filled, and is looked up by that.
# What takes a buffer does not ask whether its values are up to date, or whether other ranks take it too. Both are
# decided in one place (eager/next_forward.py), whose answer is waited for when the first buffer is about to be taken.


Key = tuple[int, int, str]


def key_of(shard: Tensor, group: str) -> Key:
    """The key of an all-gather of `shard` over `group` (Note [Where a prefetched buffer is taken])."""
    return shard.data_ptr(), shard.numel(), group


class PrefetchedGather:
    """An all-gather of the stored `shard`, 1-D `[n]`, cast to `dtype`, whose result nothing has read yet.

    Args:
        groups: the one or two hops that it goes through, in order.

    Attributes:
        key: what it is looked up by.
        then: its second stage, once `start_next_stage` was called.
        is_taken: whether a forward has taken the result.
    """

    def __init__(self, shard: Tensor, dtype: torch.dtype, groups: Sequence[NamedGroup]) -> None:
        (group, *self._later), self.dtype = groups, dtype
        self.key = key_of(shard, group.name)
        full = shard.new_empty(shard.numel() * group.size, dtype=dtype)
        self._filling: Waitable | None = start_gather(full, shard, group)
        self.then: PrefetchedGather | None = None
        self.is_taken = False

    def start_next_stage(self) -> None:
        """Start the second of two stages behind the first; on the CPU the host waits for that."""
        if self._later and self._filling is not None:
            self._filling.wait()
            self._filling = Filling(self._filling.full, ())
            self.then, self._later = PrefetchedGather(self._filling.full, self.dtype, self._later), []

    def take(self) -> Waitable:
        """What is being filled; this object no longer refers to its memory."""
        assert self._filling is not None
        filling, self._filling, self.is_taken = self._filling, None, True
        return filling

    def drop(self) -> None:
        """Wait for what nothing has taken, and free its memory."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.wait()
        if self.then is not None:
            self.then.drop()


class Offer:
    """The prefetched all-gathers that one forward may take.

    Args:
        gathers: for each whether it may be taken, asked when a forward is about to.

    Attributes:
        asked: what the forward gathered, taken or not: by the key of the shard the dtype of the full buffer.
        planned: addresses of the shards that the plan of a compiled forward wants prefetched; None: there is no plan.
    """

    def __init__(self, gathers: Mapping[PrefetchedGather, Callable[[], bool]]) -> None:
        self._gathers = {gather.key: (gather, is_usable) for gather, is_usable in gathers.items()}
        self.asked: dict[Key, torch.dtype] = {}
        self.planned: set[int] | None = None

    def take(self, shard: Tensor, dtype: torch.dtype, group: str) -> Waitable | None:
        """The all-gather of `shard` if it may be taken."""
        key = key_of(shard, group)
        self.asked[key] = dtype
        gather, is_usable = self._gathers.pop(key, (None, None))
        if gather is None or is_usable is None or gather.dtype != dtype or not is_usable():
            return None
        if gather.then is not None:
            self._gathers[gather.then.key] = gather.then, is_usable
        return gather.take()


_offer: ContextVar[Offer | None] = ContextVar("offer", default=None)  # of this thread: another trains another model


@contextmanager
def offered(gathers: Mapping[PrefetchedGather, Callable[[], bool]]) -> Iterator[Offer]:
    """Let the forward in this block take each of `gathers` once, if it may."""
    offer = Offer(gathers)
    token = _offer.set(offer)
    try:
        yield offer
    finally:
        _offer.reset(token)


def take(shard: Tensor, dtype: torch.dtype, group: str) -> Waitable | None:
    """Return the prefetched all-gather of the stored `shard` in `dtype`, or None. Call before starting one."""
    offer = _offer.get()
    return None if offer is None else offer.take(shard, dtype, group)


def plan_next(shards: Sequence[Tensor]) -> None:
    """Note, for the plan of the running forward, that these stored shards are to be gathered before the next one."""
    offer = _offer.get()
    if offer is not None:
        offer.planned = {shard.data_ptr() for shard in shards}


class DirectCollectives:
    """Collectives on process groups themselves. Each generated module has one, which holds what is in flight.

    Generated code passes nothing from a start to its wait but the tensor that is filled. The work is found by the
    address of that tensor, which nothing else can occupy before the wait.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, Waitable] = {}

    @property
    def at_start(self) -> "DirectCollectives":
        """Itself, at the start of a call of the graph: waits for what is left of a call that failed.
        A buffer must not be freed while a collective fills it.
        """
        while self._in_flight:
            _, filling = self._in_flight.popitem()
            filling.wait()
        return self

    def all_gather(self, shard: Tensor, group_size: int, group: str, *, out: Tensor) -> None:
        """Begin to all-gather `shard`, 1-D `[n]`, cast to the dtype of `out`, into `out`, 1-D `[n * group_size]`.

        Read `out` after `wait(out)`. If it was prefetched, `out` becomes the tensor that is being filled (Note [Where a
        prefetched buffer is taken]).
        """
        prefetched = take(shard, out.dtype, group)
        if prefetched is None:
            with profiled("all_gather", out.numel()):
                self._in_flight[out.data_ptr()] = start_all_gather(out, shard, group)
            return
        full = prefetched.full
        out.set_(full.untyped_storage(), 0, full.shape, (1,))  # no copy: the graph has no view of it yet
        self._in_flight[out.data_ptr()] = prefetched

    def all_to_all(self, packed: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Tensor:
        """Begin to send each rank its slice of `packed`, 1-D; returns a tensor like it, to be read after `wait`.
        All slices have one size; the lists of sizes are those of torch's operator.
        """
        with profiled("reduce", packed.numel()):
            exchange = start_exchange(packed, group)
        self._in_flight[exchange.full.data_ptr()] = exchange
        return exchange.full

    def wait(self, full: Tensor) -> None:
        """Order what follows after the collective that fills `full`."""
        filling = self._in_flight.pop(full.data_ptr(), None)
        if filling is not None:  # else `at_start` was not first, and has waited for it
            try:
                with profiled("wait_reduce" if filling.kind == "reduce" else "wait_all_gather", full.numel()):
                    filling.wait()
            except RuntimeError as error:
                note_wait(error, filling.kind, full.numel())
                raise
