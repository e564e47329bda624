"""docs/passes.md: its code runs, and each graph that it shows is what the passes make today.

Regenerate the graphs with EXPECTTEST_ACCEPT=1, and read each difference.
"""

import difflib
import os
import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compiling import printed_graphs
from generated import kernels_not_built
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

from fsdp_compile import CompileConfig, MixedPrecision, compile_step, fully_shard
from fsdp_compile.passes import PASSES, GraphContext, Pass, Plan, backend, tagged
from fsdp_compile.passes.hooks import Pipeline
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log

PAGE = Path(__file__).parents[2] / "docs" / "passes.md"
SHOWN = re.compile(
    r"<!-- (graph|plan|tasks|error): (\w+)(?:, (\w+))?(?:, (\w+))? -->\n```(?:diff|text)\n(.*?)```", re.DOTALL
)
SECTION = re.compile(r"^### `(\w+)`\n", re.MULTILINE)
ROW = re.compile(r"^\| \[?`(\w+)`(?:\]\(#(\w+)\))? \| (\w+) \| \w", re.MULTILINE)


class Linears(nn.Module):
    """Blocks of so many linear layers, with a ReLU between two of them."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*map(_layer, range(2 * count - 1))) for count in layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Linears):
    """Backward computes what is inside of a block again."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _layer(index: int) -> nn.Module:
    return nn.ReLU() if index % 2 else nn.Linear(4, 4, bias=False)


class Case(NamedTuple):
    """What is compiled: a model whose blocks are units, without some passes, with a user's pass behind one of ours."""

    build: Callable[[], nn.Module]
    disable: tuple[str, ...] = ()
    behind: tuple[str, Callable[[GraphContext], None]] | None = None


def _reduce_too_early(context: GraphContext) -> None:
    steps = context.plan.steps
    context.plan = Plan(tuple(step._replace(at=1) if step.kind == "reduce" else step for step in steps))


def _wait_too_late(context: GraphContext) -> None:
    for wait in tagged(context.graph, "wait_reduce"):
        context.graph.output_node().prepend(wait)


CASES = {
    "one": Case(lambda: Linears(1)),
    "three": Case(lambda: Linears(1, 1, 1)),
    "two": Case(lambda: Checkpointed(2, 2)),
    "unsaved": Case(lambda: Linears(1, 1), ("reshard",)),
    "hasty": Case(lambda: Linears(1), behind=("choose_plan", _reduce_too_early)),
    "moved": Case(lambda: Linears(1, 1, 1), behind=("order", _wait_too_late)),
}


def _nothing(context: GraphContext) -> None:
    """The graph before the first pass of its stage."""


class Compiled(NamedTuple):
    """What passes have made of a case: changes by (pass, direction), plans and tasks by direction, and what failed."""

    changes: dict[tuple[str, str], str]
    plans: dict[str, str]
    tasks: dict[str, str]
    error: str


@cache
def compiled(name: str) -> Compiled:
    """Compile a case and run it."""
    case, plans, tasks, error = CASES[name], dict[str, str](), dict[str, str](), ""

    def note(_: str, direction: str, plan: Plan, *, extra: dict[str, Any]) -> None:
        plans[direction], tasks[direction] = str(plan), _tasks(extra["workload"])

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(plan_log, "debug", note)
    with printed_graphs() as printed, inductor_config.patch(force_disable_caches=True), kernels_not_built():
        try:
            _run(case)
        except Exception as raised:  # as the page shows it, or as a defect of a pass, which the page then lacks
            while (inner := getattr(raised, "inner_exception", None)) is not None:
                raised = inner
            error = f"{raised}\n"
    monkeypatch.undo()
    changes, before = dict[tuple[str, str], str](), dict[str, list[str]]()
    for text in printed:
        title, *after = text.split("\n")
        direction, step = re.fullmatch(r"--- (\w+) graph after (\w+)", title).groups()  # type: ignore[union-attr]
        changes[step, direction] = _diff(before.get(direction, after), after)
        before[direction] = after
    return Compiled(changes, plans, tasks, error)


def _run(case: Case) -> None:
    torch._dynamo.reset()
    model = fully_shard(case.build(), auto_wrap_policy={nn.Sequential}, reshard_after_forward=True)
    passes = [Pass("begin", "joint", _nothing), Pass("begin_post_grad", "post_grad", _nothing), *PASSES]
    if case.behind is not None:
        at = [each.name for each in passes].index(case.behind[0])
        passes.insert(at + 1, Pass("users", "post_grad", case.behind[1]))
    compiles = backend(passes=passes, disable=case.disable)
    torch.compile(model, fullgraph=True, backend=compiles)(torch.ones(2, 4)).sum().backward()


def _tasks(workload: Workload) -> str:
    lines = []
    for at, task in enumerate(workload.tasks):
        touched = [
            f"{kind} {' '.join(workload.units[unit].name for unit in units)}"
            for kind, units in (("reads", task.reads), ("writes gradients of", task.writes))
            if units
        ]
        lines.append(f"task {at:2}  {task.name:<20} {', '.join(touched)}".rstrip() + "\n")
    return "".join(lines)


def _diff(before: list[str], after: list[str]) -> str:
    lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
    return "".join("...\n" if line.startswith("@@") else f"{line}\n" for line in lines)


def _shown_now(shown: re.Match[str]) -> str:
    kind, case, first, direction, _ = shown.groups()
    now = compiled(case)
    if kind == "error":
        return "".join(f"{line}\n" for line in textwrap.wrap(now.error, 120))
    missing = f"nothing, but {now.error}" if now.error else ""
    if kind in ("plan", "tasks"):
        return {"plan": now.plans, "tasks": now.tasks}[kind].get(first, missing)
    return now.changes.get((first, direction), missing)


def test_the_graphs_are_those_of_today() -> None:
    """Each difference, plan and error on the page is what compiling its model gives; sections that differ are named."""
    text = PAGE.read_text()
    new = SHOWN.sub(lambda shown: shown[0].removesuffix(f"{shown[5]}```") + f"{_shown_now(shown)}```", text)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(new)
    else:
        differ = [name for name, section in _sections(new).items() if section != _sections(text)[name]]
        diff = difflib.unified_diff(text.split("\n"), new.split("\n"), lineterm="", n=2)
        assert text == new, f"sections that differ: {' '.join(differ)}\n" + "\n".join(diff)


def _sections(text: str) -> dict[str, str]:
    """The text about each pass."""
    before, *parts = SECTION.split(text)
    return {"elsewhere": before, **dict(zip(parts[::2], parts[1::2], strict=True))}


def test_each_pass_has_its_row() -> None:
    """In the order of `PASSES`, with its stage; the sections are those that rows link to, and each shows something."""
    rows, sections = ROW.findall(PAGE.read_text()), _sections(PAGE.read_text())
    assert [(name, stage) for name, _, stage in rows] == [(each.name, each.stage) for each in PASSES]
    assert [section for _, section, _ in rows if section] == list(sections)[1:]
    assert all(section in ("", name) for name, section, _ in rows)
    for name in list(sections)[1:]:
        shown = [each[5] for each in SHOWN.finditer(sections[name])]
        assert shown and all(each.strip() for each in shown), name


# --- passes of a user's own -------------------------------------------------------------------------------------------


def _example(title: str) -> dict[str, Any]:
    """What the code under a heading of the page defines."""
    code = re.search(rf"^### {title}\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert code is not None
    model = Linears(1, 1, 1)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    names: dict[str, Any] = {"model": model, "fully_shard": fully_shard, "torch": torch}
    exec(compile(code[1], str(PAGE), "exec"), names)
    return names


def test_counting_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The pass that counts prints a line for each graph."""
    step = _example("Count what is sent")["step"]
    step(torch.ones(2, 4)).sum().backward()
    # shards of 16 elements and gradients of 64
    assert capsys.readouterr().out == "forward: 3 collectives, 192 bytes\nbackward: 5 collectives, 896 bytes\n"


def test_gathering_first() -> None:
    """The pass that edits the plan moves all gathers to the front, and ours verify and apply that."""
    names = _example("Change the plan")
    with printed_graphs() as printed:
        names["step"](torch.ones(2, 4)).sum().backward()
    graph = next(text for text in printed if "backward graph after order" in text)
    starts = [line.split(" = ")[1].split("(")[0] for line in graph.split("\n") if "_tensor(" in line]
    assert starts[:2] == ["all_gather_into_tensor"] * 2


def test_a_changed_pass_is_no_hit(tmp_path: Path) -> None:
    """The key of the compile caches changes with the file or the version of a pass; a pass without one has no key."""

    def key(text: str, **fields: Any) -> Any:
        path = tmp_path / f"{text}.py"
        path.write_text(f"def run(context):\n    print({text!r})\n")
        exec(compile(path.read_text(), str(path), "exec"), names := dict[str, Any]())
        passes = (*PASSES, Pass("mine", "post_grad", names["run"], **fields))
        return Pipeline(passes, "post_grad", CompileConfig()).uuid()

    keys = [
        key("a"),
        key("b"),
        key("a", version="1"),
        key("b", version="2"),
        Pipeline(PASSES, "post_grad", CompileConfig()).uuid(),
    ]
    assert all(keys) and len(set(keys)) == len(keys) and key("a") == keys[0] and key("c", version="1") == keys[2]
    closure = Pass("mine", "post_grad", lambda context: print(tmp_path))
    assert Pipeline((*PASSES, closure), "post_grad", CompileConfig()).uuid() is None


@pytest.mark.parametrize(
    ("passes", "options", "text"),
    [
        ((*PASSES, PASSES[0]), {}, "passes: 'insert_collectives' is there twice"),
        (PASSES[1:], {}, "passes: 'smallest_gather' needs 'insert_collectives', which is not among the passes before"),
        (PASSES, {"budgett": 1}, "expected names among .*found budgett"),
        (PASSES, {"disable": ("ordr",)}, "found ordr"),
    ],
)
def test_refused_at_once(passes: tuple[Pass, ...], options: dict[str, Any], text: str) -> None:
    """Passes that cannot run and impossible options are refused when the backend is made, not in the first step."""
    with pytest.raises(ValueError, match=text):
        backend(passes=passes, **options)


def test_a_whole_step() -> None:
    """`compile_step` takes such a backend too, also for updates in backward, here by gradients that were cast."""
    seen: list[int] = []
    mine = Pass("mine", "post_grad", lambda context: seen.append(len(tagged(context.graph, "update"))))
    model = fully_shard(Linears(1), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = {"backend": backend(passes=(*PASSES, mine)), "update_in_backward": True}
    compile_step(model, optimizer, lambda out: out.sum(), **ours)(torch.ones(2, 4))
    assert seen == [0, 1]
