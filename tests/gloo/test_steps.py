"""One training step, looked at closely: what module code sees, what goes out, when memory goes, what lies between."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import MODELS, Case, Residual, mlp, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from .ranks import Ranks
from .test_communication import _assert_freed, _kept, _spied
from .training import (
    OPTIMIZERS,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    follow,
    mine,
    shard,
    twins,
    units,
    whole,
)
from .wire import Sent, wire

MLP = MODELS["mlp"]
sharded = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
all_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


# --- what module code sees --------------------------------------------------------------------------------------------


class _Looks(Residual):
    """Notes what its weight is in forward and amid backward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.notes: list[tuple[type, tuple, bool]] = []

    def look(self, *_: Any) -> None:
        weight = self.up.weight
        self.notes.append((type(weight), tuple(weight.shape), weight.grad_fn is not None))

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        hidden = torch.tanh(self.up(x))
        hidden.register_hook(self.look)
        return x + self.down(hidden)


def _look(rank: int, strategy: str) -> None:
    model = fully_shard(nn.Sequential(_Looks(7, 9), _Looks(7, 9)), sharding_strategy=ShardingStrategy[strategy])
    model(vectors(rank, 4)[0]).sum().backward()
    for block in model:
        assert block.notes == [(Tensor, (9, 7), True)] * 2, block.notes  # in forward and in backward
        assert type(block.up.weight) is nn.Parameter
        assert block.up.weight.dim() == (2 if strategy == "NO_SHARD" else 1)


@all_strategies
def test_weights_in_forward_and_backward(two: Ranks, strategy: str) -> None:
    """Module code finds plain tensors in full shape, with autograd history, in forward and in backward (E-VIEW-2)."""
    two.run(_look, strategy)


def _look_at_wire(rank: int) -> None:
    model = shard(MLP)
    seen = []

    def views_of(module: nn.Module, args: tuple) -> None:
        (unit,) = units(module)
        storages = {view.untyped_storage().data_ptr() for view in unit.views}
        sizes = {view.untyped_storage().nbytes() for view in unit.views}
        offsets = [view.storage_offset() for view in unit.views]
        seen.append((len(storages), sizes, offsets == sorted(offsets) and offsets[0] == 0))

    model.blocks[0].up.register_forward_pre_hook(lambda module, args: views_of(model.blocks[0], args))
    with wire() as sent:
        backward(model, MLP, mine(MLP, 1))
    flats = [flat for unit in units(model) for flat in unit.flats]
    sizes = {(flat.layout.numel, flat.layout.shard_numel) for flat in flats}
    assert {(each.numel, each.part) for each in sent} == sizes
    assert all(whole_ == 2 * part for whole_, part in sizes), "what is sent is the flat parameter, nothing appended"
    reduces = [each for each in sent if each.kind == "reduce"]
    assert len(reduces) == len(flats), "one reduce for each unit"
    block = model.blocks[0]._fsdp_scope[0].flats[0]
    assert seen == [(1, {4 * block.layout.numel}, True)], "views lie one after another in the gathered buffer"


def test_sizes_on_the_wire(two: Ranks) -> None:
    """A gather's result is read in place, split into views; a reduce takes the packed gradients with nothing appended.

    E-FWD-7, 8, E-RED-2, E-VIEW-1.
    """
    two.run(_look_at_wire)


def _poison_padding(rank: int, strategy: str) -> None:
    reference, model = twins(MLP, strategy)
    for unit in units(model):
        for flat in unit.flats:
            (kept,) = [flat.shard.clone()]
            flat.shard.fill_(float("nan"))
            for part, values in zip(flat.parts(flat.shard), flat.parts(kept), strict=True):
                if part is not None and values is not None:
                    part.copy_(values)
    assert any(flat.shard.isnan().any() for unit in units(model) for flat in unit.flats), "no padding in the test"
    follow(model, reference, MLP)


@all_strategies
def test_padding_is_never_seen(two: Ranks, strategy: str) -> None:
    """Whatever stands in padding, no output, gradient or parameter depends on it (E-FLAT-17)."""
    two.run(_poison_padding, strategy)


# --- outputs ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class _Record:
    """An output that no one can look into."""

    x: Tensor


class _Returns(nn.Module):
    """A block that returns its two results in the structure that `kind` names; only `left` may reach the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Any:
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        return {
            "dict": {"left": left, "deep": [{"right": right}, None, 3, "text"]},
            "namedtuple": Pair(left, right),
            "dataclass": [_Record(left), _Record(right)],
            "detached": (left, right.detach()),
        }[self.kind]


def _left(out: Any) -> Tensor:
    if isinstance(out, dict):
        assert list(out) == ["left", "deep"] and out["deep"][1:] == [None, 3, "text"]
        return out["left"]
    if isinstance(out, list):
        assert [type(each) for each in out] == [_Record, _Record]
        return out[0].x
    assert type(out) in (Pair, tuple)
    return out[0]


class _Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([_Returns(kind), _Returns(kind)]), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + _left(block(x))
        return self.head(x)


def _return(rank: int, kind: str, strategy: str) -> None:
    case = Case(lambda: _Outer(kind), vectors, squared_error)
    reference, model = twins(case, strategy)
    optimizers = [OPTIMIZERS["momentum"](each.parameters()) for each in (model, reference)]
    for seed in range(2):
        backward(model, case, mine(case, seed))
        backward(reference, case, whole(case, seed))
        for block in model.blocks:  # another rank may have used it: zeros
            assert not any(param.grad.any() for param in block.right.parameters() if param.grad is not None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    with _spied() as calls:
        loss = case.loss(model, mine(case, 1))
        loss.backward()
        _assert_freed(calls, "after backward, while the loss is alive")
    assert all(unit.views is None and not list(unit.awaiting_backward) for unit in units(model))


@sharded
@pytest.mark.parametrize("kind", ["dict", "namedtuple", "dataclass", "detached"])
def test_outputs(two: Ranks, kind: str, strategy: str) -> None:
    """Outputs keep their structure and types; backward works from any tensor in them, and from a part of them.

    E-FWD-1, 3, 9, 10, E-BWD-1, 2, E-FIN-3.
    """
    two.run(_return, kind, strategy)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(1), nn.ModuleList([Residual(5, 9), Residual(5, 9)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.heads[0](x), self.heads[1](x)


def _use_one_head(rank: int, strategy: str) -> None:
    case = Case(_TwoHeads, vectors, lambda model, inputs: squared_error(lambda x: model(x)[0], inputs))  # type: ignore[arg-type]
    reference, model = twins(case, strategy)
    with _spied() as calls:
        outputs = model(mine(case, 1)[0])
        (outputs[0] + 0 * outputs[1].detach()).sum().backward()
    del outputs
    _assert_freed(calls, "after backward")
    assert all(param.grad is None for param in model.heads[1].parameters())
    model.zero_grad()
    follow(model, reference, case)


@sharded
def test_an_output_that_no_loss_uses(two: Ranks, strategy: str) -> None:
    """A unit whose output feeds no loss is freed, is not reduced, and trains in the next step (E-FIN-4)."""
    two.run(_use_one_head, strategy)


# --- units without parameters, units in several roles -----------------------------------------------------------------


def _without_parameters(rank: int) -> None:
    case = Case(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Identity()), vectors, squared_error)
    reference = build(case)
    model = fully_shard(build(case), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True)
    assert [len(module._fsdp_scope) for module in model] == [1, 0, 0] and model._fsdp_scope == ()
    follow(model, reference, case)
    with wire() as sent:
        backward(model, case, mine(case, 1))
    assert [each.kind for each in sent] == ["gather", "gather", "reduce"], sent


def test_units_without_parameters(two: Ranks) -> None:
    """A unit without parameters passes its forward through and communicates nothing (E-GEN-6)."""
    two.run(_without_parameters)


def _root_first(rank: int) -> None:
    reference = build(MLP)
    model = build(MLP)
    block = fully_shard(model.blocks[1])
    block(torch.ones(2, 11)).sum().backward()  # it has run as a root
    block.zero_grad()
    fully_shard(model)
    assert model._fsdp_is_root and not block._fsdp_is_root
    follow(model, reference, MLP)


def test_a_former_root_may_be_wrapped(two: Ranks) -> None:
    """A unit that has run on its own becomes part of a larger model (E-LAZY-3, E-ERR-7)."""
    two.run(_root_first)


def _call_twice(rank: int, strategy: str) -> list[Sent]:
    case = Case(lambda: _Twice(), vectors, squared_error)
    reference, model = twins(case, strategy)
    follow(model, reference, case)
    with wire() as sent:
        backward(model, case, mine(case, 1))
    return sent


class _Twice(nn.Module):
    """Runs its first block before and after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Residual(7, 9), Residual(7, 9)]), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(first(second(first(x))))


@all_strategies
def test_a_unit_called_twice(two: Ranks, strategy: str) -> None:
    """The gradients of several forwards of one unit add up to the unsharded ones (E-BWD-7)."""
    two.run(_call_twice, strategy)


# --- never compute with old parameters --------------------------------------------------------------------------------


def _stale(rank: int, strategy: str, change: str) -> None:
    reference, model = twins(MLP, strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for evaluate in (torch.no_grad, torch.enable_grad):
        backward(model, MLP, mine(MLP, 1))
        backward(reference, MLP, whole(MLP, 1))
        with evaluate():
            model(mine(MLP, 2)[0])
        if change == "step":
            for optimizer in optimizers:
                optimizer.step()
        elif change == "load_state_dict":
            model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
            reference.load_state_dict({name: 0.5 * value for name, value in reference.state_dict().items()})
        else:
            with torch.no_grad():
                for param in (*model.parameters(), *reference.parameters()):
                    param.fill_(0.125)
        x = mine(MLP, 3)[0]
        torch.testing.assert_close(model(x), reference(x))
        for each in (model, reference):
            each.zero_grad()
    follow(model, reference, MLP)


@pytest.mark.parametrize("change", ["step", "load_state_dict", "fill_"])
@all_strategies
def test_no_forward_with_old_parameters(two: Ranks, strategy: str, change: str) -> None:
    """After backward, evaluation and a change of the shard, forward computes with the new values (E-STRAT-10)."""
    two.run(_stale, strategy, change)


# --- checkpoints within a unit ----------------------------------------------------------------------------------------


class _Layers(nn.Module):
    """One unit of four layers, of which `inside` are recomputed, reentrant or not, together or each for itself."""

    def __init__(self, inside: tuple[int, ...], reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(4))
        self.inside, self.reentrant, self.nested = inside, reentrant, nested

    def _layer(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](x)) + x

    def _pair(self, x: Tensor) -> Tensor:
        x = self._layer(1, x)
        return checkpoint(self._layer, 2, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        if self.nested:
            x = checkpoint(self._pair, self._layer(0, x), use_reentrant=self.reentrant)
            return self._layer(3, x)
        for index in range(4):
            if index in self.inside:
                x = checkpoint(self._layer, index, x, use_reentrant=self.reentrant)
            else:
                x = self._layer(index, x)
        return x


class _Around(nn.Module):
    """Two units of layers, each in a reentrant checkpoint of its own if `around`."""

    def __init__(self, around: bool, *how: Any) -> None:
        super().__init__()
        self.around, self.stem, self.head = around, nn.Linear(7, 11), nn.Linear(11, 5)
        self.blocks = nn.ModuleList([_Layers(*how), _Layers(*how)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.around else block(x)
        return self.head(x)


def _recompute(rank: int, strategy: str, around: bool, how: tuple) -> None:
    reference = build(Case(lambda: _Around(False, (), False, False), vectors, squared_error))
    case = Case(lambda: _Around(around, *how), vectors, squared_error)
    model = shard(case, strategy)
    follow(model, reference, case)
    for each in (reference, model):
        each.zero_grad()
    with _spied() as calls:
        loss = case.loss(model, mine(case, 7))
        loss.backward()
    backward(reference, case, whole(case, 7))
    assert_same_gradients(model, reference)
    _assert_freed(calls, "after backward")
    assert all(call.numel for call in calls) and not _kept(calls).total()


@pytest.mark.parametrize("around", [False, True])
@all_strategies
@pytest.mark.parametrize(
    "how",  # which layers, reentrant, nested
    [((3,), True, False), ((1, 2), True, False), ((0, 1, 2, 3), True, False), ((), True, True),
     ((1, 2), False, False), ((), False, True)],
)  # fmt: skip
def test_checkpoints_within_a_unit(two: Ranks, strategy: str, around: bool, how: tuple) -> None:
    """A checkpoint of some layers of a unit, before or after its other layers, nested, and in one around the unit.

    A reentrant one runs a backward pass of its own: it frees nothing that the outer one still reads, and what it
    reduces is added (E-AC-2, 3, E-BWD-5).
    """
    two.run(_recompute, strategy, around, how)


# --- parts under no_grad ----------------------------------------------------------------------------------------------


class _Features(nn.Module):
    """The first block only makes features: it runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual(7, 9) for _ in range(3)), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](x)))


def _prefetch_under_no_grad(rank: int, prefetch: bool) -> None:
    case = Case(_Features, vectors, squared_error)
    reference, model = build(case), shard(case, forward_prefetch=prefetch)
    follow(model, reference, case, steps=3)
    assert all(param.grad is None for param in model.blocks[0].parameters())


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_unit_gathered_under_no_grad(two: Ranks, prefetch: bool) -> None:
    """A unit that was gathered ahead by a forward without gradients is differentiable all the same (E-VIEW-3)."""
    two.run(_prefetch_under_no_grad, prefetch)
