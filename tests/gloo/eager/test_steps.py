"""One training step, looked at closely: what module code sees, what goes out, when memory goes, what lies between."""

from typing import Any

import torch
from models import MLP, Residual, vectors
from tiers import all_strategies, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import on_ranks
from ..training import backward, executor, follow, mine, reference_and_model, shard, units
from ..wire import wire

# --- what module code sees --------------------------------------------------------------------------------------------


class _Looks(Residual):
    """Notes what its weight is in forward and amid backward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.notes: list[tuple[type, tuple, bool]] = []

    def look(self, *_: Any) -> None:
        weight = self.up.weight
        self.notes.append((type(weight), tuple(weight.shape), weight.grad_fn is not None))

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        hidden = torch.tanh(self.up(x))
        hidden.register_hook(self.look)
        return x + self.down(hidden)


@all_strategies
@on_ranks(2)
def test_weights_in_forward_and_backward(rank: int, strategy: str) -> None:
    """Module code finds plain tensors in full shape, with autograd history, in forward and in backward (E-VIEW-2)."""
    torch.manual_seed(0)  # replicas begin with equal values
    model = fully_shard(nn.Sequential(_Looks(7, 9), _Looks(7, 9)), sharding_strategy=ShardingStrategy[strategy])
    model(vectors(rank, 4)[0]).sum().backward()
    for block in model:
        assert block.notes == [(Tensor, (9, 7), True)] * 2, block.notes  # in forward and in backward
        assert isinstance(block.up.weight, nn.Parameter) and block.up.weight.shape == (9, 7)
        assert isinstance(block.up.weight, ShardedTensor)


@on_ranks(2)
def test_sizes_on_the_wire() -> None:
    """A gather's result is read in place, split into views; a reduce takes the packed gradients with nothing appended.

    E-FWD-7, 8, E-RED-2, E-VIEW-1, E-BWD-9.
    """
    model = shard(MLP)
    seen = []

    def views_of(module: nn.Module, args: tuple) -> None:
        (unit,) = units(module)
        storages = {view.untyped_storage().data_ptr() for view in unit.unsharded_params}
        sizes = {view.untyped_storage().nbytes() for view in unit.unsharded_params}
        offsets = [view.storage_offset() for view in unit.unsharded_params]
        seen.append((len(storages), sizes, offsets == sorted(offsets) and offsets[0] == 0))

    model.blocks[0].up.register_forward_pre_hook(lambda module, args: views_of(model.blocks[0], args))
    with wire() as sent:
        backward(model, MLP, mine(MLP, 1))
    flats = [flat for unit in units(model) for flat in unit.flats]
    sizes = {(flat.layout.numel, flat.layout.shard_numel) for flat in flats}
    assert {(each.numel, each.part) for each in sent if each.dtype != torch.uint8} == sizes  # others: what is used
    assert all(whole_ == 2 * part for whole_, part in sizes), "what is sent is the flat parameter, nothing appended"
    reduces = [each for each in sent if each.kind == "reduce"]
    assert len(reduces) == len(flats), "one reduce for each unit"
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads and not any(grad.requires_grad or grad.grad_fn for grad in grads), "a reduce was recorded"
    block = model.blocks[0]._fsdp.units[0].flats[0]
    assert seen == [(1, {4 * block.layout.numel}, True)], "views lie one after another in the gathered buffer"


@compiled_late
@all_strategies
@on_ranks(2)
def test_padding_is_never_seen(strategy: str, how: str) -> None:
    """Whatever stands in padding, no output, gradient or parameter depends on it (E-FLAT-17)."""
    reference, model = reference_and_model(MLP, strategy)
    for unit in units(model):
        for flat in unit.flats:
            (original,) = [flat.shard.clone()]
            flat.shard.fill_(float("nan"))
            for part, values in zip(flat.split(flat.shard), flat.split(original), strict=True):
                part.copy_(values)
    assert any(flat.shard.isnan().any() for unit in units(model) for flat in unit.flats), "no padding in the test"
    follow(executor(model, how), reference, MLP)
