"""Which kind of state dict is set: `state_dict_type` and its two functions."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import mlp
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import (
    FullyShardedDataParallel,
    fully_shard,
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
    summon_full_params,
)
from fsdp_compile.comm import hops

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
DEFAULTS = {
    FULL: StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig()),
    SHARDED: StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    LOCAL: StateDictSettings(LOCAL, LocalStateDictConfig(), LocalOptimStateDictConfig()),
}


def test_defaults() -> None:
    """Until set, the wrapper gives full state dicts, as torch's wrapper, `fully_shard` sharded ones, as torch's
    function; a module without units has none (E-SD-1, E-SD-5, E-SD-10)."""
    assert get_state_dict_type(FullyShardedDataParallel(mlp())) == DEFAULTS[FULL]
    assert get_state_dict_type(fully_shard(mlp())) == DEFAULTS[SHARDED]
    assert get_state_dict_type(nn.Linear(2, 2)) is None


def test_prefix_by_position() -> None:
    """As torch still takes it: buffers below the prefix have the dtype that the model was given."""
    linear = nn.Linear(3, 3)
    linear.register_buffer("count", torch.ones(2))
    model = fully_shard(linear, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(torch.randn(4, 3))
    with pytest.warns(FutureWarning, match="Positional args"):
        state = model.state_dict(OrderedDict(), "a.")
    assert state["a.count"].dtype == torch.float32 and model.count.dtype == torch.bfloat16


def test_setting_affects_all_units_below() -> None:
    """It returns what was set before, fills in default configs, on modules that are not sharded too, without a warning.

    E-SD-2, E-ERR-38.
    """
    model = nn.Sequential(fully_shard(mlp()), nn.Linear(2, 2))
    before = DEFAULTS[SHARDED]
    for kind in (FULL, LOCAL, SHARDED):
        assert set_state_dict_type(model, kind) == before
        assert get_state_dict_type(model) == get_state_dict_type(model[0].blocks[1]) == DEFAULTS[kind]
        before = DEFAULTS[kind]
    offload = FullStateDictConfig(offload_to_cpu=True)
    set_state_dict_type(model, FULL, offload)
    assert get_state_dict_type(model) == StateDictSettings(FULL, offload, FullOptimStateDictConfig())
    assert set_state_dict_type(nn.Linear(2, 2), FULL) == StateDictSettings(None, None, None)


def test_config_of_another_kind() -> None:
    """A config of any class but the one that belongs to the kind is refused, and nothing changes (E-SD-3, E-ERR-39)."""
    model = fully_shard(mlp())
    for config in (ShardedStateDictConfig(), StateDictConfig()):
        with pytest.raises(RuntimeError, match="state_dict_config: expected a FullStateDictConfig, found a"):
            set_state_dict_type(model, FULL, config)
    with pytest.raises(RuntimeError, match="expected a FullOptimStateDictConfig, found a Local"):
        set_state_dict_type(model, FULL, None, LocalOptimStateDictConfig())
    assert get_state_dict_type(model) == DEFAULTS[SHARDED]


def test_units_that_disagree() -> None:
    """Setting needs equal kinds before, getting equal settings (E-SD-4, E-SD-5, E-ERR-40)."""
    model = fully_shard(mlp())
    set_state_dict_type(model.blocks[0], FULL)
    for call in (lambda: set_state_dict_type(model, LOCAL), lambda: get_state_dict_type(model)):
        with pytest.raises(AssertionError, match=r"expected .*SHARDED.*as of the first unit, found .*FULL"):
            call()
    model = fully_shard(mlp())
    set_state_dict_type(model.blocks[0], SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
    with pytest.raises(AssertionError, match="state_dict_type: expected"):
        get_state_dict_type(model)
    assert set_state_dict_type(model, FULL).state_dict_type is SHARDED
    assert get_state_dict_type(model) == DEFAULTS[FULL]


def test_context() -> None:
    """As a context it restores what was set before, for each unit, after an exception too (E-SD-6)."""
    model = fully_shard(mlp())
    set_state_dict_type(model, FULL)
    with pytest.raises(KeyError), state_dict_type(model, LOCAL):
        assert get_state_dict_type(model) == DEFAULTS[LOCAL]
        raise KeyError
    assert get_state_dict_type(model) == DEFAULTS[FULL]


def test_full_values_are_gathered_unit_by_unit() -> None:
    """While a full state dict is made, one gathered unit exists at a time beside what is returned (E-SD-7)."""
    model = fully_shard(mlp(blocks=4))
    gathered: list[StorageWeakRef] = []
    alive: list[int] = []
    gather = hops.gather

    def watch(*args: object) -> torch.Tensor:
        alive.append(sum(not each.expired() for each in gathered))
        full = gather(*args)
        gathered.append(StorageWeakRef(full.untyped_storage()))
        return full

    with mock.patch.object(hops, "gather", watch), state_dict_type(model, FULL):
        found = model.state_dict()
    assert alive == [0] * 5
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values())


def test_deepcopy_keeps_what_is_set() -> None:
    """A copied model gives state dicts of the same kind, of its own shards."""
    model = fully_shard(mlp())
    set_state_dict_type(model, LOCAL)
    copied = copy.deepcopy(model)
    assert get_state_dict_type(copied) == DEFAULTS[LOCAL]
    set_state_dict_type(copied, FULL)
    assert get_state_dict_type(model) == DEFAULTS[LOCAL]
    with summon_full_params(model):
        assert model.state_dict()["stem.weight"].shape == (11, 7)


def test_where_values_are_gathered() -> None:
    """Where a value is, if its group communicates there, else on a device where it does, as with NCCL alone."""
    model = fully_shard(mlp())
    assert model.state_dict()["stem.weight"].device_mesh.device_type == "cpu"
    assert model.stem.weight.device_mesh.device_type == "cpu"
    elsewhere = fully_shard(mlp())
    with mock.patch.object(dist, "get_backend_config", lambda group: "meta:fake"):
        assert elsewhere.state_dict()["stem.weight"].device_mesh.device_type == "meta"
        assert elsewhere.state_dict()["stem.weight"].full_tensor().device.type == "meta"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", [True, False])
def test_compiled_blocks_have_the_same_names(when: str, method: bool) -> None:
    """A block that was compiled, before or after sharding, by its method or by torch.compile, changes no name.

    As unsharded, the keys of `state_dict()` itself have what `torch.compile` adds, and those of `compile()` do not.
    """

    def blocks(compiled: bool) -> nn.Module:
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3))
        return compile_block(model) if compiled else model

    def compile_block(model: Any) -> nn.Module:
        if method:
            model[0].compile()
        else:
            model[0] = torch.compile(model[0])
        return model

    model = fully_shard(blocks(when == "before"))
    if when == "after":
        compile_block(model)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {name for name, _ in blocks(compiled=False).named_parameters()}
    assert set(get_model_state_dict(model)) == set(get_optimizer_state_dict(model, optimizer)["state"]) == names
    assert set(model.state_dict()) == set(blocks(compiled=True).state_dict())


@pytest.mark.parametrize("save", [save_file, lambda state, path: save_model(fully_shard(mlp()), path)])
def test_writers_of_full_values_are_told_which(save: Callable[..., None], tmp_path: Path) -> None:
    """What asks for storages to write them, as safetensors and peft do, is told of full values."""
    with pytest.raises(TypeError, match="which this rank stores a part; on all ranks: full = get_model_state_dict"):
        save(fully_shard(mlp()).state_dict(), tmp_path / "model.safetensors")
