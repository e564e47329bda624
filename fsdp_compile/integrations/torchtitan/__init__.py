"""torchtitan's trainer on this package: its configs, with a `parallelize_fn` that shards by `fsdp_compile.fully_shard`.

    torchrun --nproc-per-node 8 -m torchtitan.train --module fsdp_compile.integrations.torchtitan.llama3 \
        --config llama3_8b --compile.enable

`llama3` and `qwen3` beside this file have the config functions of torchtitan's modules of these names. Checkpoints,
clipping, metrics and all else are torchtitan's own. Checked with torchtitan 0.3.0.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from inspect import getmembers, isfunction
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
    get_fsdp_reshard_after_forward_policy,
)
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh, validate_config
from torchtitan.models.common.decoder import Decoder

from fsdp_compile.api import fully_shard

__all__ = ["parallelize", "sharded"]

WHOLE = "FSDP_COMPILE_WHOLE_MODEL"  # the environment variable: 1 compiles the model, 0 or nothing each block
_REPLACED = ("torchtitan.models.llama3.parallelize", "torchtitan.models.qwen3.parallelize")


def sharded(given: Any) -> Any:
    """Let models be sharded by this package instead of torch's FSDP2.

    Args:
        given: a `Trainer.Config`, a `ModelSpec`, or a function that returns one of them, as in a `config_registry`.

    Returns:
        The same with `parallelize` as the spec's `parallelize_fn`; `given` stays as it is.

    Raises:
        TypeError: `given`, or what the function returns, is something else.
        ValueError: the model has a parallelize function of its own, which `parallelize` does not replace.
    """
    if isfunction(given) or isinstance(given, functools.partial):

        @functools.wraps(given)
        def make(*args: Any, **kwargs: Any) -> Any:
            return sharded(given(*args, **kwargs))

        return make
    if not is_dataclass(given) or isinstance(given, type):
        raise TypeError(f"given: expected a Trainer.Config, a ModelSpec or a function that returns one of them, found "
                        f"{type(given).__name__}")  # fmt: skip
    if (spec := getattr(given, "model_spec", None)) is not None:
        return replace(given, model_spec=sharded(spec))
    before = getattr(given, "parallelize_fn", None)
    if before is None:
        raise TypeError(f"given: expected a model_spec or a parallelize_fn, found none in {type(given).__name__}")
    if before is not parallelize and before.__module__ not in _REPLACED:
        raise ValueError(
            f"given: the model is parallelized by {before.__module__}.{before.__name__}, which this package does not "
            f"replace: use fsdp_compile.fully_shard in a parallelize_fn of your own, or, if the model is a Decoder "
            f"with nothing beside tok_embeddings, layers, norm and lm_head, set "
            f"parallelize_fn=fsdp_compile.integrations.torchtitan.parallelize"
        )
    return replace(given, parallelize_fn=parallelize)


def sharded_functions(registry: ModuleType) -> dict[str, Callable[..., Any]]:
    """`sharded` of each config function that a module like `torchtitan.models.llama3.config_registry` defines."""
    functions = getmembers(registry, isfunction)
    own = {name: each for name, each in functions if each.__module__ == registry.__name__ and name[0] != "_"}
    return {name: sharded(each) for name, each in own.items()}


def parallelize(
    model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, ac_config: Any,
    dump_folder: str,
) -> nn.Module:  # fmt: skip
    """A `parallelize_fn` for torchtitan's decoders: tensor, context and expert parallelism and checkpointing by
    torchtitan, then sharding by this package, in torchtitan's units: embeddings, each block, norm with head, the rest.

    `compile.enable` compiles each block, as torchtitan does; with FSDP_COMPILE_WHOLE_MODEL=1 in the environment it
    compiles the whole model with its communication, as one graph.

    Args:
        model: a `Decoder`, usually on the meta device.
        parallel_dims: torchtitan's meshes.
        training: the section of that name of torchtitan's config, as are the next three.
        parallelism: likewise.
        compile_config: likewise, `compile`.
        ac_config: likewise, `activation_checkpoint`; None: nothing is recomputed.
        dump_folder: where activation checkpointing writes what it reports.

    Raises:
        TypeError: the model is no `Decoder`.
        ValueError: FSDP_COMPILE_WHOLE_MODEL is neither 0 nor 1, or a parameter cannot be sharded.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a torchtitan Decoder, found {type(model).__name__}")
    compiles = compile_config.enable and "model" in compile_config.components
    whole = _compiles_whole_models() and compiles
    typed = parallelism.spmd_backend in ("full_dtensor", "spmd_types")
    if typed:
        validate_config(parallel_dims, model)
    elif parallel_dims.cp_enabled:
        attention = [block.attention.inner_attention for block in model.layers.values()]
        apply_cp_to_forward(attention, parallel_dims.get_mesh("cp"))
    if typed or parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compiles and not whole:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    _shard_model(model, parallel_dims, training, parallelism, typed)
    if whole:
        model.compile(backend=compile_config.backend, fullgraph=True)
    return model


def _compiles_whole_models() -> bool:
    text = os.environ.get(WHOLE) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{WHOLE}: expected 1, to compile whole models, or 0, to compile each block, found {text!r}")
    return text == "1"


def _shard_model(model: Any, parallel_dims: Any, training: Any, parallelism: Any, typed: bool) -> None:
    """Make torchtitan's units, whose gradients are sums over ranks: its trainer divides losses by all tokens."""
    if typed:
        mesh, dims = resolve_fsdp_mesh(parallel_dims)
        expert_mesh, expert_dims = resolve_sparse_fsdp_mesh(parallel_dims)
    else:
        replicas, dims, expert_dims = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else [], None, None
        mesh = parallel_dims.get_mesh([*replicas, "fsdp"])
        experts = parallel_dims.ep_enabled
        expert_mesh = parallel_dims.get_optional_mesh([*replicas, "efsdp"]) if experts else None
    precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mp_policy": precision, "auto_wrap_policy": None}
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    dense = {**options, "mesh": mesh, "dp_mesh_dims": dims}
    policy = parallelism.fsdp_reshard_after_forward
    frees = get_fsdp_reshard_after_forward_policy(policy, parallel_dims.pp_enabled)
    frees_last = policy == "always"  # else backward, which begins with it, finds it there
    first, last = [model.tok_embeddings], [model.norm, model.lm_head]
    if model.enable_weight_tying:  # they share a parameter, and a stage of a pipeline has some of them
        first, last = [], [each for each in (*first, *last) if each is not None]
    for modules, reshard in ((first, frees), (last, frees_last)):
        if modules and None not in modules:
            together = modules if len(modules) > 1 else modules[0]
            fully_shard(together, **dense, reshard_after_forward=reshard)
    for block in model.layers.values():
        if parallel_dims.ep_enabled and getattr(block, "moe_enabled", False):
            experts = block.moe.routed_experts.inner_experts
            fully_shard(experts, **options, mesh=expert_mesh, dp_mesh_dims=expert_dims, reshard_after_forward=frees)
        fully_shard(block, **dense, reshard_after_forward=frees)
    fully_shard(model, **dense)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
