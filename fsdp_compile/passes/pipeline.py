"""What a pass is: a named edit of one graph, and what the passes of one graph know together.

    Pipeline (inductor.py)  ->  GraphContext(graph, config)  ->  Pass.run(context), one after the other
                                .reading   set by read_graph     the graph as tasks and units
                                .workload  set by read_graph     the same as plain numbers, for the planner
                                .plan      set by choose_plan    where each collective goes

The order of all passes is `fsdp_compile.passes.PASSES`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import fx

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.graph.printing import PrintedGraph

if TYPE_CHECKING:
    from fsdp_compile.passes.graph.reading import Reading
    from fsdp_compile.passes.plan.plan import Plan
    from fsdp_compile.passes.plan.workload import Workload

log = logging.getLogger("fsdp_compile")

Stage = Literal["joint", "post_grad"]


@dataclass
class GraphContext:
    """One graph on its way through the passes of one stage. A new one is made for each graph and each stage.

    Attributes:
        graph: the graph; passes edit it in place.
        config: the configuration of this compilation.
        direction: "joint", "forward", "backward" or "inference".
        graph_index: the index that AOTAutograd gave to the graph; its joint graph, forward and backward share it.
        reading: tasks, units and the nodes of their collectives, as `read_graph` found them.
        workload: what of that the planner sees, with measured seconds if the configuration names a profile.
        plan: the plan that the graph follows.
    """

    graph: fx.Graph
    config: CompileConfig
    direction: str
    graph_index: int
    reading: "Reading" = field(init=False)
    workload: "Workload" = field(init=False)
    plan: "Plan" = field(init=False)


@dataclass(frozen=True)
class Pass:
    """One named step of compilation: an edit of a graph in place, a decision about it, or a check of it.

    Attributes:
        name: what `CompileConfig.disable` and the printed graphs call it.
        stage: "joint": forward and backward in one graph, before partitioning; "post_grad": each alone, later.
        run: the step. It may read and write its context and nothing else: on a hit in a compile cache none runs.
        needs: the passes whose results this one uses. Where one of them is disabled this one is left out as well.
    """

    name: str
    stage: Stage
    run: Callable[[GraphContext], None]
    needs: tuple[str, ...] = ()


def enabled(passes: Sequence[Pass], config: CompileConfig) -> tuple[Pass, ...]:
    """`passes` without those that `config.disable` names, and without those that need one of these; the log says which.

    Raises:
        ValueError: `config.disable` names a pass that does not exist.
    """
    known = [each.name for each in passes]
    unknown = [name for name in config.disable if name not in known]
    if unknown:
        raise ValueError(
            f"disable, or FSDP_COMPILE_DISABLE: expected names among {', '.join(known)}, found {', '.join(unknown)}"
        )
    disabled = set(config.disable)
    for each in passes:  # what a pass needs comes before it
        missing = [name for name in each.needs if name in disabled]
        if missing and each.name not in disabled:
            log.warning("pass %s is left out: it needs %s, which is disabled", each.name, ", ".join(missing))
            disabled.add(each.name)
    return tuple(each for each in passes if each.name not in disabled)


def run_passes(passes: Sequence[Pass], context: GraphContext) -> None:
    """Run `passes` on the graph of `context`, which is printed after each of them if that is asked for."""
    printed = PrintedGraph(context.direction, context.graph_index)
    for step in passes:
        step.run(context)
        context.graph.lint()
        printed.write(context.graph, step.name)
    printed.summarize(context.graph)
