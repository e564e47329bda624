"""docs/architecture.md begins with two tours: what runs in a step of two layers, eager and compiled, is what it prints.

Regenerate the traces with EXPECTTEST_ACCEPT=1, and read each difference.
"""

import ast
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from generated import kernels_not_built
from torch import nn
from torch._inductor import config as inductor_config

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile.passes import GraphContext, backend, get_tag, pipeline
from fsdp_compile.passes.graph.nodes import is_product
from fsdp_compile.passes.hooks import CORE_PASSES

PACKAGE = Path(fsdp_compile.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
STOPS = {
    "core/layout.py": ("lay_out",),
    "core/flat_param.py": ("FlatParam.bind",),
    "core/unit.py": ("Unit.link_params",),
    "core/sharding.py": ("add_lookups",),
    "eager/forward.py": ("eager_forward",),
    "eager/streams.py": ("UnshardedBuffer.start", "UnshardedBuffer.free"),
    "eager/unsharded.py": tuple(
        f"UnshardedUnit.{when}_{what}" for when in ("pre", "post") for what in ("forward", "backward")
    ),
    "eager/reduce.py": ("reduce_gradients", "RunningReduce.finish"),
}
"""Of each file of the eager tour, what it does for a unit."""


class Layers(nn.Sequential):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def _sharded() -> nn.Module:
    model = Layers()
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def _eager() -> list[str]:
    """A line for each stop, in order, with the unit that it is for."""
    seen = ["fully_shard"]

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            path = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            if code.co_qualname in STOPS.get(path, ()):
                seen.append(f"  {path:20}{code.co_qualname:30}{_unit_in(frame.f_locals)}".rstrip())

    sys.setprofile(look)
    try:
        model = _sharded()
        seen.append("forward")
        loss = model(torch.randn(2, 8)).sum()
        seen.append("backward")
        loss.backward()
    finally:
        sys.setprofile(None)
    return seen


def _unit_in(names: dict[str, Any]) -> str:
    """The path of the unit that a call is for, where its arguments say it."""
    known = names.get("self", names.get("unit"))
    path: str = getattr(getattr(known, "unit", known), "path", "")
    return path.partition(" ")[0]


def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """After each pass that has changed them, the collectives and products of a graph, in order."""
    lines: dict[str, list[str]] = {"joint": [], "forward": [], "backward": []}
    before = dict[str, str]()

    def watch(context: GraphContext, passes: Any, count: int) -> None:
        now = "  ".join(filter(None, map(_event, context.graph.nodes)))
        name = passes[count - 1].name if count else ""
        if now != before.get(context.direction) and name != "pin_order":  # which puts products into graphs of their own
            lines[context.direction].append(f"  {name:30}{now}")
            before[context.direction] = now

    monkeypatch.setattr(pipeline, "watchers", [*pipeline.watchers, watch])
    with inductor_config.patch(force_disable_caches=True), kernels_not_built():
        torch.compile(_sharded(), fullgraph=True, backend=backend(CORE_PASSES))(torch.randn(2, 8)).sum().backward()
    return [line for direction, own in lines.items() for line in (direction, *own)]


def _event(node: torch.fx.Node) -> str:
    tag = get_tag(node)
    if tag is not None:
        return f"{tag.kind} {tag.unit}" if tag.kind != "view" else ""
    return "mm" if is_product(node) else str(node.target).split(".")[1] if "fsdp_flat" in str(node.target) else ""


@pytest.mark.parametrize("tour", ["eager", "compiled"])
def test_traces(tour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace of the page is what runs."""
    found = "\n".join(_eager() if tour == "eager" else _compiled(monkeypatch))
    pattern = re.compile(rf"(<!-- trace: {tour} -->\n```text\n)(.*?)(\n```)", re.DOTALL)
    page = PAGE.read_text()
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(pattern.sub(lambda match: match[1] + found + match[3], page))
    shown = pattern.search(page)
    assert shown is not None and shown[2] == found, found


def _names_in(path: Path) -> set[str]:
    """The qualified names of the functions, classes and methods that a file defines."""
    names = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            names |= {node.name, *(f"{node.name}.{each.name}" for each in inner if isinstance(each, ast.FunctionDef))}
    return names


def test_one_file_answers_each_question() -> None:
    """A newcomer's questions have a file and a name in it each, and the file defines that name."""
    section = PAGE.read_text().partition("## Where to look first")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+\? \| `([\w/.]+)` \| `([\w.]+)` \|$", section, re.MULTILINE)
    assert len(rows) == 6
    assert [name for path, name in rows if name not in _names_in(PACKAGE / path)] == []
