"""A device that runs on the CPU and gives a record of what an accelerator's streams would be given (races.py).

with watched(model) as record:
    model(x).sum().backward()

record.races == []

Operators run in the stream that is current, collectives in one stream for each group, which begin after the stream that
starts them, hold what they use until they are waited for, and let the stream that waits go on after them. As on CUDA.
Copies with `non_blocking` have one end in the memory of the host, as have the shards of offloaded units; what has
nothing but memory of the host is run by the host.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from races import HOST, Clock, Record
from recording import NamedStreams
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.eager.streams import Streams, UnshardedBuffer

COMPUTE = "compute"
_LIBRARIES = os.path.dirname(os.path.dirname(torch.__file__))


class InFlight(NamedTuple):
    """A collective that was started and not waited for: an event behind it, and what it holds."""

    event: Clock
    holds: list[Tensor]


class Use(NamedTuple):
    """An operator by name, and the tensors that it is given; `writes` are among `reads`."""

    name: str
    reads: list[Tensor]
    writes: list[Tensor]


class Watch(TorchDispatchMode):
    """Writes operators into `record`, under the current stream; `offloads`: whether any unit does."""

    def __init__(self) -> None:
        super().__init__()
        self.record, self.stream, self.offloads = Record(), COMPUTE, False
        self._alive: dict[int, StorageWeakRef] = {}
        self._names: dict[int, str] = {}
        self._in_flight: dict[int, list[InFlight]] = {}

    # --- memory -------------------------------------------------------------------------------------------------------

    def name(self, tensor: Tensor, name: str, of_host: bool = False) -> None:
        """Say what the memory of `tensor` is, and whether it is the host's."""
        (key,) = self.keys([tensor], HOST if of_host else self.stream) or (None,)
        if key is not None:
            self._names[key] = self.record.memory[key].name = name

    def drop(self, tensor: Tensor) -> None:
        """The memory of `tensor` is given back; its storage may get other memory later."""
        self.record.give_back(tensor.untyped_storage()._cdata)

    def keys(self, tensors: Iterable[Tensor], owner: str, name: str = "memory") -> dict[int, bool]:
        """For the memory of each of `tensors` whether it was not known until now: `owner` has allocated it."""
        found: dict[int, bool] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
            if storage is None or tensor.device.type == "meta" or not storage.nbytes():
                continue
            key = storage._cdata
            is_new = key not in self.record.memory
            if is_new:
                self._alive[key] = StorageWeakRef(storage)
                self.record.allocate(key, owner, self._names.get(key) or f"{name} {tuple(tensor.shape)}")
            found[key] = found.get(key, False) or is_new
        return found

    def _find_dropped(self) -> None:
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            del self._alive[key]
            self._names.pop(key, None)
            self.record.give_back(key)

    # --- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass calls operators on what is inside
        self._find_dropped()
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
        leaves = [(a, leaf) for a, value in given for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        use = Use(
            func.name().split("::")[1],
            [leaf for _, leaf in leaves],
            [leaf for a, leaf in leaves if a.alias_info is not None and a.alias_info.is_write],
        )
        for key, is_new in self.keys(use.reads, COMPUTE).items():
            if is_new and key in self._names:  # it was dropped, and got memory again
                self.record.memory[key].owner = self.stream
                self.record.operation(f"memory for {use.name}", self.stream, allocates=True, place=_place())
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if use.name.startswith("wait_tensor"):
            for collective in self._in_flight.pop(args[0].untyped_storage()._cdata, []):
                self.record.wait(self.stream, collective.event)
        elif func.namespace in ("_c10d_functional", "c10d"):
            group = next((each for each in reversed(args) if isinstance(each, str)), "default")
            self._collective(use, f"group {group[:8]}", results, func.namespace == "c10d")
        elif not _only_looks(func):
            self._operator(use, results, self.offloads and _non_blocking(func, args, kwargs))
        return out

    def _operator(self, use: Use, results: list[Tensor], non_blocking: bool) -> None:
        reads, writes = set(self.keys(use.reads, COMPUTE)), set(self.keys(use.writes, COMPUTE))
        if non_blocking and writes and all(self.record.memory[key].owner != HOST for key in reads):
            for key in writes:  # gradients on their way to memory of the host
                self.record.memory[key].owner = HOST
        of_host = [key for key in reads | writes if self.record.memory[key].owner == HOST]
        stream = HOST if of_host and len(of_host) == len(reads | writes) and not non_blocking else self.stream
        made = {key for key, is_new in self.keys(results, stream, use.name).items() if is_new}
        if use.name.startswith(("empty", "new_empty")):
            reads, writes = set(), set()
        else:
            reads, writes = set() if _only_shape(use.name) else reads, writes | made
        self.record.operation(use.name, stream, reads, writes, bool(made) and stream != HOST, _place())
        if stream != HOST and ((of_host and not non_blocking) or use.name.startswith("_local_scalar_dense")):
            self.record.order(stream, HOST)

    def _collective(self, use: Use, stream: str, results: list[Tensor], is_waited_for: bool) -> None:
        made = self.keys(results, self.stream, use.name)
        if any(made.values()):
            self.record.operation(f"memory for {use.name}", self.stream, allocates=True, place=_place())
        self.record.order(self.stream, stream)
        writes = {*made, *self.keys(use.writes, COMPUTE)}
        self.record.operation(use.name, stream, self.keys(use.reads, COMPUTE), writes, place=_place())
        event = self.record.event(stream)
        if is_waited_for:
            self.record.wait(self.stream, event)
            return
        for key in writes:
            self._in_flight.setdefault(key, []).append(InFlight(event, [*use.reads, *results]))


def _place() -> str:
    """The line that calls torch, in the package or in a test; of backward that is the call of it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_LIBRARIES, __file__)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _only_looks(func: Any) -> bool:
    """Whether `func` makes views and uses no memory."""
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return views or func.name().startswith(("aten::set_", "aten::resize_", "profiler::"))


def _only_shape(name: str) -> bool:
    """Whether the operator takes shapes and dtypes from its arguments, and no values."""
    return name.startswith("new_") or name.split(".")[0].endswith("_like")


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `func` is a copy that the host does not wait for."""
    if func is torch.ops.aten.copy_.default:
        return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return func is torch.ops.aten._to_copy.default and bool(kwargs.get("non_blocking"))


class WatchedDevice(NamedStreams):
    """Their record."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch)
        self.watch = watch

    def order(self, first: str, then: str) -> None:
        self.watch.record.order(first, then)

    def keep(self, tensor: Tensor, stream: str) -> None:
        for key in self.watch.keys([tensor], COMPUTE):
            self.watch.record.keep(key, stream)

    def record(self, stream: str) -> Clock:
        return self.watch.record.event(stream)

    def await_event(self, event: Clock, stream: str) -> None:
        self.watch.record.wait(stream, event)

    def block(self, event: Clock) -> None:
        self.watch.record.wait(HOST, event)


def _functional_all_gather(full: Tensor, shard: Tensor, group: str) -> collectives.Filling:
    """As `start_all_gather`, by operators, which the watch sees; a group in Python has the collective beneath."""
    collectives.ALL_GATHER_INTO(shard.to(full.dtype), group_named(group).size(), group, out=full)
    return collectives.Filling(full, (collectives.WaitTensor(full),))


@contextmanager
def watched(model: Any, limit_gathers: bool = True) -> Iterator[Record]:
    """What happens inside to the root `model`, on a device that has streams, with collectives as NCCL has them."""
    watch = Watch()
    units = units_gathered_below(model)
    scopes = [(name or "root", module) for name, module in model.named_modules() if "_fsdp" in vars(module)]
    names = {flat: name for name, module in scopes for unit in module._fsdp.units for flat in unit.flats}
    watch.offloads = any(unit.settings.offload for unit in units)
    for unit in units:
        for flat in unit.flats:
            watch.name(flat.shard, f"shard of {names.get(flat)}", unit.settings.offload)
    free, start = UnshardedBuffer.free, UnshardedBuffer.start

    def freeing(buffer: UnshardedBuffer) -> None:
        before = buffer.storage.nbytes()
        free(buffer)
        if before and not buffer.storage.nbytes():
            watch.drop(buffer.full)

    def starting(buffer: UnshardedBuffer) -> None:
        if not (buffer.is_shard or buffer.is_free):
            watch.name(buffer.full, f"unsharded parameters of {names.get(buffer.flat)}")
        start(buffer)

    with ExitStack() as stack:
        streams = {unit.device: Streams(WatchedDevice(watch), limit_gathers) for unit in units[:1]}
        stack.enter_context(mock.patch.object(model._fsdp_runtime, "_streams", streams))
        stack.enter_context(mock.patch.object(collectives, "copies", lambda tensor, group: False))
        stack.enter_context(mock.patch.object(collectives, "start_all_gather", _functional_all_gather))
        stack.enter_context(mock.patch.object(UnshardedBuffer, "free", freeing))
        stack.enter_context(mock.patch.object(UnshardedBuffer, "start", starting))
        stack.enter_context(watch)
        yield watch.record
