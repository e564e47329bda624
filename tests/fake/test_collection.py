"""Which parameters a unit collects, in which order; where inputs go; defaults of `fully_shard`; on a fake group."""

import inspect

import torch
from models import mlp
from refusing import units
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision

from fsdp_compile import fully_shard
from fsdp_compile.api import shard_module
from fsdp_compile.eager.casting import prepare_inputs


class _Nested(nn.Module):
    """Parameters of its own, below, and shared between both."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.own = nn.Parameter(torch.ones(3))
        self.inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        self.inner[0].weight = self.last.weight


def test_parameters_are_collected_in_the_order_of_registration() -> None:
    """Own parameters first, then those of children, depth first; one that is shared has its first place (E-FLAT-1)."""
    model = fully_shard(_Nested(), auto_wrap_policy=None)
    (unit,) = units(model)
    assert unit.names == ["own", "last.weight", "last.bias", "inner.1.weight", "inner.1.bias"]


def test_a_module_registered_twice_has_one_set_of_parameters() -> None:
    """Both names find the same parameters, which lie in the unit once (E-FLAT-3)."""
    model = nn.Module()
    model.a = model.b = nn.Linear(3, 3)
    fully_shard(model)
    (unit,) = units(model)
    assert unit.names == ["a.weight", "a.bias"] and model.b.weight is model.a.weight
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        "a.weight", "a.bias", "b.weight", "b.bias"]  # fmt: skip


def test_a_unit_trains_if_any_parameter_does() -> None:
    """A unit requires grad if one of its parameters does; frozen ones are told apart (E-FLAT-10)."""
    model = mlp()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    fully_shard(model)
    frozen, mixed, trained = (units(block)[0] for block in model.blocks)
    assert [unit.trains for unit in (frozen, mixed, trained)] == [False, True, True]
    assert [unit.only_trains for unit in (frozen, mixed, trained)] == [False, False, True]
    assert not any(flat.autograd_shard.requires_grad for flat in frozen.flats)


def test_defaults() -> None:
    """What is not given is as in `FullyShardedDataParallel`: no offload, broadcast or forward prefetch (E-INIT-4)."""
    ours = inspect.signature(shard_module).parameters
    stock = inspect.signature(FullyShardedDataParallel.__init__).parameters
    shared = ours.keys() & stock.keys() - {"auto_wrap_policy"}  # ours: "auto"
    assert {"cpu_offload", "backward_prefetch", "forward_prefetch", "sync_module_states", "mixed_precision"} <= shared
    assert {name: ours[name].default for name in shared} == {name: stock[name].default for name in shared}
    assert ours["backward_prefetch"].default is BackwardPrefetch.BACKWARD_PRE


def test_inputs_go_to_the_device_of_the_root() -> None:
    """Tensors anywhere among the root's arguments are moved where it computes; those of inner units stay (E-FWD-2).

    The meta device stands for an accelerator.
    """
    model = fully_shard(mlp(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model._fsdp.device = model.blocks[0]._fsdp.device = torch.device("meta")
    x, ids = torch.ones(2), torch.ones(2, dtype=torch.int64)
    (moved,), named = prepare_inputs(model, ((x, {"ids": [ids]}),), {"text": "text"})
    assert moved[0].device.type == moved[1]["ids"][0].device.type == "meta" and named == {"text": "text"}
    assert moved[0].dtype is torch.bfloat16 and moved[1]["ids"][0].dtype is torch.int64
    (unchanged,), _ = prepare_inputs(model.blocks[0], (x,), {})
    assert unchanged is x
