"""What a script written for torch's `FullyShardedDataParallel` reads, side by side with torch's own class."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MLP, MODELS, Block, Residual
from states import OPTIMIZERS, assert_known, fill, start
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor as ChunkedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fsdp_compile import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
    summon_full_params,
)
from fsdp_compile.parameter_owner import HasShardedParameters
from fsdp_compile.state_dict.sharded_value import full_tensor

from ..ranks import on_ranks
from ..training import backward, build, mine

POLICY = ModuleWrapPolicy({Residual})


def _both() -> list[tuple[Any, nn.Module]]:
    """Both classes, each with a model that it has wrapped: blocks with buffers below a root with parameters."""
    pairs: list[tuple[Any, nn.Module]] = []
    for kind in (TorchFSDP, FullyShardedDataParallel):
        model = build(MLP)
        for block in model.blocks:
            block.register_buffer("scale", torch.ones(2))
        cpu = torch.device("cpu")
        pairs.append((kind, kind(model, auto_wrap_policy=POLICY, device_id=cpu, use_orig_params=True)))
    return pairs


def _names_of(module: nn.Module) -> list[list[str]]:
    walks = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return [[name for name, _ in walk] for walk in walks]


def _names_everywhere(kind: Any, model: Any) -> list[Any]:
    child = model.blocks[0]
    found: list[Any] = [_names_of(model), _names_of(child), list(model.state_dict()), list(child.state_dict())]
    for recurse in (True, False):
        with kind.summon_full_params(model, recurse):
            found += [_names_of(model), _names_of(child), _names_of(model.module)]
    with kind.summon_full_params(child):
        found += [_names_of(model), _names_of(child)]
    state = model.state_dict()
    wrong = {"blocks.0.extra": state.pop("blocks.0.up.weight"), "extra": state.pop("stem.bias"), **state}
    found.append(model.load_state_dict(wrong, strict=False))
    try:
        model.load_state_dict(wrong)
    except RuntimeError as error:
        found.append(str(error))
    wrappers = kind.fsdp_modules(model)
    found.append([[each is other for each in model.modules()] for other in wrappers])
    found.append([[each.check_is_root(), isinstance(each.module, Residual)] for each in wrappers])
    return found


@on_ranks(2)
def test_names() -> None:
    """Parameters, buffers, modules and state dicts have the names that torch's wrapper gives them, nested wrappers
    included, within `summon_full_params` and outside; so do missing and unexpected keys."""
    (torch_kind, theirs), (kind, ours) = _both()
    for expected, found in zip(_names_everywhere(torch_kind, theirs), _names_everywhere(kind, ours), strict=True):
        assert found == expected, f"expected {expected}, found {found}"


# --- training ---------------------------------------------------------------------------------------------------------


def _trained(kind: Any, name: str, options: dict[str, Any]) -> list[float]:
    """Losses and gradient norms of a script with clipping and a schedule; blocks with frozen layers are recomputed."""
    case = MODELS[name]
    model = kind(build(case), device_id=torch.device("cpu"), use_orig_params=True, **options)
    if name == "frozen":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Residual))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    found = []
    for step in range(5):
        found += [backward(model, case, mine(case, step)).item(), model.clip_grad_norm_(0.5).item()]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found


BF16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
BY_CLASS = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


@pytest.mark.parametrize("name", ["gpt", "mlp", "frozen"])
@on_ranks(4)
def test_training(name: str) -> None:
    """A transformer in bfloat16, replicas of a sharded model, and adapters whose blocks are recomputed have the losses
    and clipped norms of torch's wrapper. So gradients are means over replicas too (E-GEN-2), and frozen and trainable
    parameters mix in a unit (E-FRZ-1)."""
    options: dict[str, Any] = {"auto_wrap_policy": BY_CLASS if name == "gpt" else POLICY}
    if name == "gpt":
        options["mixed_precision"] = BF16
    if name == "mlp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options.update(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    expected, found = (_trained(kind, name, options) for kind in (TorchFSDP, FullyShardedDataParallel))
    assert found == pytest.approx(expected, rel=2e-2 if name == "gpt" else 1e-4)


# --- optimizer state --------------------------------------------------------------------------------------------------


def _wrapped(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = FullyShardedDataParallel(build(MLP, seed), auto_wrap_policy=POLICY)
    return model, start(model, OPTIMIZERS["adamw"])


@on_ranks(2)
def test_optimizer_state(rank: int, tmp_path: Path) -> None:
    """torch's recipe for sharded optimizer state, `get_state_dict` and `set_state_dict` under clean names, and ranks
    whose optimizers have parameters in different orders: all values arrive, also without parameter groups. State of a
    parameter that the model does not have is refused by name."""
    cls, names = FullyShardedDataParallel, [name for name, _ in build(MLP).named_parameters()]
    model, optimizer = _wrapped()
    fill(model, optimizer)
    with cls.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": model.state_dict(), "optimizer": cls.optim_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "recipe")

    other, fresh = _wrapped(1)
    with cls.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path / "recipe")
        other.load_state_dict(loaded["model"])
        reader = dcp.FileSystemReader(tmp_path / "recipe")
        state = load_sharded_optimizer_state_dict(loaded["model"], "optimizer", reader)
        fresh.load_state_dict(cls.optim_state_dict_to_load(other, fresh, state["optimizer"]))
    assert_known(other, fresh)

    for outer in (model, nn.ModuleDict({"net": model})):  # the wrapper itself, and below a module of the user's
        prefix = "" if outer is model else "net."
        values, state = get_state_dict(outer, optimizer)
        assert list(values) == [prefix + name for name in names]
        assert list(state["state"]) == state["param_groups"][0]["params"] == list(values)
        other, fresh = _wrapped(2)
        set_state_dict(other if outer is model else nn.ModuleDict({"net": other}), fresh,
                       model_state_dict=values, optim_state_dict=state)  # fmt: skip
        assert_known(other, fresh)

    params = list(model.parameters())
    backwards = OPTIMIZERS["adamw"](params if rank == 0 else params[::-1])
    backwards.load_state_dict(cls.optim_state_dict_to_load(model, backwards, cls.optim_state_dict(model, optimizer)))
    assert_known(model, backwards)
    full = cls.full_optim_state_dict(model, backwards, rank0_only=False)
    assert full["param_groups"][0]["params"] == (names if rank == 0 else names[::-1])
    assert list(full["state"]) == names
    for kind in (SHARDED, StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with cls.state_dict_type(model, kind):
            found = cls.optim_state_dict(model, backwards)["state"]
        assert list(found) == names
        for name, state in found.items():  # one after the other, as torch's own tests gather them
            assert torch.equal(full_tensor(state["exp_avg"]), full["state"][name]["exp_avg"]), name
    fresh = OPTIMIZERS["adamw"](model.parameters())
    fresh.load_state_dict(cls.optim_state_dict_to_load(model, fresh, {"state": full["state"]}))
    assert_known(model, fresh)
    given = cls.optim_state_dict_to_load(model, optimizer, full)["state"]
    torch.testing.assert_close(given, optimizer.state_dict()["state"])  # which takes no two types beside each other
    with cls.state_dict_type(model, SHARDED):  # two biases of one shape: a rank would get the other one's values
        uneven = cls.optim_state_dict(model, optimizer)
    for states in (uneven["state"], full["state"]):  # without a mesh torch's ShardedTensors, and plain tensors
        if rank == 1:
            del states["blocks.0.up.bias"]
        for load in (cls.optim_state_dict_to_load, lambda m, o, s: cls.flatten_sharded_optim_state_dict(s, m, o)):
            with pytest.raises(RuntimeError, match=r"parameter blocks.0.up.bias: .* and no such parameter on rank 1"):
                load(model, fresh, {**uneven, "state": states})
    wrong = {"state": {"extra": full["state"]["stem.bias"]}}
    for groups in ({}, {"param_groups": full["param_groups"]}):
        with pytest.raises(ValueError, match=r"missing \[\] and unexpected \['extra'\]"):
            cls.optim_state_dict_to_load(model, fresh, {**wrong, **groups})


class _OwnOnEachRank(nn.Module):
    """A wrapped model behind a layer that only this rank has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = FullyShardedDataParallel(build(MLP), auto_wrap_policy=POLICY)
        torch.manual_seed(rank)
        self.own_name = f"own{rank}"
        self.add_module(self.own_name, nn.Linear(7, 7))

    def forward(self, x: Tensor) -> Any:
        return self.shared(getattr(self, self.own_name)(x))


def _full_states(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


@on_ranks(2)
def test_state_of_own_parameters(rank: int) -> None:
    """State of parameters that one rank alone has stays with it, full and sharded, and may be absent from what is
    loaded. An optimizer whose state dict has names gets its state back by the names that it has itself."""
    own = {f"own{rank}.weight", f"own{rank}.bias"}
    model = _OwnOnEachRank(rank)
    optimizers: list[Any] = [start(model, OPTIMIZERS["adamw"])]
    groups = [{"params": list(model.parameters())}]
    optimizers.append(_NamedOptimizer(model.named_parameters(), torch.optim.AdamW, groups, model, lr=0.1))
    for optimizer in optimizers:
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            model.zero_grad()
            model(mine(MLP, 0)[0]).square().sum().backward()
            optimizer.step()
            with state_dict_type(model, kind):
                saved = optim_state_dict(model, optimizer)
                assert {name for name in saved["state"] if name.startswith("own")} == own
                expected = {name: p.detach().clone() for name, p in _full_states(model, optimizer).items()}
                optimizer.step()
                named = optimizer is not optimizers[0]
                optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=named))
            found = _full_states(model, optimizer)
            assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)

    model, optimizer = _OwnOnEachRank(rank), optimizers[0]
    fresh = OPTIMIZERS["adamw"](model.parameters())
    without = {"state": {name: state for name, state in saved["state"].items() if name not in own}, "param_groups": [
        {**group, "params": [name for name in group["params"] if name not in own]} for group in saved["param_groups"]
    ]}  # fmt: skip
    loaded = optim_state_dict_to_load(model, fresh, without)  # who has the state of the own layer adds it
    count = len(list(model.parameters()))
    assert loaded["param_groups"][0]["params"] == list(range(count - 2)) == list(loaded["state"])
    with pytest.raises(ValueError, match="doesn't match the size"):
        fresh.load_state_dict(loaded)


@on_ranks(2)
def test_state_without_groups() -> None:
    """A given state dict of an optimizer may lack its groups; so does the result."""
    model, optimizer = _wrapped()
    fill(model, optimizer)
    given = {"state": optimizer.state_dict()["state"]}
    found = optim_state_dict(model, optimizer, given)
    expected = optim_state_dict(model, optimizer)["state"]
    assert list(found) == ["state"] and list(found["state"]) == list(expected)
    assert all(torch.equal(value, expected[name][key]) for name, state in found["state"].items()
               for key, value in state.items())  # fmt: skip


# --- apply ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _fill_linear(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        module.weight.fill_(1.0)


def _in_order(module: nn.Module) -> list[nn.Module]:
    return [*(each for child in module.children() for each in _in_order(child)), module]


@on_ranks(2)
def test_types_in_apply() -> None:
    """What `apply` calls finds `type(module) is nn.Linear`, as with torch's wrapper, and fills the same weights; the
    modules that `fully_shard` was called on stay `FSDPModule`s. A failure leaves the classes as they were."""
    found = []
    for kind, model in _both():
        seen: list[Any] = []
        model.apply(lambda module, seen=seen: seen.append(type(module)))
        assert {Residual, nn.Linear} <= set(seen)
        model.apply(_fill_linear)
        with kind.summon_full_params(model):
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(([each for each in seen if each is not kind], values))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    assert (values["stem.weight"] == 1).all() and (values["blocks.0.up.weight"] == 1).all()

    sharded = fully_shard(build(MLP), auto_wrap_policy=POLICY)
    seen = []
    sharded.apply(lambda module: seen.append((type(module) is nn.Linear, isinstance(module, FSDPModule))))
    assert seen == [(isinstance(each, nn.Linear), isinstance(each, FSDPModule)) for each in _in_order(sharded)]
    with pytest.raises(ZeroDivisionError):
        sharded.apply(lambda module: 1 / 0)
    assert isinstance(sharded, FSDPModule) and isinstance(sharded.stem, HasShardedParameters)


# --- settings and inputs ----------------------------------------------------------------------------------------------

LEFT_OUT = {"params": "the flat parameters, which are no parameters here"}


Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Batch:
    """Tensors in a dataclass."""

    values: Tensor
    rest: Any


class Keeps(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: Any, **others: Any) -> Tensor:
        self.seen = (inputs, others)
        return self.linear(inputs[0])


def _dtypes(value: Any) -> Any:
    """The same containers with dtypes in place of tensors."""
    if isinstance(value, (Tensor, PackedSequence)):
        return (value.data if isinstance(value, PackedSequence) else value).dtype
    if isinstance(value, Batch):
        return "Batch", _dtypes(value.values), _dtypes(value.rest)
    if isinstance(value, dict):
        return type(value), {key: _dtypes(each) for key, each in value.items()}
    return (type(value), *map(_dtypes, value)) if isinstance(value, (list, tuple, set)) else value


@on_ranks(2)
def test_settings_and_inputs() -> None:
    """All public attributes have the values that torch's wrapper gives them, on the root and below it.

    Inputs are cast in the same containers, and what the caller has is not changed.
    """
    (_, theirs), (_, ours) = _both()
    for one, other in (theirs, ours), (theirs.blocks[0], ours.blocks[0]):
        for name in (name for name in vars(one) if not name.startswith("_") and name not in LEFT_OUT):
            assert getattr(one, name) == getattr(other, name), name
    with summon_full_params(ours):
        assert ours.training_state.name == "SUMMON_FULL_PARAMS"

    def inputs() -> Any:
        x, count = torch.randn(1, 2), torch.ones(2, dtype=torch.int64)
        batch = Batch(x, [x, {"count": count, "set": {x}}])
        return [x, (count, Pair(x, "text")), OrderedDict(batch=batch), pack_sequence([torch.ones(2)]), None]

    seen = []
    for kind in (TorchFSDP, FullyShardedDataParallel):
        model = kind(Keeps(), mixed_precision=MixedPrecision(torch.bfloat16), device_id=torch.device("cpu"))
        given = inputs()
        model(given, more=Batch(given[0], 1)).sum().backward()
        seen.append(_dtypes(model.module.seen))
        assert given[0].dtype == torch.float32
    assert "bfloat16" in str(seen[1][1][4])  # torch forgets what it casts in packed sequences
    assert str(seen[0]) == str(seen[1]).replace(str(seen[1][1]), str((*seen[1][1][:4], torch.float32, None)))


@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT,
                                  StateDictType.LOCAL_STATE_DICT])  # fmt: skip
@on_ranks(2)
def test_a_state_dict_is_a_snapshot(kind: StateDictType) -> None:
    """State dicts of a kind that was set, kept while training goes on, bring model and optimizer back."""
    model = FullyShardedDataParallel(MLP.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        optimizer.zero_grad()
        backward(model, MLP, mine(MLP, seed))
        optimizer.step()

    step(0)
    with state_dict_type(model, kind):
        saved, states = model.state_dict(), optim_state_dict(model, optimizer)
    step(1)
    expected = [param.detach().clone() for param in model.parameters()]
    with state_dict_type(model, kind):
        model.load_state_dict(saved)
        optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, states))
    step(1)
    assert all(torch.equal(param, other) for param, other in zip(model.parameters(), expected, strict=True))


# --- values of sharded state dicts ------------------------------------------------------------------------------------

SHARDED = StateDictType.SHARDED_STATE_DICT


def _part(value: Any) -> Tensor:
    """What this rank has of a value of a sharded state dict."""
    if isinstance(value, ChunkedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0, *value.shape[1:], dtype=value.dtype)
    return value.to_local() if isinstance(value, DTensor) else value


def _same_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours = found[name]
        kind = DTensor if isinstance(value, ChunkedTensor) else type(value)
        assert type(ours) is kind, f"{name}: {type(ours)}, expected {kind}"
        if isinstance(value, dict):
            _same_values(ours, value)
            continue
        if not isinstance(value, Tensor):
            assert ours == value
            continue
        assert (ours.dtype, ours.shape) == (value.dtype, value.shape), name
        if isinstance(value, DTensor):
            assert (ours.placements, ours.device_mesh) == (value.placements, value.device_mesh), name
        torch.testing.assert_close(_part(ours), _part(value), rtol=0, atol=0)


def _like_torch(rank: int, shape: tuple[int, ...] | None) -> None:
    cpu = torch.device("cpu")
    options: dict[str, Any] = {"auto_wrap_policy": POLICY, "use_orig_params": True}
    strategy = None if shape is None or len(shape) == 1 else ShardingStrategy.HYBRID_SHARD
    if shape is not None:
        names = ("replicate", "shard")[-len(shape) :]
        options.update(device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), sharding_strategy=strategy)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def build_odd(seed: int) -> nn.Module:  # a dimension of 5, over 2 or 4 ranks, and one of 1: some ranks have nothing
        model: Any = build(MLP, seed)
        model.blocks[0].register_parameter("one", nn.Parameter(torch.randn(1, 3)))
        model.register_buffer("count", torch.ones(2))
        return model

    def wrapped(kind: Any, seed: int, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = kind(build_odd(seed), device_id=cpu, **options, **more)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    for more in ({}, {"mixed_precision": precision}):
        both = [(kind, *wrapped(kind, 0, **more)) for kind in (TorchFSDP, FullyShardedDataParallel)]
        for _, model, optimizer in both:
            backward(model, MLP, mine(MLP, 0))
            for param in model.parameters():  # gradients are equal up to rounding only
                if param.grad is None and param.numel():  # that of one that is not used, which FSDP1 sets to zeros
                    param.grad = torch.zeros_like(param)
                if param.grad is not None:
                    param.grad.fill_(0.5)
            optimizer.step()
        (_, theirs, _), (kind, ours, optimizer) = both
        for offload in (False, True):
            config = ShardedStateDictConfig(offload_to_cpu=offload)
            states, optimizers = [], []
            for cls, model, optim in both:
                with cls.state_dict_type(model, SHARDED, config, ShardedOptimStateDictConfig(offload_to_cpu=offload)):
                    states.append(model.state_dict())
                    optimizers.append(cls.optim_state_dict(model, optim))
            _same_values(states[1], states[0])
            for entry in optimizers:
                entry["state"] = dict(
                    sorted((name, state) for name, state in entry["state"].items() if "one" not in name)
                )
            _same_values(optimizers[1]["state"], optimizers[0]["state"])
        # Each loads into the other kind of model.
        other, fresh = wrapped(kind, 1, **more)
        with kind.state_dict_type(other, SHARDED):
            other.load_state_dict(states[0])
            found = other.state_dict()
        _same_values(found, states[0])
        if shape is not None:  # else it loads torch's ShardedTensors alone
            with TorchFSDP.state_dict_type(theirs, SHARDED):
                theirs.load_state_dict(states[1])
        with kind.state_dict_type(other, SHARDED), kind.state_dict_type(ours, SHARDED):
            saved = kind.optim_state_dict(ours, optimizer)
            fresh.load_state_dict(kind.optim_state_dict_to_load(other, fresh, saved))
            _same_values(kind.optim_state_dict(other, fresh)["state"], saved["state"])
    scalar = nn.ParameterDict({"scale": torch.tensor(3.0), "rest": torch.ones(5)})  # torch's wrapper refuses it
    alone = FullyShardedDataParallel(scalar, device_id=cpu, **{**options, "auto_wrap_policy": None})
    with FullyShardedDataParallel.state_dict_type(alone, SHARDED):
        assert alone.state_dict()["scale"] == torch.tensor(3.0)


@pytest.mark.parametrize(
    ("world", "shape"),
    [("two", None), *(pytest.param(*row, marks=pytest.mark.nightly) for row in (("two", (2,)), ("four", (2, 2))))],
)
def test_values_of_sharded_state_dicts(
    request: pytest.FixtureRequest, world: str, shape: tuple[int, ...] | None
) -> None:
    """Placements, rows and dtypes are those that torch's wrapper gives, with a mesh, of replicas too, and, in its own
    ShardedTensors, without, offloaded or not, for a model and an optimizer; they load, also from torch's."""
    request.getfixturevalue(world).run(_like_torch, shape)
