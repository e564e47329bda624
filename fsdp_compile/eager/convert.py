"""`module.to()`, `.half()`, `.cuda()` and all else that goes through `Module._apply`: shards follow their parameters.

`_apply` gives each parameter new data, or the module a new parameter. New shards are made of them and bound to the
parameters; compute dtype and device follow, but for what was set explicitly (E-MP-4).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.core.unit import Unit, check_idle
from fsdp_compile.eager.accumulate import drop_cleared
from fsdp_compile.eager.unshard import free_prefetched
from fsdp_compile.eager.writeback import adopt_objects, refresh, replaced_objects, restore_objects

T = TypeVar("T")


def convert(module: Any, transform: Callable[[], T]) -> T:
    """Run `transform`, which may replace the data of all parameters of the sharded `module`, and make new shards of it.

    Raises:
        ValueError: a unit is not idle.
        RuntimeError: gradients were accumulated under `no_sync` and not reduced; or a unit's parameters come out in
            other sizes, in several dtypes or on several devices, on the meta device, or, offloaded, not on the CPU.
            Parameters and gradients are as before then.
    """
    runtime = module._fsdp_runtime
    if runtime.converting:  # a sharded module below one that is being converted
        return transform()
    units = units_used_below(module)
    check_idle(units, "Module._apply")
    for unit in units:
        _check_reduced(unit)
        free_prefetched(unit)
        refresh(unit)
    runtime.converting = True
    try:
        with _undone_by_errors(units):
            result = transform()
            shards = [_new_shards(unit) for unit in units]
    finally:
        runtime.converting = False
    for unit, new in zip(units, shards, strict=True):
        _bind(unit, new)
    return result


@contextmanager
def _undone_by_errors(units: Sequence[Unit]) -> Iterator[None]:
    grads = [(param, param.grad, param.grad.detach()) for u in units for param in u.params if param.grad is not None]
    try:
        yield
    except BaseException:
        for unit in units:
            restore_objects(unit)
            for flat in unit.flats:
                flat.bind(flat.shard)
        for param, grad, values in grads:
            grad.data = values
            param.grad = grad
        raise


def _check_reduced(unit: Unit) -> None:
    for flat in unit.flats:
        drop_cleared(flat)
    if any(flat.accumulated is not None for flat in unit.flats):
        raise RuntimeError(f"Module._apply: expected reduced gradients, found local ones from no_sync in {unit}; "
                           f"run a backward outside no_sync first")  # fmt: skip


def _new_shards(unit: Unit) -> list[Tensor | None]:
    """For each flat parameter its new shard; None where the old one is unchanged."""
    new = replaced_objects(unit)
    params = [new.get(index, param) for index, param in enumerate(unit.params)]
    _check_device(unit, params)
    shards = []
    for flat, now in unit.by_flat(params):
        _check_slices(flat, now)
        same = all(mine is param for mine, param in zip(flat.params, now, strict=True))
        shards.append(None if same and not flat.unbound() else _pack(flat, now))
    return shards


def _check_device(unit: Unit, params: Sequence[nn.Parameter]) -> None:
    device = params[0].device
    for name, param in zip(unit.names, params, strict=True):
        if param.device != device or param.is_meta or (unit.offload and device.type != "cpu"):
            where = "cpu, where an offloaded unit is stored" if unit.offload else f"{device}, as the unit's first"
            expected = "a device with values" if param.is_meta and not unit.offload else f"device {where}"
            raise RuntimeError(f"parameter {name}: expected {expected}, found {param.device}; convert all "
                               f"parameters of a unit alike")  # fmt: skip


def _check_slices(flat: FlatParam, params: Sequence[nn.Parameter]) -> None:
    for name, part, param in zip(flat.layout.names, flat.split(flat.shard), params, strict=True):
        expected = 0 if part is None else part.numel()
        if param.numel() != expected or param.dtype != params[0].dtype:
            raise RuntimeError(
                f"parameter {name}: expected {params[0].dtype} of {expected} elements, this rank's part, found "
                f"{param.dtype} of shape {tuple(param.shape)}; convert all parameters of a unit alike"
            )


def _pack(flat: FlatParam, params: Sequence[nn.Parameter]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        shard = torch.zeros(flat.shard.numel(), dtype=params[0].dtype, device=params[0].device)
        for part, param in zip(flat.split(shard), params, strict=True):
            if part is not None:
                part.copy_(param.view_as(part))
    return shard


def _bind(unit: Unit, shards: Sequence[Tensor | None]) -> None:
    adopt_objects(unit, replaced_objects(unit))
    for flat, shard in zip(unit.flats, shards, strict=True):
        if shard is not None:
            flat.bind(shard)
    if not unit.offload:
        unit.device = unit.flats[0].shard.device
    unit.update_dtypes()
    unit.locations.record()
    unit.link_params()
