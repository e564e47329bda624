"""What modules say of their state, by hooks and methods of their own, against every way to save and load it.

A row is a model, a column a way. Expected are names, order and values of the unsharded model's `state_dict()`; loading
makes another model equal to the first one. A cell that is refused has its error in `REFUSED`.
"""

import io
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.nn.utils.parametrizations import weight_norm

from fsdp_compile import FullyShardedDataParallel, checkpoint, fully_shard, state_dict_type
from fsdp_compile.checkpoint.convert import convert, open_source
from fsdp_compile.state_dict.sharded_value import full_tensor

from .ranks import Ranks
from .test_quantized import Packed

# --- rows -------------------------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """Hooks give a parameter and a buffer other names in state dicts, and take these back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.inner.register_buffer("scale", torch.randn(2))
        self.register_state_dict_post_hook(Renamed.rename)
        self.register_load_state_dict_pre_hook(Renamed.take_back)

    def rename(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in ("scale", "weight"):
            state[f"{prefix}our_{name}"] = state.pop(f"{prefix}inner.{name}")

    def take_back(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("scale", "weight"):
            if f"{prefix}our_{name}" in state:
                state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}our_{name}")


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
    """Extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.seen = {"steps": 7, "last": torch.randn(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class TensorExtra(WithExtra):
    """Extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.randn(3)


class Modified(nn.Module):
    """Leaves out a part of names, and says so to torch by `_fqn_modifiers`."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(5, 3)
        self._register_state_dict_hook(Modified.leave_out)
        self.register_load_state_dict_pre_hook(Modified.put_back)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "fused", "bias": "fused"}

    def leave_out(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}fused.{name}")

    def put_back(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}fused.{name}"] = state.pop(prefix + name)


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


class Quantized(nn.Linear):
    """A frozen weight that is a subclass around two tensors, which sharded state dicts have."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.weight = nn.Parameter(
            Packed(torch.randint(-8, 8, (3, 5), dtype=torch.int8), torch.rand(3, 1), 8), requires_grad=False
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(4, 3),
    "hooks": Renamed,
    "hooks that compute": Turned,
    "own _save_to_state_dict": OwnNames,
    "own state_dict": OfItsChild,
    "extra state": WithExtra,
    "extra state, a tensor": TensorExtra,
    "_fqn_modifiers": Modified,
    "tied": Tied,
    "parametrized": lambda: weight_norm(nn.Linear(4, 3)),
    "ignored": Ignored,
    "quantized": Quantized,
}


def build(row: str, seed: int) -> nn.Module:
    """The model of a row, unsharded; one whose `load_state_dict` is its own is the root."""
    torch.manual_seed(seed)
    return MODELS[row]() if row == "own state_dict" else nn.Sequential(MODELS[row](), nn.BatchNorm1d(3))


def shard(row: str, seed: int, wrapped: bool = False) -> Any:
    """The same, sharded."""
    model = build(row, seed)
    ignored = {"ignored_states": list(model[0].alone.parameters())} if row == "ignored" else {}
    return FullyShardedDataParallel(model, **ignored) if wrapped else fully_shard(model, **ignored)


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
        mine = full_tensor(found[name])
        if isinstance(value, Packed):
            assert (
                type(mine) is Packed and torch.equal(mine.stored, value.stored) and torch.equal(mine.scale, value.scale)
            ), name
        elif isinstance(value, Tensor):
            assert type(mine) in (Tensor, nn.Parameter) and mine.dtype == value.dtype, (name, type(mine))
            assert torch.equal(mine, value) or name.endswith("exp"), name
        else:
            assert mine["steps"] == value["steps"] and torch.equal(mine["last"], value["last"]), name


def assert_loaded(row: str, model: Any, seed: int = 0) -> None:
    """Parameters and buffers are those of the unsharded model."""
    tensors = lambda each: {**dict(each.named_parameters()), **dict(each.named_buffers())}  # noqa: E731
    plain, found = (
        build(row, seed),
        {name.replace("_fsdp_wrapped_module.", ""): t for name, t in tensors(model).items()},
    )
    for name, value in tensors(plain).items():
        if isinstance(value, Packed):
            assert torch.equal(full_tensor(found["0._weight_stored"]), value.stored) and torch.equal(
                full_tensor(found["0._weight_scale"]), value.scale
            )
        else:
            torch.testing.assert_close(full_tensor(found[name]).detach(), value.detach(), rtol=1e-5, atol=1e-6)
    if row.startswith("extra"):
        mine, theirs = model[0].seen, plain[0].seen
        assert torch.equal(mine, theirs) if isinstance(theirs, Tensor) else torch.equal(mine["last"], theirs["last"])


# --- columns ----------------------------------------------------------------------------------------------------------


def _state_dict(row: str, folder: Path) -> None:
    model, other = shard(row, 0), shard(row, 1)
    state = model.state_dict()
    assert_same(state, expected(row))
    other.load_state_dict(state)
    assert_loaded(row, other)
    other = shard(row, 1)
    other.load_state_dict(expected(row, inner=False))
    assert_loaded(row, other)


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


def _kind(kind: StateDictType, wrapped: bool = False) -> Callable[[str, Path], None]:
    def column(row: str, folder: Path) -> None:
        model, other = shard(row, 0, wrapped), shard(row, 1, wrapped)
        with state_dict_type(model, kind), state_dict_type(other, kind):
            state = model.state_dict()
            is_full = kind is StateDictType.FULL_STATE_DICT
            assert_same(state, expected(row, inner=not is_full))
            alone = [*model.named_buffers(), *(each for each in model.named_parameters() if "alone" in each[0])]
            for name, tensor in alone:  # as FSDP1 gives them: themselves
                assert name not in state or state[name].data_ptr() == tensor.data_ptr(), name
            if is_full:
                assert not any(hasattr(value, "placements") for value in state.values())
            other.load_state_dict(state)
        assert_loaded(row, other)

    return column


def _rank0_only(row: str, folder: Path) -> None:
    model = shard(row, 0)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
        state = model.state_dict()
    assert_same(state, {} if dist.get_rank() else expected(row, inner=False))


def _model_state(row: str, folder: Path) -> None:
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        state, other = get_model_state_dict(shard(row, 0), options=options), shard(row, 1)
        assert_same(state, expected(row))
        set_model_state_dict(other, state, options=options)
        assert_loaded(row, other)


def _dcp_out(row: str, folder: Path) -> None:
    dcp.save({"model": shard(row, 0).state_dict()}, checkpoint_id=folder)
    plain = expected(row, seed=1)
    dcp.load({"model": plain}, checkpoint_id=folder, no_dist=True)
    assert_same(plain, expected(row))


def _dcp_in(row: str, folder: Path) -> None:
    dcp.save({"model": expected(row)}, checkpoint_id=folder)
    model = shard(row, 1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_loaded(row, model)


def _dcp_async(row: str, folder: Path) -> None:
    model = shard(row, 0)
    saved = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, process_group=dist.new_group())
    saved.result()
    plain = expected(row, seed=1)
    dcp.load({"model": plain}, checkpoint_id=folder, no_dist=True)
    assert_same(plain, expected(row))


def _checkpoint(row: str, folder: Path) -> None:
    models = [shard(row, 0), shard(row, 1, wrapped=True)]
    optimizers = [torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1) for model in models]
    checkpoint.save({"model": models[0], "optimizer": optimizers[0]}, folder, 1)
    names = set(open_source(folder).below("model").keys)
    assert names == {f"{name}{end}" for name, value in expected(row).items() for end in _ends(value)}
    checkpoint.load({"model": models[1], "optimizer": optimizers[1]}, folder)
    assert_loaded(row, models[1])
    if dist.get_rank() == 0 and row != "extra state":
        convert(open_source(folder).below("model"), folder / "converted.pt", "torch")
        assert_same(torch.load(folder / "converted.pt"), expected(row), ordered=False)
    dist.barrier()


def _ends(value: Any) -> list[str]:
    return [""] if isinstance(value, Tensor) else [f".{key}" for key in value]


def _safetensors(row: str, folder: Path) -> None:
    checkpoint.save_safetensors(shard(row, 0), folder)
    wanted = expected(row)
    wanted.pop("0.head.weight") if row == "tied" else None
    assert_same(load_file(folder / "model.safetensors"), wanted, ordered=False)
    model = shard(row, 1)
    checkpoint.load_safetensors(model, folder)
    assert_loaded(row, model)


def _torch_save(row: str, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(shard(row, 0).state_dict(), file)
    file.seek(0)
    model = shard(row, 1)
    model.load_state_dict(torch.load(file, weights_only=True))
    assert_loaded(row, model)


COLUMNS: dict[str, Callable[[str, Path], None]] = {
    "state_dict": _state_dict,
    "keep_vars": _keep_vars,
    **{kind.name: _kind(kind) for kind in StateDictType},
    "the wrapper's FULL": _kind(StateDictType.FULL_STATE_DICT, wrapped=True),
    "the wrapper's SHARDED": _kind(StateDictType.SHARDED_STATE_DICT, wrapped=True),
    "on the first rank": _rank0_only,
    "get_model_state_dict": _model_state,
    "dcp.save": _dcp_out,
    "dcp.load": _dcp_in,
    "dcp.async_save": _dcp_async,
    "checkpoint": _checkpoint,
    "safetensors": _safetensors,
    "torch.save": _torch_save,
}

# --- cells ------------------------------------------------------------------------------------------------------------

_UNKNOWN = "has no attribute '(our_|kernel)"  # torch looks for each name in the model, as it does for FSDP2
REFUSED = {
    ("hooks", "get_model_state_dict"): _UNKNOWN,
    ("own _save_to_state_dict", "get_model_state_dict"): _UNKNOWN,
    # The wrapper is the root, whose `load_state_dict` is called, and torch passes `state_dict` by name: as with FSDP1.
    ("own state_dict", "the wrapper's FULL"): 'Unexpected key.* "turned"',
    ("own state_dict", "the wrapper's SHARDED"): 'Unexpected key.* "turned"',
    ("own state_dict", "get_model_state_dict"): "unexpected keyword argument 'state_dict'",
    # Such values are torch's ShardedTensors, which compute nothing.
    ("own _save_to_state_dict", "the wrapper's SHARDED"): "torch function 'log'",
    ("extra state", "safetensors"): "0._extra_state of the model's state_dict.. is a dict",
}


def _row(rank: int, row: str, folder: Path) -> dict[str, str]:
    """What went wrong, by column."""
    wrong = {}
    for number, (column, check) in enumerate(COLUMNS.items()):
        refused = REFUSED.get((row, column))
        try:
            if refused is None:
                check(row, folder / str(number))
            else:
                with pytest.raises(Exception, match=refused):
                    check(row, folder / str(number))
        except BaseException as error:
            wrong[column] = "".join(traceback.format_exception(error)[-3:])
    return wrong


@pytest.mark.parametrize("row", MODELS)
def test_cells(row: str, two: Ranks, tmp_path: Path) -> None:
    """Names, order and values are what the modules say, in every way to save and load; the others are refused."""
    for wrong in two.run(_row, row, tmp_path):
        assert not wrong, "\n".join(f"{column}: {error}" for column, error in wrong.items())
