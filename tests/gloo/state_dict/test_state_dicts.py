"""State dicts on real ranks: what they hold, what they communicate, and what is said of wrong ones."""

import dataclasses
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import MODELS, Residual, Stack
from states import OPTIMIZERS, assert_known, fill, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    state_dict_type,
)
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import Ranks, on_ranks
from ..training import backward, build, executor, full_parameters, local, mine, shard

MLP = MODELS["mlp"]
FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


class Collectives(TorchDispatchMode):
    """Names of the collectives that this thread starts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def collectives_of(call: Callable[[], Any]) -> list[str]:
    """The collectives that `call` starts on this rank."""
    with Collectives() as found:
        call()
    return found.names


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal keys, in this order, shapes, dtypes and values."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is Tensor and found[key].dtype == value.dtype, key
        assert torch.equal(found[key].cpu(), value.cpu()), key


# --- models -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Blocks, tied weights, buffers of two kinds, an ignored module and an ignored parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(7, 9) for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.norm = nn.BatchNorm1d(7)
        self.left_alone = nn.Linear(7, 7)
        self.register_buffer("scale", torch.full((3,), 1.1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.bias = nn.Parameter(torch.randn(7))
        self.free = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.left_alone(self.norm(x)) + self.bias


def _mixed(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Mixed()
    return fully_shard(model, ignored_states=[model.free, *model.left_alone.parameters()], **options)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_three_kinds(strategy: str, offload: bool) -> None:
    """Full, sharded and local: names, shapes, dtypes and values are the unsharded model's, each loads back.

    Tied names are all there, ignored parameters and buffers unchanged, other buffers left out as ever; full values are
    copies. Local values are loaded under LOCAL alone. E-SD-1, E-SD-7, E-SD-8, E-SD-9, E-SD-12.
    """
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=offload)}
    model = _mixed(sharding_strategy=ShardingStrategy[strategy], **options)
    torch.manual_seed(0)
    reference = Mixed()
    plain = reference.state_dict()
    with state_dict_type(model, FULL):
        full = model.state_dict()
        same(full, plain)
        same(model.blocks[0].state_dict(), reference.blocks[0].state_dict())
    sharded = model.state_dict()
    assert list(sharded) == list(plain) and all(sharded[k].shape == plain[k].shape for k in plain)
    split = {key for key, value in sharded.items() if isinstance(value, ShardedTensor)}
    unsplit = {key for key in plain if key.startswith(("free", "left_alone", "scale", "norm.run", "norm.num"))}
    assert split == set(plain) - unsplit
    assert sharded["scale"].data_ptr() == model.scale.data_ptr(), "without a kind that was set, it is no copy"
    same({key: value.full_tensor() if key in split else value for key, value in sharded.items()}, plain)
    with state_dict_type(model, LOCAL):
        stored = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(stored[name].shape == param.shape for name, param in model.named_parameters())
    assert {key for key, value in stored.items() if type(value) is ShardedTensor} == split
    options["sharding_strategy"] = ShardingStrategy[strategy]
    for kind, state in ((FULL, plain), (SHARDED, _mixed(**options).state_dict()), (LOCAL, stored)):
        other = _mixed(seed=1, **options)
        with state_dict_type(other, kind):
            assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        with state_dict_type(other, FULL):
            same(other.state_dict(), plain)
        assert other.blocks[0].up.weight is other.blocks[1].up.weight


def equal_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Both optimizers, over the same parameters, have the same state, bit for bit."""
    params = [param for group in one.param_groups for param in group["params"]]
    pairs = [(one.state.get(param, {}), other.state.get(param, {})) for param in params]
    return all(a.keys() == b.keys() and all(_same_here(a[key], b[key]) for key in a) for a, b in pairs)


def _same_here(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same_here, one, other))
    if not isinstance(one, Tensor):
        return bool(one == other)
    return type(one) is type(other) and torch.equal(local(one), local(other))


@on_ranks(2)
def test_on_the_first_rank_alone(rank: int) -> None:
    """Rank-0-only leaves the other ranks' dicts empty, on a CPU too (E-SD-7, E-SD-10, E-SD-11); loaded so, the first
    rank sends the optimizer's state."""
    torch.manual_seed(0)
    plain = Mixed().state_dict()
    model = _mixed()
    for config in (FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullStateDictConfig(rank0_only=True)):
        with state_dict_type(model, FULL, config):
            found = model.state_dict()
        same(found, plain if rank == 0 else {})
    optimizer = start(model, OPTIMIZERS["adamw"])
    with state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        saved = optim_state_dict(model, optimizer)
        assert bool(saved) == (rank == 0)
        fresh = OPTIMIZERS["adamw"](model.parameters())
        fresh.load_state_dict(optim_state_dict_to_load(model, fresh, saved))
    assert equal_states(fresh, optimizer)


@on_ranks(2)
def test_mixed_precision_is_saved_in_the_storage_dtype() -> None:
    """Parameters have the dtype that they are stored in, buffers their own, whatever is computed in (E-SD-7)."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = _mixed(mixed_precision=precision)
    assert model.scale.dtype == torch.bfloat16
    torch.manual_seed(0)
    plain = Mixed().state_dict()
    for kind in (FULL, SHARDED):
        with state_dict_type(model, kind):
            found = model.state_dict()
        assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in plain.items()}
    with state_dict_type(model, FULL):
        found = model.state_dict()
    assert all(torch.equal(found[name], plain[name]) for name, _ in model.named_parameters())
    torch.testing.assert_close(found["scale"], plain["scale"], rtol=1e-2, atol=0)


@on_ranks(2)
def test_wrapper() -> None:
    """The wrapper's state dict is full unless set otherwise, under clean names (E-SD-1, E-OSD-1); torch's own functions
    get sharded values, as they do of torch's wrapper."""
    plain = build(MLP)
    wrapped = FullyShardedDataParallel(build(MLP), auto_wrap_policy={Residual})
    same(wrapped.state_dict(), plain.state_dict())
    other = build(MLP, seed=1)
    other.blocks[0] = FullyShardedDataParallel(other.blocks[0])
    other = FullyShardedDataParallel(other)
    other.load_state_dict(plain.state_dict())
    same(dict(sorted(other.state_dict().items())), dict(sorted(plain.state_dict().items())))
    optimizer = start(wrapped, OPTIMIZERS["adamw"])
    names = [name for name, _ in plain.named_parameters()]
    found = FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
    assert list(found["state"]) == names and found["param_groups"][0]["params"] == names
    with FullyShardedDataParallel.state_dict_type(wrapped, SHARDED):
        assert type(wrapped.state_dict()["stem.weight"]) is DTensor
    assert type(wrapped.state_dict()["stem.weight"]) is Tensor
    model, _ = get_state_dict(wrapped.module, optimizer)
    assert isinstance(model["stem.weight"], ShardedTensor)


@on_ranks(2)
def test_loading() -> None:
    """Shapes, missing and unexpected names are checked as ever; parameters keep their identity, also with `assign`."""
    model, plain = shard(MLP), build(MLP, seed=1).state_dict()
    before = local(model.stem.weight).clone()
    wrong = {**plain, "stem.weight": torch.zeros(7, 11), "head.bias": "text"}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    assert "size mismatch for stem.weight: expected shape (11, 7), found shape (7, 11)" in str(error.value)
    assert "size mismatch for head.bias: expected shape (5,), found a str" in str(error.value)
    assert torch.equal(local(model.stem.weight), before)
    missing = {key: value for key, value in plain.items() if key != "blocks.0.up.bias"} | {"extra": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Missing key.*"blocks.0.up.bias"[\s\S]*Unexpected key.*"extra"'):
        model.load_state_dict(missing)
    found = model.load_state_dict(missing, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["blocks.0.up.bias"], ["extra"])
    parameters = dict(model.named_parameters())
    model.load_state_dict(plain, assign=True)
    assert all(param is parameters[name] for name, param in model.named_parameters())
    assert all(torch.equal(value, plain[name]) for name, value in full_parameters(model).items())
    with state_dict_type(model, LOCAL), pytest.raises(RuntimeError, match=r"shape \(11, 7\), found shape \(5,\)"):
        model.load_state_dict({**plain, "stem.weight": torch.zeros(5)})  # as many as this rank stores
    foreign = fully_shard(build(MLP, seed=2), auto_wrap_policy=None)
    model.load_state_dict(foreign.state_dict())  # other units: gathered on the way
    assert all(torch.equal(value, full_parameters(foreign)[name]) for name, value in full_parameters(model).items())
    model.stem.weight.data = torch.full_like(model.stem.weight, 3.0)
    with state_dict_type(model, FULL):
        assert model.state_dict()["stem.weight"].eq(3.0).all()  # replaced data is seen
    with model.summon_full_params(model):
        assert model.state_dict()["stem.weight"].eq(3.0).all()
        model.load_state_dict(plain)
    assert all(torch.equal(value, plain[name]) for name, value in full_parameters(model).items())


def _trains_on(rank: int, how: str, strategy: str) -> None:
    model, resumed = shard(MLP, strategy), shard(MLP, strategy)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = executor(model, how)

    def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> Tensor:
        loss = backward(model, MLP, mine(MLP, seed))
        optim.step()
        optim.zero_grad()
        return loss

    for seed in range(2):
        step(run, optimizer, seed)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    copied = torch.load(_through_file(state), weights_only=True)
    losses = [step(run, optimizer, seed) for seed in range(2, 4)]
    other = OPTIMIZERS["adamw"](resumed.parameters())
    resumed.load_state_dict(copied["model"])
    other.load_state_dict(copied["optim"])
    run = executor(resumed, how)
    assert [step(run, other, seed) for seed in range(2, 4)] == losses
    assert equal_states(_over(resumed, model, other), optimizer)
    with torch.no_grad():
        resumed(mine(MLP, 9)[0])
    resumed.load_state_dict(copied["model"])  # between forwards: nothing old is computed with
    fresh = shard(MLP, strategy)
    fresh.load_state_dict(copied["model"])
    assert torch.equal(executor(resumed, how)(mine(MLP, 9)[0]), executor(fresh, how)(mine(MLP, 9)[0]))


def _over(model: nn.Module, other: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's state as if it were over the parameters of another, equal model."""
    copied = torch.optim.SGD(other.parameters(), lr=0.1)
    for mine_, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if mine_ in optimizer.state:
            copied.state[theirs] = optimizer.state[mine_]
    return copied


def _through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_training_goes_on_bit_for_bit(two: Ranks, how: str) -> None:
    """What each rank saved of sharded state dicts with `torch.save` continues the run, eager or compiled."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        two.run(_trains_on, how, strategy)


def _saved_by_one_rank(rank: int, folder: str) -> None:
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    for kind in (SHARDED, LOCAL):  # the default, which communicates where it was set
        with nullcontext() if kind is SHARDED else state_dict_type(model, kind):
            if rank == 0:
                torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/{kind}")
            dist.barrier()
            state = torch.load(f"{folder}/{kind}", weights_only=True)
            before = full_parameters(model)
            if rank == 0:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optim"])
            else:
                refused = "expected what rank 1 of 2 stores, found what rank 0 of 2 has saved; .* full_tensor"
                with pytest.raises(RuntimeError, match=rf"parameter stem.weight: {refused}"):
                    model.load_state_dict(state["model"])
                with pytest.raises(RuntimeError, match=rf"state exp_avg of parameter stem.weight, .*: {refused}"):
                    optimizer.load_state_dict(state["optim"])
            same(full_parameters(model), before)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(full, f"{folder}/full")
    dist.barrier()
    other = shard(MLP)
    other.load_state_dict(torch.load(f"{folder}/full", weights_only=True))
    same(full_parameters(other), before)


def test_what_one_rank_saved(two: Ranks, tmp_path: Path) -> None:
    """`if rank == 0: torch.save(model.state_dict())`, loaded on all ranks: those whose part it is not refuse it."""
    two.run(_saved_by_one_rank, str(tmp_path))


# --- optimizers -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_optimizer_of_one_unit(rank: int) -> None:
    """Full state of an optimizer is loaded, and compared between ranks, also where one unit has all parameters.

    The sharded state of a model that `fully_shard` sharded has DTensors, without a mesh too.
    """
    model = fully_shard(nn.Linear(3, 3))
    optimizer = start(model, OPTIMIZERS["adamw"])
    with state_dict_type(model, SHARDED):
        values = [*model.state_dict().values(), optim_state_dict(model, optimizer)["state"]["weight"]["exp_avg"]]
        assert all(isinstance(value, DTensor) for value in values), list(map(type, values))
    with state_dict_type(model, FULL):
        saved = optim_state_dict(model, optimizer)
        fresh = OPTIMIZERS["adamw"](model.parameters())
        fresh.load_state_dict(optim_state_dict_to_load(model, fresh, saved))
        assert equal_states(fresh, optimizer)
        if rank:
            del saved["state"]["bias"]
        with pytest.raises(RuntimeError, match=r"parameter bias: .* and no such parameter on rank 1"):
            optim_state_dict_to_load(model, fresh, saved)


def _in_groups(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, _: Any = None) -> Any:
    """An optimizer with weights in one group and biases in another."""
    named = list(model.named_parameters())
    weights, biases = ([p for n, p in named if ("bias" in n) == is_bias] for is_bias in (False, True))
    return make([{"params": weights, "lr": 0.2}, {"params": biases}])


@on_ranks(2)
def test_any_optimizer_to_the_unsharded_one_and_back() -> None:
    """Per-element tensors get names and original shapes, scalars stay 0-d, no state stays none, groups stay.

    Full state is the unsharded optimizer's; full, sharded and the unsharded one's load back bit for bit. E-OSD-1..4.
    """
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        plain = MLP.build()
        model = shard(MLP)
        reference, optimizer = (start(each, partial(_in_groups, make, each)) for each in (plain, model))
        fill(plain, reference)
        fill(model, optimizer)
        expected = rekey_optim_state_dict(reference.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=reference)
        groups = [{"params": group["params"]} for group in reference.param_groups]
        by_input = rekey_optim_state_dict(reference.state_dict(), OptimStateKeyType.PARAM_NAME, plain, groups)
        assert by_input["param_groups"] == expected["param_groups"], name
        with state_dict_type(model, FULL):
            found = optim_state_dict(model, optimizer)
        assert found["param_groups"] == expected["param_groups"], name
        assert found["state"].keys() == expected["state"].keys(), name
        for key, state in expected["state"].items():
            same(found["state"][key], state)
        sharded = optim_state_dict(model, optimizer)
        assert all(list(state) == list(expected["state"][key]) for key, state in sharded["state"].items())
        assert sharded["state"].keys() == expected["state"].keys()
        for source in (expected, found, sharded):
            fresh = _in_groups(make, model)
            loaded = optim_state_dict_to_load(model, fresh, source)
            fresh.load_state_dict(loaded)
            assert equal_states(fresh, optimizer), name
            assert fresh.param_groups[0]["lr"] == 0.2
        back = rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain, optim=reference)
        again = _in_groups(make, plain)
        again.load_state_dict(back)
        assert equal_states(again, reference), name


@on_ranks(2)
def test_older_functions(rank: int) -> None:
    """Full, sharded, scattered and flattened states are what `optim_state_dict` says (E-OSD-3)."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    fill(model, optimizer)
    cls = FullyShardedDataParallel
    first = cls.full_optim_state_dict(model, optimizer)
    assert bool(first) == (rank == 0)
    everywhere = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    loads = [
        cls.scatter_full_optim_state_dict(first if rank == 0 else None, model, optim=optimizer),
        cls.shard_full_optim_state_dict(everywhere, model, optim=optimizer),
        cls.shard_full_optim_state_dict(everywhere, model),
        cls.shard_full_optim_state_dict(everywhere, model, model.parameters()),
        cls.shard_full_optim_state_dict(everywhere, model, [{"params": list(model.parameters())}]),
        cls.flatten_sharded_optim_state_dict(cls.sharded_optim_state_dict(model, optimizer), model, optimizer),
    ]
    for loaded in loads:
        fresh = OPTIMIZERS["adamw"](model.parameters())
        fresh.load_state_dict(loaded)
        assert equal_states(fresh, optimizer)
    with pytest.raises(ValueError, match=r"found missing \[\] and unexpected \['stem.weight'"):
        cls.shard_full_optim_state_dict(everywhere, model, list(model.parameters())[1:])


def _wrong_state(rank: int) -> None:
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    with state_dict_type(model, FULL):
        full = optim_state_dict(model, optimizer)
    fresh = OPTIMIZERS["adamw"](model.parameters())
    state, groups = full["state"], full["param_groups"]
    names = groups[0]["params"]
    cases = [
        ({"state": state, "param_groups": [{**groups[0], "params": [*names[1:], "other"]}]},
         rf"found missing \['{names[0]}'\] and unexpected \['other'\]"),
        ({"state": state, "param_groups": [{"params": names[:1]}, {"params": names[1:]}]}, "are in one group of the"),
    ]  # fmt: skip
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            optim_state_dict_to_load(model, fresh, wrong)
    theirs = {**state["stem.weight"], "exp_avg": _of_the_other_rank(model.stem.weight)}
    for load in (partial(optim_state_dict_to_load, model, fresh), fresh.load_state_dict):
        named = load is not fresh.load_state_dict
        given = {**full, "state": {**state, "stem.weight": theirs}} if named else {
            **optimizer.state_dict(), "state": {0: theirs}}  # fmt: skip
        with pytest.raises(RuntimeError, match=r"exp_avg of .*stem.weight.*found what rank . of 2 has saved"):
            load(given)
    with pytest.raises(ValueError, match="expected keys among"):
        rekey_optim_state_dict({"state": {"x": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, model)


def _of_the_other_rank(param: nn.Parameter) -> ShardedTensor:
    """What `param` is on the other of two ranks, as a file of that rank would have it."""
    spec = dataclasses.replace(param.spec, ranks=dataclasses.replace(param.spec.ranks, rank=1 - dist.get_rank()))
    return ShardedTensor(torch.zeros(spec.numel), spec)


@pytest.mark.parametrize("name", ["adafactor", "lbfgs"])
@on_ranks(2)
def test_state_of_other_shapes(name: str) -> None:
    """State that has not its parameter's shape, as Adafactor's and LBFGS's, is plain, and saved and loaded as it is."""
    make = {"adafactor": torch.optim.Adafactor, "lbfgs": partial(torch.optim.LBFGS, max_iter=1)}[name]
    model = shard(MLP)
    optimizer: Any = make(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, MLP, mine(MLP, 0))

    for _ in range(3):
        optimizer.step(closure)
    state = next(iter(optimizer.state.values()))
    odd, shape = ("row_var", (11, 1)) if name == "adafactor" else ("d", (sum(p.numel() for p in model.parameters()),))
    assert type(state[odd]) is Tensor and state[odd].shape == shape
    for kind in (FULL, SHARDED, LOCAL):
        with state_dict_type(model, kind):
            saved = optim_state_dict(model, optimizer)
            assert torch.equal(next(iter(saved["state"].values()))[odd], state[odd])
            fresh = make(model.parameters(), lr=0.1)
            fresh.load_state_dict(optim_state_dict_to_load(model, fresh, saved))
        assert equal_states(fresh, optimizer)


def _ranks_disagree(rank: int) -> None:
    model = shard(MLP, auto_wrap_policy=None)  # one unit: both ranks store some of a parameter
    optimizer = start(model, OPTIMIZERS["adamw"])
    if rank == 1:
        for state in optimizer.state.values():
            state["extra"] = torch.zeros(())
    with (
        state_dict_type(model, FULL),
        pytest.raises(RuntimeError, match="expected the same on all ranks, found"),
    ):
        optim_state_dict(model, optimizer)
    params = list(model.parameters())
    other = torch.optim.SGD(params[rank:], lr=0.1)
    with (
        state_dict_type(model, FULL),
        pytest.raises(RuntimeError, match=r"parameter stem.weight: .* and no such parameter on rank 1"),
    ):
        optim_state_dict(model, other)


def test_wrong_optimizer_state(two: Ranks) -> None:
    """Missing and unexpected state, and what another rank stored, are named.

    Ranks that disagree raise on all ranks before they gather.
    """
    two.run(_wrong_state)
    two.run(_ranks_disagree)


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _fsdp2(seed: int) -> nn.Module:
    model = build(MLP, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    found, optim = get_state_dict(model, optimizer)
    dcp.save({"model": found, "optim": optim}, checkpoint_id=folder)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    found, optim = get_state_dict(model, optimizer)
    state = {"model": found, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def _round_trip(rank: int, folder: str) -> None:
    theirs = _fsdp2(0)
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    for seed in range(2):
        backward(theirs, MLP, mine(MLP, seed))
        optimizer.step()
        optimizer.zero_grad()
    _save(theirs, optimizer, f"{folder}/1")
    ours = shard(MLP)
    ours_optimizer = OPTIMIZERS["adamw"](ours.parameters())
    _load(ours, ours_optimizer, f"{folder}/1")
    _save(ours, ours_optimizer, f"{folder}/2")
    back = _fsdp2(1)
    back_optimizer = OPTIMIZERS["adamw"](back.parameters())
    _load(back, back_optimizer, f"{folder}/2")
    options = StateDictOptions(full_state_dict=True)
    expected, found = (get_state_dict(m, o, options=options) for m, o in ((theirs, optimizer), (back, back_optimizer)))
    ours_full = get_state_dict(ours, ours_optimizer, options=options)
    for other in (found, ours_full):
        same(other[0], expected[0])
        assert other[1]["param_groups"] == expected[1]["param_groups"]
        for name, state in expected[1]["state"].items():
            same(other[1]["state"][name], state)
    if rank == 0:
        plain = build(MLP, seed=2)
        plain_optimizer = OPTIMIZERS["adamw"](plain.parameters())
        found_model, optim = get_state_dict(plain, plain_optimizer)
        state = {"model": found_model, "optim": optim}
        dcp.load(state, checkpoint_id=f"{folder}/2", no_dist=True)
        set_state_dict(plain, plain_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        same(plain.state_dict(), expected[0])
        for name, param in plain.named_parameters():
            same(plain_optimizer.state[param], expected[1]["state"][name])


def test_fsdp2_to_ours_to_fsdp2_to_unsharded(two: Ranks, tmp_path: Path) -> None:
    """Trained under FSDP2 with Adam, saved, loaded, saved, loaded by FSDP2 and by an unsharded model: bit for bit."""
    two.run(_round_trip, str(tmp_path))


def _no_collectives(rank: int, folder: str) -> None:
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    state: dict[str, Any] = {}
    assert collectives_of(lambda: state.update(model=model.state_dict(), optim=optimizer.state_dict())) == []
    assert collectives_of(lambda: state.update(named=optim_state_dict(model, optimizer))) == []
    assert collectives_of(lambda: get_state_dict(model, optimizer)) == []
    tiny = {"x": torch.zeros(1)}
    planning = collectives_of(lambda: dcp.save(tiny, checkpoint_id=f"{folder}/tiny"))
    assert collectives_of(lambda: dcp.save(state, checkpoint_id=f"{folder}/ours")) == planning != []
    planning = collectives_of(lambda: dcp.load(tiny, checkpoint_id=f"{folder}/tiny"))
    assert collectives_of(lambda: dcp.load(state, checkpoint_id=f"{folder}/ours")) == planning != []
    loads = [lambda: model.load_state_dict(state["model"]), lambda: optimizer.load_state_dict(state["optim"])]
    loads.append(lambda: optim_state_dict_to_load(model, optimizer, state["named"], load_directly=True))
    assert [collectives_of(load) for load in loads] == [[], [], []]


def test_no_collectives_beyond_planning(two: Ranks, tmp_path: Path) -> None:
    """Sharded state dicts are made and loaded without a collective; saving and loading them starts exactly the
    collectives that a checkpoint of one tensor starts: DCP's own."""
    two.run(_no_collectives, str(tmp_path))


def _modules_and_async(rank: int, folder: str) -> None:
    """Other ways into DCP: modules and optimizers as they are, in the background, staged by the writer."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    fill(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/stateful")
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    futures = [dcp.async_save(state, checkpoint_id=f"{folder}/async")]
    futures[0].result()
    futures.append(dcp.async_save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/staged")))
    fill(model, optimizer, seed=1)  # training goes on; what was staged does not change
    futures[1].result()
    fill(model, optimizer, seed=2)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/stateful")
    assert_known(model, optimizer)
    for name in ("async", "staged"):
        other = shard(MLP)
        fresh = OPTIMIZERS["adamw"](other.parameters())
        _load(other, fresh, f"{folder}/{name}")
        assert_known(other, fresh)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"model": Stack([], width=3)}, checkpoint_id=f"{folder}/stateful")


def test_other_ways_into_dcp(two: Ranks, tmp_path: Path) -> None:
    """`dcp.save({"model": model, "optim": optimizer})`, `async_save` with either stager: what was staged is saved."""
    two.run(_modules_and_async, str(tmp_path))


@on_ranks(2)
def test_options_of_torch_s_functions(rank: int) -> None:
    """`get_state_dict` and `set_state_dict` in full, on the first rank, flattened, sent by the first rank."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    fill(model, optimizer)
    full_options = StateDictOptions(full_state_dict=True)
    full = get_state_dict(model, optimizer, options=full_options)
    first = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(first[0]) == bool(first[1].get("state")) == (rank == 0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    assert isinstance(flattened["state.stem.weight.exp_avg"], ShardedTensor)
    sends = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    empty: Any = ({}, {})
    for options, state in ((full_options, [{**each} for each in full]), (sends, full if rank == 0 else empty)):
        other = shard(MLP)
        fresh = OPTIMIZERS["adamw"](other.parameters())
        for _ in range(2):  # torch leaves DTensors in the dict
            given = state[0] if options is full_options else {**state[0]}
            set_model_state_dict(other, given, options=options)
        set_optimizer_state_dict(other, fresh, state[1], options=options)
        assert_known(other, fresh)
    fresh = OPTIMIZERS["adamw"](model.parameters())
    get_optimizer_state_dict(model, fresh)
    set_optimizer_state_dict(model, fresh, flattened, options=flat)
    assert equal_states(fresh, optimizer)
    mine_ = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, mine_)  # of a trained optimizer, into itself
    assert_known(model, optimizer)


class _OfBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.linspace(-3, 3, 20).view(5, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.signs = nn.Parameter(torch.arange(-6, 6, dtype=torch.int8).view(3, 4), requires_grad=False)
        self.linear = nn.Linear(4, 4)


@on_ranks(2)
def test_bytes_in_sharded_values() -> None:
    """float8 and int8 parameters come back from sharded state dicts bit for bit: gloo knows no float8."""
    expected = _OfBytes().state_dict()
    mesh = init_device_mesh("cpu", (2,))
    for shard_it in (FullyShardedDataParallel, partial(FullyShardedDataParallel, device_mesh=mesh), fully_shard):
        model: Any = shard_it(_OfBytes())
        expected["linear.weight"], expected["linear.bias"] = torch.full((4, 4), 2.0), torch.full((4,), 3.0)
        model.load_state_dict(expected)
        with state_dict_type(model, SHARDED):
            kept = model.state_dict()
            model.load_state_dict({name: value.to(torch.int8) for name, value in _OfBytes().state_dict().items()})
            model.load_state_dict(kept)
        with state_dict_type(model, FULL):
            for name, value in model.state_dict().items():
                assert torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8)), name
