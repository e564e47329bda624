"""Stages of `torch.distributed.pipelining` that are sharded over the ranks beside them train as one process does."""

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fsdp_compile import fully_shard

from .ranks import Ranks
from .wire import wire

MICROBATCHES, STAGES = 4, 4


def _blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(STAGES)]


def _train(rank: int, kind: Any) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, part = mesh.get_coordinate() or (0, 0)
    plain, mine = _blocks(), _blocks()
    if kind is Schedule1F1B:
        chosen = {place: [2 * place, 2 * place + 1]}
    elif kind is ScheduleZBVZeroBubble:
        chosen = {stage: [stage] for stage in (place, STAGES - 1 - place)}
    else:
        chosen = {stage: [stage] for stage in (place, place + 2)}
    count = 2 if kind is Schedule1F1B else STAGES
    stages = []
    for number, blocks in chosen.items():
        submodule = nn.Sequential(*[fully_shard(mine[block], mesh=mesh["dp"]) for block in blocks])
        fully_shard(submodule, mesh=mesh["dp"])
        stages.append(PipelineStage(submodule, number, count, torch.device("cpu"), group=mesh.get_group("pp")))
    schedule = kind(stages[0] if count == 2 else stages, MICROBATCHES, loss_fn=F.mse_loss)
    blocks_here = list(chain.from_iterable(chosen.values()))
    named = [(i, name, param) for i in blocks_here for name, param in mine[i].named_parameters()]
    optimizer = torch.optim.AdamW([param for *_, param in named], lr=0.01)
    reference = torch.optim.AdamW(nn.ModuleList(plain).parameters(), lr=0.01)
    for step in range(2):
        x, target = torch.randn(2, 16, 6, generator=seeded(step)).unbind()
        optimizer.zero_grad()
        reference.zero_grad()
        given: list[Tensor] = [x[8 * part : 8 * part + 8]] if 0 in chosen else []
        last = {"target": target[8 * part : 8 * part + 8], "losses": []} if count - 1 in chosen else {}
        with wire() as sent:
            schedule.step(*given, **last)
        reduces = sum(each.kind == "reduce" for each in sent)
        F.mse_loss(nn.Sequential(*plain)(x), target).backward()
        for i, name, param in named:
            assert param.grad is not None
            torch.testing.assert_close(param.grad.full_tensor(), plain[i].get_parameter(name).grad)
        optimizer.step()
        reference.step()
    for i, name, param in named:
        torch.testing.assert_close(param.full_tensor(), plain[i].get_parameter(name))
    return reduces


@pytest.mark.parametrize(
    "kind",
    [
        Schedule1F1B,
        pytest.param(ScheduleInterleavedZeroBubble, marks=pytest.mark.nightly),
        ScheduleZBVZeroBubble,
    ],
)
def test_schedules(four: Ranks, kind: Any) -> None:
    """Gradients and parameters are those of one process, also where a schedule splits backward into two parts. A stage
    reduces once a step, where backward is not split."""
    units = 2  # of each rank
    expected = [units] * 4
    if kind is not Schedule1F1B:  # only a first stage, whose input needs no gradient, has backwards that are not split
        expected = [MICROBATCHES + 1] * 2 + [MICROBATCHES * units] * 2
    assert four.run(_train, kind) == expected
