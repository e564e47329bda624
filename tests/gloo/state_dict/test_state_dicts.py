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
from models import MLP, Residual, Stack
from states import OPTIMIZERS, assert_known, fill, start
from tiers import compiled_late
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
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
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    state_dict_type,
)
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import on_ranks
from ..training import assert_bitwise, backward, build, executor, full_parameters, local, mine, shard

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


@on_ranks(2)
def test_mixed_precision_is_saved_in_the_storage_dtype() -> None:
    """Parameters have the dtype that they are stored in, buffers their own, whatever is computed in (E-SD-7)."""
    models = [build(MLP), build(MLP)]
    for each in models:
        each.register_buffer("scale", torch.full((3,), 1.1))
    plain = models[0].state_dict()
    model = fully_shard(models[1], mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
    assert model.scale.dtype == torch.bfloat16
    for kind in (SHARDED, FULL):
        with state_dict_type(model, kind):
            found = model.state_dict()
        assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in plain.items()}
    torch.testing.assert_close(found.pop("scale"), plain.pop("scale"), rtol=1e-2, atol=0)
    same(found, plain)


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


@compiled_late
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_training_goes_on_bit_for_bit(strategy: str, how: str) -> None:
    """What each rank saved of sharded state dicts with `torch.save` continues the run, eager or compiled."""
    model, resumed = shard(MLP, strategy), shard(MLP, strategy)
    optimizer, other = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, resumed))

    def steps(run: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[Tensor]:
        losses = []
        for seed in seeds:
            losses.append(backward(run, MLP, mine(MLP, seed)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    run, again = executor(model, how), executor(resumed, how)
    steps(run, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)
    file.seek(0)
    copied = torch.load(file, weights_only=True)
    resumed.load_state_dict(copied["model"])
    other.load_state_dict(copied["optim"])
    assert steps(run, optimizer, range(2, 4)) == steps(again, other, range(2, 4))
    assert_bitwise(resumed, model, "after two more steps")
    with torch.no_grad():
        again(mine(MLP, 9)[0])
    resumed.load_state_dict(copied["model"])  # between forwards: nothing old is computed with
    fresh = shard(MLP, strategy)
    fresh.load_state_dict(copied["model"])
    assert torch.equal(again(mine(MLP, 9)[0]), executor(fresh, how)(mine(MLP, 9)[0]))


@on_ranks(2)
def test_what_one_rank_saved(rank: int, tmp_path: Path) -> None:
    """`if rank == 0: torch.save(model.state_dict())`, loaded on all ranks: those whose part it is not refuse it."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    for kind in (SHARDED, LOCAL):  # the default, which communicates where it was set
        with nullcontext() if kind is SHARDED else state_dict_type(model, kind):
            if rank == 0:
                torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / kind.name)
            dist.barrier()
            state = torch.load(tmp_path / kind.name, weights_only=True)
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
        torch.save(full, tmp_path / "full")
    dist.barrier()
    other = shard(MLP)
    other.load_state_dict(torch.load(tmp_path / "full", weights_only=True))
    same(full_parameters(other), before)


# --- optimizers -------------------------------------------------------------------------------------------------------


def _in_groups(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, _: Any = None) -> Any:
    """An optimizer with weights in one group and biases in another."""
    named = list(model.named_parameters())
    weights, biases = ([p for n, p in named if ("bias" in n) == is_bias] for is_bias in (False, True))
    return make([{"params": weights, "lr": 0.2}, {"params": biases}])


@on_ranks(2)
def test_any_optimizer_to_the_unsharded_one_and_back() -> None:
    """Per-element tensors get names and original shapes, scalars stay 0-d, no state stays none, groups stay.

    Full state is the unsharded optimizer's; it, that of this rank and DTensors load back bit for bit. E-OSD-1..4.
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
        with state_dict_type(model, SHARDED):
            rows = optim_state_dict(model, optimizer)
        values = [value for state in rows["state"].values() for value in state.values() if value.dim()]
        assert all(isinstance(value, DTensor) for value in values), list(map(type, values))
        for source in (expected, found, sharded, rows):
            fresh = _in_groups(make, model)
            loaded = optim_state_dict_to_load(model, fresh, source)
            fresh.load_state_dict(loaded)
            assert_known(model, fresh)
            assert fresh.param_groups[0]["lr"] == 0.2
        back = rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain, optim=reference)
        again = _in_groups(make, plain)
        again.load_state_dict(back)
        assert_known(plain, again)


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
        assert_known(model, fresh)
    with pytest.raises(ValueError, match=r"found missing \[\] and unexpected \['stem.weight'"):
        cls.shard_full_optim_state_dict(everywhere, model, list(model.parameters())[1:])


@on_ranks(2)
def test_wrong_optimizer_state() -> None:
    """Missing and unexpected state, and what another rank stored, are named."""
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
        found, expected = fresh.state_dict()["state"], optimizer.state_dict()["state"]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2)
def test_ranks_that_disagree(rank: int) -> None:
    """They raise on all ranks before they gather."""
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


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _fsdp2(seed: int) -> nn.Module:
    model = build(MLP, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    found, optim = get_state_dict(model, optimizer)
    dcp.save({"model": found, "optim": optim}, checkpoint_id=folder)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    found, optim = get_state_dict(model, optimizer)
    state = {"model": found, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


@on_ranks(2)
def test_fsdp2_to_ours_to_fsdp2(tmp_path: Path) -> None:
    """Trained under FSDP2 with Adam, saved, loaded, saved, loaded by FSDP2: bit for bit."""
    theirs = _fsdp2(0)
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    for seed in range(2):
        backward(theirs, MLP, mine(MLP, seed))
        optimizer.step()
        optimizer.zero_grad()
    _save(theirs, optimizer, tmp_path / "1")
    ours = shard(MLP)
    ours_optimizer = OPTIMIZERS["adamw"](ours.parameters())
    _load(ours, ours_optimizer, tmp_path / "1")
    _save(ours, ours_optimizer, tmp_path / "2")
    back = _fsdp2(1)
    back_optimizer = OPTIMIZERS["adamw"](back.parameters())
    _load(back, back_optimizer, tmp_path / "2")
    options = StateDictOptions(full_state_dict=True)
    expected, found = (get_state_dict(m, o, options=options) for m, o in ((theirs, optimizer), (back, back_optimizer)))
    ours_full = get_state_dict(ours, ours_optimizer, options=options)
    for other in (found, ours_full):
        same(other[0], expected[0])
        assert other[1]["param_groups"] == expected[1]["param_groups"]
        for name, state in expected[1]["state"].items():
            same(other[1]["state"][name], state)


@on_ranks(2)
def test_no_collectives_beyond_planning(tmp_path: Path) -> None:
    """Sharded state dicts are made and loaded without a collective; saving and loading them starts exactly the
    collectives that a checkpoint of one tensor starts: DCP's own."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    state: dict[str, Any] = {}
    assert collectives_of(lambda: state.update(model=model.state_dict(), optim=optimizer.state_dict())) == []
    assert collectives_of(lambda: state.update(named=optim_state_dict(model, optimizer))) == []
    assert collectives_of(lambda: get_state_dict(model, optimizer)) == []
    tiny = {"x": torch.zeros(1)}
    planning = collectives_of(lambda: dcp.save(tiny, checkpoint_id=tmp_path / "tiny"))
    assert collectives_of(lambda: dcp.save(state, checkpoint_id=tmp_path / "ours")) == planning != []
    planning = collectives_of(lambda: dcp.load(tiny, checkpoint_id=tmp_path / "tiny"))
    assert collectives_of(lambda: dcp.load(state, checkpoint_id=tmp_path / "ours")) == planning != []
    loads = [lambda: model.load_state_dict(state["model"]), lambda: optimizer.load_state_dict(state["optim"])]
    loads.append(lambda: optim_state_dict_to_load(model, optimizer, state["named"], load_directly=True))
    assert [collectives_of(load) for load in loads] == [[], [], []]


@on_ranks(2)
def test_other_ways_into_dcp(tmp_path: Path) -> None:
    """`dcp.save({"model": model, "optim": optimizer})`, `async_save` with either stager: what was staged is saved."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    fill(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "stateful")
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    futures = [dcp.async_save(state, checkpoint_id=tmp_path / "async")]
    futures[0].result()
    futures.append(dcp.async_save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "staged")))
    fill(model, optimizer, seed=1)  # training goes on; what was staged does not change
    futures[1].result()
    fill(model, optimizer, seed=2)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "stateful")
    assert_known(model, optimizer)
    for name in ("async", "staged"):
        other = shard(MLP)
        fresh = OPTIMIZERS["adamw"](other.parameters())
        _load(other, fresh, tmp_path / name)
        assert_known(other, fresh)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"model": Stack([], width=3)}, checkpoint_id=tmp_path / "stateful")


@on_ranks(2)
def test_options_of_torch_s_functions(rank: int) -> None:
    """`get_state_dict` on the first rank; a flattened optimizer, and a trained one's own state, are loaded."""
    model = shard(MLP)
    optimizer = start(model, OPTIMIZERS["adamw"])
    fill(model, optimizer)
    first = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(first[0]) == bool(first[1].get("state")) == (rank == 0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    assert isinstance(flattened["state.stem.weight.exp_avg"], ShardedTensor)
    fresh = OPTIMIZERS["adamw"](model.parameters())
    get_optimizer_state_dict(model, fresh)
    set_optimizer_state_dict(model, fresh, flattened, options=flat)
    assert_known(model, fresh)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert_known(model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=full)
    for _ in range(2):  # torch leaves DTensors in the dict
        set_model_state_dict(model, state, options=full)
    assert_known(model, optimizer)
