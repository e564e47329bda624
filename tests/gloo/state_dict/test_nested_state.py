"""State of optimizers in lists, dicts, tuples and dataclasses, in every kind of state dict and in checkpoints."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig

from fsdp_compile import (
    FullyShardedDataParallel,
    StateDictType,
    checkpoint,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)
from fsdp_compile.core.sharding import clean_names
from fsdp_compile.optim import by_owner
from fsdp_compile.state_dict.sharded_value import full_tensor
from fsdp_compile.tensors.nested import leaves
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import Ranks, on_ranks

FULL, SHARDED, LOCAL = (StateDictType[f"{kind}_STATE_DICT"] for kind in ("FULL", "SHARDED", "LOCAL"))


@dataclass(frozen=True)
class Moments:
    """State as a dataclass."""

    first: Tensor
    scaled: dict[str, Tensor]
    steps: int


class History(torch.optim.Optimizer):
    """Updates with the last two gradients and a running mean, each in another container."""

    def __init__(self, params: Any, with_dataclass: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.with_dataclass = with_dataclass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """A step of all parameters with a gradient."""
        for param in (param for group in self.param_groups for param in group["params"]):
            state, grad = self.state[param], param.grad
            if grad is None:
                continue
            if not state:
                state["plain"] = [1, (2, {"a": 3})]
                state["last"] = [torch.zeros_like(param), torch.zeros_like(param)]
                state["by_age"] = {0: torch.zeros_like(param), "pair": (torch.zeros_like(param), torch.zeros(()), 3)}
                if self.with_dataclass:
                    state["moments"] = Moments(torch.zeros_like(param), {"twice": torch.zeros_like(param)}, 0)
            state["last"] = [grad.clone(), state["last"][0]]
            state["plain"] = [state["plain"][0] + 1, (2, {"a": 3})]
            mean = state["by_age"][0].mul_(0.9).add_(grad)
            mean, steps, three = mean, state["by_age"]["pair"][1] + 1, state["by_age"]["pair"][2]
            state["by_age"]["pair"] = (mean * 2, steps, three)
            update = state["last"][0] + state["last"][1] * 0.5 + mean
            if self.with_dataclass:
                before = state["moments"]
                first = before.first * 0.5 + grad
                state["moments"] = replace(before, first=first, scaled={"twice": first * 2}, steps=before.steps + 1)
                update = update + first
            param.sub_(update, alpha=0.1)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with known gradients."""
    for step in steps:
        for index, param in enumerate(model.parameters()):
            full = torch.randn(param.shape, generator=seeded(10 * step + index))
            is_sharded = isinstance(param, ShardedTensor)
            param.grad = ShardedTensor(param.spec.local_of(full).clone(), param.spec) if is_sharded else full
        optimizer.step()
    optimizer.zero_grad()


def _trained(shard: Any, with_dataclass: bool = True) -> tuple[nn.Module, History]:
    model = shard(_model())
    optimizer = History(model.parameters(), with_dataclass)
    _train(model, optimizer, range(2))
    return model, optimizer


def _assert_goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
    """State and parameters, which start as after two steps, are those of an unsharded run after two more."""
    reference, expected = _trained(lambda model: model, optimizer.with_dataclass)
    for steps in (range(0), range(2, 4)):
        _train(model, optimizer, steps)
        _train(reference, expected, steps)
        plain = {name: param for param, name in clean_names(reference).items()}
        for param, name in clean_names(model).items():
            _assert_same(optimizer.state[param], expected.state[plain[name]], f"{what}: {name}")
            torch.testing.assert_close(full_tensor(param.detach()), plain[name].detach())


def _assert_same(found: Any, expected: Any, what: str) -> None:
    """The same containers, with the same full values."""
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    for (path, value), (expected_path, plain) in pairs:
        assert path == expected_path, (what, path, expected_path)
        if isinstance(plain, Tensor):
            torch.testing.assert_close(full_tensor(value), plain, msg=lambda said, path=path: f"{what} {path}: {said}")
        else:
            assert value == plain, (what, path, value, plain)
    types = type(found["by_age"]["pair"]), type(found["last"])
    assert types == (tuple, list), (what, types)
    assert "moments" not in expected or type(found["moments"]) is Moments


@torch.no_grad()
def _fresh(model: nn.Module, like: nn.Module, with_dataclass: bool = True) -> History:
    """A new optimizer over `model`, which gets the weights of `like`."""
    for param, source in zip(model.parameters(), like.parameters(), strict=True):
        param.copy_(source)
    return History(model.parameters(), with_dataclass)


@on_ranks(2)
def test_kinds_of_state_dicts(rank: int) -> None:
    """Full state has full tensors in the optimizer's containers; every kind resumes as the unsharded run goes on."""
    for shard in (fully_shard, FullyShardedDataParallel):
        model, optimizer = _trained(shard)
        plain, expected = _trained(lambda model: model)
        names = {name: param for param, name in clean_names(plain).items()}
        rank0 = FullOptimStateDictConfig(rank0_only=True)
        for kind, config in ((FULL, None), (FULL, rank0), (SHARDED, None), (LOCAL, None)):
            with state_dict_type(model, kind, None, config):
                saved = optim_state_dict(model, optimizer)
                if kind is FULL:
                    assert bool(saved) == (config is None or rank == 0)
                    for name, state in saved.get("state", {}).items():
                        assert all(type(leaf) in (Tensor, int) for _, leaf in leaves(state))
                        _assert_same(state, expected.state[names[name]], name)
                other = shard(_model(1))
                fresh = _fresh(other, model)
                with state_dict_type(other, kind, None, config):
                    optim_state_dict_to_load(other, fresh, saved, load_directly=True)
                    _assert_goes_on(other, fresh, f"{kind} {config}")


@on_ranks(2)
def test_functions_of_torch(rank: int) -> None:
    """`get_optimizer_state_dict` and `set_optimizer_state_dict` in full, sent by the first rank, and sharded."""
    model, optimizer = _trained(fully_shard, with_dataclass=False)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(type(leaf) in (Tensor, int) for _, leaf in leaves(full["state"]))
    sends = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sharded = get_optimizer_state_dict(model, optimizer)
    for options, state in (
        (StateDictOptions(full_state_dict=True), full),
        (sends, full if rank == 0 else {}),
        (StateDictOptions(), sharded),
    ):
        other = fully_shard(_model(1))
        fresh = _fresh(other, model, with_dataclass=False)
        set_optimizer_state_dict(other, fresh, state, options=options)
        _assert_goes_on(other, fresh, f"{options}")
    model, optimizer = _trained(fully_shard)
    with pytest.raises(ValueError, match=r"Unexpected value type.*Moments"):  # torch's, before anything is gathered
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def _save(rank: int, root: Path) -> None:
    model, optimizer = _trained(fully_shard)
    checkpoint.save({"model": model, "optimizer": optimizer}, root, 2)


def _load(rank: int, root: Path) -> None:
    model = fully_shard(_model(1))
    optimizer = History(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(checkpoint.CheckpointError, match=r"structure_of_state: .* pass trust=True"):
        checkpoint.load(state, root)
    with torch.serialization.safe_globals([Moments]):
        checkpoint.load(state, root)
    _assert_goes_on(model, optimizer, "checkpoint")
    checkpoint.load(state, root, trust=True)  # again, into state that there is


def _owned(model: nn.Module) -> Any:
    return by_owner(
        model.parameters(), lambda groups: History([param for group in groups for param in group["params"]])
    )


def _save_by_owner(rank: int, root: Path) -> None:
    model = fully_shard(_model())
    optimizer = _owned(model)
    _train(model, optimizer, range(2))
    checkpoint.save({"model": model, "optimizer": optimizer}, root, 2)


def _load_by_owner(rank: int, root: Path) -> None:
    model = fully_shard(_model(1))
    optimizer = _owned(model)
    for trained in (False, True):
        if trained:
            _train(model, optimizer, range(7, 8))
        checkpoint.load({"model": model, "optimizer": optimizer}, root, trust=True)
        _train(model, optimizer, range(2, 4))
        reference, expected = _trained(lambda model: model)
        _train(reference, expected, range(2, 4))
        for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(param.detach()), plain.detach())
            if optimizer.owners[param] == rank:
                assert optimizer.state[param]["by_age"]["pair"][1:] == expected.state[plain]["by_age"]["pair"][1:]
                assert optimizer.state[param]["moments"].steps == 4
                assert optimizer.state[param]["plain"] == [5, (2, {"a": 3})]


def test_by_owner(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """`by_owner` saves nested state from its owners, scalars in tuples and dataclasses too, and resumes on three."""
    two.run(_save_by_owner, tmp_path)
    three.run(_load_by_owner, tmp_path)


def test_checkpoints(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """Nested state of two ranks resumes on three, before the first step; a dataclass has to be trusted."""
    two.run(_save, tmp_path)
    three.run(_load, tmp_path)
