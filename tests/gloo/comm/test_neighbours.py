"""`reshard_after_forward=2` on four ranks: a half stays between forward and backward, which asks one other rank."""

from collections import Counter

import pytest
import torch
from models import MLP, MODELS, MODULES
from torch.distributed import ReduceOp, reduce_scatter_tensor
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile import fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import (
    OPTIMIZERS,
    assert_bitwise,
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    mine,
    shard,
    units,
)
from ..wire import Sent, wire

HALVES = {"reshard_after_forward": 2}


def _axes(sent: list[Sent]) -> Counter[tuple[str, int, int]]:
    """Kind, size of the full buffer of what was sent, by how much more it is than a rank's part; how often.
    Without the bytes by which ranks tell each other what they use.
    """
    values = [each for each in sent if each.dtype != torch.uint8]
    return Counter((each.kind, each.numel, each.numel // each.part) for each in values)


@on_ranks(4)
def test_what_is_sent_and_what_is_kept() -> None:
    """Forward: a rank's shard to its peer, a half to its neighbour. Backward: the half again; reduces in reverse. In
    between blocks keep a half, afterwards nothing."""
    model = shard(MLP, **HALVES)
    sizes = Counter(flat.layout.numel for unit in units(model) for flat in unit.flats)
    root = model._fsdp.units[0].flats[0].layout.numel
    for step in range(2):
        with wire() as sent:
            loss = MLP.loss(model, mine(MLP, step))
        there = Counter({("gather", n // 2, 2): count for n, count in sizes.items()})
        again = Counter({("gather", n, 2): count for n, count in sizes.items()})
        assert _axes(sent) == there + again, _axes(sent)
        for unit in [module._fsdp.units[0] for module in model.blocks]:
            (gathered,) = unit.awaiting_backward
            (buffer,) = gathered.buffers
            assert buffer.is_free and buffer.slice.nbytes == 4 * buffer.flat.layout.numel // 2
        with wire() as sent:
            loss.backward()
        del again["gather", root, 2]  # the root is not freed in eager
        reduced = Counter({("reduce", n, 2): count for n, count in sizes.items()})
        reduced += Counter({("reduce", n // 2, 2): count for n, count in sizes.items()})
        assert _axes(sent) == again + reduced, _axes(sent)
        assert buffer.is_free and buffer.slice is None


def _hook(_: None, full: torch.Tensor, part: torch.Tensor) -> None:
    reduce_scatter_tensor(part, full, ReduceOp.AVG)


@on_ranks(4)
def test_shards_in_another_order() -> None:
    """What ranks store, show in full, take over from edits and get from a communication hook belongs together."""
    reference, model = build(MLP), shard(MLP, **HALVES)
    follow(model, reference, MLP)
    with summon_full_params(model, with_grads=True):
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-4, atol=1e-6, msg=name)
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)
            with torch.no_grad():
                param.mul_(0.5)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(0.5)
    assert_same_parameters(model, reference)
    state = model.state_dict()
    with summon_full_params(model):
        for name, param in model.named_parameters():
            torch.testing.assert_close(state[name].full_tensor() if name in state else None, param, rtol=0, atol=0)
    model.register_comm_hook(None, _hook)
    follow(model, reference, MLP)


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)


@pytest.mark.nightly
@on_ranks(4)
def test_compiled_as_eager() -> None:
    """Bit for bit, with frozen and tied parameters, low precision and float16 sums, under no_sync and after it."""
    for name, precision in (("tied_ends", None), ("frozen", LOW)):
        case = (MODELS | MODULES)[name]
        models = [fully_shard(build(case), mixed_precision=precision, **HALVES) for _ in range(2)]
        runs = executor(models[0], "eager"), executor(models[1], "aot_eager")
        optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in models]
        for step in range(4):
            for model, run in zip(models, runs, strict=True):
                with torch._dynamo.config.patch(error_on_recompile=step > 2):  # plain, under no_sync, after it
                    model.set_requires_gradient_sync(step != 1)
                    backward(run, case, mine(case, step))
            assert_bitwise(*models, f"{name}, step {step}")
            for optimizer in optimizers if step != 1 else ():
                optimizer.step()
                optimizer.zero_grad()
