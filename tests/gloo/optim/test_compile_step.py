"""`compile_step` trains as the loop that it stands for."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, Case, Inputs, mlp
from tiers import LATE
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import FullyShardedDataParallel, Wire, compile_step, fully_shard

from ..ranks import NIGHTLY, on_ranks
from ..training import assert_bitwise, build, local, mine, shard

STEPS = 50 if NIGHTLY else 10
CLIP = 0.5
CASE = MODELS["mlp"]
TWO = Case(lambda: mlp(2), CASE.batch, CASE.loss)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss of either model."""
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.mse_loss(output.to(target.dtype), target)  # torch 2.11 refuses a loss of two dtypes


def adamw(model: nn.Module, by_groups: bool = False) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if not by_groups:
        return torch.optim.AdamW(params, lr=0.01)
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))


SHARDINGS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "wire": {"wire": Wire(gather="fp8", reduce="bf16")},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}


def _sharded(case: Case, **sharding: Any) -> nn.Module:
    return fully_shard(build(case), **sharding)


class Loop:
    """The loop that `compile_step` stands for, written out, with stock functions."""

    def __init__(
        self, model: nn.Module, optimizer: Any, clip: float | None, accumulate: int, backend: str, scaler: Any = None
    ) -> None:
        self.model, self.clip, self.accumulate = model, clip, accumulate
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.run: Any = model if backend == "eager" else torch.compile(model, backend=backend)

    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        losses = []
        pairs = list(zip(inputs.chunk(self.accumulate), target.chunk(self.accumulate), strict=True))
        for position, (x, y) in enumerate(pairs):
            with nullcontext() if position == len(pairs) - 1 else self.model.no_sync():
                loss = loss_of(self.run(x), y)
                self.scaler.scale(loss / self.accumulate if self.accumulate > 1 else loss).backward()
            losses.append(loss.detach())
        for each in self.optimizers:
            self.scaler.unscale_(each)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for each in self.optimizers:
            self.scaler.step(each)
        self.scaler.update()
        for each in self.optimizers:
            each.zero_grad()
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def batch(case: Case, seed: int, accumulate: int = 1) -> Inputs:
    parts = [mine(case, 100 * seed + position) for position in range(accumulate)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def assert_equal_state(models: list[nn.Module], optimizers: list[Any], number: Any) -> None:
    """The optimizers, one or several of each model, have equal state, bit for bit."""
    several = [each if isinstance(each, list) else [each] for each in optimizers]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        states = [next((one.state[param] for one in some if param in one.state), {})
                  for some, param in zip(several, (a, b), strict=True)]  # fmt: skip
        assert states[0].keys() == states[1].keys()
        for kind, value in states[0].items():
            assert torch.equal(local(value), local(states[1][kind])), f"{kind} after step {number}"


class Both:
    """Two equal models: `step` trains one, and the `loop` that it stands for the other.

    Args:
        make: returns the optimizer of a model, or several.
        how: the backend of both; "eager": the step is compiled by `aot_eager`, block by block.
        options: of `compile_step`.
    """

    def __init__(
        self,
        case: Case = TWO,
        make: Callable[[nn.Module], Any] = adamw,
        how: str = "aot_eager",
        build: Callable[[Case], nn.Module] = shard,
        **options: Any,
    ) -> None:
        self.case, self.models = case, [build(case) for _ in range(2)]
        self.optimizers = [make(model) for model in self.models]
        self.clip, self.accumulate = options.get("clip_norm"), options.get("accumulate", 1)
        self.scaler = copy.deepcopy(options.get("scaler"))  # of the loop
        self.step = compile_step(self.models[0], self.optimizers[0], loss_of, **{"backend": how, **options})
        self.loop = self.loop_of(1, how)

    def loop_of(self, index: int, how: str) -> Loop:
        """The loop of one of the models."""
        return Loop(self.models[index], self.optimizers[index], self.clip, self.accumulate, how, self.scaler)

    def train(self, number: int, run: Any = None) -> tuple[Tensor, Tensor]:
        """One step of both, the first one's by `run`; None: `step`. Returns both losses."""
        inputs, target = batch(self.case, number, self.accumulate)
        return (run or self.step)(inputs, target=target), self.loop(inputs, target)

    def compare(self, number: int, run: Any = None, what: str = "") -> None:
        """One step of both, which are equal bit for bit behind it."""
        assert torch.equal(*self.train(number, run)), f"{what} loss of step {number}"
        self.assert_equal(f"{number} {what}")

    def assert_equal(self, number: Any) -> None:
        assert_bitwise(*self.models, f"step {number}")
        assert_equal_state(self.models, self.optimizers, number)

    def difference(self) -> float:
        """The largest one of a parameter, relative to its largest element."""
        pairs = [(local(a), local(b)) for a, b in zip(*(model.parameters() for model in self.models), strict=True)]
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs if a.numel())


# --- as the stock loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [slice(2), pytest.param(slice(2, 4), marks=LATE)])
@on_ranks(2)
def test_regional(which: slice) -> None:
    """Block by block a step is that of the eager loop, bit for bit, under all strategies; it is compiled once."""
    accumulating: dict[str, Any] = {"clip_norm": CLIP, "accumulate": 2}
    scaling = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("mlp", SHARDINGS["bf16"], accumulating),
        ("tied", SHARDINGS["SHARD_GRAD_OP"], {"clip_norm": CLIP, **scaling}),
        ("frozen", SHARDINGS["NO_SHARD"], {}),
        ("mlp", {}, {"update_in_backward": True}),
    ]
    for name, sharding, options in cases[which]:
        torch._dynamo.reset()
        both = Both(MODELS[name], build=partial(_sharded, **sharding), regional=True, **options)
        both.loop = both.loop_of(1, "eager")
        for number in range(4):
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                both.compare(number)


STEP = ("step",)
INTERRUPTED = ("step", "step", "eager", "step", "aot_eager")


@pytest.mark.parametrize(
    ("name", "backend", "by_groups", "how", "accumulate"),
    [
        ("two", "aot_eager", True, INTERRUPTED, 2),
        pytest.param("gpt", "aot_eager", True, STEP, 2, marks=LATE),
        pytest.param("tied", "aot_eager", False, ("step", "eager"), 2, marks=LATE),
        pytest.param("frozen", "aot_eager", False, ("step", "aot_eager"), 2, marks=LATE),
        *(pytest.param("mlp", "inductor", by_groups, STEP, 2, marks=LATE) for by_groups in (False, True)),
    ],
)
@on_ranks(2)
def test_as_the_stock_loop(name: str, backend: str, by_groups: bool, how: tuple[str, ...], accumulate: int) -> None:
    """Steps of AdamW with clipping, a schedule and accumulation are those of the stock loop, bit for bit, also
    where eager and compiled steps of the loop come in between; nothing is compiled again.

    With Inductor, which fuses the update, parameters differ from the eager loop's by less than 1e-6.
    """
    case = {**MODELS, "two": TWO}[name]
    both = Both(case, partial(adamw, by_groups=by_groups), backend, clip_norm=CLIP, accumulate=accumulate)
    both.loop = both.loop_of(1, "eager" if backend == "inductor" else backend)
    runs = {each: both.loop_of(0, each) for each in set(how) - {"step"}}
    schedules = [schedule_of(optimizer) for optimizer in both.optimizers]
    update, updates = both.step._update, []
    begin = update.begin
    update.begin = lambda *given, **named: (  # type: ignore[method-assign]  # to count
        begin(*given, **named) or updates.append(len(update.ready[both.optimizers[0]]))
    )
    worst = 0.0
    for number in range(STEPS):
        run = runs.get(how[number % len(how)])
        # The state that the first step makes, and the accumulated gradients of its second half, are new.
        with torch._dynamo.config.patch(error_on_recompile=number > max(2, len(how))):
            (both.compare if backend == "aot_eager" else both.train)(number, run)
        for schedule in schedules:
            schedule.step()
        assert all(param.grad is None for param in both.models[0].parameters())
        worst = max(worst, both.difference())
    assert all(updates)
    assert worst <= (1e-6 if backend == "inductor" else 0.0), worst


# --- what a step is not alone with ------------------------------------------------------------------------------------


@on_ranks(2)
def test_between_steps() -> None:
    """Evaluation, accumulation by the user and edits of parameters between steps do what they do in the loop.

    Backward of a forward from before a step raises, as without sharding.
    """
    both = Both(CASE, clip_norm=CLIP)
    for number in range(6):
        both.compare(number)
        inputs, target = batch(CASE, number)
        if number == 1:  # evaluation, eager and compiled
            for run in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
                with torch.no_grad():
                    outputs = [run(model.eval())(inputs) for model in both.models]
                assert torch.equal(*outputs)
            for model in both.models:
                model.train()
        if number == 2:  # accumulation by the user, whose gradients count in the next step
            for model in both.models:
                with model.no_sync():
                    loss_of(model(inputs), target).backward()
        if number == 3:  # an edit of parameters
            with torch.no_grad():
                for param in (param for model in both.models for param in model.parameters()):
                    param.mul_(0.9)
    with both.models[0].no_sync(), pytest.raises(RuntimeError, match="are not synchronized"):
        both.step(inputs, target=target)
    both.compare(5)
    loss = loss_of(both.models[0](inputs), target)
    both.step(inputs, target=target)
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        loss.backward()


@on_ranks(2)
def test_scaler(rank: int) -> None:
    """A GradScaler scales, skips a step whose gradients are infinite on one rank, and goes on, as in the loop."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    both = Both(clip_norm=CLIP, scaler=scaler)
    for number in range(6):
        inputs, target = batch(CASE, number)
        if number == 2 and rank == 1:
            inputs = inputs * torch.inf
        for run in (both.step, both.loop):
            run(inputs, target=target)
        assert scaler.get_scale() == both.loop.scaler.get_scale()
        both.assert_equal(number)
    assert scaler.get_scale() == 2.0**10  # halved once, doubled once


class _NotANorm:
    """What clipping raises a TypeError about."""


def _raise(_: Tensor) -> None:
    raise ValueError("backward fails")


@on_ranks(2)
def test_failures() -> None:
    """A step that fails in the loss, in backward or in clipping changes nothing; the next one is that of the loop."""
    both = Both(clip_norm=CLIP, accumulate=2)
    step, calls = both.step, 0

    def failing(where: str) -> Any:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 2 and where == "loss":
                raise ValueError("the loss fails")
            loss = loss_of(output, target)
            if calls == 2 and where == "backward":
                loss.register_hook(_raise)
            return loss

        return loss_fn

    for number, where in enumerate(["", "loss", "", "backward", "", "update", ""]):
        calls, norm = 0, _NotANorm() if where == "update" else CLIP
        step._loss_fn, step._clip_norm = failing(where), norm  # type: ignore[assignment]  # wrong
        if not where:
            both.compare(number)
            continue
        inputs, target = batch(CASE, number, 2)
        before = [local(param).clone() for param in both.models[0].parameters()]
        with pytest.raises((ValueError, TypeError)):
            step(inputs, target=target)
        for param, value in zip(both.models[0].parameters(), before, strict=True):
            assert torch.equal(local(param), value) and param.grad is None
    with pytest.raises(
        ValueError, match=r"accumulate: a tensor of shape \(5, 7\) cannot be divided into 2 equal parts"
    ):
        step(inputs[:5], target=target[:5])
    both.compare(6)


FUSED: dict[str, Any] = {
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "plain_sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, **how),
    "adam": lambda params, **how: torch.optim.Adam(params, lr=0.01, amsgrad=True, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.01, **how),
    "adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.1, **how),
    # Those that torch does not fuse, and one that is not elementwise.
    "nadam": lambda params, **how: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params, **how: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adafactor": lambda params, **how: torch.optim.Adafactor(params, lr=0.01),
}
SCALER = torch.amp.GradScaler("cpu", init_scale=2.0**10)
WAYS: dict[str, dict[str, Any]] = {
    "accumulated and scaled": {"accumulate": 2, "scaler": SCALER}, "in backward": {"update_in_backward": True},
    "clipped too": {"clip_norm": 0.1, "accumulate": 2, "scaler": SCALER},
}  # fmt: skip


def _in_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:], "weight_decay": 0.0}]


def _fused(kinds: list[str], *ways: str) -> None:
    for kind, way in itertools.product(kinds, ways):
        if (kind, way) == ("adafactor", "in backward"):  # which is refused
            continue
        hows, options = iter(({}, {"fused": True})), copy.deepcopy(WAYS[way])

        def make(model: nn.Module, kind: str = kind, hows: Any = hows) -> torch.optim.Optimizer:
            model.blocks[1].up.bias.requires_grad_(kind != "adam")  # type: ignore[union-attr, operator]  # a module
            optimizer: torch.optim.Optimizer = FUSED[kind](_in_groups(model), **next(hows))
            return optimizer

        both = Both(TWO, make, "eager", _compiled, **options, backend="fsdp_compile")
        schedules = [schedule_of(optimizer) for optimizer in both.optimizers]
        for number in range(5):
            if number == 3 and kind == "sgd":  # what no forward uses gets no gradient
                for model in both.models:
                    model.blocks[0] = nn.Identity()  # type: ignore[operator]  # a list of modules
            if "clip_norm" not in options:
                both.compare(number, what=f"{kind}, {way}")
            else:
                both.train(number)
                for a, b in zip(*(model.parameters() for model in both.models), strict=True):
                    torch.testing.assert_close(local(a), local(b), rtol=1e-5, atol=1e-6)
            for schedule in schedules:
                schedule.step()


def _compiled(case: Case) -> Any:
    return torch.compile(shard(case), backend="eager")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_fused_kernels(way: str) -> None:
    """Where Inductor is the backend, the update is that of torch's fused kernels, bit for bit, with groups that decay
    otherwise, frozen parameters, a schedule, and units without a gradient; with a clip factor up to rounding."""
    _fused(list(FUSED) if NIGHTLY else ["sgd", "adam", *["nadam", "adafactor"] * (way == "clipped too")], way)


@on_ranks(2)
def test_a_clip_factor_in_float64() -> None:
    """It is not rounded, as by fused kernels, which take it in float32."""
    double = Case(lambda: mlp(2).double(), lambda *at: tuple(each.double() for each in CASE.batch(*at)), CASE.loss)
    both = Both(double, how="eager", build=_compiled, clip_norm=0.1, backend="fsdp_compile")
    for number in range(3):
        both.train(number)
        assert both.difference() < 1e-12


@on_ranks(2)
def test_refused() -> None:
    """What cannot be a step is refused by the name of the argument."""
    plain, model = nn.Linear(3, 3), fully_shard(CASE.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model: expected a model sharded by fully_shard, .* found Linear"):
        compile_step(plain, optimizer)
    with pytest.raises(TypeError, match="not a module inside one, found FSDPResidual"):
        compile_step(model.blocks[0], optimizer)
    with pytest.raises(ValueError, match="clip_norm: expected a number above 0, or None, found 0"):
        compile_step(model, optimizer, clip_norm=0.0)
    with pytest.raises(ValueError, match="accumulate: expected a number of micro-batches, at least 1, found 0"):
        compile_step(model, optimizer, accumulate=0)


@pytest.mark.parametrize("names", [["wire"], pytest.param(list(SHARDINGS), marks=LATE)])
@on_ranks(2)
def test_other_shardings(names: list[str]) -> None:
    """Other strategies, precisions, formats and devices: what cannot be updated as a whole is as in the loop.

    test_regional has NO_SHARD and bf16 every day, and test_update_in_backward has replicas.
    """
    for name in names:
        sharding = FullyShardedDataParallel if name == "SHARD_GRAD_OP" else fully_shard
        made: list[Any] = [sharding(build(CASE), **SHARDINGS[name]) for _ in range(2)]
        both = Both(CASE, build=lambda case, made=made: made.pop(), clip_norm=CLIP, accumulate=2)
        for number in range(3):
            both.compare(number, what=name)
