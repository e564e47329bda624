"""`by_owner`: stock optimizers on complete matrices, each of one rank, beside the same optimizer on one process."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from fsdp_compile.optim import ByOwner, by_owner, matrix_exchange
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_local
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient

from ..ranks import Ranks, on_ranks

MATRICES = [(7, 5), (4, 9), (6, 6), (3, 2), (8, 3)]
ANY = [(7, 5), (3,), (), (2, 3, 4), (0, 2), (6, 6)]
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(params, lr=0.1, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _model(shapes: list[tuple[int, ...]]) -> nn.Module:
    """An unsharded module with parameters p0, p1, ..., equal on all ranks."""
    generator = seeded(1)
    model = nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator)))
    return model


def _shard(params: list[nn.Parameter], group: str = "0") -> list[nn.Parameter]:
    """Let parameters, in place, be sharded over the ranks as one unit, whose shards end anywhere."""
    ranks = ShardRanks(group, dist.get_world_size(), dist.get_rank())
    shard_numel, offset = math.ceil(sum(param.numel() for param in params) / ranks.size), 0
    for param in params:
        spec = ShardSpec(FlatSharding(tuple(param.shape), offset, shard_numel), ranks)
        set_local(param, spec.local_of(param.detach()).clone(), spec)
        offset += param.numel()
    return params


def _reference_and_model(shapes: list[tuple[int, ...]]) -> tuple[nn.Module, nn.Module]:
    reference, model = _model(shapes), _model(shapes)
    _shard(list(model.parameters()))
    return reference, model


def _set_gradients(models: tuple[nn.Module, ...], seed: int, skip: int | None = None) -> None:
    """The same gradients for all models: sharded ones for sharded parameters, every third as a plain full tensor."""
    generator = seeded(seed)
    for i, params in enumerate(zip(*[model.parameters() for model in models], strict=True)):
        full = torch.randn(params[0].shape, generator=generator).to(params[0].dtype)
        for param in params:
            param.grad = None if i == skip else full.clone()
            if isinstance(param, ShardedTensor) and i != skip and i % 3:
                param.grad = ShardedTensor(param.spec.local_of(full).clone(), param.spec)


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_full(param).detach(), expected.detach(), rtol=0, atol=0)


def _check_updates(rank: int, name: str, shapes: list[tuple[int, ...]]) -> None:
    reference, model = _reference_and_model(shapes)
    expected, optimizer = MAKERS[name](reference.parameters()), by_owner(model.parameters(), MAKERS[name])
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (expected, optimizer)]
    for step in range(4):
        _set_gradients((reference, model), step, skip=1 if step == 2 else None)
        versions = [(param._version, param.local._version) for param in model.parameters()]
        for each in expected, optimizer:
            assert each is expected or len(each.param_groups[0]["params"]) == len(shapes)
        expected.step()
        start = matrix_exchange.start_all_to_all_of_parts
        with mock.patch.object(matrix_exchange, "start_all_to_all_of_parts", wraps=start) as exchange:
            optimizer.step()
        assert exchange.call_count == 2
        for i, (param, (own, local)) in enumerate(zip(model.parameters(), versions, strict=True)):
            assert (param._version > own and param.local._version > local) or (step, i) == (2, 1)
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"] == 0.1 * 0.5 ** (step + 1)
        _assert_same(model, reference)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    _check_state(rank, optimizer, expected, model)


def _elements(state: Any) -> int:
    values = [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
    return sum((value.local if isinstance(value, ShardedTensor) else value).numel() for value in values if value.dim())


def _check_state(rank: int, optimizer: ByOwner, expected: Optimizer, model: nn.Module) -> None:
    """State lies on owners alone, and its full tensors are those of one process."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (_elements(optimizer.inner.state), _elements(optimizer.state)))
    assert sum(inner for inner, _ in counts) == sum(shown for _, shown in counts) == _elements(expected.state)
    assert max(inner for inner, _ in counts) < _elements(expected.state)
    for param, plain in zip(model.parameters(), expected.param_groups[0]["params"], strict=True):
        for key, value in expected.state[plain].items():
            if (value.dim() or not param.dim()) and value.numel():
                torch.testing.assert_close(optimizer.state[param][key].full_tensor(), value, rtol=0, atol=0)
            elif not value.dim() and optimizer.owners[param] == rank:
                assert optimizer.state[param][key] == value
    owned = [param for param, owner in optimizer.owners.items() if owner == rank]
    assert {id(param) for param in optimizer._full} == {id(param) for param in owned}


CASES = [("muon", MATRICES), ("adamw", ANY), ("adafactor", [*MATRICES, (3,), (2, 3, 4)])]


@pytest.mark.parametrize(("name", "shapes"), CASES, ids=[name for name, _ in CASES])
@pytest.mark.parametrize("world_size", [2, 3])
def test_as_on_one_process(request: Any, world_size: int, name: str, shapes: list[tuple[int, ...]]) -> None:
    """Updates under a schedule are those of one process, with two collectives a step and state on owners alone."""
    request.getfixturevalue({2: "two", 3: "three"}[world_size]).run(_check_updates, name, shapes)


@on_ranks(2)
def test_mixed_parameters(rank: int) -> None:
    """Parameters of several process groups and dtypes, and plain ones, may be in one optimizer."""
    reference, model = _model([*ANY, *MATRICES]), _model([*ANY, *MATRICES])
    for each in reference, model:
        for param in list(each.parameters())[4:6]:
            param.data = param.data.bfloat16()
    params = list(model.parameters())
    _shard(params[:4])
    _shard(params[4:6])
    _shard(params[6:9], dist.new_group(list(range(dist.get_world_size()))).group_name)
    optimizers = []
    for each, make in (reference, MAKERS["adamw"]), (model, lambda params: by_owner(params, MAKERS["adamw"])):
        listed = list(each.parameters())
        first = {"params": listed[:7], "lr": 0.2}
        optimizers.append(make([first, {"params": [listed[10]], "weight_decay": 0.0}]))
        optimizers[-1].add_param_group({"params": listed[7:10], "lr": 0.3})
    for step in range(3):
        _set_gradients((reference, model), step)
        for optimizer in optimizers:
            optimizer.step()
        _assert_same(model, reference)
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.2, 0.1, 0.3]
    assert type(optimizers[1].state[params[10]]["exp_avg"]) is Tensor  # plain parameters are updated on every rank


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


@on_ranks(2)
def test_closure_hooks_and_scaler(rank: int) -> None:
    """A closure is called once, hooks run, and an infinity on one rank skips the step on all."""
    reference, model = _reference_and_model(MATRICES)
    expected, optimizer = MAKERS["muon"](reference.parameters()), by_owner(model.parameters(), MAKERS["muon"])

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        _set_gradients((reference, model), 3)
        return torch.tensor(5.0)

    hooked: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append("step"))
    assert optimizer.step(closure) == 5.0 and hooked == ["step"]
    expected.step()
    _assert_same(model, reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for seed, infinite in enumerate([False, True]):
        _set_gradients((reference, model), seed)
        for param in model.parameters():
            param.grad = ShardedTensor(4 * param.spec.local_of(_full(param.grad)), param.spec)
        if infinite and rank == 0:
            next(model.parameters()).grad.local[0] = math.inf  # type: ignore[union-attr]  # set above
        scaler.step(optimizer)
        scaler.update()
        if not infinite:
            expected.step()
        _assert_same(model, reference)


def _pickled(state_dict: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return file


def _as_parameters(optimizer: Optimizer, params: list[Any]) -> dict[str, Any]:
    """The state dict of an optimizer that has no owners: sharded as the parameters are."""
    state_dict = optimizer.state_dict()
    for key, state in state_dict["state"].items():
        spec = params[key].spec
        fits = {name: value for name, value in state.items() if value.dim() and value.shape == spec.shape}
        local = {name: ShardedTensor(spec.local_of(value).clone(), spec) for name, value in fits.items()}
        state_dict["state"][key] = {**state, **local}
    return state_dict


@pytest.mark.parametrize(("name", "shapes"), CASES, ids=[name for name, _ in CASES])
@on_ranks(2)
def test_state_dict_round_trip(rank: int, name: str, shapes: list[tuple[int, ...]]) -> None:
    """State of by_owner, of one process and of an optimizer over sharded parameters is loaded, and training goes on."""
    reference, model = _reference_and_model(shapes)
    expected, optimizer = MAKERS[name](reference.parameters()), by_owner(model.parameters(), MAKERS[name])
    for step in range(2):
        _set_gradients((reference, model), step)
        expected.step()
        optimizer.step()
    stored = [
        torch.load(_pickled(each), weights_only=False)
        for each in (optimizer.state_dict(), expected.state_dict(), _as_parameters(expected, list(model.parameters())))
    ]
    restored_pairs = []
    for state_dict in stored:  # by owner; of one process; sharded as parameters are
        restored = _model(shapes)
        _shard(list(restored.parameters()))
        for param, other in zip(restored.parameters(), model.parameters(), strict=True):
            param.local.data.copy_(other.local)
        restored_pairs.append((restored, by_owner(restored.parameters(), lambda params: MAKERS[name](params))))
        restored_pairs[-1][1].param_groups[0]["lr"] = 7.0
        restored_pairs[-1][1].load_state_dict(state_dict)
        assert restored_pairs[-1][1].param_groups[0]["lr"] == 0.1
        _check_state(rank, restored_pairs[-1][1], expected, restored)
    _set_gradients((reference, *(restored for restored, _ in restored_pairs)), 2)
    for each in expected, *(loaded for _, loaded in restored_pairs):
        each.step()
    for restored, _ in restored_pairs:
        _assert_same(restored, reference)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    params = {name: param.detach() for name, param in model.named_parameters() if param.numel()}
    return {"model": params, "optimizer": get_optimizer_state_dict(model, optimizer)}


def _load(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _resume(rank: int, name: str, shapes: list[tuple[int, ...]], source: str | None, target: str, seed: int) -> None:
    """Load, update once, save."""
    model = _model(shapes)
    _shard(list(model.parameters()))
    optimizer = by_owner(model.parameters(), MAKERS[name])
    if source is not None:
        _load(model, optimizer, source)
    _set_gradients((model,), seed)
    optimizer.step()
    dcp.save(_state(model, optimizer), checkpoint_id=target)


@pytest.mark.parametrize(("name", "shapes"), CASES, ids=[name for name, _ in CASES])
def test_checkpoints_reshard(two: Ranks, three: Ranks, tmp_path: Path, name: str, shapes: Any) -> None:
    """torch.distributed.checkpoint takes the state from two ranks to three and to one process, bit for bit."""
    folders = [str(tmp_path / each) for each in ("two", "three")]
    two.run(_resume, name, shapes, None, folders[0], 0)
    three.run(_resume, name, shapes, folders[0], folders[1], 1)
    reference, model = _model(shapes), _model(shapes)
    expected, optimizer = MAKERS[name](reference.parameters()), MAKERS[name](model.parameters())
    for seed in range(2):
        _set_gradients((reference,), seed)
        expected.step()
    _load(model, optimizer, folders[1])
    _set_gradients((reference, model), 2)
    expected.step()
    optimizer.step()
    _assert_same(model, reference)


@on_ranks(2)
def test_refusals(rank: int) -> None:
    """Where one rank fails no rank hangs, and gradients that were not reduced are refused."""
    _, model = _reference_and_model(MATRICES)

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if rank == 0 and self.fails:
                raise ArithmeticError("it failed")
            return super().step(closure)

    def failing(params: Any) -> Optimizer:
        if rank == 0:
            raise ArithmeticError("it failed")
        return torch.optim.SGD(params)

    failure, why = (ArithmeticError, "it failed") if rank == 0 else (RuntimeError, "failed on rank 0.*: it failed")
    with pytest.raises(failure, match=why):
        by_owner(model.parameters(), failing)
    optimizer = by_owner(model.parameters(), lambda params: Failing(params, lr=0.1, momentum=0.9))
    _set_gradients((model,), 0)
    with pytest.raises(failure, match=why):  # the first update of parameters
        optimizer.step()
    Failing.fails = False
    optimizer.step()
    assert len(optimizer.state) == len(MATRICES), "what other ranks own is told once it was updated"
    Failing.fails = True
    if rank == 0:
        with pytest.raises(ArithmeticError):
            optimizer.step()
    else:
        optimizer.step()
    Failing.fails = False
    optimizer.step()
    param = next(model.parameters())
    param.grad = None
    param.grad = UnreducedGradient(torch.zeros(param.numel()), param.spec)  # type: ignore[attr-defined]  # a ShardedTensor
    with pytest.raises(RuntimeError, match="step: a gradient was accumulated under no_sync"):
        optimizer.step()
    with pytest.raises(TypeError, match="save its state_dict"):
        torch.save(optimizer, io.BytesIO())


@on_ranks(2)
def test_state_of_another_rank_is_refused(rank: int, tmp_path: Path) -> None:
    """What another rank pickled is refused with a message that says what to do."""
    _, model = _reference_and_model(MATRICES)
    optimizer = by_owner(model.parameters(), MAKERS["sgd"])
    _set_gradients((model,), 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / str(rank))
    dist.barrier()
    with pytest.raises(RuntimeError, match=rf"stores, found the part of rank {1 - rank} of 2; .*checkpoint"):
        optimizer.load_state_dict(torch.load(tmp_path / str(1 - rank), weights_only=False))
