"""What units return, what leaves them otherwise, and what is used of it."""

import copy
import re
import warnings
from collections import namedtuple
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Case, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import (
    OPTIMIZERS,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    mine,
    reference_and_model,
    whole,
)
from ..wire import gathered_bytes, wire

FREED = r"is at version 10000\d+; expected|its base or another view of its base has been modified inplace"
"""What autograd says where it would read memory that is not there: of a parameter itself, and of a view of one."""
sharded = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])


# --- outputs ----------------------------------------------------------------------------------------------------------

_Named = namedtuple("_Named", ["x"])


@dataclass
class _Record:
    x: Tensor


class _Object:
    """An output that no one can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Holds(nn.Module):
    """Returns its result within a `kind`."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Any:
        return self.kind(torch.tanh(self.layer(x)))


class _Outer(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([_Holds(kind), _Holds(kind)]), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).x
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "eager") for kind in (_Named, _Record, _Object)),
        (_Record, "aot_eager"),
        pytest.param(_Named, "aot_eager", marks=pytest.mark.nightly),
    ],
)
@on_ranks(2)
def test_what_outputs_show(kind: Any, how: str) -> None:
    """Outputs keep their structure and types, and tensors in them let a unit be gathered again for backward; of a plain
    object a warning says that its unit stays unsharded. (E-FWD-1, 3, 9, 10)
    """
    case = Case(lambda: _Outer(kind), vectors, squared_error)
    reference, model = build(case), fully_shard(build(case), auto_wrap_policy={_Holds})
    run = executor(model, how)
    with wire() as calls, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        backward(run, case, mine(case, 1))
    backward(reference, case, whole(case, 1))
    assert_same_gradients(model, reference)
    follow(run, reference, case)
    if how == "eager":
        stays = kind is _Object
        assert sum(call.kind == "gather" for call in calls) == (3 if stays else 5)
        texts = [str(warning.message) for warning in warned]
        assert len(texts) == (2 if stays else 0), texts
        assert not stays or re.match(r"_Holds with parameters (.+[.])?layer.weight, .* returns a _Object", texts[0])


class _ReturnsParameters(nn.Module):
    """Returns parameters of its own and of a block in `kind`: themselves, views of them, or views in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.block, self.scale = kind, nn.Linear(7, 7), nn.Parameter(torch.ones(3, 7))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        results = [self.scale, self.block.weight]
        x = self.block(x) * self.scale[1]
        if self.kind == "views":
            results = [self.scale[1:], self.block.weight.t()]
        return x, {"deep": results} if self.kind == "structure" else results


@sharded
@pytest.mark.parametrize("kind", ["themselves", "views", "structure"])
@on_ranks(2)
def test_returned_parameters_can_be_read_after_backward(kind: str, strategy: str) -> None:
    """Parameters that a forward returns keep their values, and their memory, for as long as the caller holds them."""
    case = Case(lambda: _ReturnsParameters(kind), vectors, squared_error)
    reference, model = reference_and_model(case, strategy)
    optimizers = [OPTIMIZERS["momentum"](each.parameters()) for each in (model, reference)]
    for seed in range(3):
        read = []
        for each, (x, _) in ((model, mine(case, seed)), (reference, whole(case, seed))):
            out, results = each(x)
            first, second = results["deep"] if kind == "structure" else results
            (out.pow(2).mean() + first.pow(3).sum() + second.pow(3).sum()).backward()
            read += [[result.detach().clone() for result in (first, second)]]
        torch.testing.assert_close(*read)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)


# --- what leaves a forward in other ways than as an output ------------------------------------------------------------

_left_over: list[Tensor] = []


class _Aside(nn.Module):
    """A block that computes something after its output, such as a loss, which leaves as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.gate = how, nn.Linear(7, 7), nn.Linear(7, 7)
        self.kept: Any = None
        if how == "hook":
            self.gate.register_forward_hook(lambda *call: _left_over.append(call[-1].square().mean()))

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(x))
        y = x + hidden
        aside = self.gate(hidden).square().mean()
        if self.how in ("attribute", "list", "dict"):
            self.kept = {"attribute": aside, "list": [aside], "dict": {"loss": aside}}[self.how]
        elif self.how == "submodule":
            self.gate.kept = aside
        elif self.how == "argument":
            given.append(aside)
        elif self.how == "in place":
            given[0].add_(aside)
        elif self.how == "global":
            _left_over.append(aside)
        return y

    def asides(self) -> list[Tensor]:
        kept = self.gate.kept if self.how == "submodule" else self.kept
        return [*kept.values()] if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept]


class _AsideNet(nn.Module):
    """Three of these; with `apart` no gradient passes from one to the one before."""

    def __init__(self, how: str, apart: bool) -> None:
        super().__init__()
        self.how, self.apart, self.out = how, apart, nn.Linear(7, 1)
        self.blocks = nn.ModuleList(_Aside(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given = [torch.zeros(())] if self.how == "in place" else []
        _left_over.clear()
        for block in self.blocks:
            x = block(x.detach() if self.apart else x, given)
        asides = given or _left_over or [each for block in self.blocks for each in block.asides()]
        return (0.0 if self.apart else self.out(x).square().mean()) + torch.stack(asides).sum()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["attribute", "list", "dict", "submodule", "argument", "in place", "global", "hook"])
@on_ranks(2)
def test_what_leaves_in_another_way_than_as_an_output(how: str, apart: bool) -> None:
    """Losses that a block leaves in an attribute, an argument or elsewhere have the gradients of one process.

    Their backward runs before that of the output. Where they go to cannot be seen, the block stays unsharded, with a
    warning.
    """
    torch.manual_seed(0)
    reference = _AsideNet(how, apart)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    numel = model.blocks[0]._fsdp.units[0].flats[0].layout.numel
    for _ in range(2):
        x = torch.linspace(-1, 1, 14).view(2, 7).requires_grad_()
        reference.zero_grad()
        reference(x).backward()
        model.zero_grad()
        with warnings.catch_warnings(record=True) as seen, wire() as calls:
            warnings.simplefilter("always")
            loss = model(x)
            stays = bool(gathered_bytes(calls)[numel])
            loss.backward()
        assert_same_gradients(model, reference)
        for each in (model, reference):  # two backward passes, of which the second gathers again
            loss = each(x)
            loss.backward(retain_graph=True)
            try:
                loss.backward()
            except RuntimeError as error:
                assert each is model and stays and re.search(FREED, str(error)), error
                break
        else:
            assert_same_gradients(model, reference)
        texts = [str(each.message) for each in seen if "stay unsharded until backward" in str(each.message)]
        assert len(texts) == (3 if stays else 0) and stays == (how in ("global", "hook")), texts
        assert all("_Aside with parameters blocks" in text for text in texts), texts
        assert all(Path(each.filename).name == "test_outputs.py" for each in seen), seen


class _Hooked(nn.Module):
    """A block whose output has a hook that reads parameters: their values, or through a part of the graph."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "values":
            weight = self.layer.weight.detach()
            z = self.layer(x)
            z.register_hook(lambda grad: grad + 0.1 * grad @ weight)
            return z
        at = x.detach().requires_grad_()
        inner = torch.tanh(self.layer(at))  # as implicit layers do
        z = self.layer(x)
        z.register_hook(lambda grad: grad + torch.autograd.grad(inner, at, grad, retain_graph=True)[0])
        return z


@pytest.mark.parametrize("how", ["values", "graph"])
@on_ranks(2)
def test_hooks_on_outputs_read_parameters(how: str) -> None:
    """A hook that forward registers on its output is called when the unit's parameters are there again."""
    torch.manual_seed(0)
    reference = nn.Sequential(*[_Hooked(how) for _ in range(3)], nn.Linear(7, 2))
    model = copy.deepcopy(reference)
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        for each in (reference, model):
            each.zero_grad()
            each(torch.linspace(-1, 1, 14).view(2, 7)).square().mean().backward()
        assert_same_gradients(model, reference)


class _Both(nn.Module):
    def __init__(self, towers: nn.ModuleList) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, x: Tensor) -> list[Tensor]:
        return [tower(x) for tower in self.towers]


@on_ranks(2)
def test_what_is_read_of_a_unit_without_its_outputs() -> None:
    """A unit of which the loss uses no output is gathered again where backward has come to another unit before.

    Else nothing tells that backward is about to read its parameters: an error.
    """
    torch.manual_seed(0)
    reference = _Both(nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)) for _ in range(2)]))
    model = copy.deepcopy(reference)
    for tower in model.towers:
        fully_shard(tower)
    fully_shard(model)
    seen: list[Tensor] = []
    for each in (reference, model):
        layer = each.towers[0][0]
        layer.register_forward_hook(lambda layer, _x, y: seen.append(torch.tanh(y) @ layer.weight))
    for _ in range(2):
        for each in (reference, model):
            each.zero_grad()
            unused, used = each(torch.ones(2, 7))
            (used.sum() + seen.pop().sum()).backward()
            assert unused.shape == (2, 7)
        assert_same_gradients(model, reference)
    outputs = model(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match=FREED):
        seen.pop().sum().backward()
    assert len(outputs) == 2


class _Choices(nn.Module):
    """A block of two outputs, of which the caller uses one; perhaps around another one."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.left, self.right = inner, nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor, choice: int) -> tuple[Tensor, Tensor]:
        if self.inner is not None:
            x = self.inner(x, choice)[choice]
        return x + torch.tanh(self.left(x)), x + torch.sin(self.right(x))


class _ChoiceNet(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Choices(_Choices(None) if nested else None) for _ in range(3))
        self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor, choices: tuple[int, ...]) -> Tensor:
        for block, choice in zip(self.blocks, choices, strict=True):
            x = block(x, choice)[choice]
        return self.out(x).square().mean()


@pytest.mark.parametrize("nested", [False, True])
@on_ranks(2)
def test_ranks_that_use_other_outputs(rank: int, nested: bool) -> None:
    """A unit whose last output one rank does not use is gathered in the same order on all ranks."""
    x = torch.linspace(-1, 1, 14).view(2, 7)
    prefetches = (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None)
    for prefetch, choices in product(prefetches, ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))):
        torch.manual_seed(0)
        reference = _ChoiceNet(nested)
        model = copy.deepcopy(reference)
        for block in reversed([each for each in model.modules() if isinstance(each, _Choices)]):
            fully_shard(block, reshard_after_forward=True, backward_prefetch=prefetch)
        fully_shard(model, backward_prefetch=prefetch)
        for _ in range(2):
            for each in (reference, model):
                each.zero_grad()
            ((reference(x, choices) + reference(x, (0, 0, 0))) / 2).backward()
            model(x, choices if rank else (0, 0, 0)).backward()
            assert_same_gradients(model, reference)


class _Keeps(nn.Module):
    """Keeps a view of its weight, with a history or without."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.up, self.detach = nn.Linear(8, 8), detach
        self.turned: Tensor = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.up.weight.detach().t() if self.detach else self.up.weight.t()
        return x + self.up(x)


@on_ranks(2)
def test_kept_views_can_be_read() -> None:
    """After backward, under no_grad and detached: they have the values of their forward."""
    for detach in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(_Keeps(detach), nn.Linear(8, 8))
        before = [model[0].up.weight.detach().clone()]
        fully_shard(model, auto_wrap_policy={_Keeps})
        for _ in range(3):
            with warnings.catch_warnings(record=True):
                model(torch.ones(2, 8)).sum().backward()
            with torch.no_grad():
                assert torch.equal(model[0].turned.t(), before[-1])
                for param in model.parameters():
                    param.add_(1.0)
            before.append(before[-1] + 1.0)
