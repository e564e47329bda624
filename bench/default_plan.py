"""What `torch.compile(fully_shard(model))` does on gloo ranks without any option, beside the rule.

measuring    seconds that ranks measure their link and how fast they compute, at most
step         ms of forward and backward, planned, by the rule, and by the rule once more: two models of one process
             and a third take turns; medians and the 10th and 90th percentile
plans        of so many starts, while other programs take all cores: in how many all ranks have the same plans. A rank
             has caches of its own, empty but for the C++ kernels of the first start
restarts     of so many more with all caches of the last start: how many find their compiled code

python -m bench default_plan [--ranks 2 4] [--starts 20] [--restarts 10] [--rounds 30]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.models import WORKLOADS
from bench.planned_step import noted
from bench.report import parser, write
from fsdp_compile import fully_shard
from fsdp_compile.passes.cost.hardware import device
from fsdp_compile.passes.measure import measured_link, measured_speed

WARM = 3  # steps of each


def rank_of(rank: int, world: int, folder: str, rounds: int) -> dict[str, Any]:
    """One rank: what it has measured and planned and, with `rounds`, the seconds of steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(folder, world))
    dist.barrier()
    here, begin = torch.device("cpu"), time.perf_counter()
    found = measured_link(dist.group.WORLD, here, 1 << 23, 600.0)  # as compiling would; it then finds these
    measured_speed(device("cpu"), torch.float32, here)
    seconds = time.perf_counter() - begin
    workload = WORKLOADS["gpt" if rounds else "gpt_small"]()
    runs: dict[str, Any] = {}
    for name in ("planned", "rule", "rule again") if rounds else ("planned",):
        torch.manual_seed(0)
        model = fully_shard(workload.build())
        chosen: Any = {} if name == "planned" else {"backend": "fsdp_compile", "options": {"link": None}}
        runs[name] = torch.compile(model, **chosen)
    steps: dict[str, list[float]] = {name: [] for name in runs}
    with noted() as graphs:
        for number in range(WARM + rounds if rounds else 1):
            for name, run in list(runs.items())[:: -1 if number % 2 else 1]:
                dist.barrier()
                begin = time.perf_counter()
                run(*workload.batch(number, rank)).backward()
                steps[name].append(time.perf_counter() - begin)
                run.zero_grad()
    text = "".join(f"{name}: {plan}" for name, (_, plan) in graphs.items())
    plans = hashlib.sha256(text.encode()).hexdigest() if text else None
    dist.barrier()
    return {"link": found, "measuring": seconds, "plans": plans, "steps": {k: v[WARM:] for k, v in steps.items()}}


def start(world: int, caches: str, rounds: int = 0) -> list[dict[str, Any]]:
    """What fresh processes of all ranks say, each with a folder of its own in `caches`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world) as pool:

        def run(rank: int) -> dict[str, Any]:
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{rank}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            own |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, "-m", "bench", "default_plan", "--rank"]
            command += [str(rank), str(world), f"{folder}/store", str(rounds)]
            done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"rank {rank}: {done.stderr[-2000:]}")
            said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return said

        return list(pool.map(run, range(world)))


def row(world: int, starts: int, restarts: int, rounds: int) -> dict[str, Any]:
    """All figures of so many ranks."""
    with tempfile.TemporaryDirectory() as caches:
        first = start(world, caches, rounds)[0]
    said, found = [], []
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):  # load
            busy = multiprocessing.Process(target=_compute, daemon=True)
            busy.start()
            stack.callback(busy.terminate)
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        for number in range(starts):
            _forget_all_but_kernels(Path(kept))
            said.append(start(world, kept))
            print(f"start {number + 1}: {len({each['plans'] for each in said[-1]})} plans", file=sys.stderr, flush=True)
        for _ in range(restarts):
            found.append(start(world, kept))
    alike = sum(len({each["plans"] for each in ranks}) == 1 and ranks[0]["plans"] is not None for ranks in said)
    hits = sum(all(each["plans"] is None for each in ranks) for ranks in found)  # no pass runs on what is found
    seconds = [each["measuring"] for ranks in (*said, *found) for each in ranks]
    return {"ranks": world, "link": first["link"], "measuring": first["measuring"], "under load": max(seconds),
            "starts": starts, "alike": alike, "restarts": restarts, "hits": hits, "steps": first["steps"]}  # fmt: skip


def _forget_all_but_kernels(caches: Path) -> None:
    """Kernels are in folders of two letters, a rank's graphs and what it measured in others."""
    for folder in caches.glob("*/*"):
        if len(folder.name) != 2:
            shutil.rmtree(folder)


def _compute() -> None:
    while True:
        pass


def show(found: dict[str, Any]) -> None:
    """Print a row."""
    latency, bandwidth = found["link"]
    print(f"{found['ranks']} ranks: {latency:g} s and {bandwidth:g} bytes/s measured in {found['measuring']:.2f} s, "
          f"under load {found['under load']:.2f} s at most")  # fmt: skip
    for name, seconds in found["steps"].items():
        tenths = statistics.quantiles(seconds, n=10)
        print(f"  {name:12} {statistics.median(seconds) * 1e3:8.1f} ms  "
              f"({tenths[0] * 1e3:.1f} to {tenths[-1] * 1e3:.1f})")  # fmt: skip
    print(f"  the same plans on all ranks in {found['alike']} of {found['starts']} starts under load; "
          f"{found['hits']} of {found['restarts']} restarts found their code", flush=True)  # fmt: skip


def main() -> None:
    """Print a row for each number of ranks, and write `bench/results/default_plan.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--starts", type=int, default=20)
    arguments.add_argument("--restarts", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.rank:
        rank, world, folder, rounds = args.rank
        print(json.dumps(rank_of(int(rank), int(world), folder, int(rounds))))
        return
    rows = []
    for world in args.ranks:
        rows.append(row(world, args.starts, args.restarts, args.rounds))
        show(rows[-1])
    if not args.dry:
        write("default_plan", {"rows": rows})
