"""Activations that are kept or computed again, in compiled graphs: what forward saves, within the budget."""

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import printed_graphs
from cuda_code import as_for_cuda
from generated import Step, programs
from models import GPT, MODELS, Residual, Stack, checkpointed, squared_error, text, vectors
from torch import Tensor, nn

from bench.planned_step import noted
from fsdp_compile import explain_plan, fully_shard
from fsdp_compile.passes.graph.nodes import source_of
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.joint.choose_memory import _Policies
from fsdp_compile.passes.plan.plan import PlanError, simulate

LINK = "custom:2e-5,1e9"
TOKENS, TARGETS = text(0, 32)


class WithLoss(nn.Module):
    """The loss is part of the graph, whose memory is planned."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = GPT(layers=layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def planned_peaks(
    budget: int | None, activations: str, reshard: Any = "auto", device: str | None = None
) -> dict[str, int]:
    """Bytes that forward and backward are planned with."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(WithLoss(), reshard_after_forward=reshard)
    options = {"link": LINK, "budget": budget, "activations": activations, "device": device}
    run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options=options)
    with noted() as graphs:
        programs(lambda: run(TOKENS, TARGETS))
    return {direction: simulate(*graph).peak for direction, graph in graphs.items()}


@pytest.mark.nightly
def test_a_budget_that_only_recomputation_keeps() -> None:
    """What a user writes: a budget and "auto". A plan that has no room for all activations computes some again."""
    free = explain_plan(WithLoss, (TOKENS, TARGETS), link=LINK, activations="auto")
    budget = int(0.75 * free.timeline.peak)
    with pytest.raises(PlanError, match=r"budget: expected at least \d+ bytes"):
        explain_plan(WithLoss, (TOKENS, TARGETS), link=LINK, budget=budget)
    tight = explain_plan(WithLoss, (TOKENS, TARGETS), link=LINK, budget=budget, activations="auto")
    assert free.timeline.makespan < tight.timeline.makespan and tight.timeline.peak <= budget
    assert {each.activations for each in free.blocks} == {"keep"}
    assert [each.name for each in tight.blocks] == [f"model.blocks.{index}" for index in range(2)]
    assert any(each.activations.startswith("recompute") for each in tight.blocks)
    assert "model.blocks.0" in str(tight) and "units that stay unsharded" in str(tight)
    peaks = planned_peaks(budget, "auto")
    assert max(peaks.values()) <= tight.timeline.peak  # the whole step was planned with no less than the graphs need
    with pytest.raises(PlanError, match=r"budget: expected at least \d+ bytes.* activations are treated"):
        explain_plan(WithLoss, (TOKENS, TARGETS), link=LINK, budget=1, activations="auto")


def graphs_of(build: Callable[[], nn.Module], **options: Any) -> list[str]:
    """Forward and backward, as text."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = torch.compile(fully_shard(build()), fullgraph=True, backend=fsdp_compile_backend, options=options)
    inputs = vectors(0, 4)
    with printed_graphs() as graphs:
        squared_error(run, inputs).backward()
    return [graph for graph in graphs if "after check_saved" in graph.split("\n")[0]]


def products(graph: str) -> int:
    """How many matrix products a graph has."""
    return len(re.findall(r" = (?:mm|addmm)\(", graph))


def saved(graph: str, width: int) -> int:
    """How many tensors of a width a forward returns."""
    names = re.findall(rf"^(\w+): f32\[4, {width}\] = ", graph, re.MULTILINE)
    returned = re.split(r"\W+", graph.split("return ")[-1])
    return len(set(names).intersection(returned))


def test_only_what_enters_a_block_is_saved() -> None:
    """With "recompute" and no link, forward saves what enters a block, and backward repeats its first product."""
    kept = graphs_of(MODELS["mlp"].build)
    again = graphs_of(MODELS["mlp"].build, activations="recompute")
    assert products(again[0]) == products(kept[0])
    assert products(again[1]) == products(kept[1]) + 3  # nothing reads the result of a block's last product
    assert saved(kept[0], 23) == 6 and saved(again[0], 23) == 0
    assert saved(again[0], 11) >= 3


@pytest.mark.nightly
def test_checkpoints_of_the_user_are_left_as_they_are() -> None:
    """A block in which the user has put a checkpoint is computed again as the user wants, and no other way."""
    plain = graphs_of(lambda: checkpointed("around"))
    assert graphs_of(lambda: checkpointed("around"), activations="recompute") == plain


def test_what_needs_a_link_or_no_profile_says_so() -> None:
    """ "auto" without a link would mean nothing, a profile has no seconds of what is computed again."""
    for options, message in (
        ({"activations": "auto"}, "activations='auto' needs a link"),
        ({"activations": "no"}, "activations must be one of keep, recompute, offload, auto, not 'no'"),
        ({"activations": "auto", "link": LINK, "profile": "x"}, "profile cannot be used with activations='auto'"),
    ):
        with pytest.raises(Exception, match=message):
            graphs_of(MODELS["mlp"].build, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(("reshard", "device"), [("auto", None), (True, None), ("auto", "h100")])
def test_graphs_need_no_more_than_was_planned_for_the_step(reshard: Any, device: str | None) -> None:
    """Whatever the budget, forward and backward keep it, and raise nothing (Note [When the joint plan is wrong])."""
    most, least = (max(planned_peaks(None, each, reshard, device).values()) for each in ("keep", "recompute"))
    for part in (1.0, 0.75, 0.5, 0.25, 0.1):
        budget = int(least + part * (most - least))
        assert max(planned_peaks(budget, "auto", reshard, device).values()) <= budget


def _kind(step: Step) -> str:
    """A product, or what is done with a copy."""
    is_copy = "_host" in step.function or "_copy" in step.function
    return "product" if step.is_product else step.function.split(".")[-2] if is_copy else ""


def _check_policy(self: Any, block: Any, made: Any) -> None:
    """Count the bytes of a policy anew, position by position."""
    alive, back, bytes_of = self.alive, self.starts[made.at], [0] * len(self.position)
    again = [(each, self.last_in_forward[node]) for node in block.nodes if (each := alive.get(node)) is not None]
    entering = {source_of(each) for node in block.nodes for each in node.all_input_nodes}
    entering -= {*block.nodes, *block.copied}
    sources = [each for node in entering if (each := alive.get(node)) is not None and each.last < back]
    lived = [(each.size, each.last + 1, back) for each in sources]
    lived += [(-each.size, max(each.begin, last) + 1, back) for each, last in again if each.last >= self.split]
    if block.next is not None:
        left, returns = (self.position[node] for node in block.next)
        lived += [(-alive[node].size, max(self.last_in_forward[node], left) + 1, returns) for node in block.copied]
    for size, begin, end in lived:
        for at in range(begin, end):
            bytes_of[at] += size
    changes = [0] * (len(bytes_of) + 1)
    for at, size in made.changes:
        changes[at] += size
    assert list(accumulate(changes))[:-1] == bytes_of
    for repeat in made.repeats:
        begin = self.starts[repeat.task]
        places = range(begin, begin + len(self.info.tasks[repeat.task]))
        computing = [at for at in map(self.position.__getitem__, block.nodes) if at in places]
        live = [
            sum(each.size for each, _ in again if each.begin <= at <= each.last)
            for at in range(min(computing), max(computing) + 1)
        ]
        assert repeat.memory == sum(each.size for each in sources) + max(live)


def test_what_a_policy_changes() -> None:
    """What is recomputed or copied is gone from when forward has last read it until backward has it again, and what it
    is recomputed from lives until then; so does what has been recomputed, while the rest is."""
    read, names = _Policies.policy, set[str]()

    def policy(self: Any, name: str, block: Any) -> Any:
        made = read(self, name, block)
        if made is not None:
            names.add(name)
            _check_policy(self, block, made)
        return made

    with mock.patch.object(_Policies, "policy", policy):
        planned_peaks(None, "offload", device="h100")
    assert names == {"recompute", "recompute but products", "offload"}


def test_memory_of_the_host_is_none_of_the_device() -> None:
    """What is copied to the host takes none in a plan, though it is alive until backward: a tenth less here."""
    kept, copied = (planned_peaks(None, how, device="h100") for how in ("keep", "offload"))
    assert all(copied[each] < 0.9 * kept[each] for each in kept)


def test_activations_on_the_host_in_cuda_code() -> None:
    """Copies begin behind what computes an activation and are waited for a block later, until when nothing else gets
    its memory; they begin to come back a block before backward reads them. Nothing waits for the host.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(Stack([Residual(64, 256) for _ in range(3)], width=64), reshard_after_forward=True)
    options = {"link": LINK, "device": "h100", "activations": "offload"}
    run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options=options)
    inputs = vectors(0, 512)
    with as_for_cuda():
        both = programs(lambda: squared_error(run, inputs))
    names = [[_kind(step) for step in program.steps if _kind(step)] for program in both]
    block = ["product", "to_host", "product"]  # the next one's end: its copy, waited for behind the products of two
    assert names[0] == ["product", *block, *block, "wait_copy", "product", "product", "wait_copy", "product"]
    copies = [name for name in names[1] if name != "product"]
    assert copies == ["from_host", "from_host", "wait_copy", "wait_copy"]
    first, last = names[1].index("from_host"), names[1].index("wait_copy")
    assert names[1][first:last].count("product") >= 3  # the backward of a block
    for program in both:
        assert not re.search(r"synchronize\(|\.cpu\(|\.item\(", program.code[program.code.index("def call") :])
    code = both[0].code
    copies = re.findall(r"(buf\d+)\)\n\s+(buf\d+) = buf\d+\n.*to_host", code)
    copies = copies or [
        pair[::-1] for pair in re.findall(r"(buf\d+) = .*to_host.default\((buf\d+)\)", code)
    ]  # torch 2.14
    assert len(copies) == 2
    for copied, result in copies:
        assert 0 < code.index(f"wait_copy.default({result})") < code.index(f"del {copied}")
    with pytest.raises(Exception, match="activations: expected a device whose hardware file has a host_bandwidth"):
        graphs_of(MODELS["mlp"].build, link=LINK, activations="offload")
