"""Plans on graphs: read, applied, pinned; the generated code has their order (I6)."""

import operator
import pathlib
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from compiling import CASES, compiled, planned, printed_graphs, small
from generated import launches
from models import mlp, routed
from torch import Tensor, nn
from torch._inductor.utils import fresh_inductor_cache
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import explain_plan, fully_shard
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes import inductor
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan, PlanError, simulate
from fsdp_compile.passes.plan.schedule import TOLERANCE

SLOW = "custom:1e-6,1e6"  # seconds, bytes per second: communication takes far longer than computing


H100 = pytest.param({"link": "h100-nvlink", "device": "h100"}, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", [{}, {"link": SLOW}, H100], ids=str)
def test_generated_code_follows_the_plan(name: str, options: dict[str, str]) -> None:
    """Collectives and their waits stand in the generated code in the plan's order, whatever the plan is."""
    programs, plans = planned(name, "backend", **options)
    for direction, program in zip(("forward", "backward"), programs, strict=True):
        steps = plans[direction][0].steps
        assert launches(program) == [step.kind for step in steps if step.kind != "free" for _ in step.units]


def test_sizes_that_depend_on_data(plans: dict[str, Plan]) -> None:
    """One graph whose sizes data decides has a plan, which counts the most that they may be."""
    model = torch.compile(fully_shard(routed()), backend=fsdp_compile_backend, fullgraph=True)
    settings = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with settings, suppress(TypeError):  # kernels are not built here, so that nothing tells how many rows there are
        model(torch.randn(5, 8)).sum()
    assert set(plans) == {"forward", "backward"}


class _Tokens(nn.Module):
    """A model of tokens with 4 Mi elements in its embedding and as many in its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2**13, 512)
        self.blocks = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        self.head = nn.Linear(512, 2**13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def test_ends_of_a_model_are_sent_apart(plans: dict[str, Plan]) -> None:
    """A large embedding is gathered before the blocks, a large head behind them; the head is reduced first.

    Both belong to the model's own unit, which finds them wherever it reads them.
    """
    model = fully_shard(_Tokens())
    torch.compile(model, backend=fsdp_compile_backend, fullgraph=True)(torch.arange(4)).sum().backward()
    gathered = [name for each in plans["forward"].of("gather") for name in each.units]
    reduced = [name for each in plans["backward"].of("reduce") for name in each.units]
    assert gathered == ["root", "blocks.0", "blocks.1", "root:2"]
    assert reduced == ["root:2", "blocks.1", "blocks.0", "root"]
    assert [len(unit.flats) for unit in model._fsdp.units] == [2]
    step = explain_plan(_Tokens, (torch.arange(4),), link=SLOW)  # forward and backward in one graph
    assert [each.units for each in step.plan.of("reduce")] == [("root:2",), ("blocks.1",), ("blocks.0",), ("root",)]


@pytest.mark.parametrize(
    ("order", "flats"),
    [
        (("blocks", "embedding", "norm", "head"), [["embedding"], ["norm", "head"]]),
        (("embedding", "head", "blocks", "norm"), [["embedding"], ["head", "norm"]]),
        (("embedding", "blocks", "norm", "head"), [["embedding"], ["norm", "head"]]),
    ],
)
def test_ends_that_are_registered_side_by_side(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...], flats: list[list[str]]
) -> None:
    """Large parameters have flat parameters of their own, whether units lie between them, nothing, or what is ignored.

    A small one goes with its neighbor.
    """
    monkeypatch.setattr("fsdp_compile.construct.units._worth_a_collective", lambda device: 2**7)

    def build() -> nn.Module:
        parts = {"embedding": nn.Embedding(2**4, 2**3), "norm": nn.LayerNorm(2**3, bias=False)}
        parts |= {"head": nn.Linear(2**3, 2**4, bias=False), "blocks": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))}
        return nn.ModuleDict({name: parts[name] for name in order})

    def names(model: nn.Module) -> list[list[str]]:
        (unit,) = model._fsdp.units  # type: ignore[union-attr]  # a sharded module
        return [[name.removesuffix(".weight") for name in of_flat] for _, of_flat in unit.by_flat(unit.names)]

    assert names(fully_shard(build())) == flats
    model = build()
    ignored = {*model["blocks"].parameters()}  # type: ignore[index]  # a ModuleDict
    assert names(fully_shard(model, auto_wrap_policy=None, ignored_params=ignored)) == flats


class _Block(nn.Module):
    """The norm has 8 elements; the others 60, 30, 28, 64 and 64."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.norm = nn.Parameter(torch.zeros(3, 20)), nn.LayerNorm(4)
        self.query, self.out = nn.Linear(4, 6), nn.Linear(6, 4)
        self.up, self.down = nn.Linear(4, 16, bias=False), nn.Linear(16, 4, bias=False)


@pytest.mark.parametrize(
    ("worth", "flats"),
    [
        (5, [["experts", "norm"], ["query", "out"], ["up"], ["down"]]),
        (60, [["experts", "norm"], ["query", "out", "up"], ["down"]]),
        (65, [["experts", "norm"], ["query", "out", "up", "down"]]),
        (10**3, [["experts", "norm", "query", "out", "up", "down"]]),
    ],
)
def test_a_large_block_has_several_flat_parameters(
    monkeypatch: pytest.MonkeyPatch, worth: int, flats: list[list[str]]
) -> None:
    """About four of similar size, each worth a collective; a bias stays with its weight."""
    monkeypatch.setattr("fsdp_compile.construct.units._worth_a_collective", lambda device: worth)
    (unit,) = fully_shard(_Block(), auto_wrap_policy=None)._fsdp.units
    found = [list(dict.fromkeys(name.split(".")[0] for name in names)) for _, names in unit.by_flat(unit.names)]
    assert found == flats


def test_a_slow_link_is_kept_busy() -> None:
    """Where communication is the bottleneck the link of a forward never idles from the first gather to the last, up
    to the part of a step by which the search stops."""
    plan, workload = planned("mlp", "backend", link=SLOW)[1]["forward"]
    link = simulate(workload, plan).link
    assert len(link) == 4
    assert all(after.start == pytest.approx(before.end, rel=TOLERANCE) for before, after in pairwise(link))


def test_a_budget_is_kept_or_refused(plans: dict[str, Plan]) -> None:
    """A budget makes gathers start later; one that no plan keeps is an error that says how much is needed."""
    needed = 1
    assert refusal(None) is None
    free = dict(plans)
    while (error := refusal(needed)) is not None:  # forward says what it needs, then backward
        found = re.search(r"budget: expected at least (\d+) bytes.* found (\d+)", error)
        assert found is not None and int(found[1]) > int(found[2]) == needed, error
        needed = int(found[1])
    assert plans != free
    assert refusal(needed - 1) is not None


def refusal(budget: int | None) -> str | None:
    """What compiling two units with a budget raises; None if there is a plan."""
    options = {"link": SLOW, "budget": budget}
    sharded = fully_shard(mlp(blocks=1), reshard_after_forward=True)
    model = torch.compile(sharded, backend=fsdp_compile_backend, options=options)
    try:
        CASES["mlp"].loss(model, CASES["mlp"].batch(1, 4)).backward()
    except Exception as error:
        return str(error)
    return None


def test_a_plan_from_a_file(plans: dict[str, Plan], tmp_path: pathlib.Path) -> None:
    """A plan that was printed, edited and saved is followed; one for another model is refused."""
    found = planned("mlp", "backend")[1].items()
    eager_first = {name: gather_all_first(plan) if name == "forward" else plan for name, (plan, _) in found}
    path = tmp_path / "plan.txt"
    path.write_text("".join(f"{name}:\n{plan}" for name, plan in eager_first.items()))
    forward, _ = compiled("mlp", fsdp_compile_backend, options={"plan": str(path)})
    assert plans["forward"] == eager_first["forward"]
    gathers = [i for i, kind in enumerate(launches(forward)) if kind == "gather"]
    assert gathers == list(range(len(gathers)))
    with pytest.raises(PlanError):
        torch.compile(fully_shard(small()), backend=fsdp_compile_backend, options={"plan": str(path)})(torch.ones(4, 3))


def gather_all_first(plan: Plan) -> Plan:
    """`plan` with all gathers before the first task."""
    gathers = [step.__class__("gather", step.units, 0) for step in plan.of("gather")]
    return Plan((*gathers, *(step for step in plan.steps if step.kind != "gather")))


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.nightly), {"link": SLOW}], ids=str)
def test_auto_keeps_what_pays(options: dict[str, str]) -> None:
    """With "auto", or a budget where nothing is asked, backward gathers fewer units than forward: at least the one that
    it reads first is kept, on a slow link more than by rule."""
    for how, budget in (("auto", {}), (None, {"budget": 1 << 30} if options else {})):
        model = fully_shard(CASES["mlp"].build(), reshard_after_forward=how)
        counts = gathers_of(torch.compile(model, backend=fsdp_compile_backend, options=options | budget))
        assert counts[0] == 4 and counts[1] < (2 if options else 4)
    full = planned("mlp", "backend", **options)[0]
    assert [launches(program).count("gather") for program in full] == [4, 3]


def gathers_of(model: torch.nn.Module) -> list[int]:
    """How many gathers forward and backward have."""
    torch._dynamo.reset()
    with fresh_inductor_cache(), printed_graphs() as graphs:
        CASES["mlp"].loss(model, CASES["mlp"].batch(1, 4)).backward()
    return [graph.count(" = all_gather_into_tensor(") for graph in graphs if "graph after order" in graph]


def test_explain_plan() -> None:
    """The plan of a step, from a model or from a function that makes one without memory; nothing is compiled or run."""
    inputs, _ = CASES["mlp"].batch(1, 4)
    build = partial(mlp, blocks=2)
    found = explain_plan(build, (inputs,), link=SLOW)
    assert [launch.name for launch in found.scheduled.collectives[:2]] == ["gather root", "gather blocks.0"]
    kinds = Counter(launch.name.split()[0] for launch in found.scheduled.collectives)
    assert kinds["reduce"] == 3 and 3 <= kinds["gather"] < 6
    assert found.scheduled.bound <= found.scheduled.timeline.makespan and "limited by" in str(found)
    far = explain_plan(build, (inputs,), link="h100-ib400-single")  # the ranks are those of different nodes
    assert [{each.level for each in report.scheduled.collectives} for report in (found, far)] == [{"node"}, {"network"}]
    assert f"\nlink      {SLOW}: assumed, the caller\ndevice    cpu: " in str(found)  # where seconds come from
    measured = explain_plan(build, (inputs,), link="measured:0=1e-5,1e9", device="h100")
    assert "1e-5,1e9: measured, its ranks\ndevice    h100-80: 4 data sheet, 6 fitted, 8 assumed" in str(measured)
    layers = [nn.Sequential(*(nn.Linear(512, 512).requires_grad_(not frozen) for frozen in pair))
              for pair in ((False, False), (False, True))]  # fmt: skip
    plans = [explain_plan(each, (torch.ones(4, 512),), link=SLOW, optimizer="sgd") for each in layers]
    assert plans[0].scheduled.update > 1.5 * plans[1].scheduled.update > 0  # of what is frozen there is none
    same = explain_plan(fully_shard(build(), reshard_after_forward="auto"), (inputs,), link=SLOW, world_size=4)
    assert same.plan == found.plan and measured.predictions[0].setting.hardware == "h100-80"
    with pytest.raises(PlanError, match=r"budget: expected at least \d+ bytes"):
        explain_plan(build, (inputs,), link=SLOW, budget=1)
    other = explain_plan(build, (inputs,), link=SLOW, world_size=8)
    assert other.predictions[0].setting.world_size == 8 and torch.distributed.get_world_size() == 4
    with pytest.raises(ValueError, match="world_size: expected 4, over which the model is sharded, found 8"):
        explain_plan(fully_shard(build()), (inputs,), link=SLOW, world_size=8)
    model = build()
    before = [(type(module), *module.parameters(recurse=False)) for module in model.modules()]
    with torch.no_grad():
        assert not explain_plan(model, (inputs,), link=SLOW).plan.of("reduce")
    after = [(type(module), *module.parameters(recurse=False)) for module in model.modules()]
    assert all(map(operator.is_, chain(*before), chain(*after)))  # what was passed in is unchanged
    with pytest.raises(ValueError, match="model: expected sharded parameters in its graph, found none"):
        explain_plan(torch.nn.ReLU(), (torch.ones(2, requires_grad=True),), link=SLOW)


def test_explain_plan_of_replicas() -> None:
    """Under hybrid sharding the report lists the all-reduces over replicas, each as large as one rank's shard."""
    inputs, _ = CASES["mlp"].batch(1, 4)
    model = fully_shard(CASES["mlp"].build(), mesh=init_device_mesh("cpu", (2, 2)))
    found = explain_plan(model, (inputs,), link=SLOW)
    assert (found.predictions[0].setting.strategy, found.predictions[0].setting.shard_size) == ("HYBRID_SHARD", 2)
    sizes = {kind: sum(each.bytes for each in found.scheduled.collectives if each.kind == kind)
             for kind in ("reduce-scatter", "all-reduce")}  # fmt: skip
    assert sizes["reduce-scatter"] == 2 * sizes["all-reduce"] > 0


def test_when_a_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks measure their link if it is asked for, or for a budget, or to choose what stays unsharded."""
    measured: list[str] = []
    monkeypatch.setattr(inductor, "measured_link", lambda *_: measured.append("") or (1e-5, 1e9))
    monkeypatch.setattr(inductor, "measured_speed", lambda *_: 1.0)

    def look(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(inductor.for_graph(CompileConfig(**options), gm.graph))
        return gm

    plan = {"plan": "plans.txt"}
    for reshard, options, is_measured in (
        (True, {}, False),
        (None, {}, False),
        (True, {"link": "measure"}, True),
        (None, plan, False),
        (True, plan | {"budget": 1 << 30}, True),
        ("auto", plan, True),
    ):
        seen = list[CompileConfig]()
        measured.clear()
        torch._dynamo.reset()
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)), reshard_after_forward=reshard)
        torch.compile(model, backend=look, fullgraph=True)(torch.ones(2, 4))
        assert bool(measured) == is_measured == (seen[0].link is not None), (reshard, options)
