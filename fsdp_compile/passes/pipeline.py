"""What a pass is, and what the passes of one graph share."""

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from torch import fx

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.passes.graph.analyze import GraphInfo
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.workload import Workload

log = logging.getLogger("fsdp_compile")

Stage = Literal["joint", "post_grad"]


@dataclass
class GraphContext:
    """One graph and what the passes of its stage know about it.

    Attributes:
        graph: the graph; passes edit it in place.
        config: the configuration of this compilation.
        direction: "joint", "forward", "backward" or "inference".
        graph_index: the index that AOTAutograd gave to the graph; its joint graph, forward and backward share it.
        specs: in a joint graph, how each unit is gathered, by its number in tags.
        info: tasks, units and the nodes of their collectives; set by `read_graph`, as is
        workload: the same as numbers for the planner.
        plan: the plan that the graph follows; set by `choose_plan`.
    """

    graph: fx.Graph
    config: CompileConfig
    direction: str
    graph_index: int
    specs: Mapping[int, UnshardSpec] = field(default_factory=dict)
    info: GraphInfo = field(init=False)
    workload: Workload = field(init=False)
    plan: Plan = field(init=False)


@dataclass(frozen=True)
class Pass:
    """One named step of compilation: an edit of a graph in place, a decision about it, or a check of it.

    Attributes:
        name: its name in `CompileConfig.disable` and printed graphs.
        stage: "joint": on forward and backward in one graph, before partitioning; "post_grad": on each alone, later.
        run: the step. It reads and writes its context only, because on a hit in a compile cache no pass runs.
        needs: passes whose results this one uses; it is left out if one of them is disabled.
        version: what stands for the pass in the keys of the compile caches, beside its name. Change it whenever `run`
            would edit graphs in another way. None: a hash of the file that defines `run`, if that is a plain function
            without closure and default arguments; otherwise nothing that runs this pass is cached.
        after: of a pass of a layer, the pass behind which it runs; one that has the name of a pass takes its place.
    """

    name: str
    stage: Stage
    run: Callable[[GraphContext], None]
    needs: tuple[str, ...] = ()
    version: str | None = None
    after: str | None = None

    @property
    def key(self) -> str | None:
        """What stands for this pass in the keys of the compile caches; None: what it edits must not be cached."""
        if self.version is not None:
            return f"{self.name} {self.version}"
        plain = inspect.isfunction(self.run) and not (self.run.__closure__ or self.run.__defaults__)
        digest = _hash_of_file(self.run.__code__.co_filename) if plain else None
        return digest and f"{self.name} {digest}"


@cache
def _hash_of_file(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # typed into a shell
        return None


@cache
def hash_of_sources() -> str:
    """Return a digest of all Python files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def enabled(passes: Sequence[Pass], config: CompileConfig) -> tuple[Pass, ...]:
    """Return `passes` without the disabled ones and those that need one of them; log the latter.

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


Watcher = Callable[[GraphContext, Sequence[Pass], int], None]
"""Hears of a graph before the first of its passes, number 0, and after so many of them."""

watchers: list[Watcher] = []  # of layers, in the order in which they are called


def run_passes(passes: Sequence[Pass], context: GraphContext) -> None:
    """Run `passes` on the graph."""
    for count in range(len(passes) + 1):
        if count > 0:
            passes[count - 1].run(context)
            context.graph.lint()
        for watch in watchers:
            watch(context, passes, count)
