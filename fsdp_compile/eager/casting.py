"""What is in a module's inputs and outputs; what mixed precision makes of these and of buffers; where inputs go.

Parameters and gradients are cast where they are gathered and reduced (unsharded_buffer.py, reduce.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fsdp_compile.core._torch import tree_leaves, tree_map

WITHOUT_TENSORS = (int, float, complex, bool, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""What may be in an output beside tensors and has none inside."""


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in `value`, through containers that torch's pytrees know, sets and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, (set, frozenset)):
            yield from leaves_of(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_of([getattr(leaf, field.name, None) for field in fields(leaf)])
        else:
            yield leaf


def computes_in_full_precision(module: Any) -> bool:
    """Whether mixed precision is ignored: in eval mode, with the switch on at `fully_shard` (E-MP-7)."""
    return module._fsdp.full_precision_in_eval and not module.training


def prepare_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Cast and move the tensors among the arguments, also in dataclasses, sets and packed sequences.

    Floating ones are cast to `param_dtype`, where the settings ask for it (E-MP-13, E-MP-14). At the root, all go to
    the accelerator that it computes on, if it does (E-FWD-2).
    """
    dtype = _input_dtype(module)
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
        return tree_map(prepare, values, is_leaf=_is_packed)

    return prepare_all((args, kwargs))


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)  # a named tuple, of which one part stays on the CPU


def cast_outputs(module: Any, output: Any) -> Any:
    """Cast the floating tensors in `output` to the `output_dtype` of the module's `mp_policy`, if it has one."""
    dtype = module._fsdp.output_dtype
    if dtype is None or computes_in_full_precision(module):
        return output

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, output)


def casting_outputs(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of `module` with its outputs cast: before hooks on outputs are placed, for these see what users see."""
    return lambda *args, **kwargs: cast_outputs(module, forward(module, *args, **kwargs))


def _input_dtype(module: Any) -> torch.dtype | None:
    policy = module._fsdp.precision
    if policy is None or computes_in_full_precision(module):
        return None
    own = policy.cast_forward_inputs and module._fsdp.units
    return policy.param_dtype if own or (policy.cast_root_forward_inputs and module._fsdp.is_root) else None


def cast_buffers(module: Any) -> None:
    """Give the module's buffers the dtype that it computes in now: `buffer_dtype`, or their own (E-MP-16, E-MP-17).

    Buffers are found by name, whatever was put in their place since (E-MP-18); one that has two names stays one.
    """
    policy = module._fsdp.precision
    if policy is None or policy.buffer_dtype is None:
        return
    full_precision = computes_in_full_precision(module)
    cast_to: dict[Tensor, Tensor] = {}
    for name, dtype in module._fsdp.buffer_dtypes.items():
        path, _, attribute = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        buffer = buffers.get(attribute)
        if buffer is not None:
            buffers[attribute] = cast_to.setdefault(buffer, buffer.to(dtype if full_precision else policy.buffer_dtype))
