"""Where the passes meet Inductor: its custom-pass hooks, and a pipeline of passes behind each of them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm.collectives import compiles_as_gloo
from fsdp_compile.config import MEASURE, CompileConfig
from fsdp_compile.core.ops import MARKERS
from fsdp_compile.passes._torch import (
    CustomGraphPass,
    CustomSchedulerPass,
    ShortenTraceback,
    direction,
    graph_index,
    inductor_config,
    sort,
    symbols_of,
)
from fsdp_compile.passes.graph.nodes import is_ours
from fsdp_compile.passes.joint import insert_collectives, reshard
from fsdp_compile.passes.pipeline import GraphContext, Pass, Stage, enabled, hash_of_sources, run_passes
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad import in_place_grads, lower_collectives, order, plan_by_rule

CORE_PASSES = (
    Pass("insert_collectives", "joint", insert_collectives.insert_collectives),
    Pass("choose_reshard", "joint", reshard.choose_reshard),
    Pass("reshard", "joint", reshard.reshard),
    Pass("separate_reduces", "post_grad", in_place_grads.separate_reduces),
    Pass("pack_in_place", "post_grad", in_place_grads.pack_in_place),
    Pass("place_deferred_reduces", "post_grad", order.place_deferred_reduces),
    Pass("read_graph", "post_grad", plan_by_rule.read_graph),
    Pass("choose_plan", "post_grad", plan_by_rule.choose_plan, needs=("read_graph",)),
    Pass("verify_plan", "post_grad", plan_by_rule.verify_plan, needs=("choose_plan",)),
    Pass("order", "post_grad", order.order, needs=("choose_plan",)),
    Pass("reduce_scatter_by_all_to_all", "post_grad", lower_collectives.reduce_scatter_by_all_to_all),
    Pass("all_gather_into_buffer", "post_grad", lower_collectives.all_gather_into_buffer),
    Pass("pin_order", "post_grad", order.pin_order),
)
"""What is done to a graph, in order, beside the passes of layers."""

_HOOKS: dict[str, Stage] = {"joint_custom_post_pass": "joint", "post_grad_custom_post_pass": "post_grad"}
_AFTER_FUSION = "_post_fusion_custom_pass"


class Refused(ShortenTraceback, PlanError):
    """An option or a plan that is refused. Dynamo and Inductor pass it on as it is, which they do not do with others.

    `torch.compile` gives a backend its options with the first graph, so that is when they are checked;
    `FSDPModule.compile` and `compile_step` check them at once.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


def pipelines(config: CompileConfig, passes: tuple[Pass, ...]) -> dict[str, "Pipeline | AfterFusion"]:
    """Return the pass for each hook of Inductor; it first runs the pass that was registered there before.

    Args:
        config: for all graphs.
        passes: of both stages.
    """
    chosen = enabled(passes, config)

    def previous(hook: str) -> Any:
        registered = getattr(inductor_config, hook)
        return registered.previous if isinstance(registered, OURS) else registered

    hooks = {hook: Pipeline(chosen, stage, config, previous(hook)) for hook, stage in _HOOKS.items()}
    return {**hooks, _AFTER_FUSION: AfterFusion(previous(_AFTER_FUSION))}


class Pipeline(CustomGraphPass):
    """Runs the passes of one stage, after `previous`, which was registered in the hook before us.

    A graph without our markers or tags is left untouched.
    """

    def __init__(self, passes: Sequence[Pass], stage: Stage, config: CompileConfig, previous: Any = None) -> None:
        self.passes = tuple(each for each in passes if each.stage == stage)
        if config.link == MEASURE:  # of a graph that nobody has seen, or that communicates nothing
            config = config.without_search
        self.stage, self.config, self.previous = stage, config, previous

    def __call__(self, graph: fx.Graph) -> None:
        """Edit `graph` in place."""
        for before in as_tuple(self.previous):
            before(graph)
        if is_ours(graph, MARKERS):
            sort(graph)
            try:
                run_passes(self.passes, GraphContext(graph, self.config, direction(), graph_index()))
            except PlanError as error:
                sizes = symbols_of(graph).values() if str(error).startswith("budget") else ()
                counted = "".join(f"; counted for {each.source} = {each.most or each.hint}" for each in sizes)
                raise Refused(f"{error}{counted}") from error

    def uuid(self) -> Any | None:
        """Return the passes' part of the caches' key. See Note [What the compile caches key on].

        None switches the caches off: a previous pass, or one of the pipeline, has no key.
        """
        previous = as_tuple(self.previous)
        others = [before.uuid() if isinstance(before, CustomGraphPass) else None for before in previous]
        keys = [each.key for each in self.passes]
        if not all(others) or not all(keys):
            return None
        as_gloo = compiles_as_gloo(dist.group.WORLD) if dist.group.WORLD is not None else None
        return (
            hash_of_sources(), torch.__version__, as_gloo, self.stage, *keys,
            self.config, self.config.file_contents, *others,
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


def as_tuple(previous: Any) -> tuple[Any, ...]:
    """What is registered in a hook of Inductor: nothing, a pass, or several."""
    if previous is None:
        return ()
    return tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)
