"""`module.to()`, `.half()`, `.cuda()` and all else that goes through `Module._apply`, which would give each parameter
new data. Instead, the function that it applies is called with the shards, and parameters are bound to the results;
compute dtype and device follow, unless they were set explicitly (E-MP-4). `nn.Module` converts buffers and ignored
parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp_compile.core.layout import ShardRecord
from fsdp_compile.core.sharding import sharding_of, units_used_below
from fsdp_compile.core.unit import Unit, check_idle
from fsdp_compile.eager.accumulate import drop_cleared
from fsdp_compile.eager.runtime import free_for_next_forward
from fsdp_compile.edits.writeback import refresh, set_grads
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

T = TypeVar("T")
Convert = Callable[[Tensor], Tensor]


def convert(module: Any, function: Convert, transform: Callable[[], T]) -> T:
    """Call `function` with the shards and gradients of all units below `module`; `transform` converts all else.

    Raises, before anything is converted, ValueError if a unit is not idle, and RuntimeError if gradients from `no_sync`
    are not reduced or if a conversion does not fit a unit (`_check_shards`).
    """
    runtime = module._fsdp_runtime
    if runtime.converting:  # a sharded module below one that is being converted
        return transform()
    units = units_used_below(module)
    check_idle(units, "Module._apply")
    for unit in units:
        for flat in unit.flats:
            drop_cleared(flat)
        if any(flat.accumulated is not None for flat in unit.flats):
            raise RuntimeError(f"Module._apply: {unit} has gradients from no_sync that are not reduced; run a backward "
                               f"outside no_sync first")  # fmt: skip
        free_for_next_forward(unit)
        refresh(unit)
    with torch.no_grad():
        shards = [[function(flat.shard) for flat in unit.flats] for unit in units]
        for unit, new in zip(units, shards, strict=True):
            _check_shards(unit, new)
        grads = [[None if p.grad is None else _converted(p.grad, function) for p in unit.params] for unit in units]
    locations = [location for unit in units for of_param in unit.locations.of for location in of_param]
    held = [(parameters, name, parameters[name]) for parameters, name in locations if parameters.get(name) is not None]
    runtime.converting = True
    try:
        for parameters, name, _ in held:
            parameters[name] = None  # `nn.Module` does not see it
        result = transform()
    finally:
        runtime.converting = False
        for parameters, name, param in held:
            parameters[name] = param
    for unit, new, of_params in zip(units, shards, grads, strict=True):
        set_grads(unit.params, [None] * len(unit.params))
        for flat, shard in zip(unit.flats, new, strict=True):
            if shard is not flat.shard:
                with torch.inference_mode(False), torch.no_grad():  # what inference mode made may not be trained
                    trainable = shard.clone() if shard.is_inference() else shard
                    _clear_padding(trainable, flat.records)
                flat.bind(trainable)
        set_grads(unit.params, of_params)
        if not unit.settings.offload:
            unit.device = unit.flats[0].shard.device
        unit.update_dtypes()
    return result


def _converted(tensor: Tensor, function: Convert) -> Tensor:
    return ShardedTensor(function(tensor.local), tensor.spec) if isinstance(tensor, ShardedTensor) else function(tensor)


def _clear_padding(shard: Tensor, records: Sequence[ShardRecord | None]) -> None:
    """Set the elements of `shard` that belong to no parameter to zero.

    `to_empty`, or a function that does not keep zeros, leaves anything there, and nobody who initializes parameters can
    see it: but ranks compare shards that are replicated, and scales of wire formats are those of whole blocks.
    """
    end = 0
    for record in filter(None, records):
        shard[end : record.offset].zero_()
        end = record.offset + record.numel
    shard[end:].zero_()


def _check_shards(unit: Unit, shards: Sequence[Tensor]) -> None:
    device = shards[0].device
    offload = unit.settings.offload
    for flat, shard in zip(unit.flats, shards, strict=True):
        name = flat.names[0]
        if shard.device != device or shard.is_meta or (offload and device.type != "cpu"):
            where = "cpu, where an offloaded unit is stored" if offload else f"{device}, as the unit's first"
            expected = "a device with values" if shard.is_meta and not offload else f"device {where}"
            raise RuntimeError(f"parameter {name}: expected {expected}, found {shard.device}; convert all "
                               f"parameters of a unit alike")  # fmt: skip
        if flat.is_inner and (shard.dtype, shard.device) != (flat.shard.dtype, flat.shard.device):
            raise RuntimeError(
                f"parameter {name}: expected {flat.shard.dtype} on {flat.shard.device} to stay, as it is part of a "
                f"tensor subclass, found {shard.dtype} on {shard.device}; convert the model before fully_shard"
            )
        if shard.shape != flat.shard.shape:
            raise RuntimeError(
                f"parameter {name}: expected a conversion that leaves the {flat.shard.numel()} elements of its shard, "
                f"found shape {tuple(shard.shape)}; change dtype or device only"
            )


def offload(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, parameters: bool = True) -> None:
    """Move parameters, their gradients and buffers of `model`, and the state of `optimizer`, to pinned host memory.

    Values can be read and saved there; parameters stay the objects they are, and compiled code stays valid. Call `load`
    before the next forward, or step. torch's allocator keeps the memory until `torch.cuda.empty_cache()`. No rank waits
    for another one.

    Args:
        model: sharded, eager or compiled, between steps.
        optimizer: whose state moves too; None: none. Numbers in it, such as counts of steps, stay where they are.
        parameters: False moves the state alone.

    Raises:
        ValueError: a forward or backward is under way, parameters are summoned, or `model` is not sharded, or always in
            host memory.
        RuntimeError: gradients from `no_sync` are not reduced.
    """
    device = _move(model, optimizer, parameters, to_host=True)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)  # who reads host memory waits for no stream


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, parameters: bool = True) -> None:
    """Move what `offload` has moved, of these arguments, back to the device that `model` computes on."""
    _move(model, optimizer, parameters, to_host=False)


def _move(model: nn.Module, optimizer: Any, parameters: bool, to_host: bool) -> torch.device:
    sharding = next(filter(None, map(sharding_of, model.modules())), None)
    if sharding is None:
        raise ValueError(f"model: expected one that fully_shard was called on, found a {type(model).__name__}")
    if sharding.settings.offload:
        raise ValueError("model: expected one without CPUOffload or CPUOffloadPolicy, whose shards stay in host memory")
    device, moved = sharding.device, dict[int, Tensor]()

    def move(tensor: Tensor) -> Tensor:
        """The tensor in new memory; views that share memory share it there: pinned, each part takes a power of two."""
        memory = tensor.untyped_storage()
        if (key := memory.data_ptr()) not in moved:
            whole = tensor.new_empty(0, dtype=torch.uint8).set_(memory)
            host = torch.empty_like(whole, device="cpu", pin_memory=to_host and device.type != "cpu")
            moved[key] = host.copy_(whole, non_blocking=True) if to_host else whole.to(device, non_blocking=True)
        there = moved[key]
        view = there.new_empty(0, dtype=tensor.dtype)
        return view.set_(there.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    if parameters:
        model._apply(move)
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = _converted(value, move)
    return device
