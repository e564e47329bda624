"""A pass is a named function on a graph; a pipeline runs the passes of one stage and is what Inductor calls.

`FSDP_COMPILE_PRINT=1` prints the graph after each pass (logger `fsdp_compile.graphs`, level DEBUG).
"""

import hashlib
import logging
import os
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import MARKERS
from fsdp_compile.passes._torch import sort
from fsdp_compile.passes.graph.printing import format_graph
from fsdp_compile.passes.graph.tags import is_ours
from fsdp_compile.passes.post_grad.in_place_grads import register_pack_lowering

graph_log = logging.getLogger("fsdp_compile.graphs")

Stage = Literal["joint", "post_grad"]


@dataclass(frozen=True)
class Pass:
    """One named edit of a graph, in place. It may read the configuration and nothing else.

    Attributes:
        name: what `CompileConfig.disable` and the printed graphs call it.
        stage: "joint": forward and backward in one graph, before partitioning; "post_grad": each alone, later.
        run: the edit.
    """

    name: str
    stage: Stage
    run: Callable[[fx.Graph, CompileConfig], None]


class Pipeline(CustomGraphPass):
    """The enabled passes of one stage, after `previous`, the pass that was registered in this place before us.

    A graph without our markers or tags is left untouched. Passes have no side effects: on a cache hit none runs.
    """

    def __init__(self, passes: tuple[Pass, ...], stage: Stage, config: CompileConfig, previous: Any = None) -> None:
        self.passes = tuple(p for p in passes if p.stage == stage and p.name not in config.disable)
        self.stage, self.config, self.previous = stage, config, previous

    def __call__(self, graph: fx.Graph) -> None:
        """Edit `graph` in place."""
        for before in _as_tuple(self.previous):
            before(graph)
        if is_ours(graph, MARKERS):
            self._run_passes(graph)

    def _run_passes(self, graph: fx.Graph) -> None:
        _check_registered()
        register_pack_lowering()
        sort(graph)
        for step in self.passes:
            step.run(graph, self.config)
            graph.lint()
            if graph_log.isEnabledFor(logging.DEBUG):
                graph_log.debug("--- %s graph after %s\n%s", self.stage, step.name, format_graph(graph))

    def uuid(self) -> Any | None:
        """The caches' key: our sources, torch's version, the backend, the configuration, and what runs before us.

        None, which switches the caches off, if the previous pass cannot be told apart from another.
        """
        others = []
        for before in _as_tuple(self.previous):
            key = before.uuid() if isinstance(before, CustomGraphPass) else None
            if not key:
                return None
            others.append(key)
        backend = dist.get_backend_config() if dist.is_initialized() else ""  # passes look at it: gloo copies
        return (
            _hash_of_sources(),
            torch.__version__,
            backend,
            self.stage,
            self.config,
            self.config.file_contents,
            *others,
        )


def _check_registered() -> None:
    """Half of the pipeline alone would be right and slow, without a word. reshard.py looks for the other half."""
    if not any(isinstance(each, Pipeline) for each in _as_tuple(inductor_config.post_grad_custom_post_pass)):
        raise RuntimeError(
            "torch._inductor.config.post_grad_custom_post_pass: expected the pipeline that fully_shard registered, "
            "found another pass; register yours before fully_shard (ours runs after it)"
        )


def _as_tuple(previous: Any) -> tuple[Any, ...]:
    if previous is None:
        return ()
    return tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)


@cache
def _hash_of_sources() -> str:
    """Hash of every source file of the package: lowerings and operator bodies decide generated code too."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _print_graphs_if_asked() -> None:
    if os.environ.get("FSDP_COMPILE_PRINT", "0") not in ("", "0"):
        graph_log.addHandler(logging.StreamHandler(sys.stderr))
        graph_log.setLevel(logging.DEBUG)


_print_graphs_if_asked()
