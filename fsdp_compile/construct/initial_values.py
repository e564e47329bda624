"""Initial values: what is on the meta device gets memory and values, one unit at a time; and values equal on all ranks.

    before   weight: on meta    bias: has values    a module that owns both
    during   weight: empty      bias: a copy        what the function that initializes the module sees
    after    weight: values     bias: as before     the bias is untouched, whatever was done to its copy

Every parameter stays the object it was, so tied parameters stay tied and optimizers go on working. A tied parameter is
initialized in the first module that has it. See Note [Initializing without changing what has values].
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm import collectives
from fsdp_compile.comm.groups import Groups
from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.ops import inner_tensors
from fsdp_compile.core.settings import InitFn
from fsdp_compile.core.unit import unit_of

NamedModules = Sequence[tuple[str, nn.Module]]


def must_stay_on_meta(modules: Iterable[tuple[str, nn.Module]], init: InitFn | None, ignored: Set[Any]) -> bool:
    """Whether what is on the meta device must stay there, because a module has nothing that initializes it.

    Without `init` each module that directly owns meta tensors needs a `reset_parameters()`, and these must not be
    DTensors. Changes nothing.

    Raises:
        ValueError: `materialize` with the same arguments would not initialize a tensor that others refer to weakly, or
            `init` cannot be called.
    """
    if init is not None and not callable(init):
        raise ValueError(f"param_init_fn: expected a callable (module) -> None, found {type(init).__name__}")
    absent = [(path, module, _absent(module, ignored)) for path, module in modules]
    if init is None and any(of and not _can_reset(each, of) for _, each, of in absent):
        return True
    for path, _, of_module in absent:
        for name, tensor in of_module.items():
            if weakref.getweakrefcount(tensor):
                raise ValueError(
                    f"{_full_name(path, name, tensor)}: expected a meta tensor that nothing refers to weakly, found "
                    f"a weak reference, which would not follow it to its device; drop the reference"
                )
    return False


def _can_reset(module: nn.Module, absent: dict[str, Tensor]) -> bool:
    """Whether `reset_parameters` gives the values of one process: of a DTensor it would draw others on each rank."""
    has_dtensors = any(isinstance(tensor, DTensor) for tensor in absent.values())
    return callable(getattr(module, "reset_parameters", None)) and not has_dtensors


def materialize(modules: NamedModules, device: torch.device, init: InitFn | None, ignored: Set[Any]) -> None:
    """Give all meta tensors of a unit's `modules` memory and values; nothing happens if there are none.

    Only modules that directly own meta tensors are initialised, and values that are there stay (E-META-4). With `init`,
    modules that own nothing at all are passed to it as well (E-META-2).

    Args:
        modules: `(path, module)` pairs of one unit, breadth-first, without nested units and ignored modules.
        device: where the tensors go; what `init` puts on the CPU stays there.
        init: called on each module, with its tensors still on meta. None: they are made empty on `device`, and
            `module.reset_parameters()` is called (E-META-3).
        ignored: tensors to leave as they are.

    Raises:
        ValueError: `init` left a tensor on meta, or changed its shape, dtype or device.
        Exception: what `init` or `reset_parameters` raised, after a UserWarning that names the module.
    """
    if not any(_absent(module, ignored) for _, module in modules):
        return
    for path, module in modules:
        absent = _absent(module, ignored)
        if absent or (init and not _own_tensors(module)):
            with _warned(path, module), torch.no_grad(), _stand_ins(module, absent):
                _initialize(module, absent, device, init)
            for name, tensor in absent.items():
                _keep_identity(path, module, name, tensor, device)


def _initialize(module: nn.Module, absent: dict[str, Tensor], device: torch.device, init: InitFn | None) -> None:
    if init is not None:
        init(module)
        return
    for tensor in absent.values():
        empty = torch.empty_like(tensor, device=device)
        _become(tensor, nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty)
    reset: Any = module.reset_parameters
    reset()


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that `module` itself registered, by name."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


def _absent(module: nn.Module, ignored: Set[Any]) -> dict[str, Tensor]:
    return {name: t for name, t in _own_tensors(module).items() if t.is_meta and t not in ignored}


@contextmanager
def _warned(path: str, module: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn_caller(
            f"module {path or 'model'} ({type(module).__name__}): initialising it failed: {error!r}; "
            f"units before it are sharded already, so make the model anew"
        )
        raise


@contextmanager
def _stand_ins(module: nn.Module, absent: dict[str, Tensor]) -> Iterator[None]:
    """Put copies in the place of tensors that have values, so that initializing the module does not change them."""
    present = {name: tensor for name, tensor in _own_tensors(module).items() if name not in absent}
    for name, tensor in present.items():
        _set(module, name, _copy_of(tensor))
    try:
        yield
    finally:
        for name, tensor in present.items():
            _set(module, name, tensor)


# Note [Initializing without changing what has values]
# `reset_parameters` and `param_init_fn` initialize a whole module. Some of its tensors may have values that must stay:
# they were on a device from the start, or they are shared with a unit that has been sharded already, in which case
# their full values do not exist any more. While such a module is initialized it has copies of these tensors in full
# shape, which are dropped afterwards. A tensor on the meta device cannot be given memory in place, because `data` of
# another device cannot be assigned to it. So the function works on a new tensor, and `swap_tensors` then exchanges the
# contents of the two objects: the parameter that optimizers and other modules know gets the values.


def _copy_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    managed = unit_of(tensor)
    full = tensor.new_zeros(managed[0].shapes[managed[1]]) if managed else tensor.detach().clone()
    copy = nn.Parameter(full, tensor.requires_grad)
    vars(copy).update(vars(tensor))  # marks that an initialiser may look at
    return copy


def _set(module: nn.Module, name: str, tensor: Any) -> None:
    registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    registry[name] = tensor


def _keep_identity(path: str, module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """Give `tensor`, the object that was on meta, the values that are now in its place."""
    initialized = _own_tensors(module).get(name)
    _check_initialized(_full_name(path, name, tensor), tensor, initialized, device)
    if initialized is not None and initialized is not tensor:
        if isinstance(initialized, nn.Parameter):
            initialized.requires_grad_(tensor.requires_grad)
        _become(tensor, initialized)
        _set(module, name, tensor)


def _check_initialized(name: str, before: Tensor, initialized: Tensor | None, device: torch.device) -> None:
    if initialized is None or initialized.is_meta:
        what = "nothing" if initialized is None else "it on the meta device"
        raise ValueError(f"{name}: expected param_init_fn to give it memory and values, found {what}; "
                         f"call module.to_empty(device=..., recurse=False) in it")  # fmt: skip
    expected, got = ((tuple(t.shape), t.dtype) for t in (before, initialized))
    if got != expected:
        raise ValueError(f"{name}: expected shape and dtype {expected} after initialising, found {got}; keep them")
    if initialized.device not in (device, torch.device("cpu")):
        raise ValueError(f"{name}: expected device {device} after initialising, found {initialized.device}; "
                         f"pass it as device_id, or initialise there")  # fmt: skip


def _become(tensor: Tensor, other: Tensor) -> None:
    """Make `tensor` what `other` is: a meta tensor cannot be given another device's data in place."""
    for key, value in vars(tensor).items():
        vars(other).setdefault(key, value)
    torch.utils.swap_tensors(tensor, other)


def _full_name(path: str, name: str, tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} {path}.{name}" if path else f"{kind} {name}"


def move_from_cpu(params: Iterable[nn.Parameter], modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move what is on the CPU, of `params` and of the modules' own buffers, to `device` (E-INIT-15).

    Every tensor stays the object it is, so ties hold.
    """
    if device.type == "cpu":
        return
    tensors: list[Tensor] = [*params]
    for module in modules:
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.to(device)


# --- equal on all ranks: the first sends its tensors to the others, many of them in one message -----------------------

BUCKET_BYTES = 250 * 2**20


def broadcast_states(params: Iterable[nn.Parameter], module: nn.Module, groups: Groups) -> None:
    """Overwrite `params` and all buffers of `module` with the values that the first rank has (E-SYNC-1, 3).

    Buffers that an earlier call has sent are left out (E-SYNC-2). All ranks must pass tensors of equal shapes, dtypes
    and order.
    """
    buffers = unsent_buffers(module)
    broadcast([*params, *buffers.values()], groups)
    for buffer in buffers.values():
        vars(buffer)["_fsdp_sent"] = True


def unsent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of `module`, by name, that are still to be sent; those on the meta device have nothing to send."""
    return {n: b for n, b in module.named_buffers() if not (b.is_meta or getattr(b, "_fsdp_sent", False))}


def broadcast(tensors: Iterable[Tensor], groups: Groups, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Copy `tensors`, of any shapes and dtypes, from the first rank of `groups` to all others, in place.

    First among replicas, so that the first rank of every shard group has the values when they go through shard groups.
    """
    plain = [inner.detach() for tensor in tensors for inner in inner_tensors(tensor) if inner.numel()]
    for group in (groups.replicate, groups.shard):
        if group is not None and group.size() > 1:
            for bucket in _buckets(plain, bucket_bytes):
                _send(bucket, group)


def _buckets(tensors: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Groups of tensors of one device that fill a bucket; a tensor that is larger than a bucket gets its own.

    Wide dtypes come first, so that every tensor starts at a multiple of its item size in a bucket of bytes.
    """
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in sorted(tensors, key=lambda t: (str(t.device), -t.itemsize)):
        if bucket and (nbytes + tensor.nbytes > bucket_bytes or tensor.device != bucket[0].device):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket


def _send(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    segments = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in bucket]
    message = segments[0] if len(segments) == 1 else torch.cat(segments)
    collectives.broadcast(message, group)
    for tensor, segment in zip(bucket, message.split([segment.numel() for segment in segments]), strict=True):
        tensor.copy_(segment.view(tensor.dtype).view(tensor.shape))
