"""Dtypes and devices: what mixed precision makes of a module's inputs, outputs and buffers.

Parameters and gradients are cast where they are gathered and reduced (streams.py, reduce.py).
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fsdp_compile.core._torch import tree_map


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
