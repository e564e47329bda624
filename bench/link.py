"""An emulated link: one process plays rank 0 of W, and each collective takes `latency + bytes / bandwidth` seconds.

    start(world=64, latency=20e-6, bandwidth=1e9)      a default process group; from then on any system may run
    LINK.configure(bandwidth=...); LINK.reset(); step(); LINK.summary()

    compute    | forward 0   | forward 1 |~~~| forward 2 |        ~~~ exposed: a wait sleeps until the end of a transfer
    link       [gather 0][gather 1][ gather 2    ]                serial: one transfer at a time, in order of issue

The link uses no CPU: a wait sleeps. Every other rank is taken to hold and to send what this one does, so that values
stay finite; they are not those of a training on W ranks. What a network card would write into memory is written when
the collective is issued. The time that this takes is not counted, nor what a sleep lasts too long: steps are timed by
`LINK.clock()`, which leaves both out. CUDA tensors: see link_cuda.py.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "emulated"
FREE = 1e18  # bytes per second: a link that takes no time

untraced: Any = torch.compiler.disable  # a compiled DDP calls these from C++ while Dynamo watches


@dataclass
class Call:
    """One collective on the link; times in seconds of `LINK.clock()`."""

    kind: str  # all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, scatter or barrier
    group: str  # the process group's name: one for each mesh axis
    nbytes: int  # that this rank sends, by the ring algorithm; as many are received
    issued: float
    begin: float  # from here to `end` it has the link
    end: float
    waits: list[tuple[float, float]] = field(default_factory=list)  # when waits for it began and ended: exposed

    @property
    def waited(self) -> float:
        """Seconds that it held computation up."""
        return sum(end - begin for begin, end in self.waits)


class Link:
    def __init__(self) -> None:
        self.latency, self.bandwidth = 20e-6, 1e9
        self.now = time.perf_counter
        self.uncounted = 0.0  # seconds that this emulation itself has computed or overslept
        self.reset()

    def configure(self, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Set seconds per call and bytes per second, for calls from now on."""
        self.latency = self.latency if latency is None else latency
        self.bandwidth = self.bandwidth if bandwidth is None else bandwidth

    def count_cpu_time(self) -> None:
        """Count CPU seconds of this process; waits pass at once. Not for systems that wait in threads, as DDP does."""
        self.now, self.uncounted = time.process_time, 0.0

    def clock(self) -> float:
        """Seconds as they pass where a network card writes into memory by itself and wakes who waits in time."""
        return self.now() - self.uncounted

    def seconds(self, nbytes: int) -> float:
        """How long a call of `nbytes` has the link."""
        return self.latency + nbytes / self.bandwidth

    def reset(self) -> None:
        """Forget all calls; transfers in flight end at once."""
        self.calls: list[Call] = []
        self.marks: list[Any] = []  # CUDA: events of calls whose times are not known yet (link_cuda.settle)
        self.free_at = 0.0

    def forget(self) -> None:
        """Forget calls that have ended; those in flight go on, and what is waited for them from now on counts."""
        now = self.clock()
        self.calls = [call for call in self.calls if call.end > now]
        for call in self.calls:
            call.waits.clear()

    def issue(self, kind: str, group: str, nbytes: int) -> Call:
        """Put a call behind those before it."""
        now = self.clock()
        begin = max(now, self.free_at)
        self.free_at = begin + self.seconds(nbytes)
        self.calls.append(Call(kind, group, nbytes, now, begin, self.free_at))
        return self.calls[-1]

    def wait(self, call: Call) -> None:
        """Sleep until the call's transfer has ended. That a sleep returns late is not counted."""
        now = self.clock()
        if now < call.end:
            if self.now is time.perf_counter:
                time.sleep(call.end - now)
            self.uncounted += self.clock() - call.end
            call.waits.append((now, call.end))

    def summary(self) -> dict[str, Any]:
        """Totals since the last reset: seconds busy and exposed, calls and bytes by group and kind."""
        count: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        sent: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for call in self.calls:
            count[call.group][call.kind] += 1
            sent[call.group][call.kind] += call.nbytes
        calls, nbytes = ({group: dict(kinds) for group, kinds in each.items()} for each in (count, sent))
        busy = sum(call.end - call.begin for call in self.calls)
        return {"busy": busy, "exposed": sum(call.waited for call in self.calls), "calls": calls, "bytes": nbytes}


LINK = Link()  # of all groups of this process: a rank has one network card


class LinkWork(dist._Work):
    """A collective on CPU tensors that was issued."""

    def __init__(self, call: Call, result: Sequence[Tensor]) -> None:
        super().__init__()
        self.call, self.tensors = call, list(result)

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        LINK.wait(self.call)
        return True

    def is_completed(self) -> bool:
        return LINK.clock() >= self.call.end

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self.tensors

    @untraced
    def get_future(self) -> "Future[list[Tensor]]":
        """Completes at the end of the transfer; DDP waits for it in C++, so what it waits is not seen here."""
        future: Future[list[Tensor]] = Future()
        threading.Thread(target=self._complete, args=(future,), daemon=True).start()
        return future

    def _complete(self, future: "Future[list[Tensor]]") -> None:
        while (late := self.call.end - LINK.clock()) > 0:
            time.sleep(late)
        future.set_result(self.tensors)


class EmulatedGroup(dist.ProcessGroup):
    """Rank 0 of `size` ranks, whose collectives go over `LINK`."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.ranks = size
        self.alive: list[Any] = []  # C++ holds works, but not the Python halves that know how to wait

    def size(self) -> int:
        return self.ranks

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        """The name under which torch knows the group."""
        return dist.distributed_c10d._world.pg_names.get(self, "0")

    @property
    def group_name(self) -> str:
        return self.pg_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """What Inductor's own overlap pass asks for seconds of collectives: it has to compute them by itself."""
        return SimpleNamespace(supports_time_estimate=False, alltoall_base=self.alltoall_base)

    def _set_group_name(self, name: str) -> None: ...

    def _set_group_desc(self, desc: str) -> None: ...

    # --- collectives, under the names that torch 2.11 and 2.13 call ---------------------------------------------------

    @untraced
    def _allgather_base(self, out: Tensor, shard: Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([out], [shard])

    @untraced
    def _reduce_scatter_base(self, out: Tensor, full: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([out], [full], opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    @untraced
    def allgather_into_tensor_coalesced(self, outs: list[Tensor], shards: list[Tensor], opts: Any = None) -> Any:
        """Each of `outs` receives its shard once from every rank."""

        def move() -> None:
            for out, shard in zip(outs, shards, strict=True):
                out.view(self.ranks, -1).copy_(shard.reshape(1, -1).expand(self.ranks, -1))

        return self._issue("all_gather", (self.ranks - 1) * _nbytes(shards), move, outs, shards)

    @untraced
    def allgather(self, outs: list[list[Tensor]], shards: list[Tensor], opts: Any = None) -> Any:
        """The same, into a tensor for each rank."""

        def move() -> None:
            for copies, shard in zip(outs, shards, strict=True):
                for copy in copies:
                    copy.copy_(shard)

        return self._issue("all_gather", (self.ranks - 1) * _nbytes(shards), move, outs[0])

    @untraced
    def reduce_scatter_tensor_coalesced(self, outs: list[Tensor], fulls: list[Tensor], opts: Any = None) -> Any:
        """Each of `outs` is this rank's part of the sum or mean of equal tensors."""

        def move() -> None:
            for out, full in zip(outs, fulls, strict=True):
                torch.mul(full.reshape(-1)[: out.numel()], self._factor(opts), out=out.view(-1))

        return self._issue("reduce_scatter", (self.ranks - 1) * _nbytes(outs), move, outs, fulls)

    @untraced
    def alltoall_base(self, out: Tensor, full: Tensor, *sizes_and_options: Any) -> Any:
        """`out` receives from every rank, in slices of equal size, this rank's own.

        Slices may be of other sizes: then `out` is filled with what this rank sends, and the larger of what goes to
        others and comes from them has the link.
        """
        receive, send = (*sizes_and_options, [], [])[:2] if len(sizes_and_options) > 1 else ([], [])

        def move() -> None:
            if not (receive or send):
                out.view(self.ranks, -1).copy_(full.view(self.ranks, -1)[:1].expand(self.ranks, -1))
            elif full.numel():
                copies = -(-out.numel() // full.numel())
                out.view(-1).copy_(full.view(-1).repeat(copies)[: out.numel()])
            else:
                out.zero_()

        nbytes = (self.ranks - 1) * _nbytes([full]) // self.ranks
        if receive or send:
            nbytes = full.element_size() * max(sum(send) - send[0], sum(receive) - receive[0])
        return self._issue("all_to_all", nbytes, move, [out], [full])

    @untraced
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Each of `tensors` becomes the sum, mean or extreme of equal tensors."""

        def move() -> None:
            for tensor in tensors:
                tensor.mul_(int(self._factor(opts)))

        return self._issue("all_reduce", 2 * (self.ranks - 1) * _nbytes(tensors) // self.ranks, move, tensors)

    @untraced
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Equal tensors stay as they are."""
        return self._issue("broadcast", _nbytes(tensors), lambda: None, tensors)

    @untraced
    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any = None) -> Any:
        """This rank's part of its own tensors."""

        def move() -> None:
            for out, given in zip(outs, parts, strict=True):
                out.copy_(given[0])

        return self._issue("scatter", (self.ranks - 1) * _nbytes(outs), move, outs)

    @untraced
    def barrier(self, opts: Any = None) -> Any:
        return self._issue("barrier", 0, lambda: None, [])

    def _factor(self, opts: Any) -> int:
        """What a reduction multiplies by when all ranks have the same."""
        return self.ranks if opts is None or opts.reduceOp == dist.ReduceOp.SUM else 1

    def _issue(
        self, kind: str, nbytes: int, move: Callable[[], None], result: Sequence[Tensor], read: Sequence[Tensor] = ()
    ) -> Any:
        if result and result[0].is_cuda:
            from bench.link_cuda import issue

            return self._keep(issue(LINK, kind, self.pg_name, nbytes, move, [*result, *read]))
        begin = LINK.now()
        with torch.no_grad(), _disable_current_modes():  # who counts copies must not count these
            move()
        LINK.uncounted += LINK.now() - begin
        return self._keep(LinkWork(LINK.issue(kind, self.pg_name, nbytes), result))

    def _keep(self, work: Any) -> Any:
        self.alive = [each for each in self.alive if not each.is_completed()]
        self.alive.append(work)
        return work


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class EchoStore(dist.Store):
    """A store in which every other rank does what this one does: what is added is added by all of its group."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.values = world, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self.values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` once for each rank: of the group whose name is the last prefix of the key, or of all."""
        sizes = {name: group.size() for group, name in dist.distributed_c10d._world.pg_names.items()}
        ranks = sizes.get("".join(key.split("//")[-2:-1]), self.world)
        total = int(self.values.get(key, b"0")) + amount * ranks
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        """Set a value that is not there yet or is as expected; return what is there then."""
        if self.values.get(key, b"") in (b"", _bytes(expected)):
            self.values[key] = _bytes(value)
        return self.values[key]

    def forget(self, *topics: str) -> None:
        """Forget all keys about these topics."""
        self.values = {key: each for key, each in self.values.items() if not any(topic in key for topic in topics)}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """What this rank has not set, nobody sets."""
        if not self.check(keys):
            raise RuntimeError(f"keys {keys} are not set, and no other rank exists to set them")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _all_gather_out(shard: Tensor, group_size: int, group: str, *, out: Tensor) -> Tensor:
    """The functional all-gather with an `out`: the one collective that torch does not pass on to groups in Python."""
    emulated: Any = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str in 2.13
    torch._C._distributed_c10d._register_work(out, emulated._allgather_base(out, shard))
    return out


_kernels: list[torch.library.Library] = []  # registered as long as this lives


def _register() -> None:
    if BACKEND.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: EmulatedGroup(rank, size), devices=["cpu", "cuda"]
    )
    _kernels.append(torch.library.Library("_c10d_functional", "IMPL"))
    for key in ("CPU", "CUDA"):  # torch's own kernel is for no device in particular, and stays for all others
        _kernels[0].impl("all_gather_into_tensor_out", _all_gather_out, key)


def start(world: int, latency: float = 20e-6, bandwidth: float = 1e9) -> dist.ProcessGroup:
    """Initialise the default process group as rank 0 of `world` on the emulated link."""
    _register()
    LINK.configure(latency, bandwidth)
    LINK.reset()
    store = EchoStore(world)
    dist.init_process_group(BACKEND, rank=0, world_size=world, store=store)
    group: Any = dist.group.WORLD
    group.alive_store = store  # torch keeps the C++ half of it, which cannot do without the Python half
    return group
