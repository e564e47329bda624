"""`compile_step` trains as the loop that it stands for."""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, Case, Inputs, Residual, Stack, mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import FullyShardedDataParallel, compile_step, fully_shard
from fsdp_compile.optim.joint import JointStep

from .ranks import NIGHTLY, Ranks, on_ranks
from .training import assert_bitwise, local, mine, shard

LATE = pytest.mark.nightly
STEPS = 50 if NIGHTLY else 15
CLIP = 0.5
CASE = MODELS["mlp"]
SMALL = Case(lambda: Stack([Residual(11, 23)], width=11), CASE.batch, CASE.loss)  # one unit
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


class Loop:
    """The loop that `compile_step` stands for, written out, with stock functions."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None, accumulate: int, backend: str
    ) -> None:
        self.model, self.optimizer, self.clip, self.accumulate = model, optimizer, clip, accumulate
        self.run: Any = model if backend == "eager" else torch.compile(model, backend=backend)

    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        losses = []
        pairs = list(zip(inputs.chunk(self.accumulate), target.chunk(self.accumulate), strict=True))
        for position, (x, y) in enumerate(pairs):
            with nullcontext() if position == len(pairs) - 1 else self.model.no_sync():
                loss = loss_of(self.run(x), y)
                (loss / self.accumulate if self.accumulate > 1 else loss).backward()
            losses.append(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def batch(case: Case, seed: int, accumulate: int = 1) -> Inputs:
    parts = [mine(case, 100 * seed + position) for position in range(accumulate)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


# --- as the stock loop ------------------------------------------------------------------------------------------------


@LATE  # test_other_shardings has mixed precision every day
@on_ranks(2)
def test_ten_lines(rank: int) -> None:
    """A training loop of ten lines, in mixed precision, trains, and takes the all-gathers that it prefetches."""
    torch.manual_seed(0)
    model = fully_shard(MODELS["mlp"].build(), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    step = compile_step(model, optimizer, loss_of, clip_norm=1.0, accumulate=2, backend="aot_eager")
    losses = []
    for _ in range(10):
        inputs, target = batch(MODELS["mlp"], rank, 2)
        losses.append(step(inputs, target=target).item())
        schedule.step()
    assert losses[-1] < 0.9 * losses[0]
    assert list(step._next_forward._gathered.values()) == [torch.bfloat16] * 2


@pytest.mark.parametrize("which", [slice(3), pytest.param(slice(3, 4), marks=LATE)])
@on_ranks(2)
def test_regional(which: slice) -> None:
    """Block by block a step is that of the eager loop, bit for bit, under all strategies; it is compiled once."""
    accumulating: dict[str, Any] = {"clip_norm": CLIP, "accumulate": 2}
    scaling = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("mlp", "FULL_SHARD", accumulating),
        ("tied", "SHARD_GRAD_OP", {"clip_norm": CLIP, **scaling}),
        ("frozen", "NO_SHARD", {}),
        ("mlp", "FULL_SHARD", {"update_in_backward": True}),
    ]
    for name, strategy, options in cases[which]:
        case, accumulate = MODELS[name], options.get("accumulate", 1)
        torch._dynamo.reset()
        models = [shard(case, strategy) for _ in range(2)]
        optimizers = [adamw(model) for model in models]
        step = compile_step(models[0], optimizers[0], loss_of, regional=True, backend="aot_eager", **options)
        loop = Loop(models[1], optimizers[1], options.get("clip_norm"), accumulate, "eager")
        for number in range(4):
            inputs, target = batch(case, number, accumulate)
            with torch._dynamo.config.patch(error_on_recompile=number > 1):
                assert torch.equal(step(inputs, target=target), loop(inputs, target)), (name, number)
            assert_bitwise(*models, f"{name}, step {number}")
        _assert_equal_state(models, optimizers, number)


def _follow(
    rank: int, name: str, backend: str, steps: int, by_groups: bool, how: tuple[str, ...], accumulate: int = 2
) -> float:
    """Train one model by `compile_step`, in the steps that `how` says so, another by the loop; the largest difference.

    In other steps the first one is trained by the loop too, eager or compiled.
    """
    case = {**MODELS, "small": SMALL, "two": TWO}[name]
    models = [shard(case) for _ in range(2)]
    optimizers = [adamw(model, by_groups) for model in models]
    schedules = [schedule_of(optimizer) for optimizer in optimizers]
    step = compile_step(models[0], optimizers[0], loss_of, CLIP, accumulate, backend=backend)
    own = {each: Loop(models[0], optimizers[0], CLIP, accumulate, each) for each in set(how) - {"step"}}
    loop = Loop(models[1], optimizers[1], CLIP, accumulate, "eager" if backend == "inductor" else backend)
    updates, begin = [], step._update.begin
    step._update.begin = lambda *given, **named: (
        begin(*given, **named) or updates.append(len(step._update.ready[optimizers[0]]))
    )
    worst = 0.0
    for number in range(steps):
        inputs, target = batch(case, number, accumulate)
        chosen = how[number % len(how)]
        # The state that the first step makes, and the accumulated gradients of its second half, are new.
        with torch._dynamo.config.patch(error_on_recompile=number > max(2, len(how))):
            losses = [step(inputs, target=target) if chosen == "step" else own[chosen](inputs, target)]
            losses.append(loop(inputs, target))
        for schedule in schedules:
            schedule.step()
        assert all(param.grad is None for param in models[0].parameters())
        if backend == "aot_eager":
            assert torch.equal(*losses), f"loss of step {number}"
            assert_bitwise(*models, f"step {number}")
            _assert_equal_state(models, optimizers, number)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            if local(a).numel():
                worst = max(worst, ((local(a) - local(b)).abs().max() / local(b).abs().max()).item())
    assert all(updates)
    return worst


def _assert_equal_state(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], number: int) -> None:
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, (a, b), strict=True)]
        assert states[0].keys() == states[1].keys()
        for kind, value in states[0].items():
            assert torch.equal(local(value), local(states[1][kind])), f"{kind} after step {number}"


@pytest.mark.parametrize(
    ("name", "by_groups", "how"),
    [
        pytest.param("mlp", False, ("step",), marks=LATE),
        ("two", True, ("step", "step", "eager", "step", "aot_eager")),
        pytest.param("mlp", True, ("step", "step", "eager", "step", "aot_eager"), marks=LATE),
        pytest.param("gpt", True, ("step",), marks=LATE),
        pytest.param("tied", False, ("step", "eager"), marks=LATE),
        pytest.param("frozen", False, ("step", "aot_eager"), marks=LATE),
    ],
)
def test_as_the_stock_loop(two: Ranks, name: str, by_groups: bool, how: tuple[str, ...]) -> None:
    """Steps of AdamW with clipping, a schedule and accumulation are those of the stock loop, bit for bit, also
    where eager and compiled steps of the loop come in between; nothing is compiled again."""
    assert two.run(_follow, name, "aot_eager", STEPS, by_groups, how) == [0.0, 0.0]


@LATE
@pytest.mark.parametrize("by_groups", [False, True])
def test_on_three_ranks(three: Ranks, by_groups: bool) -> None:
    """So they are on three ranks."""
    assert three.run(_follow, "gpt", "aot_eager", STEPS, by_groups, ("step", "step", "eager")) == [0.0] * 3


@pytest.mark.parametrize(
    ("name", "by_groups", "accumulate"),
    [("small", False, 1), pytest.param("mlp", False, 2, marks=LATE), pytest.param("mlp", True, 2, marks=LATE)],
)
def test_with_inductor(two: Ranks, name: str, by_groups: bool, accumulate: int) -> None:
    """With Inductor, which fuses the update, parameters differ from the eager loop's by less than 1e-6."""
    worst = two.run(_follow, name, "inductor", STEPS if NIGHTLY else 5, by_groups, ("step",), accumulate)
    print("largest relative difference of a parameter:", worst)
    assert max(worst) <= 1e-6


# --- what a step is not alone with ------------------------------------------------------------------------------------


def _pair(case: Case = TWO, **options: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer], Any, Loop]:
    """Two equal models; what steps the one, and the loop for the other."""
    models = [shard(case) for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    step = compile_step(models[0], optimizers[0], loss_of, CLIP, backend="aot_eager", **options)
    return models, optimizers, step, Loop(models[1], optimizers[1], CLIP, options.get("accumulate", 1), "aot_eager")


@on_ranks(2)
def test_between_steps() -> None:
    """Evaluation, accumulation by the user and edits of parameters between steps do what they do in the loop.

    Backward of a forward from before a step raises, as without sharding.
    """
    models, _, step, loop = _pair(CASE)
    for number in range(6):
        inputs, target = batch(CASE, number)
        assert torch.equal(step(inputs, target=target), loop(inputs, target))
        if number == 1:  # evaluation, eager and compiled
            for run in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
                with torch.no_grad():
                    outputs = [run(model.eval())(inputs) for model in models]
                assert torch.equal(*outputs)
            for model in models:
                model.train()
        if number == 2:  # accumulation by the user, whose gradients count in the next step
            for model in models:
                with model.no_sync():
                    loss_of(model(inputs), target).backward()
        if number == 3:  # an edit of parameters
            with torch.no_grad():
                for param in (param for model in models for param in model.parameters()):
                    param.mul_(0.9)
        assert_bitwise(*models, f"step {number}")
    with models[0].no_sync(), pytest.raises(RuntimeError, match="are not synchronized"):
        step(inputs, target=target)
    assert torch.equal(step(inputs, target=target), loop(inputs, target))
    loss = loss_of(models[0](inputs), target)
    step(inputs, target=target)
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        loss.backward()


@on_ranks(2)
def test_state_dicts() -> None:
    """State dicts of model and optimizer between steps are those of the loop, and a run that loads them goes on so."""
    models, optimizers, step, loop = _pair()
    for number in range(3):
        inputs, target = batch(CASE, number)
        step(inputs, target=target)
        loop(inputs, target)
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in zip(models, optimizers, strict=True)]
    for kind in (0, 1):
        flattened = [torch.utils._pytree.tree_leaves(state[kind]) for state in saved]
        for one, other in zip(*flattened, strict=True):
            same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
            assert same, (one, other)
    for number in range(3, 6):
        step(*batch(CASE, number)[:1], target=batch(CASE, number)[1])
    models[0].load_state_dict(saved[1][0])  # of the other model, which stands where the first one stood
    optimizers[0].load_state_dict(saved[1][1])
    for number in range(3, 6):
        inputs, target = batch(CASE, number)
        assert torch.equal(step(inputs, target=target), loop(inputs, target))
        assert_bitwise(*models, f"step {number}")
    _assert_equal_state(models, optimizers, 6)


@on_ranks(2)
def test_scaler(rank: int) -> None:
    """A GradScaler scales, skips a step whose gradients are infinite on one rank, and goes on, as in the loop."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    models, optimizers, step, loop = _pair(scaler=scalers[0])
    for number in range(6):
        inputs, target = batch(CASE, number)
        if number == 2 and rank == 1:
            inputs = inputs * torch.inf
        step(inputs, target=target)
        scalers[1].scale(loss_of(loop.run(inputs), target)).backward()
        scalers[1].unscale_(optimizers[1])
        nn.utils.clip_grad_norm_(models[1].parameters(), CLIP)
        scalers[1].step(optimizers[1])
        scalers[1].update()
        optimizers[1].zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_bitwise(*models, f"step {number}")
    assert scalers[0].get_scale() == 2.0**10  # halved once, doubled once


class _NotANorm:
    """What clipping raises a TypeError about."""


def _raise(_: Tensor) -> None:
    raise ValueError("backward fails")


@on_ranks(2)
def test_failures() -> None:
    """A step that fails in the loss, in backward or in clipping changes nothing; the next one is that of the loop."""
    models, _, step, loop = _pair(accumulate=2)
    calls = 0

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
        inputs, target = batch(CASE, number, 2)
        calls, step._options = 0, replace(step._options, loss_fn=failing(where), clip_norm=CLIP)
        before = [local(param).clone() for param in models[0].parameters()]
        if where:
            if where == "update":
                step._options = replace(step._options, clip_norm=_NotANorm())
            with pytest.raises((ValueError, TypeError)):
                step(inputs, target=target)
            for param, value in zip(models[0].parameters(), before, strict=True):
                assert torch.equal(local(param), value) and param.grad is None
            continue
        assert torch.equal(step(inputs, target=target), loop(inputs, target))
        assert_bitwise(*models, f"step {number}")
    with pytest.raises(
        ValueError, match=r"accumulate: a tensor of shape \(5, 7\) cannot be divided into 2 equal parts"
    ):
        step(inputs[:5], target=target[:5])
    assert torch.equal(step(inputs, target=target), loop(inputs, target))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True, maximize=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
BY_DAY = ["sgd", "adam", "rmsprop", "radam", "foreach", "adafactor"]  # test_flat_step.py has the others


@on_ranks(2)
def test_optimizers() -> None:
    """Elementwise optimizers do on segments, bit for bit, what they do by themselves; others step as they are."""
    for name in list(OPTIMIZERS) if NIGHTLY else BY_DAY:
        models = [shard(SMALL) for _ in range(2)]
        optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
        update = JointStep([optimizers[0]], fuses=False)
        for number in range(8):
            inputs, target = batch(CASE, number)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model(inputs), target).backward()
            if number == 4:
                next(models[0].parameters()).grad = next(models[1].parameters()).grad = None
            update.begin([])
            if number < 4:
                assert bool(update.ready.get(optimizers[0])) == (name != "adafactor"), (name, number)
            update.step_others()
            update.run()
            assert list(update.finish()) == []
            optimizers[1].step()
            for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert torch.equal(local(a), local(b)), (name, number)
            _assert_equal_state(models, optimizers, number)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] *= 0.9


FUSED: dict[str, Any] = {
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "plain_sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, **how),
    "adam": lambda params, **how: torch.optim.Adam(params, lr=0.01, amsgrad=True, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.01, **how),
    "adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.1, **how),
    "nadam": lambda params, **how: torch.optim.NAdam(params, lr=0.01),  # which torch does not fuse
}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {}, "clipped": {"clip_norm": 0.1}, "accumulated": {"accumulate": 2},
    "in backward": {"update_in_backward": True}, "scaled": {"scaler": True},
    "all": {"clip_norm": 0.1, "accumulate": 2, "scaler": True},
}  # fmt: skip


def _in_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:], "weight_decay": 0.0}]


def _fused(kinds: list[str], *ways: str) -> None:
    for kind, way in itertools.product(kinds, ways):
        options = dict(WAYS[way])
        models = [shard(TWO) for _ in range(2)]
        apart = [model.blocks[1].up.bias for model in models]
        for param in apart if kind == "adam" else ():
            param.requires_grad_(False)
        optimizers = [FUSED[kind](_in_groups(models[0])), FUSED[kind](_in_groups(models[1]), fused=True)]
        schedules = [schedule_of(optimizer) for optimizer in optimizers]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled="scaler" in options) for _ in range(2)]
        if "scaler" in options:
            options["scaler"] = scalers[0]
        step = compile_step(torch.compile(models[0], backend="eager"), optimizers[0], loss_of, **options)
        for number in range(5):
            if number == 3 and kind == "sgd":  # what no forward uses gets no gradient
                for model in models:
                    model.blocks[0] = nn.Identity()
            accumulate = options.get("accumulate", 1)
            inputs, target = batch(TWO, number, accumulate)
            step(inputs, target=target)
            pairs = list(zip(inputs.chunk(accumulate), target.chunk(accumulate), strict=True))
            for position, (x, y) in enumerate(pairs):
                with nullcontext() if position == len(pairs) - 1 else models[1].no_sync():
                    scalers[1].scale(loss_of(models[1](x), y) / accumulate).backward()
            scalers[1].unscale_(optimizers[1])
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(models[1].parameters(), options["clip_norm"])
            scalers[1].step(optimizers[1])
            scalers[1].update()
            optimizers[1].zero_grad()
            for schedule in schedules:
                schedule.step()
            exact = "clip_norm" not in options
            near = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(local(a), local(b), **near, msg=f"{kind}, {way}, {number}: {{}}".format)
            if exact:
                _assert_equal_state(models, optimizers, number)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_fused_kernels(way: str) -> None:
    """Where Inductor is the backend, the update is that of torch's fused kernels, bit for bit, with groups that decay
    otherwise, frozen parameters, a schedule, and units without a gradient; with a clip factor up to rounding."""
    _fused(list(FUSED) if NIGHTLY else ["sgd", "adam", "nadam"], way)


@LATE
@on_ranks(4)
def test_fused_kernels_on_four_ranks() -> None:
    """So it is on four ranks."""
    _fused(["sgd", "adamw"], "alone", "clipped", "in backward")


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


SHARDINGS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "two_stages": {"reshard_after_forward": 2},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)},
}


def _sharded(rank: int, names: list[str], backend: str) -> None:
    for name in names:
        options = dict(SHARDINGS[name])
        if "mesh" in options:
            options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicas", "shards"))
        build = FullyShardedDataParallel if name == "SHARD_GRAD_OP" else fully_shard
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(build(CASE.build(), **options))
        optimizers = [adamw(model) for model in models]
        step = compile_step(models[0], optimizers[0], loss_of, CLIP, accumulate=2, backend=backend)
        loop = Loop(models[1], optimizers[1], CLIP, 2, backend)
        for number in range(3):
            inputs, target = batch(CASE, number, 2)
            losses = step(inputs, target=target), loop(inputs, target)
            if backend == "aot_eager":
                assert torch.equal(*losses), (name, number)
                assert_bitwise(*models, f"{name}, step {number}")
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("names", [["bf16"], pytest.param(list(SHARDINGS)[:-2], marks=LATE)])
def test_other_shardings(two: Ranks, names: list[str]) -> None:
    """Other strategies, precisions and devices: what cannot be updated or prefetched as a whole is as in the loop.

    test_regional has NO_SHARD every day.
    """
    two.run(_sharded, names, "aot_eager")


@LATE
def test_other_shardings_with_inductor(two: Ranks) -> None:
    """So it is with Inductor."""
    two.run(_sharded, ["SHARD_GRAD_OP", "bf16"], "inductor")


@LATE
def test_groups_of_ranks(four: Ranks) -> None:
    """Two stages of gathers, and replicas."""
    four.run(_sharded, ["two_stages", "hybrid"], "aot_eager")
