"""`link="measure"`: ranks measure their link together, and follow one plan."""

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from fsdp_compile.comm.waits import MessageBoard, state_of
from fsdp_compile.passes import agreement, inductor, measure
from fsdp_compile.passes.cost.hardware import device
from fsdp_compile.passes.measure import NotMeasured, measured_link, measured_speed

from .ranks import Ranks, on_ranks

CPU = torch.device("cpu")


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What is logged meanwhile at the level of warnings."""
    log, texts = logging.getLogger("fsdp_compile"), _Texts()
    texts.setLevel(logging.WARNING)
    log.addHandler(texts)
    try:
        yield texts.texts
    finally:
        log.removeHandler(texts)


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
    assert {shared_name(group): measured_link(group, CPU, 1 << 24, 60.0) for group in groups} == found  # as known
    return found, speed, seconds


def _late(rank: int) -> str:
    """The last rank comes after the limit."""
    group = dist.new_group(timeout=dist.default_pg_timeout)
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(NotMeasured) as caught:
        measured_link(group, CPU, 0, 0.5)
    return str(caught.value)


def test_figures_are_the_same_on_all_ranks(four: Ranks, two: Ranks) -> None:
    """Groups along one dimension share their figures; all ranks have the same ones, within seconds. A rank that comes
    too late leaves all of them without, and they say so.
    """
    found, speeds, seconds = zip(*four.run(_figures), strict=True)
    assert all(each == found[0] for each in found), found
    assert len({*speeds}) == 1, speeds
    assert all(latency >= 0 and bandwidth > 0 for latency, bandwidth in found[0].values())
    assert sorted(name[:8] for name in found[0]) == ["0", "fsdp.2x1", "fsdp.2x2"] and max(seconds) < 30
    reason = "a rank has not compiled a sharded model within 0.5 s"
    assert two.run(_late) == [reason] * 2


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


def _failing(rank: int) -> tuple[list[str], list[float]]:
    """The reasons that ranks have: all of them fail at one place; rank 1 has no memory. Their groups go on."""

    def broken() -> float:
        raise NotImplementedError("no collectives of this kind\n(a second line)")

    reasons, sums = list[str](), list[float]()
    for clock, limited in ((broken, False), (time.perf_counter, True)):
        group = dist.new_group(timeout=dist.default_pg_timeout)
        before = resource.getrlimit(resource.RLIMIT_AS)
        if limited and rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
        try:
            for _ in range(2):  # and it is not tried again
                with pytest.raises(NotMeasured) as caught:
                    measured_link(group, CPU, 1 << 27, 60.0, clock)
                reasons.append(str(caught.value))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        summed = torch.ones(2)
        dist.all_reduce(summed, group=group)
        sums += summed.tolist()
    return reasons, sums


def _failing_in_a_compile(rank: int, attempt: str) -> tuple[float, list[str]]:
    """The loss of a compiled model on ranks that cannot measure, and what they log."""
    fails = {"speed": rank == 0, "link": True}[attempt]

    def broken(*_: object) -> None:
        raise OSError(f"no {attempt}")

    name = {"speed": "_speed", "link": "_seconds_of_both"}[attempt]
    with pytest.MonkeyPatch.context() as patch, _logged() as texts:
        if fails:
            patch.setattr(measure, name, broken)
        patch.setattr(agreement, "board", lambda: MessageBoard.of_group(dist.group.WORLD, f"test/{attempt}"))
        state_of(dist.group.WORLD).link = None
        inductor._log_once.cache_clear()
        torch.manual_seed(0)
        model = fully_shard(_products())
        run = torch.compile(model, backend="fsdp_compile", options={"link": "measure"})
        loss = run(torch.ones(4, 64)).square().mean()
        loss.backward()
        state_of(dist.group.WORLD).link = None
    return loss.item(), [text for text in texts if text.startswith("collectives follow")]


def test_measuring_never_ends_a_run(two: Ranks) -> None:
    """Whatever fails, on all ranks at one place or on one that has no memory or cannot time a product: all of them
    have one reason, which the first logs in one line, and go on with the rule. Their groups communicate.
    """
    (first, sums), (second, others) = two.run(_failing)
    assert first == second and sums == others == [2.0] * 4
    assert first[0] == first[1] and "NotImplementedError: no collectives of this kind" in first[0]
    assert "second line" not in first[0]
    assert first[2] == first[3] and first[2].startswith("rank 1 has no memory for ")
    torch.manual_seed(0)
    loss = _products()(torch.ones(4, 64)).square().mean().item()
    for attempt in ("speed", "link"):
        answers = two.run(_failing_in_a_compile, attempt)
        assert [value for value, _ in answers] == pytest.approx([loss] * 2)
        assert [len(texts) for _, texts in answers] == [1, 0]
        (text,) = answers[0][1]
        assert text.endswith(f"OSError: no {attempt}") and "the order of blocks, as no link was measured" in text


@pytest.mark.nightly
@on_ranks(2)
def test_a_rank_that_fails_alone(rank: int) -> None:
    """One that fails where the others wait for it in a collective cannot go on: no rank hangs, and each says why."""
    group = dist.new_group(timeout=dist.default_pg_timeout)
    readings = count()

    def clock() -> float:
        if rank == 1 and next(readings) == 5:
            raise OSError("this clock has stopped")
        return time.perf_counter()

    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        measured_link(group, CPU, 1 << 21, 3.0, clock)
    assert time.monotonic() - begin < 15.0 and "measur" in str(caught.value)
    if rank == 1:
        assert "rank 1 failed while ranks measured their link, and the others did not: OSError" in str(caught.value)


def _stopped(rank: int) -> tuple[float, float]:
    """Rank 1 is stopped while it measures, for 1 s and, in another group, for longer than ranks wait."""
    groups = [dist.new_group(timeout=dist.default_pg_timeout) for _ in range(2)]

    def stopping(seconds: float) -> Callable[[], float]:
        readings = count()

        def clock() -> float:
            if rank == 1 and next(readings) == 5:
                os.system(f"(sleep {seconds}; kill -CONT {os.getpid()}) &")
                os.kill(os.getpid(), signal.SIGSTOP)
            return time.perf_counter()

        return clock

    found = measured_link(groups[0], CPU, 1 << 21, 60.0, stopping(1.0))
    summed = torch.full((4,), rank + 1.0)
    dist.all_reduce(summed, group=groups[0])
    assert summed.tolist() == [3.0] * 4
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="expected all ranks to measure their link, but one came and then stopped"):
        measured_link(groups[1], CPU, 1 << 21, 0.5, stopping(2.5))
    assert time.monotonic() - begin < 20.0
    return found


@pytest.mark.nightly
def test_a_rank_that_is_stopped(two: Ranks) -> None:
    """A rank that is stopped in the middle of measuring and goes on changes nothing. One that stays away for longer
    than the limit makes all of them raise, soon after it.
    """
    first, second = two.run(_stopped)
    assert first == second and first[0] < 0.5 and first[1] > 0  # the second that it was away counts for nothing


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
        if next(readings) == at:  # there are 36 for each of the two smallest sizes
            LINK.configure(bandwidth=end)
        return LINK.clock()

    latency, bandwidth = measured_link(group, CPU, 1 << 24, 60.0, clock)
    assert next(readings) > at + 1
    assert 1e8 <= bandwidth <= 4e8 and latency < 1e-3


def test_a_slow_launch(link: Callable[[float, float], dist.ProcessGroup]) -> None:
    """Where a launch alone takes long, bandwidth is measured too: without noise, both figures are those of the link."""
    found = measured_link(link(0.01, 1e8), CPU, 1 << 24, 60.0, LINK.clock)
    assert found == pytest.approx((0.01, 1e8))


def _agree(rank: int) -> str:
    first = agreement.agree("a test", f"rank {rank}")
    assert agreement.agree("a test", "another text") == first
    return first


def test_first_text_counts(two: Ranks) -> None:
    """What a rank says first, all ranks hear, and nothing else later."""
    assert len({*two.run(_agree)}) == 1
