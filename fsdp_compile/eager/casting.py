"""Dtypes and devices: what mixed precision makes of a module's inputs, outputs and buffers, and what `.to()` converts.

Parameters and gradients are cast where they are gathered and reduced (streams.py, reduce.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fsdp_compile.core._torch import tree_map
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.core.unit import Unit, check_idle
from fsdp_compile.eager.accumulate import drop_cleared
from fsdp_compile.eager.unsharded import free_for_next_forward
from fsdp_compile.eager.writeback import refresh, set_grads


def computes_in_full_precision(module: Any) -> bool:
    """Whether mixed precision is ignored: in eval mode, with the switch on at `fully_shard` (E-MP-7)."""
    return module._fsdp.settings.full_precision_in_eval and not module.training


def prepare_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Cast and move the tensors among the arguments, also in dataclasses, sets and packed sequences.

    Floating ones are cast to `param_dtype` where the settings ask for it (E-MP-13, E-MP-14). The root moves all of them
    to the accelerator that it computes on, if any (E-FWD-2).
    """
    policy, dtype = module._fsdp.settings.precision, None
    if policy.param_dtype is not None and not computes_in_full_precision(module):
        own = policy.cast_forward_inputs and module._fsdp.units
        dtype = policy.param_dtype if own or (policy.cast_root_forward_inputs and module._fsdp.is_root) else None
    device = module._fsdp.device if module._fsdp.is_root and module._fsdp.device.type != "cpu" else None
    if dtype is None and device is None:
        return args, kwargs

    def prepare(value: Any) -> Any:
        if isinstance(value, (Tensor, PackedSequence)):
            floating = (value.data if isinstance(value, PackedSequence) else value).is_floating_point()
            to: Any = value.to
            return to(device=device, dtype=dtype if floating else None)
        if isinstance(value, (set, frozenset)):
            return type(value)(map(prepare_all, value))
        if is_dataclass(value) and not isinstance(value, type):
            given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
            return replace(value, **{name: prepare_all(each) for name, each in given.items()})
        return value

    def prepare_all(values: Any) -> Any:
        # A packed sequence is a named tuple, of which one part stays on the CPU.
        return tree_map(prepare, values, is_leaf=lambda value: isinstance(value, PackedSequence))

    return prepare_all((args, kwargs))


def cast_outputs(module: Any, output: Any) -> Any:
    """Cast the floating tensors in `output` to the `output_dtype` of the module's `mp_policy`, if it has one."""
    dtype = module._fsdp.settings.output_dtype
    if dtype is None or computes_in_full_precision(module):
        return output

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, output)


def cast_buffers(module: Any) -> None:
    """Cast the module's buffers to the dtype that it computes in: `buffer_dtype`, or their own (E-MP-16, E-MP-17).

    Buffers are found by name, whatever was put in their place (E-MP-18); one that has two names stays one.
    """
    policy = module._fsdp.settings.precision
    if policy.buffer_dtype is None:
        return
    full_precision = computes_in_full_precision(module)
    cast_to: dict[Tensor, Tensor] = {}
    for name, dtype in module._fsdp.buffer_dtypes.items():
        path, _, attribute = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        buffer = buffers.get(attribute)
        if buffer is not None:
            buffers[attribute] = cast_to.setdefault(buffer, buffer.to(dtype if full_precision else policy.buffer_dtype))


# --- conversions ------------------------------------------------------------------------------------------------------

# `module.to()`, `.half()`, `.cuda()` and all else that goes through `Module._apply`, which would give each parameter
# new data. Instead, the function that it applies is called with the shards, and parameters are bound to the results;
# compute dtype and device follow, unless they were set explicitly (E-MP-4). `nn.Module` converts buffers and ignored
# parameters.


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

    def converted(grad: Tensor) -> Tensor:
        if isinstance(grad, ShardedTensor):
            return ShardedTensor(function(grad.local), grad.spec)
        return function(grad)

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
        grads = [[None if p.grad is None else converted(p.grad) for p in unit.params] for unit in units]
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
                flat.bind(trainable)
        set_grads(unit.params, of_params)
        if not unit.settings.offload:
            unit.device = unit.flats[0].shard.device
        unit.update_dtypes()
    return result


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
