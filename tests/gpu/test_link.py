"""The benchmark's emulated link on a GPU: a stream that is busy for the modelled time, beside computing."""

from typing import Any

import pytest
import torch

from bench.link import LINK, EmulatedGroup
from bench.link_cuda import settle


@pytest.fixture
def link() -> Any:
    """A group of 8 beside the default one, which it knows nothing of."""
    LINK.configure(latency=1e-3, bandwidth=1e9)
    return EmulatedGroup(0, 8)


def seconds(run: Any) -> float:
    """By events, after what is queued."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def test_transfers_are_serial_and_take_their_time(link: Any) -> None:
    """Three gathers of 1 ms and 7 MB each at 1 GB/s: 24 ms, one behind the other; their results are shards repeated."""
    shard = torch.arange(250_000.0, device="cuda")
    outs = [torch.empty(8 * 250_000, device="cuda") for _ in range(3)]
    link._allgather_base(outs[0], shard).wait()  # ticks are measured at the first call
    LINK.reset()
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    took = seconds(lambda: [work.wait() for work in [link._allgather_base(out, shard) for out in outs]])
    settle(LINK, origin)
    assert took == pytest.approx(24e-3, rel=0.1)
    assert all(call.end - call.begin == pytest.approx(8e-3, rel=0.1) for call in LINK.calls)
    assert all(before.end <= after.begin + 1e-4 for before, after in zip(LINK.calls, LINK.calls[1:], strict=False))
    assert sum(call.waited for call in LINK.calls) == pytest.approx(took, rel=0.1)
    assert torch.equal(outs[2], shard.repeat(8))


def test_computing_goes_on_beside_a_transfer(link: Any) -> None:
    """Matrix products that fill the GPU take as long beside a transfer as without one, and hide it."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    shard, out = torch.ones(250_000, device="cuda"), torch.empty(8 * 250_000, device="cuda")

    def compute() -> None:
        for _ in range(60):
            torch.mm(a, a)

    def both() -> None:
        work = link._allgather_base(out, shard)
        compute()
        work.wait()

    both()
    alone, beside = (min(seconds(run) for _ in range(3)) for run in (compute, both))
    assert alone > 10e-3 and beside < 1.05 * alone
