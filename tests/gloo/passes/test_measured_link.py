"""`link="measure"`: ranks measure their link together, and follow one plan."""

import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.link import LINK, start
from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.passes import agreement
from fsdp_compile.passes.cost.hardware import device
from fsdp_compile.passes.measure import measured_link, measured_speed

from ..ranks import Ranks

CPU = torch.device("cpu")


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _products() -> nn.Module:
    """Forward and backward are matrix products alone: no kernel to build."""
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))


def _train_unequal(rank: int) -> list[str]:
    """Ranks with batches of other sizes train a model that is planned for the link that they measure."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_products() for _ in range(3)))
    torch.manual_seed(0)
    whole = nn.Sequential(*(_products() for _ in range(3)))
    sharded = fully_shard(model, reshard_after_forward=True)
    run = torch.compile(sharded, backend="fsdp_compile", options={"link": "measure"})
    log, texts = logging.getLogger("fsdp_compile"), _Texts()
    log.addHandler(texts)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        batches = [torch.randn(rows, 64) for rows in (64, 8)]  # 8 times the work on rank 0
        run(batches[rank]).square().mean().backward()
    finally:
        log.removeHandler(texts)
        log.setLevel(level)
    sum(whole(each).square().mean() for each in batches).div(2).backward()
    with torch.no_grad():
        for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    return [text for text in texts.texts if "planned" in text]


def test_a_measured_link_is_planned_for(two: Ranks) -> None:
    """Forward and backward are planned for the measured link, with one plan on ranks whose batches
    differ, and gradients are those of one process.
    """
    texts = [text for each in two.run(_train_unequal) for text in each]  # graphs from the cache are not planned
    assert {text.split(":")[0] for text in texts} == {"forward", "backward"}
    links = {text.split("planned for ")[1].split(", ")[0] for text in texts}
    assert len(links) == 1 and next(iter(links)).startswith("measured:0=")


def _figures(rank: int) -> object:
    """Of three groups, each rank's; and the seconds that measuring takes."""
    mesh = init_device_mesh("cpu", (2, 2))
    groups = [dist.group.WORLD, mesh.get_group(1), mesh.get_group(0)]
    begin = time.monotonic()
    largest = 1 << (24 if rank else 0)  # ranks that begin with other graphs make as many calls
    found = {shared_name(group): measured_link(group, CPU, largest, 60.0) for group in groups}
    seconds = time.monotonic() - begin
    speed = measured_speed(device("cpu"), torch.float32, CPU)
    first = agreement.agree("a test", f"rank {rank}")
    assert agreement.agree("a test", "another text") == first
    assert {shared_name(group): measured_link(group, CPU, 1 << 24, 60.0) for group in groups} == found  # as known
    return found, (speed, first), seconds


def _late(rank: int) -> str:
    """The last rank comes after the limit."""
    group = dist.new_group(timeout=dist.default_pg_timeout)
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as caught:
        measured_link(group, CPU, 0, 0.5)
    return str(caught.value)


def test_figures_are_the_same_on_all_ranks(four: Ranks, two: Ranks) -> None:
    """Groups along one dimension share their figures; all ranks have the same ones, within seconds. A rank that comes
    too late makes all of them raise the same error.
    """
    found, speeds, seconds = zip(*four.run(_figures), strict=True)
    assert all(each == found[0] for each in found), found
    assert len({*speeds}) == 1, speeds
    assert all(latency >= 0 and bandwidth > 0 for latency, bandwidth in found[0].values())
    assert sorted(name[:8] for name in found[0]) == ["0", "fsdp.2x1", "fsdp.2x2"] and max(seconds) < 30
    first, second = two.run(_late)
    assert first == second and "found one missing for 0.5 s; name the link instead" in first


class _PlainStore(dist.Store):
    """A store of Python, as torch's EtcdStore: it has no `compare_set`, and raises LookupError when time is up."""

    def __init__(self, path: str, ranks: int) -> None:
        super().__init__()
        self.inner = dist.FileStore(path, ranks)
        for name in ("set", "get", "add", "check", "delete_key", "num_keys"):
            setattr(self, name, partial(getattr(self.inner, name)))

    def clone(self) -> dist.Store:
        return self

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:  # type: ignore[override]  # torch's has two
        try:
            self.inner.wait(keys, timeout)
        except RuntimeError:
            raise LookupError(keys) from None


def _train_on_a_plain_store(rank: int, folder: str) -> tuple[object, list[Tensor], str]:
    """The link and gradients in a process group whose store lacks `compare_set`, and what ranks agree on."""
    dist.destroy_process_group()
    store = _PlainStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    figures = measured_link(group, CPU, 1 << 14, 60.0)
    torch.manual_seed(0)
    model = fully_shard(_products())
    model(torch.ones(4, 64)).square().mean().backward()
    agreed = agreement.agree("a plan", f"that of rank {rank}")
    return figures, [param.grad.full_tensor() for param in model.parameters()], agreed


def test_a_store_without_compare_set(tmp_path: Path) -> None:
    """Ranks compare models, measure and agree in any store that has `add`; gradients are those of one process."""
    ranks = Ranks(2, tmp_path)
    try:
        (link, grads, agreed), (other, others, heard) = ranks.run(_train_on_a_plain_store, str(tmp_path))
    finally:
        ranks.stop()
    assert link == other and agreed == heard
    torch.manual_seed(0)
    whole = _products()
    whole(torch.ones(4, 64)).square().mean().backward()
    for mine, theirs, param in zip(grads, others, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)
        assert mine.equal(theirs)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], dist.ProcessGroup]]:
    """Starts rank 0 of 8 on an emulated link: its clock goes on while one waits alone."""
    monkeypatch.setattr(LINK, "now", lambda: 0.0)
    monkeypatch.setattr(LINK, "uncounted", 0.0)
    yield partial(start, 8)
    dist.destroy_process_group()


@pytest.mark.parametrize(("begin", "end"), [(1e8, 4e8), (4e8, 1e8)])
@pytest.mark.parametrize("at", [20, 40, 60, 80, 100])
def test_a_link_whose_speed_changes(
    begin: float, end: float, at: int, link: Callable[[float, float], dist.ProcessGroup]
) -> None:
    """A link that becomes 4 times as fast or as slow while it is measured has a figure between, wherever that is."""
    group, readings = link(1e-4, begin), count()

    def clock() -> float:
        if next(readings) == at:
            LINK.configure(bandwidth=end)
        return LINK.clock()

    latency, bandwidth = measured_link(group, CPU, 1 << 24, 60.0, clock)
    assert next(readings) > at + 1
    assert 0.95e8 <= bandwidth <= 4.2e8 and latency < 1e-3  # up to what a fit of two sizes is off


@pytest.mark.parametrize(("latency", "largest"), [(0.01, 1 << 24), (1e-4, 1 << 18)], ids=["slow", "little"])
def test_two_sizes(latency: float, largest: int, link: Callable[[float, float], dist.ProcessGroup]) -> None:
    """Two sizes at least, and there no more, tell latency from bandwidth: without noise both are those of the link."""
    found = measured_link(link(latency, 1e8), CPU, largest, 60.0, LINK.clock)
    assert found == pytest.approx((latency, 1e8)) and len({call.nbytes for call in LINK.calls}) == 2
