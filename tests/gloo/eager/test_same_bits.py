"""`reduction_order="tree"`: a run on four ranks, on two and on one ends with the same bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded
from tiers import LATE, compiled_late
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.utils import checkpoint as activations

from fsdp_compile import fully_shard
from fsdp_compile.core.sharding import units_gathered_below

from ..ranks import NIGHTLY, Ranks, on_ranks
from ..same_bits import CASES, MICROBATCHES, first, of_ranks, resized, stepped, trained

HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
COPIES = {"sharding_strategy": ShardingStrategy.NO_SHARD}


@pytest.mark.parametrize(
    ("how", "names", "optimizer", "options"),
    [
        ("eager", ("low_rank", "recurrent", "checkpointed"), "adamw", {}),
        ("eager", ("gpt", "experts"), "sgd", {"reshard_after_forward": False}),
        ("eager", ("conv",), "foreach", {"mixed_precision": HALF}),
        ("eager", ("tied", "frozen"), "fused", {"cpu_offload": CPUOffload(True)}),
        ("eager", ("low_rank", "recurrent"), "adamw", COPIES),
        ("aot_eager", ("short",), "sgd", {"mixed_precision": HALF}),
        # test_same_bits_of_many.py has more of the other kinds.
        pytest.param("eager", ("gpt",), "muon", COPIES, marks=LATE),
        pytest.param("aot_eager", ("frozen",), "sgd", {"mixed_precision": HALF}, marks=LATE),
        *(pytest.param("inductor", ("gpt",), "adamw", {"mixed_precision": HALF, **options}, marks=LATE)
          for options in ({}, COPIES)),
    ],
)  # fmt: skip
@on_ranks(4)
def test_equal(rank: int, how: str, names: tuple[str, ...], optimizer: str, options: dict[str, Any]) -> None:
    """Parameters, losses and norms are equal after steps with accumulation, clipping, a schedule and dropout.

    So they are in compiled steps, whose graphs reduce, and in generated code, which adds up rows by an operator that
    rounds as eager code does.
    """
    for name in names:

        def run(group: Any, name: str = name) -> Any:
            return trained(CASES[name], group, how, optimizer, process_group=group, **options)

        of_ranks(rank, run, (1, 2, 4) if how != "aot_eager" or NIGHTLY else (2, 4))


@compiled_late
@on_ranks(4)
def test_hybrid_and_two_stages(how: str) -> None:
    """Replicas, and the second of two stages, are the upper levels of the same tree."""
    expected = trained(CASES["gpt"], None, "eager", "adamw")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for way, options in (
        (how, {"mesh": mesh}),
        (how, {"mesh": init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicas", "shards"))}),
        ("eager", {"reshard_after_forward": 2}),
        ("eager", {"reshard_after_forward": False}),
        (how, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    ):
        assert trained(CASES["gpt"], None, way, "adamw", **options) == expected, (way, options)


@pytest.mark.parametrize(
    ("options", "backend", "strategy"),
    [({"clip_norm": 0.5}, "eager", None), pytest.param({"update_in_backward": True}, "eager", None, marks=LATE)]
    + [pytest.param({"clip_norm": 0.5}, backend, None, marks=LATE) for backend in ("aot_eager", "fsdp_compile")]
    + [pytest.param({"clip_norm": 0.5}, backend, "NO_SHARD", marks=LATE) for backend in ("eager", "fsdp_compile")],
)
@on_ranks(4)
def test_compile_step(rank: int, options: dict[str, Any], backend: str, strategy: str | None) -> None:
    """Whole steps, clipped or with updates in backward, are equal too, also of models that each rank has a copy of."""
    chosen = {"sharding_strategy": ShardingStrategy[strategy]} if strategy else {}
    of_ranks(rank, lambda group: stepped(group, options, backend, process_group=group, **chosen))


@on_ranks(2)
def test_what_was_accumulated_joins_the_gradients_of_a_graph(rank: int) -> None:
    """A graph that reduces in place reduces the sum of its gradients and of those that were accumulated before."""
    for order in ("any", "tree"):
        torch.manual_seed(0)
        plain = nn.Linear(3, 3)
        model: Any = fully_shard(copy.deepcopy(plain), reduction_order=order)
        with model.no_sync():
            for number in range(3):
                x = torch.randn(2, 3, generator=seeded(number + 10 * rank))
                for each in (plain, model):
                    each(x).square().sum().backward()
        (unit,) = units_gathered_below(model)
        (flat,) = unit.flats
        packed = flat.pack([torch.ones(3, 3), torch.ones(3)], torch.float32, torch.device("cpu"))
        torch.ops.fsdp_flat.add_accumulated_(packed, flat.flat_param_id)
        sums = flat.views(packed)
        for param, found in zip(plain.parameters(), sums, strict=True):
            torch.testing.assert_close(found, param.grad + 1)


def test_resuming_on_other_ranks(four: Ranks, tmp_path: Path) -> None:
    """A run of four ranks, continued on one and on two, ends with the bits of the run without a stop."""
    four.run(resized, str(tmp_path), (4, 1, 2), "adamw", "eager", 1, MICROBATCHES)


class _Reentrant(nn.Module):
    """Runs another module, of which it holds no parameters, in a reentrant checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.run = [module]

    def forward(self, x: Tensor) -> Any:
        return activations.checkpoint(self.run[0].__call__, x.requires_grad_(), use_reentrant=True)


@on_ranks(2)
def test_reentrant_checkpoints_are_refused(rank: int) -> None:
    """Around the root, a unit, a part of one, or parameters of the root: each runs a backward pass within another."""
    case = CASES["mlp"]
    for around in ("", "blocks.0", "blocks.0.up", "head"):
        model = fully_shard(case.build(), reduction_order="tree")
        inside = model.get_submodule(around)
        run = _Reentrant(inside)
        if around:
            parent, _, name = around.rpartition(".")
            model.get_submodule(parent)._modules[name] = run
        for _ in range(2):  # nothing is left of a pass that was refused
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                case.loss(model if around else run, case.batch(rank, 2)).backward()


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int) -> None:
    """On all ranks, with what to do; afterwards, with gradients cleared, training goes on."""
    case = CASES["mlp"]

    def model(**options: Any) -> Any:
        return fully_shard(case.build(), reduction_order="tree", **options)

    refused = {
        "'any' or 'tree', found 'treee'": lambda: fully_shard(case.build(), reduction_order="treee"),
        "param_dtype is float16": lambda: model(mixed_precision=MixedPrecision(param_dtype=torch.float16)),
        "parameter stem.weight is float16": lambda: fully_shard(case.build().half(), reduction_order="tree"),
        "register_comm_hook: with": lambda: model().register_comm_hook(None, print),
        "set_requires_all_reduce: with": lambda: model().set_requires_all_reduce(False),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()
    trained = model()
    backward = lambda: case.loss(trained, case.batch(rank, 2)).backward()  # noqa: E731
    for _ in range(2):
        with trained.no_sync():
            backward()
    with pytest.raises(RuntimeError, match="a step of 3 microbatches"):
        backward()
    trained.zero_grad()
    backward()  # the step begins anew
    with pytest.raises(RuntimeError, match="has the gradient of an earlier backward"):
        backward()
    trained.zero_grad(set_to_none=False)
    backward()  # adding to zeros is in order
    trained.zero_grad()
    with trained.no_sync():
        backward()
        next(trained.parameters()).grad.mul_(2)
        with pytest.raises(RuntimeError, match="was changed inside no_sync"):
            backward()
    trained.zero_grad()
    compiled = torch.compile(trained, backend="aot_eager")
    for runs in ((compiled, trained), (trained, compiled), (compiled, compiled)):
        losses = [case.loss(run, case.batch(rank, 2)) for run in runs]
        with pytest.raises(RuntimeError, match="runs more than once before a backward and is compiled"):
            torch.stack(losses).sum().backward()
        trained.zero_grad()


@on_ranks(4)
def test_three_ranks_are_refused(rank: int) -> None:
    """A tree needs a power of two."""
    group, alone = dist.new_group(range(3)), first(1)
    if rank < 3:
        with pytest.raises(ValueError, match="3 shards are not a power of two"):
            fully_shard(CASES["mlp"].build(), reduction_order="tree", process_group=group)
        hybrid = {"process_group": (alone, group), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        with pytest.raises(ValueError, match="3 replicas are not a power of two"):
            fully_shard(CASES["mlp"].build(), reduction_order="tree", **hybrid)
