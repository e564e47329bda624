"""Order of collectives in the generated code (I6), on Inductor's default path and through the backend."""

import re
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiling import CASES, cached, pairs
from cuda_code import as_for_cuda, as_for_templates
from generated import Program, programs
from models import mlp, squared_error, vectors
from recording import recorded, unlike_blocks
from torch import Tensor, nn

from fsdp_compile import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compile.construct import units
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan


def late_gathers(program: Program) -> list[int]:
    """Numbers of the gathers that start only after the unit before them has begun to compute."""
    steps = program.steps
    gathers = [i for i, step in enumerate(steps) if step.is_gather]
    late = []
    for number, (this, following) in enumerate(pairwise(gathers)):
        products = [i for i in products_of(program, steps[this].out) if i > this]
        if products and following > products[0]:
            late.append(number + 1)
    return late


def products_of(program: Program, buffer: str | None) -> list[int]:
    """Positions of the matrix products that read or write `buffer`."""
    return [
        i
        for i, step in enumerate(program.steps)
        if step.is_product and buffer in {program.viewed(name) for name in (*step.names, step.out or "")}
    ]


@pairs()
def test_gathers_start_one_unit_ahead(name: str, backend: str) -> None:
    """Gather i+1 starts before the first matrix product of unit i (E-LIM-15).

    Backward does not gather the root, with which forward ends (E-STRAT-4).
    """
    for number, program in enumerate(cached(name, backend)):
        assert sum(step.is_gather for step in program.steps) == len(CASES[name].build().blocks) + 1 - number
        assert late_gathers(program) == []


@pairs()
def test_what_is_under_way(name: str, backend: str) -> None:
    """Beside the buffer of the block that computes, the next gather, and in backward one reduce, are under way; a
    kernel or product is between each start and its wait, but for a graph's first gather and its last reduce (E-COMP-7).
    What is launched is waited for once, and read by nothing before."""
    for number, program in enumerate(cached(name, backend)):
        started, under_way, most, hidden = dict[str | None, str](), Counter[str](), Counter[str](), list[bool]()
        for at, step in enumerate(program.steps):
            if step.is_gather or step.is_reduce:
                started[step.out] = "gather" if step.is_gather else "reduce"
                end = next(i for i, each in enumerate(program.steps) if each.is_wait and each.names[0] == step.out)
                between = program.steps[at:end]
                hidden.append(any(each.is_product or each.function in program.kernels for each in between))
                under_way[started[step.out]] += 1
            elif step.is_wait:
                under_way[started.pop(step.names[0])] -= 1
            else:
                assert not started.keys() & {program.memory(name) for name in step.names}, step.text
            most |= under_way
        assert not started
        assert most == {"gather": 2, **({"reduce": 2} if number else {})}  # the next before this one is waited for
        assert all(hidden[1 : -1 if number else None])


def test_eager_steps_have_the_same_order(plans: dict[str, Plan]) -> None:
    """An eager step launches what the plan of a compiled one says, in its order, forward and backward."""
    model: Any = fully_shard(unlike_blocks(), forward_prefetch=True)
    for _ in range(2):  # the first forward learns what comes next
        with recorded(model) as log:
            model(torch.randn(3, 7)).sum().backward()
    launched = [line.partition(" in ")[0] for line in log.about("gather ", "reduce ")]
    torch.compile(model)(torch.randn(3, 7)).sum().backward()
    starts = [each for plan in plans.values() for each in plan.of("gather", "reduce")]
    assert launched == [f"{each.kind} {' '.join(each.units)}" for each in starts]


def test_a_group_of_its_own_for_reduces_changes_the_group_alone() -> None:
    """After `set_separate_reduce_scatter_group` a graph launches the same collectives in the same order; reduces name
    another group than gathers, hop by hop, and after it was switched off the same."""

    def launched(chosen: bool | None) -> list[tuple[str, str]]:
        model: Any = fully_shard(mlp(blocks=1), reshard_after_forward=2)
        for enable in () if chosen is None else (True, chosen):
            model.set_separate_reduce_scatter_group(enable)
        run, inputs, calls = torch.compile(model, fullgraph=True), CASES["mlp"].batch(1, 4), []
        for program in programs(lambda: CASES["mlp"].loss(run, inputs)):
            said = next(step.text for step in program.steps if "fsdp_flat.check_ranks" in step.function)
            groups = re.findall(r"'(fsdp\.[\w.]+|0)'", said)
            calls += [(kind, groups[int(index)]) for kind, index in re.findall(r"(gather|reduce) .*?group (\d)", said)]
        return calls

    shared, own = launched(None), launched(True)
    assert [kind for kind, _ in own] == [kind for kind, _ in shared] and launched(False) == shared
    gathers, reduces = ({group for kind, group in own if kind == each} for each in ("gather", "reduce"))
    assert len(gathers) == len(reduces) == 2 and not gathers & reduces


@pairs()
def test_no_kernel_ties_units_together(name: str, backend: str) -> None:
    """Horizontal fusion does not put gradients of two units into one kernel, which would delay a reduce-scatter.

    The root is exempt where it shares a kernel with the unit it is computed beside.
    """
    assert cached(name, backend)[1].shared_kernels() == []


class Branch(nn.Module):
    """Its last gradients are sums over the same shape, of what all branches are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(64, 64), nn.LayerNorm(64), nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.layer(x))) * self.scale


class Parallel(nn.Module):
    """Branches side by side, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.head = nn.ModuleList(Branch() for _ in range(4)), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(branch(x) for branch in self.branches)).square().mean()


@pytest.mark.parametrize(
    ("disable", "shares"), [((), False), pytest.param(("pin_order",), True, marks=pytest.mark.nightly)]
)
def test_no_kernel_ties_branches_together(disable: tuple[str, ...], shares: bool) -> None:
    """Units that nothing but their place in the plan keeps apart: Inductor alone would fuse them, the pass stops it."""
    model = fully_shard(Parallel())
    run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options={"disable": disable})
    assert bool(programs(lambda: run(torch.randn(8, 64)))[1].shared_kernels()) == shares


@pytest.mark.parametrize(
    ("name", "on", "dtype"),
    [
        pytest.param("gpt", nullcontext, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("gpt", nullcontext, torch.float32, marks=pytest.mark.nightly),
        pytest.param("mlp", as_for_cuda, torch.bfloat16, marks=pytest.mark.nightly),
        ("mlp", as_for_templates, torch.bfloat16),
    ],
)
def test_the_pin_blocks_no_fusion(name: str, on: Any, dtype: torch.dtype) -> None:
    """With the order pinned, graphs call no kernel that they do not call without: all is fused, into templates too."""

    def called(*disable: str) -> list[Counter[str]]:
        torch.manual_seed(0)
        model = fully_shard(mlp(1) if name == "mlp" else CASES[name].build(), mixed_precision=MixedPrecision(dtype))
        run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options={"disable": disable})
        inputs = CASES[name].batch(1, 4)
        with on():
            both = programs(lambda: CASES[name].loss(run, inputs))
        fused = [[step.function for step in each.steps if step.function in each.kernels] for each in both]
        return [Counter(function.rstrip("_0123456789") for function in those) for those in fused]

    for pinned, free in zip(called(), called("pin_order"), strict=True):
        assert pinned and not pinned - free
        assert any("tem_fused" in function and "gelu" in function for function in pinned) == (on is as_for_templates)


def test_received_rows_are_reduced_at_once() -> None:
    """The mean of rows follows its wait directly: fused with a later one it would keep whole gradients alive."""
    _, backward = cached("gpt", "default")
    received = {step.out for step in backward.steps if step.function.endswith(".all_to_all")}
    assert len(received) == sum(step.is_reduce for step in backward.steps) == 3
    for step, following in pairwise(backward.steps):
        if step.is_wait and step.names[0] in received:
            assert received & set(following.names) == {step.names[0]}, following.text


class SideBySide(nn.Module):
    """Embedding, norm and head are registered behind the blocks, without a unit between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.tokens, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class HeadAlone(SideBySide):
    """Without the norm: the head's gradients fill their flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]  # in its place


@pytest.mark.parametrize("reduce_dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [SideBySide, pytest.param(HeadAlone, marks=pytest.mark.nightly)])
def test_the_end_of_a_root(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], reduce_dtype: torch.dtype) -> None:
    """Norm and head have a flat parameter of their own. They are reduced before backward reaches the blocks: each
    gradient is cast, and scaled, where it is computed, though autograd ends with the views that are cast. With them
    forward ends, so they stay unsharded, and the first gather of backward is a block's."""
    monkeypatch.setattr(units, "_worth_a_collective", lambda device: 1024)
    torch.manual_seed(0)
    model = kind()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True, mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype))
    run = torch.compile(model, backend=fsdp_compile_backend, fullgraph=True)
    forward, backward = programs(lambda: run(torch.arange(8)).float().square().mean())
    assert sum(step.is_gather for step in forward.steps) == 4  # embedding, two blocks, norm and head
    kinds = ["gather" if step.is_gather else "reduce" if step.is_reduce else "product"
             for step in backward.steps if step.is_gather or step.is_reduce or step.is_product]  # fmt: skip
    assert kinds.count("gather") == 2 and kinds[0] == "gather"  # before the head's products, which hide it
    kinds = [kind for kind in kinds if kind != "gather"]
    assert kinds.index("reduce") <= 2 and kinds.count("reduce") == 4  # behind both products of the head at the latest


def test_all_waits_at_the_end_if_asked() -> None:
    """With as many `reduces_in_flight` as there are, each is waited for after all matrix products."""
    run = torch.compile(fully_shard(mlp(2)), backend=fsdp_compile_backend, options={"reduces_in_flight": 9})
    _, backward = programs(lambda: squared_error(run, vectors(1, 4)))
    last_product = max(i for i, step in enumerate(backward.steps) if step.is_product)
    reduced = {step.out for step in backward.steps if step.is_reduce}
    waits = [i for i, step in enumerate(backward.steps) if step.is_wait and step.names[0] in reduced]
    assert len(waits) == len(reduced) > 0 and min(waits) > last_product


def test_collectives_do_not_pass_the_dispatcher() -> None:
    """Generated code calls the process group: starts and waits pair up, and no operator stands between. Every gather is
    given its output: the allocating form corrupts gloo's memory on torch 2.13."""
    for program in cached("gpt", "default"):
        starts = [step.function for step in program.steps if step.is_gather or step.is_reduce]
        assert len(starts) == sum(step.function == "fsdp_collectives.wait" for step in program.steps) > 0
        gathers = {name for name in starts[1:] if "gather" in name}  # the first knows of steps that have failed
        assert gathers <= {"fsdp_collectives.all_gather"} and starts[0].startswith("fsdp_collectives.at_start.")
        assert not any("_c10d_functional" in step.function for step in program.steps)


@pairs("gpt", "mlp")
def test_ranks_agree_before_the_first_collective(name: str, backend: str) -> None:
    """Each graph with collectives compares them once, before any starts; Inductor neither drops nor moves that."""
    for program in cached(name, backend):
        compared = [i for i, step in enumerate(program.steps) if "fsdp_flat.check_ranks" in step.function]
        first = next(i for i, step in enumerate(program.steps) if step.is_gather or step.is_reduce)
        assert len(compared) == 1 and compared[0] < first


def test_ranks_agree_where_backward_alone_communicates() -> None:
    """Under NO_SHARD forward has nothing to compare."""
    model = fully_shard(mlp(blocks=1), sharding_strategy=ShardingStrategy.NO_SHARD)
    run = torch.compile(model, fullgraph=True)
    forward, backward = programs(lambda: squared_error(run, vectors(1, 4)))
    assert "check_ranks" not in forward.code and "fsdp_flat.check_ranks" in backward.code
