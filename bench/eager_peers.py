"""Our eager runtime against FSDP2's: `python -m bench.eager_peers`, about four minutes, one with --quick.

    gpt          two gloo ranks of one thread each train the example's GPT: tokens per second
    many_small   the same with 1,000 small parameters in 50 units: steps per second
    host         one process on a fake group, tiny tensors: CPU time of a sharded step less that of the unsharded
                 model's, per unit; what the runtime itself takes

Both systems live in the same processes, train equal models on equal batches with the same optimizer (AdamW, foreach),
and are timed in turns, the first of a round taking turns too. A difference between their losses is an error.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.host_overhead import cpu_microseconds
from bench.peers import SYSTEMS, Trainer, Workload, gpt, many_small, tiny_gpt, unsharded

RANKS, FAKE_RANKS, WARM_UP = 2, 8, 3
TOLERANCE = 1e-4  # relative, between the losses of both systems
WORKLOADS: dict[str, Callable[[], Workload]] = {"gpt": gpt, "many_small": many_small}
TARGETS = {"gpt": 1.15, "many_small": 1.5, "host": 0.7}
Seconds = dict[str, dict[str, list[float]]]  # system -> part of a step -> seconds per step, by round


# --- on gloo ranks ----------------------------------------------------------------------------------------------------


def train_on_rank(rank: int, folder: str, name: str, rounds: int, steps: int) -> None:
    """One of the ranks: time both systems in turns; rank 0 leaves its figures in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    workload = WORKLOADS[name]()
    trainers = {system: Trainer(workload, shard) for system, shard in SYSTEMS.items()}
    seconds: Seconds = {system: {"backward": [], "step": []} for system in trainers}
    run_round(trainers, workload, rank, 0, WARM_UP)
    for number in range(rounds):
        progress(rank, f"{name}: round {number + 1} of {rounds}")
        timed = run_round(trainers, workload, rank, WARM_UP + number * steps, steps)
        for system, (backward, step) in timed.items():
            seconds[system]["backward"].append(backward)
            seconds[system]["step"].append(step)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def run_round(
    trainers: dict[str, Trainer], workload: Workload, rank: int, first: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Every system trains on the same batches, first the one, then the other; seconds per step by system."""
    batches = [workload.batch(step, rank) for step in range(first, first + steps)]
    order = list(trainers) if (first - WARM_UP) // steps % 2 else list(trainers)[::-1]
    losses: dict[str, list[float]] = {}
    timed: dict[str, tuple[float, float]] = {}
    for system in order:
        dist.barrier()
        losses[system], backward, step = train(trainers[system], batches)
        timed[system] = backward, step
    for at, (a, b) in enumerate(zip(*losses.values(), strict=True), first):
        if not abs(a - b) <= TOLERANCE * abs(a):  # false for nan too
            raise RuntimeError(f"step {at}: expected losses within {TOLERANCE:.0e}, found {a} and {b} of {order}")
    return timed


def train(trainer: Trainer, batches: list[Any]) -> tuple[list[float], float, float]:
    """Losses, seconds of forward and backward, and seconds of the whole step, per step."""
    losses, backward, begin = [], 0.0, time.perf_counter()
    for batch in batches:
        start = time.perf_counter()
        losses.append(trainer.accumulate(batch))
        backward += time.perf_counter() - start
        trainer.update()
    whole = time.perf_counter() - begin
    return [loss.item() for loss in losses], backward / len(batches), whole / len(batches)


def measure_speed(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Figures of a workload: units per second of all ranks, and how many times as fast ours is."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_on_rank, (folder, name, rounds, steps), nprocs=RANKS)
        seconds: Seconds = json.loads(Path(folder, "seconds.json").read_text())
    workload = WORKLOADS[name]()
    done = workload.per_step * (RANKS if workload.unit == "tokens" else 1)
    medians = {system: {part: statistics.median(of) for part, of in parts.items()} for system, parts in seconds.items()}
    pairs = [b / a for a, b in zip(*(seconds[system]["step"] for system in SYSTEMS), strict=True)]
    return {
        "unit": f"{workload.unit}/s",
        **{system: done / medians[system]["step"] for system in SYSTEMS},
        "ratio": medians["fsdp2"]["step"] / medians["ours"]["step"],
        "ratio without optimizer": medians["fsdp2"]["backward"] / medians["ours"]["backward"],
        "ratio by round, least and most": [min(pairs), max(pairs)],
        "milliseconds": {system: {part: 1e3 * s for part, s in parts.items()} for system, parts in medians.items()},
    }


# --- on a fake group --------------------------------------------------------------------------------------------------


def time_host(_: int, folder: str, rounds: int, steps: int) -> None:
    """CPU microseconds of a step of each system and of the unsharded model, with and without the optimizer."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nothing is received on a fake group, and stray numbers must not slow kernels
    dist.init_process_group("fake", rank=0, world_size=FAKE_RANKS, store=FakeStore())
    workload = tiny_gpt()
    batch = workload.batch(0, 0)
    trainers = {system: Trainer(workload, shard) for system, shard in {**SYSTEMS, "unsharded": unsharded}.items()}
    calls: dict[str, Callable[[], Any]] = {}
    for system, trainer in trainers.items():
        calls[f"{system} step"] = lambda trainer=trainer: (trainer.accumulate(batch), trainer.update())
        calls[f"{system} backward"] = lambda trainer=trainer: (trainer.accumulate(batch), trainer.model.zero_grad())
    for call in calls.values():
        cpu_microseconds(call, WARM_UP)
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        progress(0, f"host: round {number + 1} of {rounds}")
        for name in list(calls)[:: 1 if number % 2 else -1]:
            measured[name].append(cpu_microseconds(calls[name], steps))
    medians = {name: statistics.median(values) for name, values in measured.items()}
    units = len(workload.blocks(trainers["unsharded"].model)) + 1
    Path(folder, "medians.json").write_text(json.dumps({"units": units, **medians}))
    dist.destroy_process_group()


def measure_host(rounds: int, steps: int) -> dict[str, Any]:
    """Host time that sharding adds per unit and step; the target is set for forward and backward, the runtime's own."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_host, (folder, rounds, steps), nprocs=1)
        medians = json.loads(Path(folder, "medians.json").read_text())

    def added(system: str, part: str) -> float:
        return (medians[f"{system} {part}"] - medians[f"unsharded {part}"]) / medians["units"]

    return {
        "unit": "us/unit",
        **{system: added(system, "backward") for system in SYSTEMS},
        "ratio": added("ours", "backward") / added("fsdp2", "backward"),
        "with optimizer": {system: added(system, "step") for system in SYSTEMS},
        "ratio with optimizer": added("ours", "step") / added("fsdp2", "step"),
        "microseconds": medians,
    }


# --- report -----------------------------------------------------------------------------------------------------------


def progress(rank: int, text: str) -> None:
    """Say on standard error where the measurement stands."""
    if rank == 0:
        print(f"{text:60}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def machine() -> str:
    """Processor and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{platform.machine()}, {model or 'unknown processor'}, {os.cpu_count()} cores"


def row(name: str, figures: dict[str, Any]) -> str:
    """A line of the table."""
    target = f"{'<=' if name == 'host' else '>='} {TARGETS[name]}"
    return (
        f"{name:12}{figures['unit']:>12}{figures['ours']:12,.1f}{figures['fsdp2']:12,.1f}{figures['ratio']:9.3f}"
        f"{target:>10}"
    )


def main() -> None:
    """Measure, print the table, write `bench/results/eager_peers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(TARGETS), help="one of the measurements; nothing is written")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each system in a round (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 steps; nothing is written")
    args = parser.parse_args()
    rounds, steps = (3, 2) if args.quick else (args.rounds, args.steps)
    wanted = [args.only] if args.only else list(TARGETS)
    figures = {
        name: measure_host(rounds, 4 * steps) if name == "host" else measure_speed(name, rounds, steps)
        for name in wanted
    }
    print(f"{'':12}{'':>12}{'ours':>12}{'fsdp2':>12}{'ratio':>9}{'target':>10}")
    for name in wanted:
        print(row(name, figures[name]))
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rounds": rounds,
        "steps": steps,
        **figures,
    }
    if args.only or args.quick:
        print(json.dumps(report, indent=1))
        return
    target = Path(__file__).parent / "results" / "eager_peers.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
