"""Sums whose bits do not depend on who adds them up: the tree over microbatches, exact sums, hashes of values."""

import pytest
import torch
from torch import Tensor

from fsdp_compile.comm.collectives import add_in_pairs
from fsdp_compile.core.exact_sums import exact_sums
from fsdp_compile.eager.partial_sums import PartialSums
from fsdp_compile.reproducibility import fingerprint_of, hash_of, mean_over_ranks, microbatch_seed


def tree(leaves: list[Tensor]) -> Tensor:
    """The sum by the definition."""
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def draw(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) * 10 ** (index % 5) for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_partial_sums_and_ranks_are_one_tree(count: int, shares: int) -> None:
    """However many ranks share the leaves, partial sums on each and pairs of ranks give the tree of all leaves."""
    if shares > count:
        return
    leaves, rows = draw(count), []
    for share in range(shares):
        sums = PartialSums()
        for index, leaf in enumerate(leaves[share * count // shares : (share + 1) * count // shares]):
            sums.add(index, leaf.clone())
        rows.append(sums.finish(count // shares))
    total = torch.empty(7)
    add_in_pairs(torch.stack(rows), out=total)
    assert torch.equal(total, tree(leaves))


@pytest.mark.parametrize("missing", [{0}, {3}, {7}, {0, 1}, {1, 2, 3}, {4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6}, {2, 3, 6}])
def test_leaves_that_are_missing_count_as_zeros(missing: set[int]) -> None:
    """The others stay in their places, and -0.0 becomes 0.0 as where a rank sends zeros."""
    leaves, sums = [leaf.index_fill(0, torch.tensor([0]), -0.0) for leaf in draw(8)], PartialSums()
    for index, leaf in enumerate(leaves):
        if index not in missing:
            sums.add(index, leaf.clone())
    expected = tree([torch.zeros(7) if index in missing else leaf for index, leaf in enumerate(leaves)])
    found = sums.finish(8)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_leaf_may_come_in_several_parts() -> None:
    """What one backward pass adds twice is one leaf, whatever was complete before; sums so far count all of it."""
    leaves, sums, before = draw(4), PartialSums(), None
    for index, leaf in enumerate(leaves):
        sums.add(index, leaf.clone())
        sums.add(index, 2 * leaf)
        before = sums.so_far(before)
        torch.testing.assert_close(before, 3 * torch.stack(leaves[: index + 1]).sum(0))
        assert len(sums.parts()) <= 3
    assert torch.equal(sums.finish(4), tree([leaf + 2 * leaf for leaf in leaves]))


def test_exact_sums_do_not_depend_on_the_order() -> None:
    """Values over 30 orders of magnitude, cut between any cells of 64, by themselves or beside other sets: equal bits,
    close to the sum in float64.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40003, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-15, 15, (40003,), generator=generator)
    alone = {"addend": lambda x: x, "device": values.device, "all_reduce": lambda value, op: value}
    found = set()
    for cells in (1, 2, 3, 7, 64, 1000):
        parts = values.split(64 * cells)
        shuffled = [parts[index] for index in torch.randperm(len(parts), generator=generator)]
        [total] = exact_sums([shuffled], **alone)
        *_, beside, nothing = exact_sums([[torch.ones(3)], [values[:70]], shuffled, []], **alone)
        found |= {total.item(), beside.item()}
        assert nothing == 0
    [only] = found
    assert only == pytest.approx(values.sum().item(), rel=1e-12)
    mantissas = torch.randn(1000, generator=generator, dtype=torch.float64)
    [total] = exact_sums([[mantissas]], **alone)
    assert abs(total - mantissas.sum()) < 1e-9


def test_exact_sums_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tensors are added up piece by piece, of which none is larger than a cache; the bits are the same."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen: list[int] = []

    def addend(piece: Tensor) -> Tensor:
        seen.append(piece.numel())
        return piece

    def total(sizes: tuple[int, ...]) -> Tensor:
        return exact_sums([list(values.split(sizes))], addend, values.device, lambda value, op: value)

    sizes = (64, 128, 64, 1024, 320, 3400)
    at_once = total(sizes)
    monkeypatch.setattr("fsdp_compile.core.exact_sums._PIECE", 256)
    seen.clear()
    assert torch.equal(total(sizes), at_once)
    assert max(seen) == 256 and sum(seen) >= 5000


@pytest.mark.parametrize("special", [[float("inf")], [float("nan")], [float("inf"), -float("inf")], [-float("inf")]])
def test_exact_sums_of_infinities(special: list[float]) -> None:
    """They are what a sum is; so is the sum of nothing, of zeros and of the smallest numbers."""
    values = torch.tensor([1.0, *special], dtype=torch.float64)
    [total] = exact_sums([[values]], lambda x: x, values.device, lambda value, op: value)
    torch.testing.assert_close(total, values.sum(), equal_nan=True)
    tiny = torch.full((3,), 5e-324, dtype=torch.float64)
    sums = exact_sums(
        [[], [torch.zeros(3, dtype=torch.float64)], [tiny]], lambda x: x, values.device, lambda value, op: value
    )
    assert sums[:2].tolist() == [0, 0]
    assert 0 <= sums[2] < 1e-300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float64])
def test_hashes_add_up(dtype: torch.dtype) -> None:
    """The hash of a tensor is the sum of its parts' hashes; another value or another place changes it."""
    values = (torch.arange(1000) % 251).to(dtype)
    whole = hash_of(values)
    assert whole == sum(hash_of(values[begin : begin + 300], begin) for begin in range(0, 1000, 300))
    changed = values.clone()
    changed[17] += 1
    assert len({int(hash_of(each)) for each in (values, changed, values.flip(0), values[:-1])}) == 4


def test_a_fingerprint_tells_models_apart() -> None:
    """By names, shapes, dtypes and values, not by the order in which they come."""
    a, b = torch.ones(4), torch.zeros(2, 3)
    first = fingerprint_of([("a", a), ("b", b)])
    assert first == fingerprint_of([("b", b), ("a", a.clone())])
    others = [
        [("a", a), ("c", b)],
        [("a", a), ("b", b.view(3, 2))],
        [("a", a.double()), ("b", b)],
        [("a", -a), ("b", b)],
    ]
    assert first not in {fingerprint_of(each) for each in others}


def test_microbatches_draw_alike() -> None:
    """A microbatch draws the same numbers whatever was drawn before, and another one draws others."""
    drawn = []
    for index, seed in ((3, 0), (4, 0), (3, 0), (3, 1)):
        microbatch_seed(index, seed)
        drawn.append(torch.rand(5))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[3])


def test_the_mean_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the tree; a number of values that is no power of two is refused."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # other tests may have made a group
    values = torch.stack(draw(8))[:, 0]
    assert torch.equal(mean_over_ranks(values), tree(list(values)) / 8)
    with pytest.raises(ValueError, match="3 on all ranks together"):
        mean_over_ranks(values[:3])
