"""Eager and `aot_eager` are one program: equal gradients and parameters, bit for bit, at every step."""

import pytest
from models import MODELS

from .ranks import Ranks
from .training import OPTIMIZERS, assert_bitwise, backward, executor, mine, shard

STEPS = 4
LATE = pytest.mark.nightly  # "tied" is "gpt" and more
Plan = tuple[str, ...]  # how to run each step


def _compare(rank: int, name: str, strategy: str, plans: tuple[Plan, Plan], to_none: bool) -> None:
    """Train two sharded models side by side, each run at each step as its plan says; compare at each step."""
    case = MODELS[name]
    models = [shard(case, strategy) for _ in plans]
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in models]
    runs = [{how: executor(model, how) for how in set(plan)} for model, plan in zip(models, plans, strict=True)]
    for step, hows in enumerate(zip(*plans, strict=True)):
        for run, how, optimizer in zip(runs, hows, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            backward(run[how], case, mine(case, step))
        assert_bitwise(*models, f"step {step}, gradients of {hows}")
        for optimizer in optimizers:
            optimizer.step()
        assert_bitwise(*models, f"step {step}, parameters of {hows}")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=LATE)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "tied" else LATE) for name in MODELS])
def test_aot_eager_equals_eager(two: Ranks, name: str, strategy: str) -> None:
    """A compiled model and an eager one stay equal through several steps, with gradients set to None in between.

    E-COMP-8.
    """
    two.run(_compare, name, strategy, (("eager",) * STEPS, ("aot_eager",) * STEPS), True)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=LATE), "frozen"])
def test_gradients_set_to_zero(two: Ranks, name: str) -> None:
    """So they do where `zero_grad` keeps the gradients and the next backward adds to them."""
    two.run(_compare, name, "FULL_SHARD", (("eager",) * STEPS, ("aot_eager",) * STEPS), False)


@pytest.mark.parametrize(
    ("name", "to_none"),
    [("tied", False), *(pytest.param(*late, marks=LATE) for late in (("tied", True), ("gpt", True)))],
)
def test_switching_in_mid_training(two: Ranks, name: str, to_none: bool) -> None:
    """A model that goes from eager to compiled and back trains as one that stays eager."""
    switching = ("eager", "eager", "aot_eager", "aot_eager", "eager", "aot_eager", "eager")
    two.run(_compare, name, "FULL_SHARD", (("eager",) * len(switching), switching), to_none)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATE) for name in MODELS])
def test_four_ranks(four: Ranks, name: str) -> None:
    """Four ranks, whose shards cut parameters in other places, agree as well."""
    four.run(_compare, name, "FULL_SHARD", (("eager",) * STEPS, ("aot_eager",) * STEPS), True)
