"""Every feature, eager and compiled: what docs/features.md says. `make features` writes its table from what this found.

Each run takes 3 steps. Of every nine rows three compile one thing by aot_eager: the model, a module around it, and a
function around it. With `FSDP_COMPILE_TESTS=nightly` each run takes 50 steps, and every row compiles all three and runs
Inductor, whose values by day tests of regional compilation, links, whole steps and traps look at.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from features import ROWS, Row
from models import Inputs, part
from torch import Tensor, nn

from fsdp_compile.core.unit import unit_of

from .emulation import Emulation, loss_of, windows_of
from .ranks import NIGHTLY, Ranks
from .training import OPTIMIZERS, build, local, stored_here

RESULTS = Path(__file__).parents[1] / "feature_results.json"
STEPS = 50 if NIGHTLY else 3
COMPARED = min(STEPS, 4)  # steps whose gradients are compared: later ones start from parameters that rounding has moved
CURVE = 1e-3  # relative, on every loss of every step
BY_NAME = {row.name: row for row in ROWS}


class Step(NamedTuple):
    """What one step of one executor left on this rank."""

    losses: list[Tensor]
    grads: list[Tensor]  # of the parameters that have one
    params: list[Tensor]


class Found(NamedTuple):
    """How executors compare on this rank."""

    eager: float  # largest relative difference from the emulating process
    equal: dict[str, bool]  # whether what was compiled by aot_eager has eager's losses, gradients and parameters
    inductor: float | None  # largest relative difference from eager; None if it was not run
    curve: float  # largest relative difference of a loss from eager's


def _batches(row: Row, step: int) -> list[Inputs]:
    size = row.sizes[step % len(row.sizes)] * dist.get_world_size()
    return [row.case.batch(100 * step + index, size) for index in range(len(row.syncs))]


# --- training ---------------------------------------------------------------------------------------------------------


def _shard(row: Row) -> nn.Module:
    return row.shard(build(row.case), **({"mixed_precision": row.precision} if row.precision else {}))


def _train(row: Row, how: str, caller: str = "") -> list[Step]:
    """Train the sharded model, with a caller compile that; from the second step on nothing is compiled again.

    With batches of changing size nothing ever is.
    """
    torch._dynamo.reset()
    model = _shard(row)
    dynamic = True if len(row.sizes) > 1 else None
    run = model if how == "eager" else _compile(row, model, caller, backend=how, fullgraph=True, dynamic=dynamic)
    optimizers, steps = _optimizers(row, model), list[Step]()
    for step in range(STEPS):
        executor = model if row.switches and step % 2 else run
        with torch._dynamo.config.patch(error_on_recompile=step > 0 or dynamic is True):
            losses = []
            for batch, syncs in zip(_batches(row, step), row.syncs, strict=True):
                if False in row.syncs:
                    model.set_requires_gradient_sync(syncs)
                losses.append(_backward(row, executor, batch))
            _average_ignored(model)
            if row.clip is not None:
                losses.append(model.clip_grad_norm_(row.clip))
            grads = [local(param.grad).clone() for param in model.parameters() if param.grad is not None]
            _update(optimizers)
            if row.replaces:
                _replace(model)
            if row.evaluates:
                losses.append(_evaluate(row, executor, model, step))
        steps.append(Step(losses, grads, [local(param.detach()).clone() for param in model.parameters()]))
    return steps


def _optimizers(row: Row, model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if row.muon and param.dim() == 2]
    rest = [param for param in model.parameters() if not row.muon or param.dim() != 2]
    muon = [torch.optim.Muon(matrices, lr=0.01)] if matrices else []
    return [*muon, OPTIMIZERS["momentum"](rest)]


def _update(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class _Caller(nn.Module):
    """A module of the user's around the sharded model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


CALLERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "module": _Caller,
    "function": lambda model: lambda *args, **kwargs: model(*args, **kwargs),
}


COMPILED = {"": "aot_eager", "module": "called", "function": "called"}  # the model or its caller: column of the table


def _compiled_for(name: str) -> list[str]:
    """What is compiled by aot_eager for a row."""
    what, number = list(COMPILED), list(BY_NAME).index(name)
    if NIGHTLY:
        return what
    return [what[number % len(what)]] if number // len(what) % 3 == 0 else []


def _compile(row: Row, model: nn.Module, caller: str, **options: Any) -> Any:
    if caller:
        return torch.compile(CALLERS[caller](model), **options)
    if not row.regions:
        return torch.compile(model, **options)
    for block in model.blocks:
        block.compile(**options)
    return model


def _replace(model: nn.Module) -> None:
    """Give every parameter new data."""
    for param in model.parameters():
        param.data = 0.9 * param.data


def _backward(row: Row, run: nn.Module, batch: Inputs) -> Tensor:
    loss = loss_of(row.case, run, part(batch, dist.get_rank(), dist.get_world_size()))
    loss.backward()
    return loss.detach()


def _average_ignored(model: nn.Module) -> None:
    """Parameters that `fully_shard` was told to leave alone are the script's to average."""
    for param in model.parameters():
        if unit_of(param) is None and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _evaluate(row: Row, run: nn.Module, model: nn.Module, step: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss = loss_of(row.case, run, row.case.batch(1000 + step, 4))
    model.train()
    return loss


def _emulate(row: Row, like: nn.Module) -> list[Step]:
    """The same steps in one unsharded process; of gradients and parameters what this rank stores of `like`."""
    emulation = Emulation(row.case, row.precision, dist.get_world_size())
    reference, steps = emulation.model, list[Step]()
    optimizers = _optimizers(row, reference)
    for step in range(COMPARED):
        emulation.backward(windows_of(_batches(row, step), list(row.syncs)))
        if row.clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), row.clip)
        grads = [_here(mine, p.grad) for mine, p in _pairs(like, reference) if p.grad is not None]
        _update(optimizers)
        if row.replaces:
            _replace(reference)
        params = [_here(mine, p.detach()) for mine, p in _pairs(like, reference)]
        steps.append(Step([], [g for g in grads if g is not None], [mine for mine in params if mine is not None]))
    return steps


def _pairs(like: nn.Module, reference: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(like.parameters(), reference.parameters(), strict=True))


def _here(mine: nn.Parameter, full: Tensor) -> Tensor | None:
    here = full if unit_of(mine) is None else stored_here(mine, full)
    return None if here is None else here.clone()  # the next step changes it


# --- comparing --------------------------------------------------------------------------------------------------------


def _apart(found: list[Step], expected: list[Step]) -> float:
    """Largest relative difference of a step's gradients, or of its parameters, all taken as one vector."""
    pairs = zip(found, expected, strict=True)
    return max(max(_relative(a.grads, b.grads), _relative(a.params, b.params)) for a, b in pairs)


def _relative(found: list[Tensor], expected: list[Tensor]) -> float:
    one, other = (torch.cat([x.flatten().double().cpu() for x in each if x.numel()]) for each in (found, expected))
    assert one.shape == other.shape, f"expected {other.numel()} elements, found {one.numel()}"
    return ((one - other).norm() / other.norm()).item()


def _curves_apart(found: list[Step], expected: list[Step]) -> float:
    one, other = ([loss for step in each for loss in step.losses] for each in (found, expected))
    return max(abs(a / b - 1).item() for a, b in zip(one, other, strict=True))


def _equal(found: list[Step], expected: list[Step]) -> bool:
    one, other = ([x for step in each for kind in step for x in kind] for each in (found, expected))
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _compare(rank: int, name: str) -> Found:
    row = BY_NAME[name]
    emulated, eager = _emulate(row, _shard(row)), _train(row, "eager")
    accurate = _apart(eager[:COMPARED], emulated)
    equal: dict[str, bool] = {}
    for what in _compiled_for(name):
        how = COMPILED[what]
        equal[how] = equal.get(how, True) and _equal(_train(row, "aot_eager", what), eager)
    if not NIGHTLY:
        return Found(accurate, equal, None, 0.0)
    inductor = _train(row, "inductor")
    apart, curve = _apart(inductor[:COMPARED], eager[:COMPARED]), _curves_apart(inductor, eager)
    return Found(accurate, equal, apart, curve)


def _write(row: Row, green: dict[str, bool]) -> None:
    """Note what held, in the order of the rows; a tolerance says what was asked for. What was not run stays."""
    asked = {"eager": row.apart, "aot_eager": 0.0, "called": 0.0, "inductor": row.tolerance}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = results.get(row.name, {}) | {how: asked[how] if held else None for how, held in green.items()}
    results[row.name] = {how: found.get(how) for how in asked}
    text = json.dumps({name: results[name] for name in BY_NAME if name in results}, indent=1) + "\n"
    if not RESULTS.exists() or RESULTS.read_text() != text:
        RESULTS.write_text(text)


@pytest.mark.parametrize("name", BY_NAME)
def test_row(request: pytest.FixtureRequest, name: str) -> None:
    """Eager trains as one process that plays all ranks and aot_eager as eager, bit for bit, Inductor within rounding.

    Compiled as one full graph, once; also as a part of a module or a function of the user's (E-GEN-8).
    Nothing needs an accelerator.

    E-TEST-2, E-ERR-1, E-ERR-56, E-GRAD-3, E-INIT-3, E-LIM-17.
    """
    row = BY_NAME[name]
    ranks: Ranks = request.getfixturevalue({2: "two", 4: "four"}[row.ranks])
    green = dict.fromkeys(["eager", *(COMPILED[what] for what in _compiled_for(name))], False)
    if NIGHTLY:
        green["inductor"] = False
    try:
        found = ranks.run(_compare, name)
        for rank, each in enumerate(found):
            print(f"{name} rank {rank}: {each}")
        green["eager"] = all(each.eager <= row.apart for each in found)
        for how in green.keys() & found[0].equal.keys():
            green[how] = all(each.equal[how] for each in found)
        if NIGHTLY:
            green["inductor"] = all(each.inductor <= row.tolerance and each.curve <= CURVE for each in found)
    finally:
        _write(row, green)
    assert all(green.values()), green
