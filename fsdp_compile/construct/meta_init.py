"""Deferred initialisation: parameters and buffers on the meta device get memory and values, one unit at a time.

    before   weight: meta      bias: real      a module that owns both
    during   weight: empty     bias: copy      what initialises the module sees these
    after    weight: new       bias: real      what held values is back, untouched

Every parameter stays the object it was, so ties and optimizers hold; a tied one is initialised at its first place.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.unit import unit_of

InitFn = Callable[[nn.Module], Any]
NamedModules = Sequence[tuple[str, nn.Module]]


def check_materializable(modules: NamedModules, init: InitFn | None, ignored: Set[Any]) -> None:
    """Raise ValueError if `materialize` with the same arguments could not initialise a module.

    Without `init` each module that directly owns meta tensors needs a `reset_parameters()`. Changes nothing.
    """
    if init is not None and not callable(init):
        raise ValueError(f"param_init_fn: expected a callable (module) -> None, found {type(init).__name__}")
    for path, module in modules:
        absent = _absent(module, ignored)
        if absent and init is None and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {path or 'model'}: expected reset_parameters() to initialise {', '.join(absent)}, found none "
                f"in {type(module).__name__}; pass param_init_fn, or initialise it before fully_shard"
            )
        for name, tensor in absent.items():
            if weakref.getweakrefcount(tensor):
                raise ValueError(
                    f"{_full_name(path, name, tensor)}: expected a meta tensor that nothing refers to weakly, found "
                    f"a weak reference, which would not follow it to its device; drop the reference"
                )


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
                _initialise(module, absent, device, init)
            for name, tensor in absent.items():
                _keep_identity(path, module, name, tensor, device)


def _initialise(module: nn.Module, absent: dict[str, Tensor], device: torch.device, init: InitFn | None) -> None:
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
    places = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in places if tensor is not None}


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
    """While initialising, put copies in the place of what holds values already; also where only a shard is left."""
    kept = {name: tensor for name, tensor in _own_tensors(module).items() if name not in absent}
    for name, tensor in kept.items():
        _set(module, name, _copy_of(tensor))
    try:
        yield
    finally:
        for name, tensor in kept.items():
            _set(module, name, tensor)


def _copy_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    found = unit_of(tensor)
    whole = tensor.new_zeros(found[0].shapes[found[1]]) if found else tensor.detach().clone()
    copy = nn.Parameter(whole, tensor.requires_grad)
    vars(copy).update(vars(tensor))  # marks that an initialiser may look at
    return copy


def _set(module: nn.Module, name: str, tensor: Any) -> None:
    places: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    places[name] = tensor


def _keep_identity(path: str, module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """Give `tensor`, the object that was on meta, the values that are now in its place."""
    found = _own_tensors(module).get(name)
    _check_initialised(_full_name(path, name, tensor), tensor, found, device)
    if found is not None and found is not tensor:
        if isinstance(found, nn.Parameter):
            found.requires_grad_(tensor.requires_grad)
        _become(tensor, found)
        _set(module, name, tensor)


def _check_initialised(name: str, before: Tensor, found: Tensor | None, device: torch.device) -> None:
    if found is None or found.is_meta:
        what = "nothing" if found is None else "it on the meta device"
        raise ValueError(f"{name}: expected param_init_fn to give it memory and values, found {what}; "
                         f"call module.to_empty(device=..., recurse=False) in it")  # fmt: skip
    expected, got = ((tuple(t.shape), t.dtype) for t in (before, found))
    if got != expected:
        raise ValueError(f"{name}: expected shape and dtype {expected} after initialising, found {got}; keep them")
    if found.device not in (device, torch.device("cpu")):
        raise ValueError(f"{name}: expected device {device} after initialising, found {found.device}; "
                         f"pass it as device_id, or initialise there")  # fmt: skip


def _become(tensor: Tensor, other: Tensor) -> None:
    """Make `tensor` what `other` is: a meta tensor cannot be given another device's data in place."""
    for key, value in vars(tensor).items():
        vars(other).setdefault(key, value)
    torch.utils.swap_tensors(tensor, other)


def _full_name(path: str, name: str, tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} {path}.{name}" if path else f"{kind} {name}"
