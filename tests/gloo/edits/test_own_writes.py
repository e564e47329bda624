"""Forwards that change parameters of their own unit through `.data`: as unsharded where ranks agree, else refused."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tiers import LATE
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.edits import own_writes

from ..ranks import on_ranks

STEPS = 5


Write = Callable[[Any], Any]


def _clamps_later(block: Any) -> None:
    block.calls += 1
    limit = 0.1 if block.calls > 3 else 100.0  # which changes nothing at first
    block.up.weight.data.clamp_(-limit, limit)


WRITES: dict[str, Write] = {
    "clamps": lambda block: block.up.weight.data.clamp_(-0.2, 0.2) if block.training else None,
    "clamps later": _clamps_later,
    "renormalizes": lambda block: block.up.weight.data.div_(block.up.weight.data.norm(dim=1, keepdim=True)),
    "moves a codebook": lambda b: b.codes.data.mul_(0.9).add_(b.up.weight.detach().mean(0), alpha=0.1),
    "writes a row": lambda block: block.up.weight.data.__setitem__(2, 0.5),
    "writes to a view": lambda block: block.up.bias.data.view(-1)[1:4].fill_(0.25),
    "replaces data": lambda block: setattr(block.up.weight, "data", block.up.weight.data.clamp(-0.2, 0.2)),
    "changes nothing": lambda block: block.up.weight.data.clamp_(-100, 100),
}


class _Block(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.up, self.write, self.calls = nn.Linear(8, 8), write, 0
        self.codes = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return x + torch.tanh(self.up(x)) * self.codes


def _model(write: Write) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(_Block(write), nn.Linear(8, 8), _Block(write))


def _train(model: Any, rank: int | None) -> list[Tensor]:
    """The losses of some steps on this rank's part of the data; None: on all of it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(8, 8)
        loss = model(x if rank is None else x.chunk(2)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(2, 8)).sum())
    return losses


NAMES, NOT_AT_FIRST = list(WRITES), ("clamps later", "changes nothing")


def _compile(model: Any, how: str) -> Any:
    """What runs `model`: eagerly, or "whole" or "blocks", compiled."""
    torch._dynamo.reset()
    if how == "whole":
        return torch.compile(model, backend="aot_eager")
    for block in model if how == "blocks" else ():
        block.compile(backend="aot_eager")
    return model


# Before 2.14, Dynamo leaves `.data = ...` in a function to eager code, and autograd counts it: refused below.
ASSIGNED_IN_A_FUNCTION = ("replaces data",) if torch.__version__ < "2.14" else ()


@pytest.mark.parametrize(
    ("options", "how", "names"),
    [
        ({"mixed_precision": MixedPrecision(torch.bfloat16)}, "eager", NAMES),
        ({}, "whole", ["clamps later"]),
        ({}, "blocks", ["moves a codebook", "replaces data"]),
        pytest.param({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "eager", NAMES, marks=LATE),
        pytest.param({}, "whole", [name for name in NAMES if name not in ASSIGNED_IN_A_FUNCTION], marks=LATE),
        pytest.param({}, "blocks", NAMES, marks=LATE),
    ],
)
@on_ranks(2)
def test_equal_changes_stay(rank: int, options: dict[str, Any], how: str, names: list[str]) -> None:
    """What all ranks write in the same way stays, in the first forward and later, as in one process; also where the
    model is compiled, or each block: the unit whose graph would write runs eagerly."""
    for name in names:
        plain, model = _model(WRITES[name]), _model(WRITES[name])
        fully_shard(model, auto_wrap_policy={_Block}, **options)
        if name in NOT_AT_FIRST and how == "eager":  # a graph shows that it is going to write
            model.set_writes_own_parameters(True)
        expected, found = _train(plain, None), _train(_compile(model, how), rank)
        close = {"rtol": 0.05, "atol": 0.02} if "mixed_precision" in options else {}
        for key, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).full_tensor(), param, msg=f"{name}: {key}", **close)
        torch.testing.assert_close(found[-1], expected[-1], check_dtype=False, **close)


@on_ranks(2)
def test_what_a_graph_cannot_keep_is_refused() -> None:
    """By name: as one graph, and where Dynamo leaves an assignment to `.data` to eager code."""
    refused = [("clamps", r"0\.up\.weight of its own unit, so it runs eagerly; leave out fullgraph=True")]
    refused += [(each, r"forward changed parameter 0\.up\.weight of its own unit") for each in ASSIGNED_IN_A_FUNCTION]
    for name, match in refused:
        torch._dynamo.reset()
        model = fully_shard(_model(WRITES[name]), auto_wrap_policy={_Block})
        compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "clamps")
        with pytest.raises(Exception, match=match):
            compiled(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("first", "how", "alone"),
    [
        *((first, "eager", False) for first in (0, 1, 3)),
        *((first, "eager", True) for first in (0, 1)),
        *((1, how, False) for how in ("whole", "blocks")),
    ],
)
@on_ranks(2)
def test_different_changes_are_refused(first: int, how: str, alone: bool) -> None:
    """On all ranks, by name, whenever they begin, also those of one rank alone and of what another rank stores."""

    def write(block: Any) -> None:
        block.calls += 1
        block.up.weight.data.clamp_(-100, 100)
        if block.calls > first and (dist.get_rank() or not alone):
            block.up.weight.data[-1] += 1.0 + dist.get_rank()

    model = fully_shard(_model(write), auto_wrap_policy={_Block}, process_group=dist.new_group())
    run = _compile(model, how)
    for _ in range(first):
        run(torch.ones(2, 8)).sum().backward()
    writes = r"0 .*writes to parameter 0\.up\.weight of its own unit through \.data"
    message = (
        rf"ranks communicate different things.*{writes}" if alone and first
        else rf"{writes}.*; let .*write the same values to parameters" if how == "eager"
        else r"forward changed parameter 0\.up\.weight of its own unit.*this one is not"
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        run(torch.ones(2, 8)).sum().backward()


@on_ranks(2)
def test_different_changes_of_a_unit_that_writes() -> None:
    """All ranks name the one parameter that differs, also those that store nothing of it."""
    model = fully_shard(_model(lambda block: block.up.bias.data[:1].fill_(dist.get_rank())), auto_wrap_policy={_Block})
    model.set_writes_own_parameters(True)
    with pytest.raises(RuntimeError, match=r"forward changed parameter 0\.up\.bias of its own unit.*this one is not"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_late_changes_are_refused() -> None:
    """A unit that begins to write after its first two forwards raises, before twice as many forwards have run."""

    def write(block: Any) -> None:
        block.calls += 1
        if block.calls > 2:
            block.up.weight.data.mul_(0.9)

    model = fully_shard(_model(write), auto_wrap_policy={_Block})
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has begun to write to parameter 0\.up\.weight .* changes were lost since"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_others_pay_nothing() -> None:
    """Where nothing writes, the third forward is not looked at."""
    plain = fully_shard(_model(lambda block: None), auto_wrap_policy={_Block})
    for _ in range(2):
        plain(torch.ones(2, 8)).sum().backward()
    with patch.object(own_writes, "checksums", side_effect=AssertionError):
        plain(torch.ones(2, 8)).sum().backward()
