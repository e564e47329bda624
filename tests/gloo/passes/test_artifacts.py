"""`share_artifacts`: the first rank compiles, and the others load what it compiled."""

import hashlib
import multiprocessing
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ..ranks import on_ranks

LATE = pytest.mark.nightly


class Report(NamedTuple):
    """What one rank did."""

    losses: list[float]
    hits: int  # graphs that were found in the compiler's caches
    misses: int
    code: set[str]  # digests of the generated modules in the rank's cache folder
    warnings: list[str]


def shard(model: Any, how: str) -> Any:
    """`fully_shard` over the world, or over groups whose ranks and names differ from rank to rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from fsdp_compile import fully_shard

    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    if how == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    return fully_shard(model, reshard_after_forward=2 if how == "stages" else True)


def train(rank: int, folder: str, world_size: int, backend: str, how: str, own: dict[str, str], results: Any) -> None:
    """One rank, from process start, with a cache folder of its own."""
    import logging
    import os

    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/rank{rank}", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "OMP_NUM_THREADS": "1", **own}
    import torch.distributed as dist
    from models import MODELS, mlp, part
    from torch._dynamo.utils import counters

    from fsdp_compile.passes.inductor import fsdp_compile_backend

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]  # a handler that only remembers
    logging.getLogger("fsdp_compile").addHandler(handler)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    torch.manual_seed(0)
    case = MODELS["mlp"]
    model = shard(mlp(1, 12, 24), how)  # sizes that divide among ranks, for tensor parallelism
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if backend == "inductor":
        step: Any = torch.compile(model, fullgraph=True)
    else:
        step = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options={"share_artifacts": True})
    losses = []
    for seed in range(3):
        loss = case.loss(step, part(case.batch(seed, 4 * world_size), rank, world_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = counters["inductor"]
    code = {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(f"{folder}/rank{rank}").glob("*/*.py")}
    report = Report(
        losses,
        found["fxgraph_cache_hit"],
        found["fxgraph_cache_miss"],
        code,
        warnings,
    )
    results.put((rank, tuple(report)))
    dist.barrier()
    dist.destroy_process_group()


def start(
    folder: Path,
    world_size: int = 2,
    backend: str = "inductor",
    own: dict[int, dict[str, str]] | None = None,
    how: str = "world",
) -> list[Report]:
    """Start all ranks anew; their reports by rank. `own`: environment variables of single ranks."""
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shared = {"FSDP_COMPILE_SHARE_ARTIFACTS": "1"} if backend == "inductor" else {}
    processes = [
        context.Process(
            target=train,
            args=(rank, str(folder), world_size, backend, how, shared | (own or {}).get(rank, {}), results),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        reports = sorted(results.get(timeout=240) for _ in processes)
        return [Report(*report) for _, report in reports]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def check_loaded(reports: list[Report]) -> None:
    """Every rank but the first has found both graphs, the same code as the first has."""
    first, *others = reports
    for other in others:
        assert (other.hits, other.misses) == (2, 0)
        assert other.code == first.code != set()
        assert other.warnings == []


@pytest.mark.parametrize(
    ("backend", "world_size", "how"),
    [
        pytest.param("inductor", 2, "world", marks=LATE),
        pytest.param("fsdp_compile", 2, "world", marks=LATE),
        pytest.param("inductor", 4, "world", marks=LATE),
        pytest.param("inductor", 4, "hybrid", marks=LATE),
        pytest.param("inductor", 4, "stages", marks=LATE),
    ],
)
def test_first_rank_compiles_for_all(tmp_path: Path, backend: str, world_size: int, how: str) -> None:
    """With empty caches one rank generates code, and the others find it."""
    reports = start(tmp_path, world_size, backend, how=how)
    assert reports[0].misses == 2
    check_loaded(reports)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "how", "ranks", "removed"),
    [
        ("fsdp_compile", "world", 2, ()),
        *(("inductor", "world", 3, removed) for removed in ((), (0,), (1,), (1, 2))),
        *(("inductor", "hybrid", 4, removed) for removed in ((0,), (2,), (1, 2, 3))),
    ],
    ids=str,
)
def test_some_caches_are_gone(tmp_path: Path, backend: str, how: str, ranks: int, removed: tuple[int, ...]) -> None:
    """A second start loads what the first one compiled. Ranks whose caches are empty and ranks whose caches are full
    end alike, with the numbers that they had before."""
    before = start(tmp_path, ranks, backend, how=how)
    for rank in removed:
        shutil.rmtree(tmp_path / f"rank{rank}")
    reports = start(tmp_path, ranks, backend, how=how)
    assert reports[0].misses == (2 if 0 in removed else 0)
    check_loaded(reports)
    assert [report.losses for report in reports] == [report.losses for report in before]


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "ranks"), [("world", 2), ("hybrid", 4)])
def test_a_rank_that_differs_compiles_for_itself(tmp_path: Path, how: str, ranks: int) -> None:
    """What the first rank compiled does not fit a rank with other settings of the compiler, which says so."""
    before = start(tmp_path, ranks, how=how)
    shutil.rmtree(tmp_path / "rank1")
    reports = start(tmp_path, ranks, own={1: {"TORCHINDUCTOR_COMPREHENSIVE_PADDING": "0"}}, how=how)
    assert reports[1].misses == 2
    assert ["compiled for itself" in warning for warning in reports[1].warnings] == [True]
    assert reports[1].losses == pytest.approx(before[1].losses, rel=1e-5)


@on_ranks(2)
def test_a_disk_that_fails_costs_time_alone() -> None:
    """A rank that cannot write its caches raises nothing, and no rank waits for what will not come."""
    import torch.distributed as dist

    from fsdp_compile.passes.artifacts import ArtifactSharing

    assert dist.group.WORLD is not None
    sharing = ArtifactSharing(dist.group.WORLD, limit=30.0)
    saved = mock.patch("torch.compiler.save_cache_artifacts", return_value=(b"entries", None))
    full = mock.patch("torch.compiler.load_cache_artifacts", side_effect=OSError("no space left on device"))
    with saved, full as load:
        sharing.begin()
        sharing.end()
    assert sharing.count == 1 and load.call_args_list == ([] if sharing.is_first else [mock.call(b"entries")])


@LATE
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(4)
def test_a_name_stands_for_the_group_of_its_rank(rank: int, backend: str) -> None:
    """Where ranks call different groups by one name, each model still communicates in its own: gradients are means over
    its ranks, also in graphs that come out of a cache folder which the ranks share.
    """
    import torch.distributed as dist

    from fsdp_compile import fully_shard
    from fsdp_compile.comm.groups import shared_name

    torch._dynamo.reset()
    members = ([0, 1, 3], [0, 2, 3])
    groups = [dist.new_group(each) for each in members]
    own = [index for index in ((1, 0) if rank == 3 else (0, 1)) if rank in members[index]]
    names = {index: shared_name(groups[index]) for index in own}
    assert len(set(names.values())) == len(own)
    for index in sorted(own):
        torch.manual_seed(0)
        whole = torch.nn.Linear(5, 3)
        inputs = [torch.full((2, 5), 1.0 + each) for each in members[index]]
        sum(whole(each).square().mean() for each in inputs).div(3).backward()
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(5, 3), process_group=groups[index])
        run = torch.compile(model, fullgraph=True, backend=backend)
        run(inputs[members[index].index(rank)]).square().mean().backward()
        for mine, reference in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), reference.grad)
    for index in own:  # torch names groups by how many this rank is in, which is to be equal on all ranks again
        dist.destroy_process_group(groups[index])
