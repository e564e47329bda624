"""What a pass is, and what the passes of one graph share.

`FSDP_COMPILE_PRINT=FOLDER` writes the graph after each pass into a file (1 means `./fsdp_compile_graphs`):

    FOLDER/rank0/graph0_1_joint/00_insert_collectives.txt      first graph, forward and backward in one
    FOLDER/rank0/graph0_2_forward/05_order.txt                 the same graph's forward, later

Graphs from a compile cache are not written; `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1` has them compiled. The logger
`fsdp_compile.graphs` gets the same texts at level DEBUG.
"""

import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.passes.graph.analyze import GraphInfo
from fsdp_compile.passes.graph.nodes import get_tag, tagged
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
    specs: Mapping[int, UnshardSpec] = field(init=False)
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


def placed(passes: Sequence[Pass], extra: Sequence[Pass]) -> tuple[Pass, ...]:
    """`passes` with `extra`: each in place of the pass of its name, or behind the pass that its `after` names.

    Raises:
        ValueError: there is no such pass.
    """
    names = {each.name for each in passes}
    instead = {one.name: one for one in extra if one.name in names}
    added = [one for one in extra if one.name not in names]
    if unplaced := [one for one in added if one.after not in names]:
        raise ValueError(f"passes: {unplaced[0].name!r} runs after {unplaced[0].after!r}, which does not exist")
    return tuple(
        each
        for own in passes
        for each in (instead.get(own.name, own), *(one for one in added if one.after == own.name))
    )


def check_passes(passes: Sequence[Pass]) -> None:
    """ValueError if two passes have one name, or a pass comes before one that it needs."""
    seen: set[str] = set()
    for each in passes:
        if each.name in seen:
            raise ValueError(f"passes: {each.name!r} is there twice; give each pass a name of its own")
        if missing := [name for name in each.needs if name not in seen]:
            raise ValueError(f"passes: {each.name!r} needs {missing[0]!r}, which is not among the passes before it")
        seen.add(each.name)


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


def run_passes(passes: Sequence[Pass], context: GraphContext) -> None:
    """Run `passes` on the graph, and print it after each of them if asked to."""
    graph, folder = context.graph, _folder_of(context)
    for index, step in enumerate(passes):
        step.run(context)
        graph.lint()
        if graph_log.isEnabledFor(logging.DEBUG):
            graph_log.debug("--- %s graph after %s\n%s", context.direction, step.name, format_graph(graph))
        if folder is not None:
            (folder / f"{index:02}_{step.name}.txt").write_text(format_graph(graph) + "\n")
    if folder is not None and _rank() == 0:
        gathers, reduces = len(tagged(graph, "gather")), len(tagged(graph, "reduce"))
        print(f"fsdp_compile: {context.direction} graph, {len(graph.nodes)} nodes, {gathers} all-gathers, {reduces} "
              f"reduce-scatters; after each of {len(passes)} passes in {folder}", file=sys.stderr)  # fmt: skip


# --- graphs as text ---------------------------------------------------------------------------------------------------

graph_log = logging.getLogger("fsdp_compile.graphs")

_ORDER = {"joint": 1, "forward": 2, "backward": 3, "inference": 2}
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int64: "i64"}


def _folder_of(context: GraphContext) -> Path | None:
    """Make and return the folder to print the graph into; None if printing is off."""
    asked = os.environ.get("FSDP_COMPILE_PRINT", "0")
    if asked in ("", "0"):
        return None
    root, direction = Path("fsdp_compile_graphs" if asked == "1" else asked), context.direction
    folder = root / f"rank{_rank()}" / f"graph{context.graph_index}_{_ORDER[direction]}_{direction}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def format_graph(graph: fx.Graph) -> str:
    """`graph` as lines `name: dtype[shape] = target(arguments)  # tag`; `get_attr` nodes are left out."""
    return "\n".join(_format_node(node) for node in graph.nodes if node.op != "get_attr")


def _format_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    value = node.meta.get("val")
    shown = type(value).__name__
    if isinstance(value, Tensor):
        shown = f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]"
    if node.op == "placeholder":
        return f"{node.name}: {shown}"
    arguments = [*map(_format_argument, node.args), *(f"{k}={_format_argument(v)}" for k, v in node.kwargs.items())]
    target = str(node.target).removeprefix("aten.").removeprefix("_c10d_functional.").removesuffix(".default")
    notes = [str(tag)] if (tag := get_tag(node)) else []
    if "recompute" in node.meta:
        notes.append(node.meta["recompute"].name)
    note = f"  # {', '.join(notes)}" if notes else ""
    return f"{node.name}: {shown} = {target}({', '.join(arguments)}){note}"


def _format_argument(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_format_argument, argument))}]"
    if isinstance(argument, str):
        return repr(argument) if "\n" not in argument else f"<{argument.count(chr(10)) + 1} lines>"
    return str(argument)
