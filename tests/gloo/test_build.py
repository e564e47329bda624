"""`fsdp-compile build`: one process compiles for ranks that start later, and compile nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_artifacts import PROBES

LATE = pytest.mark.nightly

# What a user writes: what makes the step, above the loop that runs it.
MODEL = """
def make():
    torch.manual_seed(0)
    return fully_shard(nn.Linear(33, 7))

def example_inputs():
    return (torch.ones(4, 33),)
"""
STEP = """
def make():
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = fully_shard(nn.Sequential(nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 7)), mesh=mesh,
                        sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    return compile_step(model, torch.optim.AdamW(model.parameters()), F.mse_loss, clip_norm=1.0)

def example_inputs():
    return (torch.ones(4, 33),), {"target": torch.ones(4, 7)}
"""
HEAD = """
import json, logging, resource
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from fsdp_compile import compile_step, fully_shard
"""
LOOP = """
if __name__ == "__main__":
    from torch._dynamo.utils import counters
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("fsdp_compile").addHandler(handler)
    dist.init_process_group("gloo")
    made = make()
    for seed in range(3):
        inputs = torch.full((4, 33), 1.0 + seed + dist.get_rank())
        if isinstance(made, nn.Module):
            loss = torch.compile(made)(inputs).sum()
            loss.backward()
        else:
            loss = made(inputs, target=torch.ones(4, 7))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({
        "loss": loss.item(), "warnings": warnings,
        "graphs": [counters["inductor"][f"fxgraph_cache_{each}"] for each in ("hit", "miss")],
        "autograd": [counters["aot_autograd"][f"autograd_cache_{each}"] for each in ("hit", "miss")],
        "compilers": children.ru_utime + children.ru_stime,
    }))
    dist.destroy_process_group()
"""


def environment(caches: Path, **variables: str) -> dict[str, str]:
    """Of a process with a cache folder of its own."""
    fixed = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "TORCHINDUCTOR_CACHE_DIR": str(caches), **variables}


def build(folder: Path, maker: str, ranks: int) -> None:
    """Run the command; artifacts lie in `made` then."""
    (folder / "train.py").write_text(HEAD + maker + LOOP)
    command = [sys.executable, "-m", "fsdp_compile", "build", "train.py:make", "made", f"--world-size={ranks}"]
    done = subprocess.run(command, cwd=folder, env=environment(folder / "caches"), capture_output=True, text=True)
    assert done.returncode == 0 and "wrote made" in done.stdout, done.stdout + done.stderr


def train(folder: Path, maker: str, ranks: int, **variables: str) -> list[dict[str, Any]]:
    """What all ranks report, each with empty caches at first."""
    (folder / "train.py").write_text(HEAD + maker + LOOP)
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 20000), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env=environment(folder / f"rank{rank}", RANK=str(rank), **port, **variables),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@LATE
@pytest.mark.parametrize(("maker", "ranks", "graphs"), [(MODEL, 2, 2), (STEP, 4, 4)], ids=["model", "step"])
def test_ranks_compile_nothing(tmp_path: Path, maker: str, ranks: int, graphs: int) -> None:
    """Both caches have every graph, forward, backward and updates, and the C++ compiler is asked for its version and
    its headers alone; under hybrid sharding too.
    """
    build(tmp_path, maker, ranks)
    reports = train(tmp_path, maker, ranks, FSDP_COMPILE_ARTIFACTS="made")
    for report in reports:
        assert report["graphs"] == [graphs, 0] and report["autograd"][1] == 0
        assert report["compilers"] < PROBES + 0.3 and report["warnings"] == []


@LATE
def test_stale_artifacts(tmp_path: Path) -> None:
    """Ranks say why they load nothing, compile for themselves, and end with the same numbers."""
    build(tmp_path, MODEL, 2)
    fitting = train(tmp_path, MODEL, 2, FSDP_COMPILE_ARTIFACTS="made")
    listed = tmp_path / "made" / "artifacts.json"
    listed.write_text(listed.read_text().replace('"torch": "', '"torch": "1.'))
    for rank in range(2):
        (tmp_path / f"rank{rank}").rename(tmp_path / f"before{rank}")
    stale = train(tmp_path, MODEL, 2, FSDP_COMPILE_ARTIFACTS="made")
    for before, report in zip(fitting, stale, strict=True):
        assert report["graphs"] == [0, 2] and report["loss"] == pytest.approx(before["loss"], rel=1e-5)
        assert len(report["warnings"]) == 1 and "built for torch 1.2" in report["warnings"][0]


@LATE
def test_artifacts_of_another_model(tmp_path: Path) -> None:
    """Where nothing that was loaded is what a rank compiles, it says so."""
    build(tmp_path, MODEL, 2)
    reports = train(tmp_path, MODEL.replace("33, 7", "33, 8"), 2, FSDP_COMPILE_ARTIFACTS="made")
    for report in reports:
        assert report["graphs"][0] == 0
        assert ["nothing in made is what this rank has compiled" in each for each in report["warnings"]] == [True]
