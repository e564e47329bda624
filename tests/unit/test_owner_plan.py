"""Owners of complete matrices are planned from shapes: balanced, and at home where that costs nothing."""

import math
from typing import Any

import pytest

from fsdp_compile.core.layout import lay_out
from fsdp_compile.explain.matrices import _end
from fsdp_compile.optim.owner_plan import Matrix, OwnerPlan, plan_owners
from fsdp_compile.tensors.shard_spec import FlatSharding

Shapes = list[tuple[str, tuple[int, ...]]]


def newton_schulz(shape: tuple[int, ...]) -> int:
    low, high = sorted(shape)
    return 5 * (4 * low * low * high + 2 * low**3)


def llama_8b() -> list[Shapes]:
    block = [("q", (4096, 4096)), ("k", (1024, 4096)), ("v", (1024, 4096)), ("o", (4096, 4096))]
    block += [("gate", (14336, 4096)), ("up", (14336, 4096)), ("down", (4096, 14336))]
    return [[(f"{i}.{name}", shape) for name, shape in block] for i in range(32)]


def mixture(experts: int = 128) -> list[Shapes]:
    """Attention, and three matrices for each expert, as Qwen3-30B-A3B has them, with half of its blocks."""
    block = [("q", (4096, 2048)), ("k", (512, 2048)), ("v", (512, 2048)), ("o", (2048, 4096)), ("router", (128, 2048))]
    for expert in range(experts):
        block += [(f"{expert}.gate", (768, 2048)), (f"{expert}.up", (768, 2048)), (f"{expert}.down", (2048, 768))]
    return [[(f"{i}.{name}", shape) for name, shape in block] for i in range(24)]


def planned(units: list[Shapes], size: int) -> OwnerPlan:
    matrices = []
    for unit in units:
        layout = lay_out(unit, size)
        for (name, shape), offset in zip(unit, layout.offsets, strict=True):
            sharding = FlatSharding(shape, offset, layout.shard_numel)
            low, high = offset // layout.shard_numel, (offset + math.prod(shape) - 1) // layout.shard_numel
            stored = tuple((rank, sharding.local_range(rank)[1]) for rank in range(low, high + 1))
            matrices.append((name, shape, newton_schulz(shape), stored))
    return of_matrices(matrices, size)


def of_matrices(matrices: list[Any], size: int) -> OwnerPlan:
    """A plan for matrices of one parameter each."""
    return plan_owners([Matrix(*each, index) for index, each in enumerate(matrices)], size)


@pytest.mark.parametrize(("name", "size"), [("llama", 64), ("llama", 8), ("mixture", 64), ("mixture", 16)])
def test_balance(name: str, size: int) -> None:
    """The largest load is within 15 % of the mean, each matrix has one owner, and the plan is the same every time."""
    units = {"llama": llama_8b, "mixture": mixture}[name]()
    plan = planned(units, size)
    assert plan.balance <= 1.15
    assert len(plan.owners) == sum(map(len, units)) and set(plan.owners) <= set(range(size))
    assert sum(plan.loads) == sum(matrix.cost for matrix in plan.matrices)
    assert planned(units, size) == plan
    text = f"{len(plan.owners)} matrices on {size} ranks, {sum(plan.loads):.3g} operations, largest load "
    assert str(plan).startswith(f"{text}{plan.balance:.3f} x the mean; ")
    print(plan)


@pytest.mark.parametrize(("blocks", "size"), [(16, 8), (32, 8), (32, 16)])
def test_no_rank_waits_for_a_stage(blocks: int, size: int) -> None:
    """A rank that stores most of the largest matrix of each block owns no more of a stage than others do."""
    block = [("qkv", (3072, 1024)), ("proj", (1024, 1024)), ("up", (4096, 1024)), ("down", (1024, 4096))]
    plan = planned([[(f"{i}.{name}", shape) for name, shape in block] for i in range(blocks)], size)
    of_stages = [[0] * size for _ in range(max(plan.stages) + 1)]
    for matrix, owner, stage in zip(plan.matrices, plan.owners, plan.stages, strict=True):
        of_stages[stage][owner] += matrix.cost
    end = _end([0] * size, of_stages, [0] * len(of_stages))  # type: ignore[arg-type]  # operations, not seconds
    assert end <= 1.15 * sum(plan.loads) / size
    stays = sum(dict(matrix.stored).get(owner, 0) for matrix, owner in zip(plan.matrices, plan.owners, strict=True))
    assert stays > 1.3 * sum(matrix.numel for matrix in plan.matrices) / size  # by chance it would be one of `size`


def test_what_is_whole_stays() -> None:
    """A matrix that lies on one rank is computed there if that does not delay the others."""
    plan = of_matrices([(str(i), (4, 4), 10, ((i % 4, 16),)) for i in range(8)], 4)
    assert plan.owners == (0, 1, 2, 3, 0, 1, 2, 3) and plan.moved == 0
    assert of_matrices([(str(i), (4, 4), 10, ((0, 16),)) for i in range(8)], 4).balance == 1.0


def test_stages() -> None:
    """Stages follow the time at which owners compute, and the first one and the last one are short."""
    first, second = ((0, 16),), ((1, 16),)
    costs = [(4, first), (1, second), (1, second), (1, second), (1, second), (4, first), (4, second)]
    plan = of_matrices([(str(i), (4, 4), cost, stored) for i, (cost, stored) in enumerate(costs)], 2)
    assert plan.owners == (0, 1, 1, 1, 1, 0, 1) and plan.stages == (1, 0, 1, 1, 1, 2, 2)
    together = [Matrix(str(i), (4, 4), 1, ((i % 2, 16),), i // 4) for i in range(16)]
    assert plan_owners(together, 2).stages == (*[1] * 4, *[3] * 4, *[4] * 4, *[6] * 4), "four parameters"
    assert plan_owners(together[:3], 4).stages == (0, 0, 0) and plan_owners([], 4).stages == ()
    stages = of_matrices([(str(i), (4, 4), 1, ((0, 16),)) for i in range(100)], 2).stages
    assert [stages.count(each) for each in range(8)] == [8, 14, 14, 14, 16, 14, 14, 6]
