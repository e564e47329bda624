"""What follows from a parameter alone is computed on the shard: fewer bytes on the wire, and the same bits.

Each case trains ten steps with the passes on joint graphs, with and without `smallest_gather`; losses, gradients and
parameters are equal bit for bit. Collectives are compared with what the smallest gathers take.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joint import Collective, JointPasses
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils.checkpoint import checkpoint
from weights import (
    Block,
    D,
    Float8Block,
    Float8RowsBlock,
    Microscaled,
    OneWeight,
    Special,
    SpecialBlocks,
    halves,
    negative,
    two_levels,
)

from fsdp_compile import fully_shard
from fsdp_compile.passes.inductor import fsdp_compile_backend

from ..ranks import Ranks, on_ranks
from ..training import local

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
STEPS = 10


class Net(nn.Module):
    """Two blocks, each a unit."""

    def __init__(self, make: Callable[[], nn.Module], checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class Weights:
    """A model, how it is sharded, and what a unit's gathers are on two ranks: dtype and bytes."""

    make: Callable[[], nn.Module]
    gathers: tuple[tuple[torch.dtype, int], ...]
    autocast: bool = False
    checkpointed: bool = False
    maxima: tuple[int, ...] = ()  # bytes of each all-reduce
    options: dict[str, Any] = field(default_factory=dict)


def _signs(weight: Tensor) -> Tensor:
    """Differs for 0 and -0."""
    low = (weight.clamp(min=0) * -1).bfloat16()
    return (low + torch.copysign(torch.ones_like(low), low)).float()


SEVERAL = ((BF16, 512), (BF16, 12_672))  # the norm in float32, all else in half of 25,344 bytes
AS_BYTES = ((U8, 768), (U8, 6_336))
CASES: dict[str, Weights] = {
    "autocast": Weights(partial(Block, norm=False), ((BF16, 12_544),), autocast=True),
    "with a norm": Weights(Block, SEVERAL, autocast=True),
    "checkpointed": Weights(Block, SEVERAL, autocast=True, checkpointed=True),
    "SHARD_GRAD_OP": Weights(Block, SEVERAL, autocast=True, options={"reshard_after_forward": False}),
    "odd sizes": Weights(partial(Block, width=7), ((BF16, 256), (BF16, 832)), autocast=True),
    "float8": Weights(partial(Float8Block, norm=False, bias=False), ((U8, 6_144),), maxima=(32,)),
    "float8 with a norm": Weights(Float8Block, AS_BYTES, maxima=(32,)),
    "float8 checkpointed": Weights(Float8Block, AS_BYTES, maxima=(32,), checkpointed=True),
    "float8 of bfloat16": Weights(
        Float8Block, ((U8, 384), (U8, 6_336)), maxima=(32,), options={"mixed_precision": MixedPrecision(BF16, F32)}
    ),
    "rows": Weights(partial(Float8RowsBlock, norm=False, bias=False), ((U8, 6_144),), maxima=(2_048,)),
    "rows that are cut": Weights(partial(Float8RowsBlock, width=7), ((U8, 384), (U8, 416)), maxima=(448,)),
    "blocks of 16": Weights(Microscaled, ((U8, 1_024), (U8, 1_024)), maxima=(1_024,)),
    "special blocks": Weights(SpecialBlocks, ((U8, 1_024), (U8, 1_024)), maxima=(1_024,)),
    "two levels": Weights(partial(OneWeight, two_levels), ((U8, 2_048), (U8, 1_024)), maxima=(32, 16)),
    "halves": Weights(partial(OneWeight, halves), ((U8, 2_048), (U8, 1_024)), maxima=(176,)),
    "NaN": Weights(partial(Special, float("nan")), ((BF16, 2_048),), maxima=(16,)),
    "infinity": Weights(partial(Special, float("inf")), ((BF16, 2_048),), maxima=(16,)),
    "negative": Weights(partial(OneWeight, negative), ((BF16, 2_048),), maxima=(16,)),
    "negative zero": Weights(partial(OneWeight, _signs), ((U8, 1_024), (U8, 2_048))),  # backward needs a mask,
}
DAILY = {"float8 of bfloat16", "halves", "two levels", "NaN"}


def _train(case: Weights, backend: Any, steps: int = STEPS) -> list[Tensor]:
    """Losses, gradients and parameters of this rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(case.make, case.checkpointed)
    fully_shard(model, auto_wrap_policy={type(model.blocks[0])}, **case.options)
    run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    width = next(model.blocks[0].parameters()).shape[-1]
    seen: list[Tensor] = []
    for _ in range(steps):
        with torch.autocast("cpu", BF16, enabled=case.autocast):
            loss = run(torch.randn(4, width))
        loss.backward()
        seen += [loss.detach(), *(local(param.grad).clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(param).detach().clone() for param in model.parameters()]


def _equal_bits(rank: int, name: str, exact_bytes: bool) -> None:
    case = CASES[name]
    before, after = JointPasses(("smallest_gather",)), JointPasses()
    for one, other in zip(_train(case, before), _train(case, after), strict=True):
        assert torch.equal(one.reshape(-1).view(U8), other.reshape(-1).view(U8))
    assert len(after.texts) == 1
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, after.texts)
    assert all(each == texts[0] for each in texts)
    assert _of("reduce_scatter", after.backward) == _of("reduce_scatter", before.backward)
    assert _of("all_reduce", after.backward) == []
    assert [each[2] for each in _of("all_reduce", after.forward)] == list(case.maxima)
    gathered = _of("all_gather", after.forward)
    if exact_bytes:
        assert [each[1:] for each in gathered] == [*case.gathers] * 2, gathered
    assert _bytes(after.forward) < _bytes(before.forward) and _bytes(after.backward) <= _bytes(before.backward)


def _of(kind: str, collectives: list[Collective]) -> list[Collective]:
    return [each for each in collectives if each[0] == kind]


def _bytes(collectives: list[Collective]) -> int:
    return sum(each[2] for each in collectives)


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.nightly) for n in CASES])
def test_equal_bits_and_fewer_bytes(two: Ranks, name: str) -> None:
    """Ten steps of AdamW have the same bits with and without the pass; graphs are equal on all ranks."""
    two.run(_equal_bits, name, True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(four: Ranks, name: str) -> None:
    """So they have on four ranks, where parameters are cut in other places and some ranks have none of one."""
    four.run(_equal_bits, name, False)


class _OfBits(torch.autograd.Function):
    """A weight rounded to bfloat16 by arithmetic on its bits, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return ((weight.view(torch.int32) + 0x8000) & -0x10000).view(F32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@on_ranks(2)
def test_bits_of_weights() -> None:
    """A weight's bits in another dtype, and its negative, are no views that the pass may take for the weight."""
    for of in (_OfBits.apply, torch._neg_view):
        case = Weights(partial(OneWeight, of), ())
        before, after = _train(case, JointPasses(("smallest_gather",)), 2), _train(case, JointPasses(), 2)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["float8 with a norm", "with a norm", "rows", "blocks of 16"])
@on_ranks(4)
def test_two_stages(name: str) -> None:
    """Where shards are gathered in two stages, so is what is computed on them."""
    case = CASES[name]
    options = {**case.options, "reshard_after_forward": 2}
    before, after = JointPasses(("smallest_gather",)), JointPasses()
    staged = Weights(case.make, (), case.autocast, case.checkpointed, case.maxima, options)
    for one, other in zip(_train(staged, before, 3), _train(staged, after, 3), strict=True):
        assert torch.equal(one, other)
    assert _bytes(after.forward) < _bytes(before.forward)


# Not "two levels": it rounds to integers, and Inductor divides otherwise than eager code, with and without the pass.
_NIGHTLY = ("with a norm", "rows", "rows that are cut", "blocks of 16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) for name in ("float8 with a norm", *_NIGHTLY)]
)
@on_ranks(2)
def test_inductor(name: str) -> None:
    """Under Inductor values differ by 1e-6 at most."""
    case = CASES[name]
    off = partial(fsdp_compile_backend, options={"disable": ("smallest_gather",)})
    for one, other in zip(_train(case, off, 4), _train(case, "inductor", 4), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class _OfTheRank(OneWeight):
    """Multiplies in bfloat16: two casts in a row torch 2.11 would leave out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() @ (self.weight * (1 + dist.get_rank())).bfloat16()).float()


@pytest.mark.nightly
@on_ranks(2)
def test_ranks_compare_what_they_compute() -> None:
    """A number in a program that differs by rank raises on all ranks: parameters would be put together of both."""
    torch.manual_seed(0)
    model = Net(_OfTheRank)
    run = torch.compile(fully_shard(model, auto_wrap_policy={_OfTheRank}), fullgraph=True)
    with pytest.raises(RuntimeError, match="computed from the shard by"):
        run(torch.randn(4, D))
