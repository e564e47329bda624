"""Parameters that code of a step changes: the values of one process, or an error, compiled as well as eager."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from ..ranks import NIGHTLY, Ranks, on_ranks

Edit = Callable[[Any], Any]


def _without_gradients(edits: dict[str, Edit]) -> dict[str, Edit]:
    def changing(edit: Edit) -> Edit:
        def change(model: Any) -> None:
            with torch.no_grad():
                edit(model)

        return change

    return {name: changing(edit) for name, edit in edits.items()}


def _average(model: Any) -> None:
    for mine, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        mine.lerp_(other, 0.1)


def _write_local(model: Any) -> None:
    weight = model.teacher.weight
    (weight.to_local() if hasattr(weight, "to_local") else weight).mul_(0.9)


def _behind_a_break(model: Any) -> None:
    weight, bias = model.teacher.weight, model.teacher.bias
    torch._dynamo.graph_break()
    with torch.no_grad():
        torch._foreach_mul_([weight, bias], 0.9)


def _data_behind_a_break(model: Any) -> None:
    row = model.teacher.weight[1]
    torch._dynamo.graph_break()
    row.data.mul_(0.9)


@torch.compiler.disable
def _scale(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


@torch.compiler.disable
def _set_scaled(weight: Tensor) -> None:
    weight.data = weight.data * 0.9


def _weight_of(model: Any) -> Any:
    return model.teacher.weight


EDITS: dict[str, Edit] = {
    **_without_gradients(
        {
            "lerp": lambda model: model.teacher.weight.lerp_(model.student.weight, 0.1),
            "multiply": lambda model: model.teacher.weight.mul_(0.9),
            "copy": lambda model: model.teacher.weight.copy_(model.student.weight),
            "foreach": lambda model: torch._foreach_mul_([model.teacher.weight, model.teacher.bias], 0.9),
            "clamp": lambda model: model.teacher.weight.clamp_(-0.1, 0.1),
            "out": lambda model: torch.mul(model.teacher.weight, 0.9, out=model.teacher.weight),
            "local": _write_local,
            "row": lambda model: model.teacher.weight.__setitem__(0, 0.5),
            "average": _average,
        }
    ),
    "data": lambda model: model.teacher.weight.data.mul_(0.9),
    "detached": lambda model: model.teacher.weight.detach().mul_(0.9),
    "new data": lambda model: setattr(model.teacher.weight, "data", model.teacher.weight.data * 0.9),
}
VIEWS = _without_gradients(
    {
        "fill row": lambda model: model.teacher.weight[:1].fill_(0.5),
        "half": lambda model: model.teacher.weight.chunk(2)[1].mul_(0.9),
        "transposed": lambda model: model.teacher.weight.t().add_(model.student.weight.t(), alpha=0.1),
    }
)
# Where compiled code reads a parameter and hands it to eager code.
HANDED_OVER: dict[str, Edit] = {
    "behind a break": _behind_a_break,
    "data behind a break": _data_behind_a_break,
    "untraced": lambda model: _scale(model.teacher.weight),
    "data untraced": lambda model: _set_scaled(model.teacher.weight),
    "from a traced function": torch.compiler.disable(lambda model: _scale(_weight_of(model)), recursive=False),
}
ALL = {**EDITS, **VIEWS, **HANDED_OVER}


class _Edited(nn.Module):
    """Changes its teacher, then runs it; or the other way round."""

    def __init__(self, edit: Edit, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)
        self.edit, self.first = edit, first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.edit(self)
        y = self.teacher(x) + self.student(x)
        if not self.first:
            self.edit(self)
        return y


def _steps(run: Callable[[Tensor], Tensor], grad: bool) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    outputs = []
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            outputs.append(run(x))
        if outputs[-1].requires_grad:
            outputs[-1].sum().backward()
    return [output.detach() for output in outputs]


# What is called, whether with gradients, and whether the teacher is frozen.
CALLS = (
    ("module", True, False),
    ("module", True, True),
    ("module", False, False),
    ("function", True, False),
    ("function", False, False),
)


def _another_unit(rank: int, how: str, names: tuple[str, ...], strategy: ShardingStrategy, every: int) -> None:
    cases = list(product(names, (True, False), CALLS))
    for name, first, (caller, grad, frozen) in cases[::every]:  # each order and call is met, as no factor is in ten
        what, edit = f"{name}, first {first}, {caller}, grad {grad}, frozen {frozen}", ALL[name]
        whole, model = _Edited(edit, first), _Edited(edit, first)
        for each in (whole, model):
            each.teacher.requires_grad_(not frozen)
        fully_shard(model.teacher, sharding_strategy=strategy)
        fully_shard(model.student, sharding_strategy=strategy)
        if caller == "module":
            fully_shard(model, sharding_strategy=strategy)
        run: Any = model if caller == "module" else partial(_Edited.forward, model)
        torch._dynamo.reset()
        try:
            found = _steps(run if how == "eager" else torch.compile(run, backend=how), grad)
        except Exception as error:
            # By us, or by autograd of what a graph of Inductor has saved.
            too_early = re.search("between forward and backward|inplace operation", str(error)) and grad and not first
            assert too_early, f"{what}: {error}"
            continue
        for mine, expected in zip(found, _steps(whole, grad), strict=True):
            torch.testing.assert_close(mine, expected, msg=what)


@pytest.mark.parametrize(
    ("how", "names", "strategy", "every"),
    [
        ("eager", tuple(ALL), "FULL_SHARD", 7),
        ("aot_eager", ("lerp", "multiply", "fill row"), "FULL_SHARD", 22),
        ("aot_eager", tuple(HANDED_OVER), "FULL_SHARD", 20),  # of every other one the call of a module that trains
        ("aot_eager", (*EDITS, *HANDED_OVER), "NO_SHARD", 27),
    ],
)
def test_of_another_unit(two: Ranks, how: str, names: tuple[str, ...], strategy: str, every: int) -> None:
    """A forward that changes parameters of another unit, before or after that one's forward, has one process's values,
    whatever operator it uses and wherever the graph breaks; or says that backward needs the old values."""
    two.run(_another_unit, how, names, ShardingStrategy[strategy], every)


@on_ranks(2)
def test_a_view_in_one_graph() -> None:
    """Dynamo says what it cannot trace where a graph may not break at a view of a parameter of another unit."""
    for edit in VIEWS.values():
        torch._dynamo.reset()
        model = _Edited(edit, first=True)
        fully_shard(model.teacher)
        fully_shard(model.student)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a view of a sharded parameter"):
            torch.compile(partial(_Edited.forward, model), backend="eager", fullgraph=True)(torch.ones(3, 4))


class _Region(nn.Module):
    """Runs a module in a checkpointed region."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@on_ranks(2)
def test_in_a_checkpointed_region() -> None:
    """So do changes in a checkpointed region of a compiled forward, which is a graph within its graph; NO_SHARD too."""
    x = torch.linspace(-1, 1, 12).view(3, 4)
    places = ((True, "FULL_SHARD"), (True, "NO_SHARD"), (False, "NO_SHARD"))
    cases = list(product(("data", "detached", "multiply"), places))
    for name, (in_region, strategy) in cases if NIGHTLY else cases[::4]:  # by day each edit and each place is met once
        torch._dynamo.reset()
        edited = [_Edited(EDITS[name], True) for _ in range(2)]
        whole, model = map(_Region, edited) if in_region else edited
        for each in (m for m in [*model.modules()][::-1] if isinstance(m, nn.Linear) or m is model):
            fully_shard(each, sharding_strategy=ShardingStrategy[strategy])
        run = torch.compile(model, backend="aot_eager")
        for _ in range(2):  # without backward, which would run the edit again
            torch.testing.assert_close(run(x), whole(x), msg=name)
    coded = torch.compile(fully_shard(_Region(_Coded(OWN["multiply"]))), backend="aot_eager")
    with pytest.raises(Exception, match=REFUSED):
        coded(torch.ones(3, 4))


class _Replacing(_Edited):
    """Replaces a parameter of its teacher in the frame that calls it, and so in one graph with that call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.teacher.weight = nn.Parameter(torch.full((4, 4), 0.5))
        y = self.teacher(x) + self.student(x)
        if not self.first:
            self.teacher.weight = nn.Parameter(torch.full((4, 4), 0.5))
        return y


@on_ranks(2)
def test_replaced_where_it_is_called() -> None:
    """A new parameter in the place of one of another unit counts from that unit's next forward on."""
    ways = list(product(("eager", "aot_eager"), (True, False), (True, False)))
    for how, first, grad in (*ways[:4], *ways[4:7:2]):  # compiled with gradients: without, the graph is a part of it
        whole, model = (_Replacing(EDITS["lerp"], first) for _ in range(2))
        fully_shard(model.teacher)
        fully_shard(model.student)
        torch._dynamo.reset()
        found = _steps(model if how == "eager" else torch.compile(model, backend=how), grad)
        for mine, expected in zip(found, _steps(whole, grad), strict=True):
            torch.testing.assert_close(mine, expected, msg=f"{how}, first {first}, grad {grad}")


@pytest.mark.nightly
@pytest.mark.parametrize("how, every", [("eager", 1), ("aot_eager", 3), ("inductor", 17)])
@pytest.mark.parametrize("strategy", [ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")])
def test_of_another_unit_in_each_call(two: Ranks, how: str, every: int, strategy: ShardingStrategy) -> None:
    """The same with every edit: eager in every call, compiled in some of its calls, as each takes seconds."""
    two.run(_another_unit, how, tuple(ALL), strategy, every)


# --- a forward that changes its own unit's parameters -----------------------------------------------------------------


OWN: dict[str, Edit] = {
    **_without_gradients(
        {
            "listed": lambda model: [param.mul_(0.9) for param in model.parameters()],
            "multiply": lambda model: model.code.mul_(0.9),
            "copy": lambda model: model.code.copy_(model.code * 0.9),
            "row": lambda model: model.code.__setitem__(0, model.code[0] * 0.9),
            "foreach": lambda model: torch._foreach_mul_([model.code], 0.9),
        }
    ),
    "data": lambda model: model.code.data.mul_(0.9),
    "max_norm": lambda model: F.embedding(torch.arange(4), model.code, max_norm=0.5),  # as nn.Embedding changes it
    "new data": lambda model: setattr(model.code, "data", model.code.data * 0.9),
    "new parameter": lambda model: setattr(model, "code", nn.Parameter(model.code.detach() * 0.9)),
}


class _Coded(nn.Module):
    def __init__(self, edit: Edit) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.code, self.edit = nn.Parameter(torch.randn(4, 4)), edit

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self)
        return x @ self.code


REFUSED = "|".join(
    (
        "forward changed parameter code of its own unit",
        "view is the output of a function that returns multiple views",  # autograd's own, with the line of the model,
        "This view was created inside a custom Function",  # and in torch 2.14
    )
)


@pytest.mark.parametrize(
    ("how", "every"), [("eager", 1), ("aot_eager", 5), pytest.param("aot_eager", 1, marks=pytest.mark.nightly)]
)
@on_ranks(2)
def test_of_its_own_unit(how: str, every: int) -> None:
    """A forward that changes parameters of its own unit, which it reads as a gathered copy, raises on all ranks."""
    kept = {"data", "foreach", *(["new data"] if how == "eager" else [])}  # unseen by autograd: test_own_writes.py
    refused = [name for name in OWN if name not in kept]
    for name, grad in list(product(refused, (True, False)))[::every]:
        torch._dynamo.reset()
        model = fully_shard(_Coded(OWN[name]))
        run = model if how == "eager" else torch.compile(model, backend=how)
        with torch.set_grad_enabled(grad), pytest.raises(Exception, match=REFUSED):
            run(torch.ones(3, 4))
        model.edit = lambda _: None  # the model is usable afterwards
        code: Any = model.get_parameter("code").detach()
        expected = code.full_tensor() if hasattr(code, "full_tensor") else code  # a new parameter is the unit's now
        torch._dynamo.reset()
        run = model if how == "eager" else torch.compile(model, backend=how)
        torch.testing.assert_close(run(torch.ones(3, 4)), torch.ones(3, 4) @ expected, msg=name)


@compiled_late
@on_ranks(2)
def test_under_no_shard(how: str) -> None:
    """Under NO_SHARD such a forward has one process's values, or raises."""
    for name, grad in product(("multiply", "data", "copy", "new data"), (True, False)):
        torch._dynamo.reset()
        whole, model = _Coded(OWN[name]), _Coded(OWN[name])
        fully_shard(model, sharding_strategy=ShardingStrategy.NO_SHARD)
        run = model if how == "eager" else torch.compile(model, backend=how)
        try:
            found = _steps(run, grad)
        except Exception as error:
            assert re.search(REFUSED, str(error)), f"{name}: {error}"
            continue
        for mine, expected in zip(found, _steps(whole, grad), strict=True):
            torch.testing.assert_close(mine, expected, msg=name)


# --- between steps, where the call of the model is traced with its caller ---------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class _Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()


def _scaled_data(net: Any) -> None:
    for param in net.parameters():
        param.data = param.data * 2


CHANGES: dict[str, Edit] = {
    "new data": lambda net: setattr(net.first.weight, "data", torch.full((4, 4), 0.3)),
    "scaled data": _scaled_data,
    "new parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.full((4, 4), 0.3))),
    "thaw module": lambda net: net.requires_grad_(True),
    "thaw weight": lambda net: setattr(net.first.weight, "requires_grad", True),
    "freeze": lambda net: net.last.requires_grad_(False),
}


def _train(run: Callable[[Tensor], Tensor], net: nn.Module, change: Edit, grad: bool) -> list[Tensor]:
    losses = []
    for step in range(5):
        if step in (2, 4):
            change(net)
        with torch.set_grad_enabled(grad):
            losses.append(run(torch.linspace(-1, step, 12).view(3, 4)))
        if grad:
            losses[-1].backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize(("how", "every"), [("aot_eager", 7), pytest.param("inductor", 1, marks=pytest.mark.nightly)])
@on_ranks(2)
def test_before_a_compiled_caller(how: str, every: int) -> None:
    """A compiled module or function that calls a sharded model sees data, parameters and `requires_grad` that were
    changed since the last step, with one graph (E-WB-1)."""
    rows = product(("FULL_SHARD", "NO_SHARD"), CHANGES, ("module", "function"), (True, False))
    for strategy, name, caller, grad in list(rows)[::every]:
        change = CHANGES[name]
        whole, net = _Net(), _Net()
        for each in (whole, net):
            each.first.requires_grad_("thaw" not in name)
        fully_shard(net.first, sharding_strategy=ShardingStrategy[strategy])
        fully_shard(net, sharding_strategy=ShardingStrategy[strategy])
        torch._dynamo.reset()
        run: Any = _Loss(net) if caller == "module" else partial(_Loss.forward, SimpleNamespace(net=net))
        found = _train(torch.compile(run, backend=how, fullgraph=True), net, change, grad)
        for step, pair in enumerate(zip(found, _train(_Loss(whole), whole, change, grad), strict=True)):
            torch.testing.assert_close(*pair, msg=f"{name}, {caller}, grad {grad}, step {step}")
