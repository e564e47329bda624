"""Compile caches: a second process start finds compiled code, its own or that of rank 0, and behaves the same."""

import multiprocessing
import pathlib
from typing import Any, NamedTuple

import pytest


class Report(NamedTuple):
    """What one rank found."""

    losses: list[float]
    total: float  # of the parameters that this rank stores
    hits: int  # in AOTAutograd's cache
    misses: tuple[int, int]  # in Inductor's cache, in AOTAutograd's


def train(rank: int, ranks: int, folder: str, backend: str, how: str, loads: bool, results: Any) -> None:
    """One rank, from process start. `loads`: it has the artifacts of rank 0, and a cache that is empty."""
    import os

    cache = f"{folder}/of_rank_{rank}" if loads else f"{folder}/cache"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist
    from models import MODELS, mlp, part
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh

    from fsdp_compile import fully_shard
    from fsdp_compile.passes.inductor import fsdp_compile_backend

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    artifacts = pathlib.Path(f"{folder}/artifacts")
    if loads:
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    torch.manual_seed(0)
    case = MODELS["mlp"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if how == "hybrid" else None
    model = fully_shard(mlp(1), mesh=mesh, reshard_after_forward=2 if how == "stages" else True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen: Any = fsdp_compile_backend if backend == "fsdp_compile" else backend
    compiled = torch.compile(model, fullgraph=True, backend=chosen)
    losses = []
    for seed in range(3):
        loss = case.loss(compiled, part(case.batch(seed, 4 * ranks), rank, ranks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = sum(param.detach().to_local().double().sum().item() for param in model.parameters())
    misses = counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"]
    results.put((rank, (losses, total, counters["aot_autograd"]["autograd_cache_hit"], misses)))
    if rank == 0 and not loads:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        artifacts.write_bytes(saved[0])
    dist.barrier()
    dist.destroy_process_group()


def start(folder: pathlib.Path, ranks: int, *given: Any) -> list[Report]:
    """Start all processes anew; their reports by rank."""
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    each = [context.Process(target=train, args=(rank, ranks, str(folder), *given, results)) for rank in range(ranks)]
    for process in each:
        process.start()
    try:
        return [Report(*report) for _, report in sorted(results.get(timeout=240) for _ in each)]
    finally:
        for process in each:
            process.join(timeout=30)
            process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "ranks", "how", "loads"),
    [
        ("inductor", 2, "world", False),
        ("fsdp_compile", 2, "world", False),
        ("inductor", 2, "world", True),
        ("inductor", 4, "hybrid", True),
        ("inductor", 4, "stages", True),
    ],
)
def test_second_start_compiles_nothing(tmp_path: pathlib.Path, backend: str, ranks: int, how: str, loads: bool) -> None:
    """Every rank finds both graphs in a cache, or in torch's artifacts of rank 0, though it may communicate in other
    groups. The numbers are the same.
    """
    first, second = start(tmp_path, ranks, backend, how, False), start(tmp_path, ranks, backend, how, loads)
    assert sum(report.misses[1] for report in first) >= 1
    for before, after in zip(first, second, strict=True):
        assert after[:2] == before[:2] and after.hits == 1 and after.misses == (0, 0)
