"""Gathers in two stages: how shards are numbered, and what the generated code sends to whom (rank 1 of 4, n = 2)."""

from itertools import pairwise

import pytest
import torch
from compiling import BACKENDS
from generated import programs
from models import MLP, mlp

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.core.ops import shard_order

BLOCKS = 4


@pytest.mark.parametrize(("peers", "neighbours"), [(2, 2), (2, 4), (3, 2), (4, 1), (1, 4)])
def test_numbers_of_shards(peers: int, neighbours: int) -> None:
    """What all ranks gather, stage by stage, is the shards in order; in one stage rank r stores shard r."""
    order = shard_order([NamedGroup("peers", peers), NamedGroup("neighbours", neighbours)])
    of_peers = [[order[run * neighbours + place] for run in range(peers)] for place in range(neighbours)]
    assert [shard for shards in of_peers for shard in shards] == list(range(peers * neighbours))
    assert shard_order([NamedGroup("all", 4)]) == ()


@pytest.mark.parametrize("backend", ["backend", pytest.param("default", marks=pytest.mark.nightly)])
def test_each_stage_is_under_way_while_units_compute(backend: str) -> None:
    """A second stage starts a unit ahead, its first stage another unit ahead; no collective is waited for at once."""
    model = fully_shard(mlp(blocks=BLOCKS), reshard_after_forward=2)
    run, inputs = torch.compile(model, fullgraph=True, backend=BACKENDS[backend]), MLP.batch(1, 4)
    forward, backward = programs(lambda: MLP.loss(run, inputs))
    for program in (forward, backward):
        steps = program.steps
        started = [step.out for step in steps if step.is_gather or step.is_reduce]
        events = [step for step in steps if step.out in started or step.is_wait]
        at_once = [
            step.out
            for step, following in pairwise(events)
            if step.out in started and following.is_wait and following.names[0] == step.out
        ]
        assert at_once == []
    gathers = [step for step in forward.steps if step.is_gather]
    stage = ["second" if step.names[0] in forward.gathered() else "first" for step in gathers]
    assert stage == ["first", "first", *["second", "first"] * (BLOCKS - 1), "second", "second"]
