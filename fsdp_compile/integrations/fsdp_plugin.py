"""Accelerate's FSDP configuration, of either version, as arguments of `fully_shard`.

It comes from `accelerate launch`, `TrainingArguments(fsdp=..., fsdp_config=...)` or a `FullyShardedDataParallelPlugin`.

auto_wrap_policy, transformer_cls_names_to_wrap, min_num_params   `auto_wrap_policy`
sync_module_states, cpu_ram_efficient_loading                     `sync_module_states`
activation_checkpointing, activation_checkpointing_offload        the wrapped modules are checkpointed
state_dict_type and its configs, use_orig_params                  none: what is saved has one form, parameters are kept
all others                                                        the argument of FSDP1 or FSDP2
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from fsdp_compile.integrations._torch import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper

_USE = "ACCELERATE_USE_FSDP"  # in the environment that `accelerate launch` makes


@contextmanager
def without_fsdp() -> Iterator[Plugin | None]:
    """Let accelerate find no FSDP in the environment; give the configuration that is there."""
    used = os.environ.pop(_USE, None)
    try:
        yield Plugin() if (used or "").lower() == "true" else None
    finally:
        if used is not None:
            os.environ[_USE] = used


def configured(plugin: Plugin, model: nn.Module, mixed_precision: str, evaluates: bool) -> dict[str, Any]:
    """Checkpoint activations of `model` as configured, and give the arguments of `fully_shard`.

    Args:
        plugin: the configuration.
        model: to be sharded.
        mixed_precision: of the Accelerator; parameters that train become float32 then, as accelerate has it.
        evaluates: whether the model is not trained: it may lack the configured classes, and keeps its dtypes.

    Raises:
        ValueError: the model has no module of a class that is to be wrapped, or nothing says what to checkpoint.
    """
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    policy = _policy(plugin, model, evaluates)
    if not evaluates:
        for param in model.parameters() if mixed_precision != "no" else ():
            if param.requires_grad and param.is_floating_point():
                param.data = param.data.to(torch.float32)
        if plugin.activation_checkpointing:
            _checkpoint_activations(plugin, model, policy)
    ignored: Any = plugin.ignored_modules
    if isinstance(ignored, str):
        ignored = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
    options = {
        "auto_wrap_policy": policy,
        "ignored_modules": ignored,
        "sync_module_states": bool(plugin.sync_module_states or plugin.cpu_ram_efficient_loading),
        "param_init_fn": plugin.param_init_fn,
        "limit_all_gathers": plugin.limit_all_gathers,
    }
    if plugin.fsdp_version == 2:
        options["reshard_after_forward"], options["mp_policy"] = (
            plugin.reshard_after_forward,
            plugin.mixed_precision_policy,
        )
        return options | {"offload_policy": plugin.cpu_offload}
    return options | {
        "sharding_strategy": plugin.sharding_strategy or plugin.reshard_after_forward,
        "mixed_precision": plugin.mixed_precision_policy,
        "cpu_offload": plugin.cpu_offload,
        "backward_prefetch": plugin.backward_prefetch,
        "forward_prefetch": bool(plugin.forward_prefetch),
    }


def _policy(plugin: Plugin, model: nn.Module, evaluates: bool) -> Any:
    """The `auto_wrap_policy`."""
    policy = plugin.auto_wrap_policy
    if policy is size_based_auto_wrap_policy:
        least = plugin.min_num_params
        return functools.partial(policy, min_num_params=least) if least else None
    if policy is not transformer_auto_wrap_policy:
        return policy
    asked = plugin.transformer_cls_names_to_wrap
    classes = {type(module).__name__: type(module) for module in model.modules()}
    found = {classes[name] for name in asked or getattr(model, "_no_split_modules", None) or () if name in classes}
    if not evaluates and (missing := [name for name in asked or () if name not in classes]):
        raise ValueError(f"transformer_cls_names_to_wrap: {type(model).__name__} has no module of class "
                         f"{', '.join(missing)}; correct fsdp_transformer_layer_cls_to_wrap")  # fmt: skip
    return ModuleWrapPolicy(found) if found else "auto"


def _checkpoint_activations(plugin: Plugin, model: nn.Module, policy: Any) -> None:
    if not callable(policy):
        raise ValueError("activation_checkpointing: expected an auto_wrap_policy whose modules are checkpointed, found "
                         "none; set fsdp_auto_wrap_policy")  # fmt: skip

    def wrap(module: nn.Module) -> nn.Module:
        wrapped = checkpoint_wrapper(module)
        return offload_wrapper(wrapped) if plugin.activation_checkpointing_offload else wrapped

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, auto_wrap_policy=policy)
