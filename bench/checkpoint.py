"""Sharded checkpoints with torch.distributed.checkpoint, ours against FSDP2's.

Two gloo ranks save and load the same model with Adam's state, each system in turn: wall and CPU seconds of
`get_state_dict` and `dcp.save`, and of `dcp.load` and `set_state_dict`, of the slower rank.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from bench.report import parser, write
from bench.systems import Setup, prepare

SYSTEMS = ("ours", "fsdp2")
WIDTH, LAYERS, RANKS = 1024, 12, 2  # 48 MiB of parameters, three times that with Adam's state


def trained(system: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of linear layers, each a unit, whose optimizer has state."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    prepare(system, model, list(model), Setup(torch.device("cpu"), init_device_mesh("cpu", (RANKS,))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def timed(call: Callable[..., None], *args: Any) -> tuple[float, float]:
    """Wall and CPU seconds of a call on this rank."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call(*args)
    return time.perf_counter() - wall, time.process_time() - cpu


def time_on_rank(rank: int, folder: str, rounds: int) -> None:
    """One of the gloo ranks: both systems in turns; it leaves its figures in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    systems = {system: trained(system) for system in SYSTEMS}
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {s: {"save": [], "load": []} for s in systems}
    for number in range(rounds + 1):
        for system in list(systems)[:: 1 if number % 2 else -1]:
            for what, call in (("save", save), ("load", load)):
                found = timed(call, *systems[system], f"{folder}/{system}")
                seconds[system][what] += [found] if number else []  # the first is a warm-up
    Path(folder, f"seconds_{rank}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure_speed(rounds: int) -> dict[str, Any]:
    """Median seconds, and how many times as fast ours is."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_on_rank, (folder, rounds), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"seconds_{rank}.json").read_text()) for rank in range(RANKS)]
    figures: dict[str, Any] = {}
    for what in ("save", "load"):
        for index, clock in enumerate(("wall", "CPU")):
            median = {}
            for system in SYSTEMS:
                turns = zip(*(seconds[system][what] for seconds in ranks), strict=True)
                median[system] = statistics.median(max(found[index] for found in turn) for turn in turns)
            figures[f"{what}, {clock} s"] = {**median, "ratio": median["fsdp2"] / median["ours"]}
    return figures


def main() -> None:
    """Print the table and write `bench/results/checkpoint.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=21, help="rounds of each system (default: %(default)s)")
    args = arguments.parse_args()
    figures = measure_speed(args.rounds)
    print(f"{'':16}{'ours':>10}{'fsdp2':>10}{'ratio':>8}")
    for name, each in figures.items():
        print(f"{name:16}{each['ours']:10.3f}{each['fsdp2']:10.3f}{each['ratio']:8.2f}")
    if not args.dry:
        write("checkpoint", {"speed": figures})
