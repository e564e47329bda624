"""Where the passes meet Inductor: the default path's hooks and the `fsdp_compile` backend.

Two ways in, one set of passes:
  torch.compile(model)                           `install` puts our pipelines into two of Inductor's custom-pass hooks,
                                                 after what is there already. Nothing else in the process changes.
  torch.compile(model, backend="fsdp_compile")   the same hooks, for this compilation only, with a `CompileConfig`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch._inductor import config as inductor_config

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes import PASSES
from fsdp_compile.passes.pipeline import Pass, Pipeline, Stage

_HOOKS: dict[str, Stage] = {"joint_custom_post_pass": "joint", "post_grad_custom_post_pass": "post_grad"}


def install() -> None:
    """Make plain `torch.compile` run our passes on graphs that hold our markers. Idempotent."""
    config = CompileConfig.from_environment()
    check_names(config)
    for hook, pipeline in pipelines(config).items():
        if not isinstance(getattr(inductor_config, hook), Pipeline):
            setattr(inductor_config, hook, pipeline)


def pipelines(config: CompileConfig, passes: tuple[Pass, ...] = PASSES) -> dict[str, Pipeline]:
    """A pipeline for each hook of Inductor, to run after the pass that somebody else registered there."""
    return {hook: Pipeline(passes, stage, config, _foreign(hook)) for hook, stage in _HOOKS.items()}


def _foreign(hook: str) -> Any:
    """The pass that somebody else has registered in `hook`."""
    registered = getattr(inductor_config, hook)
    return registered.previous if isinstance(registered, Pipeline) else registered


def fsdp_compile_backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="fsdp_compile", options={...})`.

    Options are the fields of `CompileConfig`. Inductor compiles, with our passes and with its own memory-driven
    reordering switched off for this compilation.

    Raises:
        ValueError: an option or a pass name is unknown.
    """
    return compile_with(gm, example_inputs, PASSES, _config_from(options or {}))


def compile_with(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], passes: tuple[Pass, ...], config: CompileConfig
) -> Callable[..., Any]:
    """Compile by Inductor with `passes`, for this compilation only."""
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {"reorder_for_peak_memory": False, **pipelines(config, passes)}
    return compile_fx(gm, list(example_inputs), config_patches=patches)  # type: ignore[return-value]  # declared wider


def _config_from(options: dict[str, Any]) -> CompileConfig:
    known = [field.name for field in fields(CompileConfig)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"options: expected names among {', '.join(known)}, found {', '.join(unknown)}")
    config = CompileConfig(**options)
    check_names(config)
    return config


def check_names(config: CompileConfig) -> None:
    """Raise ValueError if `config.disable` names a pass that does not exist."""
    known = [p.name for p in PASSES]
    unknown = [name for name in config.disable if name not in known]
    if unknown:
        raise ValueError(f"disable: expected names among {', '.join(known)}, found {', '.join(unknown)}")
