"""Compile caches: a second process start reuses compiled code and behaves the same."""

import multiprocessing
import pathlib
from typing import Any, NamedTuple

import pytest

BACKENDS = ("inductor", "fsdp_compile")
LATE = pytest.mark.nightly


class Report(NamedTuple):
    """What one rank found with one backend."""

    losses: list[float]
    total: float  # of the parameters that this rank stores
    hits: tuple[int, int]  # in Inductor's cache, in AOTAutograd's
    misses: tuple[int, int]


def train(rank: int, folder: str, backends: tuple[str, ...], results: Any) -> None:
    """One rank of two, from process start: a report for each of the backends."""
    import os

    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    results.put((rank, [tuple(_train(rank, backend)) for backend in backends]))
    dist.barrier()
    dist.destroy_process_group()


def _train(rank: int, backend: str) -> Report:
    """Compile, train three steps, report the caches' counters and the numbers."""
    import torch
    from models import MODELS, mlp, part
    from torch._dynamo.utils import counters

    from fsdp_compile import fully_shard
    from fsdp_compile.passes.inductor import fsdp_compile_backend

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    case = MODELS["mlp"]
    model = fully_shard(mlp(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ours = backend == "fsdp_compile"
    compiled = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend if ours else backend)
    losses = []
    for seed in range(3):
        loss = case.loss(compiled, part(case.batch(seed, 8), rank, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = sum(param.detach().to_local().double().sum().item() for param in model.parameters())
    caches = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
    hits, misses = (tuple(counters[who][f"{name}_{what}"] for who, name in caches) for what in ("hit", "miss"))
    return Report(losses, total, hits, misses)


def start(folder: pathlib.Path, backends: tuple[str, ...]) -> list[list[Report]]:
    """Start two processes anew; for each rank its reports, one for each backend."""
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=train, args=(rank, str(folder), backends, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        reports = sorted(results.get(timeout=240) for _ in processes)
        return [[Report(*report) for report in of_rank] for _, of_rank in reports]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


@pytest.mark.parametrize(
    "backends", [pytest.param(BACKENDS[:1], marks=LATE), pytest.param(BACKENDS, marks=LATE)], ids=len
)
def test_second_start_reuses_compiled_code(tmp_path: pathlib.Path, backends: tuple[str, ...]) -> None:
    """Cold, ranks compile; warm, every rank loads both graphs from AOTAutograd's cache; the numbers are the same.

    So it is with the default backend and with ours, whose entries differ.
    """
    cold, warm = start(tmp_path, backends), start(tmp_path, backends)
    for backend in range(len(backends)):
        for first, second in zip(cold, warm, strict=True):
            assert second[backend][:2] == first[backend][:2]
            assert second[backend].hits[1] == 1 and second[backend].misses == (0, 0)
        assert sum(reports[backend].misses[1] for reports in cold) >= 1
