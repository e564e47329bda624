"""Ranks of which one fails: who learns what, after how many seconds. `test_faults.py` runs this.

    python faults.py FOLDER SCENARIO STAGE HOW [SCENARIO STAGE HOW ...]

HOW is what runs the model, on three ranks, or on four with hybrid sharding, as in "eager hybrid". Rank 1 takes one good
step, and in the second one it fails in STAGE; it does not end, which would tell the others at once, but for `kill`.
Prints a line of JSON for each row: what the ranks said after how many seconds, None if that was before the second step.
This process never makes a process group, so its forks can, and torch is imported once.
"""

import json
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import MixedPrecision, checkpoint, fully_shard

STEPS, LIMIT = 3, 90.0
TIMEOUT = {"eager": 3, "aot_eager": 10, "inductor": 20}  # seconds, by what runs the model: more than it compiles


def fail(scenario: str) -> None:
    """What happens to rank 1."""
    if scenario == "raise":
        raise ArithmeticError("the user's code fails")
    if scenario == "out of memory":
        raise torch.OutOfMemoryError("out of memory")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[scenario])


class Fault:
    """Fails when it is armed and called with its own stage."""

    def __init__(self, rank: int, scenario: str, stage: str) -> None:
        self.is_mine = rank == 1 and scenario in ("raise", "out of memory", "kill", "stop")
        self.scenario, self.stage, self.is_armed, self.is_loading = scenario, stage, False, False

    def at(self, stage: str, *_: Any) -> None:
        """Fail, if this is the moment."""
        if self.is_mine and self.is_armed and stage == self.stage:
            fail(self.scenario)


def ranks_of(how: str) -> int:
    """How many ranks a row has."""
    return 4 if how.endswith("hybrid") else 3


def train(rank: int, folder: Path, scenario: str, stage: str, how: str) -> None:
    """Three steps, with a save and a load each if STAGE is one of theirs, as one rank."""
    torch.manual_seed(0)
    how, odd = how.split()[0], rank == 1
    precision = MixedPrecision(reduce_dtype=torch.bfloat16) if scenario == "option" and odd else MixedPrecision()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
    options: dict[str, Any] = {"auto_wrap_policy": {nn.Linear}, "mixed_precision": precision}
    if dist.get_world_size() == 4:
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "devices_per_node": 2}
    fault = Fault(rank, scenario, stage)
    early = stage in ("construction", "first forward")
    if early:  # before there is a step
        dist.barrier()
        note(folder, rank, "armed", "")
        options["sync_module_states"] = fault.is_armed = True
        fault.at("construction")
    model = fully_shard(model, **options)
    fault.at("first forward")
    if how == "eager":  # in the middle of the model
        model[1].register_forward_pre_hook(partial(fault.at, "forward"))
    run = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(partial(fault.at, "optimizer"))
    for step in range(STEPS):
        fault.is_armed = early or step == 1
        if step == 1 and not early:
            dist.barrier()
            note(folder, rank, "armed", "")
        if scenario == "skip" and odd and step == 1:
            continue
        batch = torch.ones(5 if scenario == "batch" and odd else 4, 16)
        fault.at("" if how == "eager" else "forward")
        out = run(batch)
        if out.requires_grad:
            out.register_hook(partial(fault.at, "backward"))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stage in ("save", "write", "load"):
            save(folder / "checkpoints", step + 1, {"model": model, "optimizer": optimizer}, rank, fault)


def save(root: Path, step: int, state: dict[str, Any], rank: int, fault: Fault) -> None:
    """Save, and load what was saved; if that raises, the checkpoint before must be there, or also the new one."""
    fails = {"calls": _Calls(fault), "pickled": {f"of rank {rank}": _Pickled(fault)}}
    try:
        checkpoint.save(state | fails, root, step)
        fault.is_loading = True
        checkpoint.load(state | {"calls": fails["calls"]}, root, step)
        fault.is_loading = False
    except BaseException as error:
        newest = checkpoint.latest(root)
        error.add_note(f"newest checkpoint: {newest and newest.name}")
        raise


class _Calls:
    """Part of a checkpoint that fails when it is asked for its state: to save it, or to load it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, int]:
        self.fault.at("load" if self.fault.is_loading else "save")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to load."""


class _Pickled:
    """A value that fails when it is written."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        self.fault.at("write")
        return (int, ())


def note(folder: Path, rank: int, kind: str, text: str) -> None:
    """Let the process that started the ranks know."""
    path = folder / f"{kind}_{rank}"
    path.with_suffix(".new").write_text(json.dumps([time.monotonic(), text]))
    path.with_suffix(".new").rename(path)


def live(rank: int, folder: Path, *row: str) -> None:
    """A rank's life, to its end or its error."""
    torch.set_num_threads(1)
    parent = os.getppid()
    if row[0] == "cache":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            str(folder.parent / "warm") if rank == 1 else str(folder / f"cold_{rank}")
        )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        timeout=timedelta(seconds=TIMEOUT[row[2].split()[0]]),
        rank=rank,
        world_size=ranks_of(row[2]),
    )
    try:
        train(rank, folder, *row)
    except BaseException as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        note(folder, rank, "end", f"{type(error).__name__}: {error} {notes}")
    else:
        note(folder, rank, "end", "")
    while os.getppid() == parent:
        time.sleep(0.5)


def start(rank: int, folder: Path, *row: str) -> int:
    """A rank in a process of its own; its id."""
    child = os.fork()
    if child == 0:
        try:
            live(rank, folder, *row)
        finally:
            os._exit(1)
    return child


def run(folder: Path, *row: str) -> dict[str, Any]:
    """One row of the table."""
    folder.mkdir()
    ranks = [start(rank, folder, *row) for rank in range(ranks_of(row[2]))]
    end = time.monotonic() + LIMIT
    expected = [r for r in range(ranks_of(row[2])) if r != 1 or row[0] not in ("kill", "stop")]
    while time.monotonic() < end and not all((folder / f"end_{rank}").exists() for rank in expected):
        time.sleep(0.02)
    said = {}
    for rank in expected:
        if (folder / f"end_{rank}").exists():
            when, text = json.loads((folder / f"end_{rank}").read_text())
            armed = folder / f"armed_{rank}"
            since = round(when - json.loads(armed.read_text())[0], 1) if armed.exists() else None
            said[rank] = [since, text]
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return {"row": row, "said": said}


def main() -> None:
    """Run the rows of the command line."""
    folder_of_all, *words = sys.argv[1:]
    for number in range(len(words) // 3):
        folder = Path(folder_of_all).resolve() / f"row_{number}"
        print(json.dumps(run(folder, *words[3 * number : 3 * number + 3])), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
