"""Whatever is raised within a step, and wherever, the next step is right, or says what to do."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from interruptions import Interruption, interrupted
from models import MLP
from torch import Tensor
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import fsdp_compile
from fsdp_compile.core.backward_pass import _running

from ..ranks import on_ranks
from ..training import OPTIMIZERS, backward, build, local, mine

BF16 = MixedPrecision(torch.bfloat16, torch.float32)


class Trained(NamedTuple):
    """A sharded model; `step(seed)` trains it, by the optimizer if there is one."""

    model: Any
    step: Callable[[int], Any]
    optimizer: torch.optim.Optimizer | None = None

    def values(self) -> list[Tensor]:
        """What this rank has of parameters, gradients and state."""
        params = list(self.model.parameters())
        states = [] if self.optimizer is None else [self.optimizer.state[param] for param in params]
        others = [param.grad for param in params] + [value for state in states for value in state.values()]
        return [local(value).detach().clone() for value in [*params, *others] if value is not None]

    def save(self) -> Any:
        """All that `load` restores."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer and self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        """Go back to when it was saved."""
        self.model.zero_grad()
        if self.optimizer is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(saved[1]))


def _eager(**options: Any) -> Trained:
    model: Any = fsdp_compile.fully_shard(build(MLP), **options)
    return Trained(model, lambda seed: backward(model, MLP, mine(MLP, seed)))


def _accumulating() -> Trained:
    model, step, _ = _eager()

    def accumulate(seed: int) -> None:
        with model.no_sync():
            step(seed + 10)
        step(seed)

    return Trained(model, accumulate)


def _summoning() -> Trained:
    model, step, _ = _eager()

    def summon(seed: int) -> None:
        with fsdp_compile.summon_full_params(model, with_grads=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0)
        step(seed)

    return Trained(model, summon)


def _compiled() -> Trained:
    model = fsdp_compile.fully_shard(build(MLP))
    run: Any = torch.compile(model, backend="aot_eager")
    return Trained(model, lambda seed: backward(run, MLP, mine(MLP, seed)))


def _compiled_step(**options: Any) -> Trained:
    model = fsdp_compile.fully_shard(build(MLP))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = fsdp_compile.compile_step(model, optimizer, F.mse_loss, backend="aot_eager", **options)

    def train(seed: int) -> None:
        inputs, target = mine(MLP, seed)
        step(inputs, target=target)

    return Trained(model, train, optimizer)


TRAINED: dict[str, Callable[[], Trained]] = {
    "FULL_SHARD": _eager,
    "SHARD_GRAD_OP": partial(_eager, reshard_after_forward=False),
    "NO_SHARD": partial(_eager, sharding_strategy=ShardingStrategy.NO_SHARD),
    "prefetch": partial(_eager, forward_prefetch=True),
    "bf16": partial(_eager, mixed_precision=BF16),
    "accumulation": _accumulating,
    "summon": _summoning,
    "compiled": _compiled,
    "compile_step": _compiled_step,
    "compile_step, clipped, accumulated": partial(_compiled_step, clip_norm=0.1, accumulate=3),
    "compile_step, in backward": partial(_compiled_step, update_in_backward=True),
}


# Their compiled forwards and backwards are those of "compiled".
REPEATED = ("compile_step", "compile_step, clipped, accumulated", "compile_step, in backward")


def _values_after(trained: Trained, *seeds: int) -> list[Tensor]:
    for seed in seeds:
        trained.model.zero_grad()
        trained.step(seed)
    return trained.values()


def _interrupt_again_and_again(name: str, number: int, begin: Callable[[], Trained]) -> None:
    trained = begin()
    saved = trained.save()
    calls = interrupted(partial(trained.step, 1), at=-1)
    trained.load(saved)
    trained = begin()
    expected = _values_after(trained, 2)
    trained.load(saved)
    trained = begin()
    both = _values_after(trained, 1, 2)
    for at in random.Random(0).sample(range(1, calls + 1), min(number, calls)):
        trained.load(saved)
        trained = begin()
        clean = expected
        with suppress(Interruption, RuntimeError):
            interrupted(partial(trained.step, 1), at)
            clean = both  # what was raised did not come through
        try:
            found = _values_after(trained, 2)
        except RuntimeError as error:
            assert trained.optimizer and "load a checkpoint of model and optimizer" in str(error), (at, calls)
            continue
        assert not _running, f"{name}: a backward pass is left at call {at} of {calls}"
        assert len(found) == len(clean) and all(map(torch.equal, found, clean)), f"{name}: call {at} of {calls}"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(pytest.param(name, 8, marks=pytest.mark.nightly if name in REPEATED else ()) for name in TRAINED),
        *(pytest.param(name, 300, marks=pytest.mark.nightly) for name in TRAINED),
    ],
)
@on_ranks(2)
def test_the_step_after_an_interruption(name: str, number: int) -> None:
    """An exception at any call of the package in forward, backward, a summon or an update leaves a model whose next
    step is that of a clean one, bit for bit; or it raises and says that a checkpoint has to be loaded, which helps."""
    trained = TRAINED[name]()
    trained.step(0)
    _interrupt_again_and_again(name, number, lambda: trained)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "number"), [("compile_step", 100), ("compiled", 100)])
@on_ranks(2)
def test_the_step_after_an_interrupted_compilation(name: str, number: int) -> None:
    """An exception in the first step, which compiles, leaves a model whose next step is that of a clean one."""

    def begin() -> Trained:
        with suppress(AssertionError):  # torch counts compilations: not one whose last call-back was interrupted
            torch._dynamo.reset()
        return TRAINED[name]()

    _interrupt_again_and_again(name, number, begin)
