"""Gradients that are reduced in bfloat16, and in float8 with error feedback."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Case, mlp, seeded, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from fsdp_compile import Float8ErrorFeedback, float8_reduce_scatter, fully_shard
from fsdp_compile.comm import collectives
from fsdp_compile.comm.formats import encode, message_bytes

from .ranks import Ranks
from .test_compiled_accumulation import _Both
from .test_reduce import _two_by_two
from .training import backward, build, executor, local, mine, reference_and_model, shard, units, whole
from .wire import wire

SMALL = Case(lambda: mlp(2), vectors, squared_error)
no_recompile = torch._dynamo.config.patch(error_on_recompile=True)


def _use(rank: int) -> None:
    """What a user writes."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = seeded(rank)
    for _ in range(40):
        x = torch.randn(32, 8, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 1.5, loss  # it begins at 8


def test_use(two: Ranks) -> None:
    """A model learns; two objects are all that is needed."""
    two.run(_use)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _count(rank: int, how: str, choice: str) -> None:
    precision = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if choice == "bfloat16" else None
    model = fully_shard(build(SMALL), **({"mp_policy": precision} if precision else {}))
    if choice == "float8":
        model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)
    run, ranks = executor(model, how), dist.get_world_size()
    for seed in (0, 1):  # in the first two, ranks tell each other what they use
        backward(run, SMALL, mine(SMALL, seed))
    with wire() as sent:
        backward(run, SMALL, mine(SMALL, 2))
    reduces = sorted((each.kind, each.nbytes) for each in sent if each.kind != "gather")
    layouts = [flat.layout for unit in units(model) for flat in unit.flats]
    if choice == "float8":
        expected = [ranks * message_bytes(layout.shard_numel, "fp8") for layout in layouts]
        assert reduces == sorted(("all_to_all", size) for size in expected), reduces
        return
    size = 2 if choice == "bfloat16" else 4
    assert reduces == sorted(("reduce", size * layout.numel) for layout in layouts), reduces


@pytest.mark.parametrize("choice", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_bytes(two: Ranks, how: str, choice: str) -> None:
    """A step reduces every unit once, in four bytes for each element by default, in two, or in one and the scales."""
    two.run(_count, how, choice)


@pytest.mark.nightly
def test_bytes_on_four_ranks(four: Ranks) -> None:
    """So it is where shards are smaller than blocks."""
    four.run(_count, "aot_eager", "float8")


def test_messages_are_a_quarter() -> None:
    """A message has 1/4 of float32's bytes and one for each block of 128."""
    assert encode(torch.zeros(1, 1 << 20), "fp8").nbytes == (1 << 20) + (1 << 13)


# --- error feedback ---------------------------------------------------------------------------------------------------


class _Linear(nn.Module):
    """Its gradient is its input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


NUMEL = 1003  # no multiple of anything


def _gradient(seed: int, rank: int) -> Tensor:
    generator = seeded(100 * seed + rank)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-4, 2, NUMEL)


def _full(value: Any) -> Tensor:
    return value.full_tensor().double()


def _mean_of_all(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _feed_back(rank: int, feedback: bool) -> None:
    model = fully_shard(_Linear(NUMEL))
    state = Float8ErrorFeedback(error_feedback=feedback)
    model.register_comm_hook(state, float8_reduce_scatter)
    given, arrived, steps = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64), 20
    for seed in range(steps):
        gradient = _gradient(seed, rank)
        model.zero_grad()
        model(gradient).backward()
        given += _mean_of_all(gradient)
        arrived += _full(model.weight.grad)
    residuals = state.state_dict()
    assert list(residuals) == (["weight"] if feedback else [])
    (flat,) = units(model)[0].flats
    scale = torch.logspace(-4, 2, NUMEL)
    if not feedback:
        assert ((given - arrived) / scale).norm() > 0.1
        return
    assert residuals["weight"].shape == (flat.layout.numel,) and residuals["weight"].dtype == torch.float32
    left = _mean_of_all(residuals["weight"][:NUMEL])
    assert ((given - arrived - left) / scale).abs().max() < 1e-5
    assert ((given - arrived) / scale).norm() > 0.01  # something was lost, and the residual has it


@pytest.mark.parametrize("feedback", [True, False])
def test_feedback(two: Ranks, feedback: bool) -> None:
    """What arrives in all steps and the last residual add up to the gradients of all steps, to float32 rounding."""
    two.run(_feed_back, feedback)


def test_feedback_on_four_ranks(four: Ranks) -> None:
    """So it is where slices are of another size."""
    four.run(_feed_back, True)


def _exactness(rank: int) -> None:
    model = fully_shard(_Linear(NUMEL))
    state = Float8ErrorFeedback()
    model.register_comm_hook(state, float8_reduce_scatter)
    gradient = _gradient(1, rank)
    model(gradient).backward()
    sent = gradient.double() - state.state_dict()["weight"][:NUMEL].double()  # exact, as the residual is
    assert torch.equal(sent.float().double(), sent)
    torch.testing.assert_close(_full(model.weight.grad), _mean_of_all(sent), rtol=1e-6, atol=1e-12)


def test_residuals_are_exact(two: Ranks) -> None:
    """A gradient less its residual is what was sent; the mean of that over ranks is the reduced gradient."""
    two.run(_exactness)


class _Distance(nn.Module):
    """Its loss is least where its weight is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.weight - x).square().sum()


def _error(choice: str, optimum: Tensor, mine: Tensor) -> float:
    """How far 200 steps end from `optimum`, root mean square, where this rank's loss is least at `mine`."""
    precision = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if choice == "bfloat16" else None
    model = fully_shard(_Distance(), **({"mp_policy": precision} if precision else {}))
    if choice.startswith("float8"):
        model.register_comm_hook(Float8ErrorFeedback(error_feedback=choice == "float8"), float8_reduce_scatter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        model(mine).backward()
        optimizer.step()
    return float((_full(model.weight) - optimum).square().mean().sqrt())


def _converge(rank: int) -> None:
    generator = seeded(0)
    optimum, offset = torch.randn(NUMEL, generator=generator), 2 + 4 * torch.rand(NUMEL, generator=generator)
    mine = optimum + (offset if rank == 0 else -offset)
    errors = {choice: _error(choice, optimum, mine) for choice in ("float32", "bfloat16", "float8", "float8 alone")}
    assert errors["float32"] < 1e-4, errors
    assert errors["float8"] < 0.01, errors
    assert errors["float8 alone"] > 10 * errors["float8"], errors  # it stops where the mean is below the rounding error
    assert errors["float8"] < errors["bfloat16"] * 2, errors


@pytest.mark.nightly
def test_feedback_reaches_the_optimum(two: Ranks) -> None:
    """Where ranks' gradients are large and their mean is small, training ends near the optimum only with feedback."""
    two.run(_converge)


def _fail(rank: int) -> None:
    state, group = Float8ErrorFeedback(), dist.group.WORLD
    assert group is not None
    first, again = torch.empty(64), torch.empty(64)
    of_flat_param = state.of_flat_param(model := nn.Module(), "weight", group)
    float8_reduce_scatter(of_flat_param, _gradient(1, rank)[:128], first)
    before = state.state_dict()["weight"].clone()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(collectives, "all_to_all", _raise)
        float8_reduce_scatter(of_flat_param, _gradient(2, rank)[:128], again)
    assert torch.equal(state.state_dict()["weight"], before)
    del model


def _raise(*args: Any) -> Tensor:
    raise ConnectionError


def test_residuals_outlive_failures(two: Ranks) -> None:
    """A reduce whose collective raises leaves residuals as they were, so that it may be repeated."""
    two.run(_fail)


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def _pass_on(rank: int, how: str) -> None:
    model = fully_shard(_Linear(NUMEL))
    state = Float8ErrorFeedback()
    model.register_comm_hook(state, float8_reduce_scatter)
    run = executor(model, how)
    gradient = _gradient(1, rank)
    if rank == dist.get_world_size() - 1:
        gradient[[3, 900]], gradient[500], gradient[501] = torch.nan, torch.inf, -torch.inf
    run(gradient).backward()
    found, expected = _full(model.weight.grad), _mean_of_all(gradient)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[[500, 501]], torch.tensor([torch.inf, -torch.inf]).double())
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert ((found - expected)[finite].norm() / expected[finite].norm()) < 0.05, "neighbours keep their precision"
    residual = state.state_dict()["weight"]
    assert residual.isfinite().all()
    assert rank != dist.get_world_size() - 1 or not residual[[3, 500, 501, 900]].any()
    assert residual.any()
    model.zero_grad()
    run(_gradient(2, rank)).backward()
    assert _full(model.weight.grad).isfinite().all()


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_nan_and_infinity_pass(two: Ranks, how: str) -> None:
    """Elements that are not finite arrive at their places, and nowhere else; the next step is free of them."""
    two.run(_pass_on, how)


# --- equal to eager; accumulation, hybrid sharding, precision ---------------------------------------------------------


def _compile(rank: int, how: str, options: dict[str, Any]) -> None:
    both = _Both(SMALL, how, **options)
    states = [Float8ErrorFeedback() for _ in both.models]
    for model, state in zip(both.models, states, strict=True):
        model.register_comm_hook(state, float8_reduce_scatter)
    both.accumulate("snns")
    with no_recompile:
        both.accumulate("nss", 10)
        both.accumulate("s", 20)
    residuals = [state.state_dict() for state in states]
    assert list(residuals[0]) == list(residuals[1]) and len(residuals[0]) == len(units(both.models[0]))
    if how == "aot_eager":
        assert all(torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        pytest.param({"mixed_precision": MixedPrecision(torch.bfloat16)}, marks=pytest.mark.nightly),
    ],
    ids=["float32", "wide", "bfloat16"],
)
def test_compiled_equals_eager(two: Ranks, options: dict[str, Any]) -> None:
    """Gradients, parameters and residuals are equal bit for bit, also with gradients that no_sync has accumulated."""
    two.run(_compile, "aot_eager", options)


def _accumulate(rank: int) -> None:
    reference, model = reference_and_model(SMALL)
    state = Float8ErrorFeedback()
    model.register_comm_hook(state, float8_reduce_scatter)
    with wire() as sent:
        with model.no_sync():
            backward(model, SMALL, mine(SMALL, 1))
        assert not state.state_dict() and not any(each.kind == "all_to_all" for each in sent)
        backward(model, SMALL, mine(SMALL, 2))
    assert sum(each.kind == "all_to_all" for each in sent) == len(units(model))
    for seed in (1, 2):
        backward(reference, SMALL, whole(SMALL, seed))
    _assert_near(model, reference)


def _assert_near(model: nn.Module, reference: nn.Module, tolerance: float = 0.05) -> None:
    for name, param in reference.named_parameters():
        assert param.grad is not None
        difference = _full(dict(model.named_parameters())[name].grad) - param.grad
        assert difference.norm() <= tolerance * param.grad.norm(), name


def test_accumulation(two: Ranks) -> None:
    """Under no_sync nothing is rounded; the sum is sent once."""
    two.run(_accumulate)


def _hybrid(rank: int, how: str) -> None:
    with _two_by_two() as groups:
        reference = build(SMALL)
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}
        model = fully_shard(build(SMALL), find_unused_parameters=False, **options)
        model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)
        with wire() as sent:
            backward(executor(model, how), SMALL, mine(SMALL, 1))
        backward(reference, SMALL, whole(SMALL, 1))
        _assert_near(model, reference)
        flats = [flat.layout for unit in units(model) for flat in unit.flats]
        reduces = sorted((each.numel, each.dtype) for each in sent if each.kind == "all_reduce")
        assert reduces == sorted((layout.shard_numel, torch.float32) for layout in flats), reduces
        assert sum(each.kind == "all_to_all" for each in sent) == len(flats)


@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_hybrid(four: Ranks, how: str) -> None:
    """A copy's ranks reduce in float8, replicas in float32."""
    four.run(_hybrid, how)


def _two_stages(rank: int) -> None:
    reference, model = build(SMALL), fully_shard(build(SMALL), reshard_after_forward=2)
    model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)
    backward(model, SMALL, mine(SMALL, 1))
    backward(reference, SMALL, whole(SMALL, 1))
    _assert_near(model, reference)


def test_two_stages(four: Ranks) -> None:
    """Shards that are ordered by two groups get their own slices."""
    four.run(_two_stages)


# --- state ------------------------------------------------------------------------------------------------------------


def _save_and_load(rank: int) -> None:
    state, steps = Float8ErrorFeedback(), 2
    model = shard(SMALL)
    model.register_comm_hook(state, float8_reduce_scatter)
    for seed in range(steps):
        backward(model, SMALL, mine(SMALL, seed))
    saved = copy.deepcopy(state.state_dict())
    again, resumed = Float8ErrorFeedback(), shard(SMALL)
    again.load_state_dict(saved)
    assert list(again.state_dict()) == list(saved)
    resumed.register_comm_hook(again, float8_reduce_scatter)
    for each in (model, resumed):
        each.zero_grad()
        backward(each, SMALL, mine(SMALL, steps))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad))
    copied = copy.deepcopy(model)
    copied.zero_grad()
    backward(copied, SMALL, mine(SMALL, 1))
    with pytest.raises(ValueError, match=r"state_dict: two flat parameters begin with .*"):
        state.state_dict()
    again.load_state_dict({name: residual[:-1] for name, residual in saved.items()})
    with pytest.raises(ValueError, match=r"residual of the flat parameter of .*: expected \d+ elements, found \d+"):
        backward(resumed, SMALL, mine(SMALL, 1))


def test_state_dict(two: Ranks) -> None:
    """A run that loads residuals goes on bit for bit; copies of a model have residuals of their own."""
    two.run(_save_and_load)


def _refuse(rank: int) -> None:
    model = shard(SMALL, "NO_SHARD")
    model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)
    with pytest.raises(ValueError, match=r"the unit of .* is not sharded \(NO_SHARD\)"):
        backward(model, SMALL, mine(SMALL, 1))


def test_unsharded_units_are_refused(two: Ranks) -> None:
    """NO_SHARD has no slices to scatter."""
    two.run(_refuse)


def test_errors() -> None:
    """Blocks are those of wire formats, and the state comes from a sharded model."""
    with pytest.raises(ValueError, match="block_size: expected 128, as in every wire format, found 1024"):
        Float8ErrorFeedback(block_size=1024)
    with pytest.raises(TypeError, match="expected the Float8ErrorFeedback of a model"):
        float8_reduce_scatter(Float8ErrorFeedback(), torch.zeros(4), torch.zeros(2))
