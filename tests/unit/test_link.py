"""The benchmark's emulated link: when transfers end, in which order, what is counted, what other ranks seem to hold."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.link import LINK, EchoStore, start
from fsdp_compile import fully_shard

WORLD = 8
FUNCTIONAL = torch.ops._c10d_functional
done = FUNCTIONAL.wait_tensor


@pytest.fixture
def link() -> Iterator[Any]:
    group = start(WORLD, latency=2e-3, bandwidth=1e6)
    yield group
    dist.destroy_process_group()


def gather(numel: int) -> Any:
    return dist.group.WORLD._allgather_base(torch.empty(WORLD * numel), torch.ones(numel))


def test_a_wait_lasts_until_the_deadline_and_uses_no_cpu(link: Any) -> None:
    """`latency + bytes / bandwidth` after the call, and the process sleeps; that it wakes late is not counted."""
    LINK.configure(latency=0.272)
    begin, cpu = LINK.clock(), time.process_time()
    gather(1000).wait()  # 7 * 4,000 bytes at 1 MB/s
    took, cpu = LINK.clock() - begin, time.process_time() - cpu
    assert LINK.calls[-1].nbytes == 28_000
    assert LINK.calls[-1].end - LINK.calls[-1].begin == pytest.approx(0.3)
    assert took >= 0.3 and cpu < 0.15
    assert LINK.clock() >= LINK.calls[-1].end


def test_the_link_is_serial(link: Any) -> None:
    """Each transfer begins where the one before it ends, across groups too."""
    LINK.reset()
    LINK.configure(latency=60.0)  # nobody waits: the link is busy whenever the next one is called, however late that is
    half = dist.new_group(list(range(WORLD // 2)))
    for group in (dist.group.WORLD, half, dist.group.WORLD, half):
        dist.all_reduce(torch.ones(10), group=group, async_op=True)
    assert [call.group for call in LINK.calls] == ["0", half.group_name] * 2
    for before, after in zip(LINK.calls, LINK.calls[1:], strict=False):
        assert after.begin == before.end
    assert LINK.summary()["busy"] == pytest.approx(2 * (120.0 + 70e-6 + 60e-6))


def test_every_rank_seems_to_hold_the_same(link: Any) -> None:
    """Gathers repeat, means keep, sums multiply; with an `out` as well; objects and stores agree."""
    LINK.configure(latency=0.0, bandwidth=1e12)
    shard, full = torch.arange(3.0), torch.arange(24.0)
    assert torch.equal(done(FUNCTIONAL.all_gather_into_tensor(shard, WORLD, "0")), shard.repeat(WORLD))
    out = torch.empty(24)
    assert torch.equal(done(FUNCTIONAL.all_gather_into_tensor_out(shard, WORLD, "0", out=out)), shard.repeat(WORLD))
    assert torch.equal(done(FUNCTIONAL.reduce_scatter_tensor(full, "avg", WORLD, "0")), shard)
    assert torch.equal(done(FUNCTIONAL.reduce_scatter_tensor(full, "sum", WORLD, "0")), WORLD * shard)
    assert torch.equal(done(FUNCTIONAL.all_reduce(shard, "sum", "0")), WORLD * shard)
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, "here")
    assert found == ["here"] * WORLD
    assert EchoStore(WORLD).add("came", 1) == WORLD
    half = dist.new_group(list(range(WORLD // 2)))
    assert EchoStore(WORLD).add(f"0//{half.group_name}//came", 1) == WORLD // 2


def test_ours_gathers_and_scatters_there(link: Any) -> None:
    """Our eager runtime goes around copies in gloo alone: here a unit is one gather and one reduce-scatter."""
    LINK.configure(latency=1e-5, bandwidth=1e9)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy=None)
    for _ in range(2):  # in which ranks tell each other what they use
        model(torch.ones(2, 4)).sum().backward()
    LINK.reset()
    model(torch.ones(2, 4)).sum().backward()
    assert LINK.summary()["calls"] == {"0": {"all_gather": 1, "reduce_scatter": 1}}
    assert any(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())
