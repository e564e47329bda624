"""Gradients of flat shards: parameters show them where somebody looks, and a fused step frees each with its update."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.core.unit import unit_of
from fsdp_compile.optim.joint import JointStep
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor
from gloo.ranks import on_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    return fully_shard(model)


def _flat_gradients(of: nn.Module) -> list[FlatGradient]:
    params: list[Any] = list(of.parameters())
    return FlatGradient.behind(params, [param.spec for param in params])


@on_ranks(2)
def test_gradients_pass_autograd_by() -> None:
    """Gradients are segments of the flat one, split when one is looked at, also when an optimizer has made its state;
    hooks, other gradients of the same pass, and new data of a gradient count."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        for layer in (model[0], model[2], model[4]):
            [flat] = _flat_gradients(layer)
            assert "local" not in vars(layer.weight.grad)
            segments = [each for param in layer.parameters() if (each := param.grad.to_local()).numel()]
            assert {each.untyped_storage().data_ptr() for each in segments} == {flat.grad.untyped_storage().data_ptr()}
        optimizer.step()
        optimizer.zero_grad()
        assert all(param._backward_hooks is None for param in model.parameters())
    model[0].weight.clone()  # a gradient that comes of this is to be averaged
    assert model[0].weight._backward_hooks
    model(torch.ones(4, 8)).sum().backward()
    assert _flat_gradients(model[0])
    optimizer.zero_grad()
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    (model(torch.ones(4, 8)).sum() + model[2].weight.sum()).backward()
    assert [type(each) for each in seen] == [ShardedTensor]
    alone = [p.grad.full_tensor().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    for (name, param), both in zip(model.named_parameters(), alone, strict=True):
        torch.testing.assert_close(both - param.grad.full_tensor(), torch.full_like(both, float(name == "2.weight")))
    assert _flat_gradients(model[2])
    model[2].bias.grad.data = torch.zeros(8)
    assert not _flat_gradients(model[2])


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@on_ranks(2)
def test_a_fused_step_frees_each_gradient_with_its_update(rank: int, clip_norm: float | None) -> None:
    """Parameters get no gradients, clipped or not, and nothing holds the flat one when its update has run; hooks and
    parameters of no optimizer are served as by the loop."""
    models = [_model() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model[:4].parameters(), lr=0.01, weight_decay=0.1) for model in models]

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    step = compile_step(torch.compile(models[0], backend="eager"), optimizers[0], loss_fn, clip_norm)
    storages: list[StorageWeakRef] = []
    run, shown = JointStep.run, []

    def running(self: JointStep, factor: Tensor | None = None) -> None:
        ready = self.ready[optimizers[0]][:]
        shown.extend(param.grad for segment, _ in ready for param in segment.params if param.grad is not None)
        freed = [StorageWeakRef(gradient.untyped_storage()) for _, gradient in ready]
        del ready
        run(self, factor)
        assert all(storage.expired() for storage in freed)
        storages.extend(freed)

    inputs = torch.arange(32.0).view(4, 8) / 32 + rank
    with mock.patch.object(JointStep, "run", running):
        for number in range(4):
            step(inputs)
            loss_fn(models[1](inputs)).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(models[1].parameters(), clip_norm)
            optimizers[1].step()
            optimizers[1].zero_grad()
            last = [model[4].weight for model in models]  # no parameter of the optimizer: gradients stay and add up
            torch.testing.assert_close(*[each.grad.full_tensor() for each in last], rtol=1e-5, atol=1e-6)
            if number == 2:
                models[0][2].weight.register_hook(lambda gradient: gradient * 2)
                models[1][2].weight.register_hook(lambda gradient: gradient * 2)
    assert len(storages) >= 4 and len(shown) == 0
    managed = unit_of(models[0][0].weight)
    assert managed is not None and managed[0].flats[0].reduction.flat_gradient is None
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert max((a.full_tensor() - b.full_tensor()).abs().max().item() for a, b in pairs) < 1e-5
