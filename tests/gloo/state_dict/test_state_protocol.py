"""What modules say of their state, by hooks and methods of their own, against every way to save and load it.

A row is a model, a column a way. Expected are names, order and values of the unsharded model's `state_dict()`; loading
makes another model equal to the first one. A cell that is refused has its error in `REFUSED`.
"""

import io
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

from fsdp_compile import FullyShardedDataParallel, checkpoint, fully_shard, state_dict_type
from fsdp_compile.checkpoint.convert import convert, open_source
from fsdp_compile.state_dict._torch import flatten_state_dict
from fsdp_compile.state_dict.sharded_value import full_tensor

from ..ranks import on_ranks
from ..tensors.test_quantized import Packed

# --- rows -------------------------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """Hooks give parameters and a buffer other names in state dicts, and take these back."""

    NAMES: Mapping[str, str] = {"inner.scale": "our_scale", "inner.weight": "our_weight"}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.inner.register_buffer("scale", torch.randn(2))
        self.register_state_dict_post_hook(lambda _, state, prefix, *rest: self.rename(state, prefix, self.NAMES))
        back = {new: old for old, new in self.NAMES.items()}
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: self.rename(state, prefix, back))

    def rename(self, state: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


class Modified(Renamed):
    """Leaves out a part of names, and says so to torch."""

    NAMES: Mapping[str, str] = {f"inner.{name}": name for name in ("weight", "bias", "scale")}

    def _fqn_modifiers(self) -> dict[str, str]:
        return dict.fromkeys(("weight", "bias", "scale"), "inner")


class Turned(nn.Module):
    """A hook transposes a weight under its own name; it sees whatever kind of value is set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.register_state_dict_post_hook(Turned.turn)
        self.register_load_state_dict_pre_hook(Turned.turn)

    def turn(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"].t()


class OwnNames(nn.Module):
    """Saves views of its parameters, and what it computes of them, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.qkv, self.log = (nn.Parameter(torch.randn(*shape)) for shape in ((4, 6), (9, 4), (3, 5)))
        self.plain = nn.Parameter(torch.randn(3))

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "kernel"] = state.pop(prefix + "w").t().detach()
        q, k, v = state.pop(prefix + "qkv").chunk(3)
        state |= {prefix + "q": q, prefix + "kv": torch.cat([k, v]), prefix + "exp": state.pop(prefix + "log").exp()}

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "w"] = state.pop(prefix + "kernel").t()
            k, v = state.pop(prefix + "kv").chunk(2)
            state[prefix + "qkv"] = torch.cat([state.pop(prefix + "q"), k, v])
            state[prefix + "log"] = state.pop(prefix + "exp").log()
        super()._load_from_state_dict(state, prefix, *rest)


class OfItsChild(nn.Module):
    """Without parameters of its own, it saves one of its child, whose own it removes; `load_state_dict` is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        state[prefix + "turned"] = self.child.weight.t().detach()
        del state[prefix + "child.weight"]
        return state

    def load_state_dict(self, values: Any, strict: bool = True) -> Any:  # type: ignore[override]  # another first name
        values = dict(values)
        values["child.weight"] = values.pop("turned").t()
        return super().load_state_dict(values, strict)


class WithExtra(nn.Linear):
    """Extra state."""

    def __init__(self, seen: Any) -> None:
        super().__init__(4, 3)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Tied(nn.Module):
    """Two names of one parameter, the second one in a module of its own unit."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.head.weight = self.tokens.weight


class Ignored(nn.Module):
    """Parameters that `fully_shard` leaves alone, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded, self.alone, self.norm = nn.Linear(4, 3), nn.Linear(3, 2), nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Quantized(nn.Linear):
    """A frozen weight that is a subclass around two tensors, which sharded state dicts have."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.weight = nn.Parameter(
            Packed(torch.randint(-8, 8, (3, 5), dtype=torch.int8), torch.rand(3, 1), 8), requires_grad=False
        )


class Codes(nn.Linear):
    """Frozen numbers that gloo does not know."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.codes = nn.Parameter(torch.randn(5, 4).to(torch.float8_e4m3fn), requires_grad=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(4, 3),
    "hooks": Renamed,
    "hooks that compute": Turned,
    "own _save_to_state_dict": OwnNames,
    "own state_dict": OfItsChild,
    "extra state": lambda: WithExtra({"steps": 7, "last": torch.randn(2)}),
    "extra state, a tensor": lambda: WithExtra(torch.randn(3)),
    "_fqn_modifiers": Modified,
    "tied": Tied,
    "parametrized": lambda: weight_norm(nn.Linear(4, 3)),
    "ignored": Ignored,
    "quantized": Quantized,
    "float8": Codes,
}


def build(row: str, seed: int) -> nn.Module:
    """The model of a row, unsharded; one whose `load_state_dict` is its own is the root."""
    torch.manual_seed(seed)
    return MODELS[row]() if row == "own state_dict" else nn.Sequential(MODELS[row](), nn.BatchNorm1d(3))


def shard(row: str, seed: int, make: Any = fully_shard, **options: Any) -> Any:
    """The same, sharded."""
    model = build(row, seed)
    if row == "ignored":
        options["ignored_states"] = list(model[0].alone.parameters())
    return make(model, **options)


# --- what is compared -------------------------------------------------------------------------------------------------


def expected(row: str, seed: int = 0, inner: bool = True) -> dict[str, Any]:
    """The unsharded model's state dict; `inner`: with the tensors in subclasses in their place."""
    state = build(row, seed).state_dict()
    if row == "quantized" and inner:
        weight = state.pop("0.weight")
        state = {"0._weight_stored": weight.stored, "0._weight_scale": weight.scale, **state}
    return state


def assert_same(found: dict[str, Any], wanted: dict[str, Any], ordered: bool = True) -> None:
    """Names, in this order, and values."""
    assert (list(found) == list(wanted)) if ordered else (found.keys() == wanted.keys()), (list(found), list(wanted))
    for name, value in wanted.items():
        assert_equal(full_tensor(found[name]), value, name)


def assert_equal(mine: Any, value: Any, name: str = "") -> None:
    """Types and values; of what was computed and computed back, nearly."""
    if isinstance(value, Packed):
        assert type(mine) is Packed and torch.equal(mine.unpacked(), value.unpacked()), name
    elif isinstance(value, Tensor):
        assert isinstance(mine, Tensor) and not hasattr(mine, "placements") and mine.dtype == value.dtype, name
        torch.testing.assert_close(mine.detach(), value.detach(), rtol=0, atol=1e-5 * name.endswith(("exp", "log")))
    else:
        assert mine["steps"] == value["steps"] and torch.equal(mine["last"], value["last"]), name


def assert_loaded(row: str, model: Any) -> None:
    """Parameters, buffers and extra state are those of the unsharded model."""
    plain = build(row, 0)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {name.replace("_fsdp_wrapped_module.", ""): full_tensor(tensor) for name, tensor in tensors}
    if row == "quantized":
        found["0.weight"] = Packed(found["0._weight_stored"], found["0._weight_scale"], 8)
    for name, value in (*plain.named_parameters(), *plain.named_buffers()):
        assert_equal(found[name], value, name)
    if row.startswith("extra"):
        assert_equal(model[0].seen, plain[0].seen)
    if row == "tied":
        assert getattr(model, "module", model)[0].head.weight is getattr(model, "module", model)[0].tokens.weight


# --- columns ----------------------------------------------------------------------------------------------------------


def _keep_vars(row: str, folder: Path) -> None:
    plain, model = build(row, 0), shard(row, 0)
    names, named = {id(p): n for n, p in plain.named_parameters()}, dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    for kind in StateDictType:
        with state_dict_type(model, kind):
            kept = model.state_dict(keep_vars=True)
        for name, value in plain.state_dict(keep_vars=True).items():
            if name in buffers:
                assert kept[name] is buffers[name], name
            elif id(value) in names and not isinstance(value, Packed):
                assert kept[name] is named[names[id(value)]] and kept[name].grad is named[names[id(value)]].grad, name
            elif isinstance(value, Tensor) and value.requires_grad:
                assert torch.allclose(full_tensor(kept[name]), value), name


def _kind(kind: StateDictType | None, **how: Any) -> Callable[[str, Path], None]:
    """State dicts of a kind, or of none that was set: sharded ones, which load full values too."""

    def column(row: str, folder: Path) -> None:
        model, is_full = shard(row, 0, **how), kind is StateDictType.FULL_STATE_DICT
        with state_dict_type(model, kind) if kind else nullcontext():
            state = model.state_dict()
            if is_full and "make" not in how:
                for mine, plain in zip(model.children(), build(row, 0).children(), strict=True):
                    assert_same(mine.state_dict(), plain.state_dict())
        assert_same(state, expected(row, inner=not is_full))
        tensors = [*model.named_buffers(), *(each for each in model.named_parameters() if "alone" in each[0])]
        alone = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in tensors}
        for name in state.keys() & alone:  # as FSDP1 gives them: themselves
            assert state[name].data_ptr() == alone[name].data_ptr(), name
        if is_full or row in ("plain", "tied", "ignored"):
            found = {name for name, value in state.items() if isinstance(value, DTensor)}
            assert found == (set() if is_full else state.keys() - alone), found
        for given in (state, *([expected(row, inner=False)] if kind is None else [])):
            other = shard(row, 1, **how)
            with state_dict_type(other, kind) if kind else nullcontext():
                other.load_state_dict(given)
            assert_loaded(row, other)

    return column


def _rank0_only(row: str, folder: Path) -> None:
    model = shard(row, 0)
    for offload in (True, False):
        with state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload, rank0_only=True)):
            state = model.state_dict()
        assert_same(state, {} if dist.get_rank() else expected(row, inner=False))


def _model_state(row: str, folder: Path, sends: bool = False) -> None:
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
    for options in (full,) if sends else (StateDictOptions(), full):
        state, other = get_model_state_dict(shard(row, 0), options=options), shard(row, 1)
        assert_same(state, expected(row))
        set_model_state_dict(other, {} if sends and dist.get_rank() else state, options=options)
        assert_loaded(row, other)


def _dcp_out(row: str, folder: Path, save: Callable[..., Any] = dcp.save) -> None:
    save({"model": shard(row, 0).state_dict()}, checkpoint_id=folder)
    plain = expected(row, seed=1)
    dcp.load({"model": plain}, checkpoint_id=folder, no_dist=True)
    assert_same(plain, expected(row))


def _save_in_background(state: dict[str, Any], checkpoint_id: Path) -> None:
    dcp.async_save(state, checkpoint_id=checkpoint_id, process_group=dist.new_group()).result()


def _dcp_in(row: str, folder: Path) -> None:
    dcp.save({"model": expected(row)}, checkpoint_id=folder)
    model = shard(row, 1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_loaded(row, model)


def _checkpoint(row: str, folder: Path) -> None:
    models = [shard(row, 0), shard(row, 1, **WRAPPER)]
    optimizers = [torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1) for model in models]
    checkpoint.save({"model": models[0], "optimizer": optimizers[0]}, folder, 1)
    source = open_source(folder).below("model")
    assert set(source.keys) == set(flatten_state_dict(expected(row))[0])
    assert source.tied == ({"0.head.weight": "0.tokens.weight"} if row == "tied" else {})  # saved once
    checkpoint.load({"model": models[1], "optimizer": optimizers[1]}, folder)
    assert_loaded(row, models[1])
    if dist.get_rank() == 0 and row != "extra state":
        convert(source, folder / "converted.pt", "torch")
        assert_same(torch.load(folder / "converted.pt"), expected(row), ordered=False)
    dist.barrier()


def _safetensors(row: str, folder: Path) -> None:
    checkpoint.save_safetensors(shard(row, 0), folder)
    wanted = expected(row)
    wanted.pop("0.head.weight") if row == "tied" else None
    assert_same(load_file(folder / "model.safetensors"), wanted, ordered=False)
    model = shard(row, 1, **WRAPPER)
    checkpoint.load_safetensors(torch.compile(model), folder)
    assert_loaded(row, model)


def _torch_save(row: str, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(shard(row, 0).state_dict(), file)
    file.seek(0)
    model = shard(row, 1)
    model.load_state_dict(torch.load(file, weights_only=True))
    assert_loaded(row, model)


WRAPPER = {"make": FullyShardedDataParallel}
NO_SHARD, OFFLOAD = {"sharding_strategy": ShardingStrategy.NO_SHARD}, {"cpu_offload": CPUOffload(True)}
COLUMNS: dict[str, Callable[[str, Path], None]] = {
    "state_dict": _kind(None),
    "keep_vars": _keep_vars,
    **{kind.name: _kind(kind) for kind in StateDictType},
    **{f"{kind.name} of replicas": _kind(kind, **NO_SHARD) for kind in StateDictType},
    **{f"{kind.name} in host memory": _kind(kind, **OFFLOAD) for kind in StateDictType},
    "the wrapper's FULL": _kind(StateDictType.FULL_STATE_DICT, **WRAPPER),
    "the wrapper's SHARDED": _kind(StateDictType.SHARDED_STATE_DICT, **WRAPPER),
    "on the first rank": _rank0_only,
    "get_model_state_dict": _model_state,
    "broadcast_from_rank0": partial(_model_state, sends=True),
    "dcp.save": _dcp_out,
    "dcp.load": _dcp_in,
    "dcp.async_save": partial(_dcp_out, save=_save_in_background),
    "checkpoint": _checkpoint,
    "safetensors": _safetensors,
    "torch.save": _torch_save,
}

# --- cells ------------------------------------------------------------------------------------------------------------

_NAMED = ("get_model_state_dict", "broadcast_from_rank0")
_UNKNOWN = "has no attribute '(our_|kernel)"  # torch looks for each name in the model, as it does for FSDP2
REFUSED = {
    **{(row, column): _UNKNOWN for row in ("hooks", "own _save_to_state_dict") for column in _NAMED},
    # The wrapper is the root, whose `load_state_dict` is called, and torch passes `state_dict` by name: as with FSDP1.
    ("own state_dict", "the wrapper's FULL"): 'Unexpected key.* "turned"',
    ("own state_dict", "the wrapper's SHARDED"): 'Unexpected key.* "turned"',
    **{("own state_dict", column): "unexpected keyword argument 'state_dict'" for column in _NAMED},
    ("hooks that compute", "broadcast_from_rank0"): "The expanded size",  # torch copies into parameters as they are
    **{("float8", column): "Invalid scalar type" for column in _NAMED},  # torch sends full values as they are
    ("extra state", "safetensors"): "0._extra_state of the model's state_dict.. is a dict",
}


@pytest.mark.parametrize("row", MODELS)
@on_ranks(2)
def test_cells(row: str, tmp_path: Path) -> None:
    """Names, order and values are what the modules say, in every way to save and load; the others are refused.

    Tied names are all there, ignored parameters and buffers unchanged, other buffers left out as ever; rank-0-only
    leaves the other ranks' dicts empty. E-SD-1, E-SD-7, E-SD-8, E-SD-9, E-SD-10, E-SD-11, E-SD-12.
    """
    wrong = {}
    for number, (column, check) in enumerate(COLUMNS.items()):
        refused = REFUSED.get((row, column))
        try:
            with pytest.raises(Exception, match=refused) if refused else nullcontext():
                check(row, tmp_path / str(number))
        except BaseException as error:
            wrong[column] = "".join(traceback.format_exception(error)[-3:])
    assert not wrong, "\n".join(f"{column}: {error}" for column, error in wrong.items())
