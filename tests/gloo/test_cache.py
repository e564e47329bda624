"""Compile caches: a second process start reuses compiled code and behaves the same."""

import multiprocessing
import pathlib
from typing import Any

import pytest


def train(rank: int, folder: str, backend_name: str, results: Any) -> None:
    """One rank of two, from process start: compile, train three steps, report the caches' counters and the numbers."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from models import MODELS, part
    from torch._dynamo.utils import counters

    from fsdp_compile import fully_shard
    from fsdp_compile.passes.inductor import fsdp_compile_backend

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    torch.manual_seed(0)
    case = MODELS["mlp"]
    model = fully_shard(case.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backend = fsdp_compile_backend if backend_name == "fsdp_compile" else backend_name
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    losses = []
    for seed in range(3):
        loss = case.loss(compiled, part(case.batch(seed, 8), rank, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"]
    total = sum(param.detach().double().sum().item() for param in model.parameters())
    results.put((rank, losses, total, hits, misses))
    dist.barrier()
    dist.destroy_process_group()


def start(folder: pathlib.Path, backend: str) -> list[Any]:
    """Start two processes anew; their reports in rank order."""
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=train, args=(rank, str(folder), backend, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        return sorted(results.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


@pytest.mark.parametrize("backend", ["inductor", "fsdp_compile"])
def test_second_start_reuses_compiled_code(tmp_path: pathlib.Path, backend: str) -> None:
    """Cold, ranks compile; warm, every rank loads both graphs from AOTAutograd's cache; the numbers are the same."""
    cold, warm = start(tmp_path, backend), start(tmp_path, backend)
    for (_, cold_losses, cold_total, *_), (_, losses, total, hits, misses) in zip(cold, warm, strict=True):
        assert (losses, total) == (cold_losses, cold_total)
        assert hits[1] == 1 and misses == (0, 0)
    assert sum(misses[1] for *_, misses in cold) >= 1
