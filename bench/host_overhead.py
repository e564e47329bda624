"""CPU time of a compiled step outside kernels and collectives: sharded against `torch.compile` of the unsharded model.

A GPT whose tensors are tiny, so that a step is nearly all host work; a fake process group, whose collectives return at
once. Three measures, in microseconds of CPU time per step, the variants interleaved:

    guards        a forward whose compiled graph does nothing: Dynamo's guards, inputs, outputs
    step          forward and backward compiled by Inductor, zero_grad: guards, wrappers, autograd, tiny kernels
    collectives   the same gathers, exchanges and waits as generated code has them, called by themselves
    without them  what a step adds beyond these calls

The fake group copies a gather's input into each of its 8 parts: of the time of a call nearly all.
"""

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import fully_shard
from fsdp_compile.comm.direct import DirectCollectives
from fsdp_compile.core.unit import unit_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

Step = Callable[[], Any]


def build(layers: int, sharded: bool) -> torch.nn.Module:
    """A GPT with `layers` blocks of width 16."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=16, context=4, layers=layers, heads=1, dim=16, tied=False))
    return fully_shard(model) if sharded else model


def do_nothing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend whose graph computes nothing and returns a loss-shaped constant."""
    return lambda *args: (torch.zeros(()),)


def guards_only(layers: int, sharded: bool) -> Step:
    """A compiled call without a graph behind it."""
    tokens = torch.zeros(1, 4, dtype=torch.long)
    compiled = torch.compile(build(layers, sharded), backend=do_nothing, fullgraph=True)

    def step() -> None:
        with torch.no_grad():
            compiled(tokens, tokens)

    return step


def whole_step(layers: int, sharded: bool) -> Step:
    """Forward, backward and zero_grad."""
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model = build(layers, sharded)
    compiled = torch.compile(model, fullgraph=True)

    def step() -> None:
        compiled(tokens, tokens).backward()
        model.zero_grad()

    return step


def collectives_only(layers: int, sharded: bool) -> Step:
    """Per unit two all-gathers and one all-to-all with their waits; nothing for the unsharded model."""
    units = {at[0] for p in build(layers, True).parameters() if (at := unit_of(p))} if sharded else set()
    buffers = [(unit, flat.shard, flat.shard.new_empty(flat.layout.numel)) for unit in units for flat in unit.flats]

    collectives = DirectCollectives()

    def step() -> None:
        for unit, shard, full in buffers:
            for _ in range(2):
                collectives.all_gather(shard, unit.group_size, unit.group_name, out=full)
                collectives.wait(full)
            collectives.wait(collectives.all_to_all(full, [], [], unit.group_name))  # what is compiled on the CPU

    return step


def cpu_microseconds(step: Step, repeat: int) -> float:
    """CPU time of this process per call."""
    begin = time.process_time()
    for _ in range(repeat):
        step()
    return (time.process_time() - begin) / repeat * 1e6


def compare(make: Callable[[int, bool], Step], layers: int, rounds: int, repeat: int) -> dict[str, float]:
    """Medians of interleaved rounds, and their difference per block."""
    steps = {name: make(layers, name == "sharded") for name in ("unsharded", "sharded")}
    for step in steps.values():
        cpu_microseconds(step, 5)  # compile, settle
    measured: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            measured[name].append(cpu_microseconds(step, repeat))
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {**medians, "added per block": (medians["sharded"] - medians["unsharded"]) / layers}


def main() -> None:
    """Print a table and write `bench/results/host_overhead.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    figures = {
        "guards": compare(guards_only, args.layers, args.rounds, repeat=200),
        "step": compare(whole_step, args.layers, args.rounds, repeat=20),
        "collectives": compare(collectives_only, args.layers, args.rounds, repeat=20),
    }
    figures["without them"] = {name: figures["step"][name] - spent for name, spent in figures["collectives"].items()}
    print(f"{'us of CPU time per step':28}{'unsharded':>12}{'sharded':>12}{'added per block':>18}")
    for name, row in figures.items():
        print(f"{name:28}{row['unsharded']:12.1f}{row['sharded']:12.1f}{row['added per block']:18.2f}")
    report = {"layers": args.layers, "torch": torch.__version__, "machine": platform.machine(), **figures}
    target = pathlib.Path(__file__).parent / "results" / "host_overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
