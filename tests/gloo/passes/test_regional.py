"""Blocks that are compiled by themselves inside a model that runs eagerly."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP, MODELS, MODULES, Case, Residual, Stack, checkpointed, squared_error, vectors
from tiers import LATE
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.testing import assert_close

from fsdp_compile import fully_shard
from fsdp_compile.construct import units as units_of_modules
from fsdp_compile.eager import reduce
from fsdp_compile.eager.block_reader import BlockReader
from fsdp_compile.eager.streams import UnshardedBuffer

from ..ranks import on_ranks
from ..training import assert_bitwise, backward, build, follow, mine, reference_and_model, shard, units, whole
from ..wire import assert_freed, gathered_bytes, per_unit, wire


def _compile_blocks(model: nn.Module, how: str) -> nn.Module:
    for block in getattr(model, "blocks", model):
        block.compile(backend=how, fullgraph=True)
    return model


class _Peer(nn.Module):
    """Adds the product with the weight of another block, which is a unit of its own."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.weight, self.others = nn.Parameter(torch.eye(11) / 3 + 0.1), others

    def forward(self, x: Tensor) -> Tensor:
        result = x @ self.weight
        for weight in (other.weight for other in self.others):  # a view of which ends graphs under no_grad
            result = result + (x @ weight.t() if torch.is_grad_enabled() else nn.functional.linear(x, weight))
        return torch.tanh(result)


def _peers() -> nn.Module:
    first = _Peer()
    return Stack([first, _Peer(first), _Peer(first)])


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    **{name: MODELS[name] for name in ("tied", "frozen")},
    "tied_blocks": MODULES["tied_blocks"],
    "peers": Case(_peers, vectors, squared_error),
    "inside": Case(partial(checkpointed, "inside"), vectors, squared_error),
    "around": Case(partial(checkpointed, "around"), vectors, squared_error),
}


@pytest.mark.parametrize("names", [("frozen", "tied_blocks"), pytest.param(tuple(CASES), marks=LATE)], ids=len)
@on_ranks(2)
def test_compiled_blocks_train_as_one_process_does(names: tuple[str, ...]) -> None:
    """Tied, frozen and recomputed parameters too, also of other blocks; nothing is compiled after the first step.

    test_regional of test_compile_step.py compares with eager steps, bit for bit.
    """
    for name in names:
        torch._dynamo.reset()
        reference, model = reference_and_model(CASES[name])
        _compile_blocks(model, "aot_eager")
        for steps, recompiles in ((1, False), (2, True)):
            with torch._dynamo.config.patch(error_on_recompile=recompiles):
                follow(model, reference, CASES[name], steps=steps)
        with torch.no_grad():
            assert_close(*(CASES[name].loss(each, whole(CASES[name], 1)) for each in (model, reference)))


@contextmanager
def _gathered_late() -> Iterator[None]:
    """All-gathers of the eager runtime begin where they are waited for: until then the memory is not a number."""
    start, finish = UnshardedBuffer.start, UnshardedBuffer.finish

    def fill(self: UnshardedBuffer) -> None:
        if not self.is_shard:
            if self.is_free:
                self.storage.resize_(self.nbytes)
            self.full.fill_(torch.nan)
            self.filling = True

    def gather(self: UnshardedBuffer) -> None:
        start(self)
        finish(self)

    with patch.multiple(UnshardedBuffer, start=fill, finish=gather):
        yield


@contextmanager
def _noted(lines: list[str]) -> Iterator[None]:
    def noted(verb: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            unit, flat = (args[0].unit, args[0].flat) if len(args) == 1 else args[:2]
            lines.append(f"{verb} {unit.path.split()[0]} {flat.layout.names[0].split('.')[0]}")
            return function(*args, **kwargs)

        return call

    start, finish = noted("gather", UnshardedBuffer.start), noted("wait for", UnshardedBuffer.finish)
    started = patch.object(reduce, "_start_reduce", noted("reduce", reduce._start_reduce))
    with patch.multiple(UnshardedBuffer, start=start, finish=finish), started:
        yield


@on_ranks(2)
def test_order_of_collectives() -> None:
    """From its second call on, a block waits for each flat parameter where it is read; the next one is gathered before.

    Backward gathers the last parameters first, and reduces each of them as soon as its gradient is there. What a graph
    that fails has not waited for, the next forward does: other ranks may not take part for a while. Who asks for the
    gradient of an input alone starts no reduce, though the graph computes all gradients.
    """
    lines: list[str] = []
    torch._dynamo.reset()
    model: Any = nn.Sequential(Residual(3, 5), Residual(3, 5))
    with patch.object(units_of_modules, "_worth_a_collective", return_value=10):
        fully_shard(model, auto_wrap_policy={Residual}, forward_prefetch=True, reshard_after_forward=True)
    _compile_blocks(model, "inductor")
    x = torch.ones(4, 3, requires_grad=True)
    model(x).sum().backward()
    with _noted(lines):
        loss = model(x).sum()
        lines.append("backward")
        loss.backward()
        passed = "\n".join(lines)
        with patch.object(BlockReader, "await_in", side_effect=KeyError), pytest.raises(KeyError):
            model(x)
        del lines[:]
        loss = model(x).sum()
        after_failure = "\n".join(lines[:6])
        grads = [param.grad.full_tensor() for param in model.parameters()]
        for param in model.parameters():
            param.grad = None
        with model.no_sync():
            torch.autograd.grad(loss, x)
            assert all(param.grad is None for param in model.parameters())
        torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward()
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert_close(param.grad.full_tensor() * 2, grad)
        reduced = "\n".join(line for line in lines if "reduce" in line)
    assert_expected_inline(
        passed,
        """\
gather 0 up
gather 0 down
gather 1 up
gather 1 down
wait for 0 up
wait for 0 down
wait for 1 up
wait for 1 down
backward
gather 1 down
gather 1 up
gather 0 down
gather 0 up
wait for 1 down
reduce 1 down
reduce 1 up
wait for 1 up
wait for 0 down
reduce 0 down
reduce 0 up
wait for 0 up""",
    )
    assert_expected_inline(
        after_failure,
        """\
wait for 0 down
wait for 0 up
gather 0 up
gather 0 down
gather 1 up
gather 1 down""",
    )
    assert_expected_inline(
        reduced,
        """\
reduce 1 down
reduce 1 up
reduce 0 down
reduce 0 up""",
    )


@on_ranks(2)
def test_blocks_that_share_a_unit() -> None:
    """Two graphs read its parameters, and the sum of what both have packed is reduced."""
    torch._dynamo.reset()
    grads = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Residual(3, 5), Residual(3, 5), Residual(3, 5))
        with patch.object(units_of_modules, "_worth_a_collective", return_value=10):
            fully_shard([model[0], model[2]])
            fully_shard(model)
        if compiles:
            for block in (model[0], model[2]):
                block.compile(fullgraph=True)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            with model.no_sync():
                model(torch.ones(4, 3)).sum().backward()
        model(torch.ones(4, 3)).sum().backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert_close(*grads)


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [(("around", {}),), (("frozen", {"mixed_precision": BF16}), ("tied", {}))], ids=len)
@on_ranks(2)
def test_graphs_wait_for_what_they_read(cases: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    """A compiled block computes with values, wherever its parameters were gathered from the second call on.

    Members: recomputed, frozen, low precision, tied; no gradients, no_sync; code that Dynamo is told to leave alone,
    between steps whose graphs wait by themselves.
    """
    with _gathered_late(), patch.object(units_of_modules, "_worth_a_collective", return_value=1):
        for name, options in cases:
            torch._dynamo.reset()
            case = CASES[name]
            ours, theirs = (fully_shard(build(case), **options) for _ in range(2))
            assert len(units(ours)[-1].flats) > 1
            _compile_blocks(ours, "inductor")
            for step in range(6):
                stance = "force_eager" if step == 3 else "default"  # graphs before and behind it wait
                for model in (ours, theirs):
                    with torch.compiler.set_stance(stance), model.no_sync() if step == 2 else nullcontext():
                        backward(model, case, mine(case, step))
                losses = []
                for model in (ours, theirs):
                    with torch.no_grad() if name == "frozen" else nullcontext():
                        losses.append(case.loss(model, mine(case, step)))
                assert_close(*losses, rtol=0.02, atol=0.02)
                for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert (param.grad is None) == (other.grad is None)
                    if param.grad is not None and step != 2:
                        assert_close(param.grad.full_tensor(), other.grad.full_tensor(), rtol=0.05, atol=0.05)


class _OfManySizes(nn.Module):
    """Layers of different sizes that one piece of code runs, each compiled by itself."""

    def __init__(self, weights_train: bool) -> None:
        super().__init__()
        sizes = [(4, 8), (8, 16), (16, 4), (4, 64)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*size)) for size in sizes)
        for layer in self.layers:
            layer[0].weight.requires_grad_(weights_train)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = self._run(layer, x)
        return x

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        return x.relu()


@LATE
@pytest.mark.parametrize("weights_train", [True, False])
@on_ranks(2)
def test_units_of_many_sizes_run_by_one_piece_of_code(rank: int, weights_train: bool) -> None:
    """Dynamo makes the sizes of inputs symbolic when it meets others; those of flat shards stay constants, also where
    weights are frozen and the bias alone is reduced, which is a view of a sum."""

    def gradients(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = fully_shard(_OfManySizes(weights_train), auto_wrap_policy={nn.Sequential}, mixed_precision=BF16)
        run = torch.compile(model, backend="inductor") if how == "inductor" else model
        torch.manual_seed(rank)
        run(torch.randn(2, 4)).sum().backward()
        return [param.grad.full_tensor() for param in model.parameters() if param.requires_grad]

    torch._dynamo.reset()
    assert_close(gradients("inductor"), gradients("eager"), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("strategy", "how", "gathers"),
    [
        ("FULL_SHARD", "aot_eager", [1, 2]),
        pytest.param("FULL_SHARD", "inductor", [1, 2], marks=LATE),
        pytest.param("SHARD_GRAD_OP", "inductor", [1, 1], marks=LATE),
    ],
)
@on_ranks(2)
def test_gathered_memory_and_collectives(strategy: str, how: str, gathers: list[int]) -> None:
    """The eager runtime frees between forward and backward what a compiled block has saved (I4), and reduces once."""
    model = _compile_blocks(shard(MLP, strategy), how)
    block = model.blocks[0]._fsdp.units[0].flats[0].layout.numel
    backward(model, MLP, mine(MLP, 0))
    with wire() as calls:
        loss = MLP.loss(model, mine(MLP, 1))
        assert gathered_bytes(calls)[block] == (3 * 4 * block if strategy == "SHARD_GRAD_OP" else 0)
        loss.backward()
        assert_freed(calls, "after backward while the loss is alive")
    assert all(unit.unsharded_params is unit.unsharded_flats is None for unit in units(model))
    assert (per_unit(model, calls, "gather"), per_unit(model, calls, "reduce")) == (gathers, [1, 1])


@on_ranks(2)
def test_what_was_gathered_by_hand_is_used() -> None:
    """As in eager: a compiled block reads what `unshard()` gathered for it, and gathers no second time (E-PRE-7)."""
    model = _compile_blocks(shard(MLP), "aot_eager")
    backward(model, MLP, mine(MLP, 0))
    with wire() as calls:
        for block in model.blocks:
            block.unshard()
        with torch.no_grad():
            MLP.loss(model, mine(MLP, 1))
    assert per_unit(model, calls, "gather") == [1, 1]


@pytest.mark.nightly
@on_ranks(2)
def test_order_of_calls_and_other_ways_to_run() -> None:
    """Blocks may be compiled before or after sharding, run eagerly all the same, or be traced in one graph."""

    def losses(model: nn.Module) -> list[float]:
        return [backward(model, MLP, mine(MLP, seed)).item() for seed in range(2)]

    first, last = build(MLP), build(MLP)
    _compile_blocks(first, "aot_eager")
    models: list[Any] = [fully_shard(first), _compile_blocks(fully_shard(last), "aot_eager"), fully_shard(build(MLP))]
    found = [losses(model) for model in models]
    assert found[0] == found[1] == found[2]
    with torch.compiler.set_stance("force_eager"):
        assert losses(models[0]) == found[0]
    for model in models[1:]:
        for param in model.parameters():
            param.grad = None
    run = torch.compile(models[1], backend="aot_eager", fullgraph=True)  # the blocks' own compilation is left aside
    assert losses(run) == losses(models[2])
    assert_bitwise(models[1], models[2], "whole")
