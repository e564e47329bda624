"""`FullyShardedDataParallel`, the class that scripts written for torch's wrapper import."""

import pytest
import torch
from models import Residual, Stack, mlp
from refusing import local
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import FSDPModule, FullyShardedDataParallel, StateDictType, fully_shard, set_state_dict_type
from fsdp_compile.wrapper import WRAPPED


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def test_parameters_keep_identity_and_carry_the_prefix() -> None:
    """Parameters are the original objects; names have one prefix for each nesting level (E-MOD-4, E-VIEW-6)."""
    model = mlp()
    originals, plain = list(model.parameters()), names(model)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    wrapped = FullyShardedDataParallel(model)
    assert all(one is other for one, other in zip(wrapped.parameters(), originals, strict=True))
    inner = [name.replace("blocks.0.", f"blocks.0.{WRAPPED}.") for name in plain]
    assert names(wrapped) == [f"{WRAPPED}.{name}" for name in inner]


def test_state_dict_keys_are_the_plain_module_s() -> None:
    """Keys of state dicts are clean whatever the nesting, and such a state dict loads (E-MOD-4)."""
    plain = list(mlp().state_dict())
    model = mlp()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    wrapped = FullyShardedDataParallel(model)
    set_state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT)
    state = {key: value.clone() for key, value in wrapped.state_dict().items()}
    assert sorted(state) == sorted(plain)
    with torch.no_grad():
        for param in wrapped.parameters():
            param.add_(1.0)
    wrapped.load_state_dict(state)
    assert all(torch.equal(local(value), local(state[key])) for key, value in wrapped.state_dict().items())


def test_the_wrapped_module_shows_through() -> None:
    """`module` is the wrapped module; its attributes, items, length and iteration are reachable (E-MOD-5, 6)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.note = "seen"
    wrapped = FullyShardedDataParallel(model)
    assert wrapped.module is model and isinstance(wrapped.module, FSDPModule)
    assert wrapped.note == "seen" and wrapped[1] is model[1]
    assert len(wrapped) == 2 and list(wrapped) == list(model)
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapped.absent


def test_wrappers_are_listed() -> None:
    """All wrappers of a tree, or its roots only (E-MOD-7)."""
    model = mlp()
    inner = model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    outer = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Residual}))
    tree = nn.ModuleDict({"one": outer, "other": FullyShardedDataParallel(nn.Linear(2, 2))})
    assert FullyShardedDataParallel.fsdp_modules(tree) == [outer, inner, tree["other"]]
    assert FullyShardedDataParallel.fsdp_modules(tree, root_only=True) == [outer, tree["other"]]


def test_a_policy_shards_what_fully_shard_does() -> None:
    """The wrapper with a policy has the units of `fully_shard` with it; none means one unit (E-INIT-5)."""

    def scopes(model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    policy = ModuleWrapPolicy({Residual})
    assert scopes(FullyShardedDataParallel(mlp(), auto_wrap_policy=policy).module) == scopes(
        fully_shard(mlp(), auto_wrap_policy=policy)
    )
    assert scopes(FullyShardedDataParallel(mlp()).module) == [""]


def test_the_wrapper_compiles_as_one_graph() -> None:
    """`torch.compile(FullyShardedDataParallel(model), fullgraph=True)` runs forward and backward.

    No option has to be set for that, as `use_orig_params` has in torch (E-COMP-5).
    """
    wrapped = FullyShardedDataParallel(Stack([Residual(11, 13)]))
    torch.compile(wrapped, fullgraph=True, backend="aot_eager")(torch.randn(4, 7)).sum().backward()
    assert any(param.grad is not None for param in wrapped.parameters())
