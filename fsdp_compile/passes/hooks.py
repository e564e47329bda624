"""Where the passes meet Inductor: its custom-pass hooks, and a pipeline of passes behind each of them."""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm.collectives import STARTS, compiles_as_gloo
from fsdp_compile.config import AUTO, CompileConfig
from fsdp_compile.core.ops import MARKERS
from fsdp_compile.passes._torch import (
    CustomGraphPass,
    CustomSchedulerPass,
    ShortenTraceback,
    call_after_compiling,
    direction,
    graph_index,
    inductor_config,
    sort,
    symbols_of,
    tree_leaves,
)
from fsdp_compile.passes.graph.nodes import is_ours
from fsdp_compile.passes.joint import insert_collectives, reshard
from fsdp_compile.passes.pipeline import GraphContext, Pass, Stage, enabled, hash_of_sources, run_passes
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad import in_place_grads, lower_collectives, order, plan_pass

CORE_PASSES = (
    Pass("insert_collectives", "joint", insert_collectives.insert_collectives),
    Pass("keep_where_forward_ends", "joint", reshard.keep_where_forward_ends, needs=("insert_collectives",)),
    Pass("choose_reshard", "joint", reshard.choose_reshard),
    Pass("reshard", "joint", reshard.reshard),
    Pass("check_saved", "post_grad", reshard.check_saved),
    Pass("separate_reduces", "post_grad", in_place_grads.separate_reduces),
    Pass("pack_in_place", "post_grad", in_place_grads.pack_in_place),
    Pass("place_deferred_reduces", "post_grad", order.place_deferred_reduces),
    Pass("read_graph", "post_grad", plan_pass.read_graph),
    Pass("choose_plan", "post_grad", plan_pass.choose_plan, needs=("read_graph",)),
    Pass("verify_plan", "post_grad", plan_pass.verify_plan, needs=("choose_plan",)),
    Pass("order", "post_grad", order.order, needs=("choose_plan",)),
    Pass("check_order", "post_grad", order.check_order, needs=("order",)),
    Pass("coalesce_launches", "post_grad", lower_collectives.coalesce_launches),
    Pass("reduce_scatter_by_all_to_all", "post_grad", lower_collectives.reduce_scatter_by_all_to_all),
    Pass("all_gather_into_buffer", "post_grad", lower_collectives.all_gather_into_buffer),
    Pass("pin_order", "post_grad", order.pin_order),
)
"""What is done to a graph, in order, beside the passes of layers."""

_HOOKS: dict[str, Stage] = {"joint_custom_post_pass": "joint", "post_grad_custom_post_pass": "post_grad"}
_AFTER_FUSION = "_post_fusion_custom_pass"


class OtherShardings(NamedTuple):
    """How the passes order graphs that somebody else has sharded."""

    reshard_after_forward: Callable[[fx.Graph], None]  # in a joint graph: gather again in backward, save nothing
    tag_collectives: Callable[[fx.Graph, str | None], int | None]  # given the link; how many reduces may be in flight


class Refused(ShortenTraceback, PlanError):
    """An option or a plan that is refused. Dynamo and Inductor pass it on as it is, which they do not do with others.

    `torch.compile` gives a backend its options with the first graph, so that is when they are checked;
    `FSDPModule.compile` and `compile_step` check them at once.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


def pipelines(
    config: CompileConfig, passes: tuple[Pass, ...], others: OtherShardings | None = None
) -> dict[str, "Pipeline | AfterFusion"]:
    """Return the pass for each hook of Inductor; it first runs the pass that was registered there before."""
    chosen = enabled(passes, config)

    def previous(hook: str) -> Any:
        registered = getattr(inductor_config, hook)
        return registered.previous if isinstance(registered, OURS) else registered

    hooks = {hook: Pipeline(chosen, stage, config, previous(hook), others) for hook, stage in _HOOKS.items()}
    return {**hooks, _AFTER_FUSION: AfterFusion(previous(_AFTER_FUSION))}


class Pipeline(CustomGraphPass):
    """Runs the passes of one stage, after `previous`, which was registered in the hook before us.

    A graph without our markers or tags is left untouched; with `others`, collectives of another sharding are planned.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        stage: Stage,
        config: CompileConfig,
        previous: Any = None,
        others: OtherShardings | None = None,
    ) -> None:
        self.passes = tuple(each for each in passes if each.stage == stage)
        if config.link == AUTO:  # of a graph that nobody has seen, or that communicates nothing
            config = replace(config, link=None, device=None, budget=None, activations="keep", profile=None)
        self.stage, self.config, self.previous, self.others = stage, config, previous, others

    def __call__(self, graph: fx.Graph) -> None:
        """Edit `graph` in place."""
        for before in _as_tuple(self.previous):
            before(graph)
        config, is_planned = self.config, is_ours(graph, MARKERS)
        if not is_planned and self.others and self.stage == "joint" and config.reshard_after_forward:
            self.others.reshard_after_forward(graph)
        elif not is_planned and self.others and self.stage == "post_grad":
            in_flight = self.others.tag_collectives(graph, config.link)
            is_planned = in_flight is not None
            if config.reduces_in_flight == 1:  # counts units, and here each parameter is one
                config = replace(config, reduces_in_flight=in_flight)
        if is_planned:
            sort(graph)
            _check_settings(graph)
            try:
                run_passes(self.passes, GraphContext(graph, config, direction(), graph_index()))
            except PlanError as error:
                sizes = symbols_of(graph).values() if str(error).startswith("budget") else ()
                counted = "".join(f"; counted for {each.source} = {each.most or each.hint}" for each in sizes)
                raise Refused(f"{error}{counted}") from error
            _check_settings(graph)  # again: the joint graph has collectives from now on

    def uuid(self) -> Any | None:
        """Return the passes' part of the caches' key. See Note [What the compile caches key on].

        None switches the caches off: a previous pass, or one of the pipeline, has no key.
        """
        previous = _as_tuple(self.previous)
        others = [before.uuid() if isinstance(before, CustomGraphPass) else None for before in previous]
        keys = [each.key for each in self.passes]
        if not all(others) or not all(keys):
            return None
        as_gloo = compiles_as_gloo(dist.group.WORLD) if dist.group.WORLD is not None else None
        return (
            hash_of_sources(), torch.__version__, as_gloo, self.stage, self.others is not None, *keys,
            self.config.deciding_code, self.config.file_contents, *others,
        )  # fmt: skip


class AfterFusion(CustomSchedulerPass):
    """Runs `after_fusion` on the scheduler's nodes, after `previous`, which was registered before us."""

    def __init__(self, previous: Any = None) -> None:
        self.previous = previous

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes sorted by their dependencies."""
        return lower_collectives.after_fusion(self.previous(nodes) if self.previous is not None else nodes)

    def uuid(self) -> Any | None:
        """Return this pass's part of the caches' key; None, which switches them off, if `previous` has none."""
        if self.previous is None:
            return hash_of_sources()
        key = self.previous.uuid() if isinstance(self.previous, CustomSchedulerPass) else None
        return (hash_of_sources(), key) if key else None


OURS = (Pipeline, AfterFusion)

# Note [What the compile caches key on]
# Inductor and AOTAutograd store compiled graphs under a key that holds the `uuid` of each custom pass. On a hit no pass
# runs, so the key must hold everything besides the graph that passes and lowerings look at: a hash of our source files
# (our operators and lowerings decide generated code, and Inductor hashes neither), torch's version, whether the backend
# for the CPU is gloo (whose collectives are lowered differently; the fake backend stands for it, so that its entries
# serve ranks of gloo), each pass (`Pass.key`), the configuration, and the contents of the files that it names. It must
# not hold the rank: ranks that share a cache directory share entries, see Note [Graphs without a rank].


# Note [Collectives and CUDA graphs]
# A CUDA graph replays kernels without Python. torch captures what lies between operators tagged `cudagraph_unsafe`; its
# collectives are not, so they would be captured too. A replay would ignore what `compile_step` has prefetched, and read
# the buffer of the capture, which is another unit's memory by then. Where one of our operators divides the graph
# (accumulated gradients, deferred reduces), a reduce would start in one capture and be waited for in another, which
# CUDA refuses. And torch takes shards for inputs, which each replay would copy. So graphs with collectives on an
# accelerator are refused. Graphs without any (blocks compiled one by one, models on one rank) may be captured.


def _check_settings(graph: fx.Graph) -> None:
    """RuntimeError if Inductor's configuration cannot be used with our passes or with collectives.

    With only the joint half of the pipeline, steps would silently be slow; `check_saved` looks for the other half.
    torch 2.13 refuses to call collectives from C++, and torch 2.11 crashes. For CUDA graphs see
    Note [Collectives and CUDA graphs].
    """
    if not any(isinstance(each, Pipeline) for each in _as_tuple(inductor_config.post_grad_custom_post_pass)):
        raise RuntimeError(
            "torch._inductor.config.post_grad_custom_post_pass: expected the pipeline that fully_shard registered, "
            "found another pass; register yours before fully_shard (ours runs after it)"
        )
    starts = [node for node in graph.nodes if node.target in STARTS]
    devices = {leaf.device.type for node in starts for leaf in tree_leaves(node.meta["val"])}
    if inductor_config.triton.cudagraphs and devices - {"cpu"}:
        raise RuntimeError(
            "torch._inductor.config.triton.cudagraphs: expected False for a graph with collectives, found True, and a "
            "CUDA graph would replay them with the buffers of an earlier step; compile with "
            'mode="max-autotune-no-cudagraphs" or without a mode, where "reduce-overhead" and "max-autotune" set it'
        )
    if inductor_config.cpp_wrapper and starts:
        raise RuntimeError(
            "torch._inductor.config.cpp_wrapper: expected False for a graph with collectives, found True, and torch's "
            "C++ wrapper cannot call them; set it to False, and leave TORCHINDUCTOR_CPP_WRAPPER unset"
        )


def _as_tuple(previous: Any) -> tuple[Any, ...]:
    if previous is None:
        return ()
    return tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)


class CompileNotice:
    """Prints on rank 0 that a sharded model is being compiled, if that takes more than `after` seconds."""

    def __init__(self, after: float = 5.0) -> None:
        self.after = after
        self.timer: threading.Timer | None = None  # until the compilation has ended

    def start(self) -> None:
        """Call when a compilation begins."""
        if self.timer is None and (not dist.is_initialized() or dist.get_rank() == 0):
            call_after_compiling(self.end)
            text = "fsdp_compile: compiling a sharded model; later steps do not wait for this"
            self.timer = threading.Timer(self.after, lambda: print(text, file=sys.stderr))
            self.timer.daemon = True
            self.timer.start()

    def end(self, _: Any = None) -> None:
        """Call when the compilation has ended."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
