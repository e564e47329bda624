"""Options that may interact, in combinations that hypothesis draws, against one unsharded process that emulates them.

5 combinations on two ranks by default; `FSDP_COMPILE_TESTS=nightly` draws 200.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import MODELS, Case, Inputs, checkpointed, part, squared_error, vectors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard

from .emulation import Emulation, loss_of, windows_of
from .ranks import NIGHTLY, Ranks
from .training import OPTIMIZERS, PER_RANK, assert_same_parameters, build, executor

STEPS = 5
EXAMPLES = 200 if NIGHTLY else 10
COMPILERS = ["aot_eager", "inductor"] if NIGHTLY else ["aot_eager"]

CASES: dict[str, Case] = {
    **{name: MODELS[name] for name in ("mlp", "gpt", "tied", "frozen", "conv")},
    "checkpoint_inside": Case(lambda: checkpointed("inside"), vectors, squared_error),
    "checkpoint_around": Case(lambda: checkpointed("around"), vectors, squared_error),
    "checkpoint_reentrant": Case(lambda: checkpointed("reentrant"), vectors, squared_error),
}
PRECISIONS = {
    "full": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp32, reduced in bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
}
ACCUMULATIONS = ("no", "no_sync", "outside no_sync", "sync, no_sync, sync")


@dataclass(frozen=True)
class Options:
    """One combination."""

    case: str
    strategy: str
    precision: str
    accumulation: str
    optimizer: str
    offload: bool
    one_unit: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool

    @property
    def microbatches(self) -> list[bool]:
        """For each microbatch of a step, whether its backward reduces gradients."""
        return {
            "no": [True],
            "no_sync": [False, False, True],
            "outside no_sync": [True, True],
            "sync, no_sync, sync": [True, False, True],
        }[self.accumulation]


def combinations(hybrid: bool) -> st.SearchStrategy[Options]:
    """All that may interact; hybrid sharding needs ranks for two groups."""
    flat = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    return st.builds(
        Options,
        case=st.sampled_from(sorted(CASES)),
        strategy=st.sampled_from([*flat, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if hybrid else flat),
        precision=st.sampled_from(sorted(PRECISIONS)),
        accumulation=st.sampled_from(ACCUMULATIONS),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        offload=st.booleans(),
        one_unit=st.booleans(),
        backward_prefetch=st.sampled_from([None, *BackwardPrefetch]),
        forward_prefetch=st.booleans(),
    )


def _batches(case: Case, options: Options, step: int) -> list[Inputs]:
    size = PER_RANK * dist.get_world_size()
    return [case.batch(100 * step + index, size) for index in range(len(options.microbatches))]


def _mesh(strategy: str) -> Any:
    if "HYBRID" not in strategy:
        return None
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))


def _train(rank: int, options: Options, how: str = "eager") -> None:
    case = CASES[options.case]
    reference = Emulation(case, PRECISIONS[options.precision], dist.get_world_size())
    model = fully_shard(
        build(case),
        mesh=_mesh(options.strategy),
        sharding_strategy=ShardingStrategy[options.strategy],
        auto_wrap_policy=None if options.one_unit else "auto",
        mixed_precision=PRECISIONS[options.precision],
        cpu_offload=CPUOffload(offload_params=options.offload),
        backward_prefetch=options.backward_prefetch,
        forward_prefetch=options.forward_prefetch,
    )
    run = executor(model, how)
    optimizer, expected = [OPTIMIZERS[options.optimizer](each.parameters()) for each in (model, reference.model)]
    # A sum of two ranks has one order. One of four has several, and so has one of microbatches that a reentrant
    # checkpoint adds to: what is rounded to 8 bits of mantissa may then round the other way.
    adds_otherwise = options.case == "checkpoint_reentrant" and False in options.microbatches
    exact, low = dist.get_world_size() == 2 and not adds_otherwise, options.precision != "full"
    tolerances = (0.0, 0.0) if exact else (2e-2, 5e-3) if low else (1e-4, 1e-5)
    for step in range(STEPS):
        batches = _batches(case, options, step)
        expected.zero_grad()
        reference.backward(windows_of(batches, options.microbatches))
        expected.step()
        optimizer.zero_grad()
        for inputs, syncs in zip(batches, options.microbatches, strict=True):
            model.set_requires_gradient_sync(syncs)
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                loss_of(case, run, part(inputs, rank, dist.get_world_size())).backward()
        optimizer.step()
        assert_same_parameters(model, reference.model, *tolerances)


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=combinations(hybrid=False))
def test_combinations_on_two(two: Ranks, options: Options) -> None:
    """On two ranks, five steps end with the bits of the emulating process, whatever is combined (E-TEST-2)."""
    two.run(_train, options)


@pytest.mark.nightly
@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=combinations(hybrid=True))
def test_combinations_on_four(four: Ranks, options: Options) -> None:
    """On four ranks too, hybrid sharding included."""
    four.run(_train, options)


@pytest.mark.nightly
@settings(max_examples=EXAMPLES // 10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=combinations(hybrid=True), how=st.sampled_from(COMPILERS))
def test_compiled_combinations(four: Ranks, options: Options, how: str) -> None:
    """So do compiled models."""
    four.run(_train, options, how)


pytestmark = pytest.mark.timeout(1800)
