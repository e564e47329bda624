"""Steps that were predicted from a calibration of this machine, beside the same steps measured on the emulated link.

Three sizes of GPT, each plain, checkpointed, with hybrid sharding and by `compile_step`, as one compiled graph. Rounds
of the calibration alternate with measured steps, of which predictions know nothing. One process plays rank 0 of 8. All
seconds are those that its one thread computes, to which waits add what a transfer still takes: other programs do not
count.

    step       ms of forward, backward and AdamW; the mean of the middle half of alternating rounds
    exposed    ms of it that are spent in waits; its error is given as a part of the measured step
    peak       MiB: parameters and optimizer states, and what lives beside them in forward and backward, as counted by
               the records of torch's allocator
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.emulated import WORLD, count_one_thread
from bench.link import FREE, LINK
from bench.memory import peak
from bench.models import gpt
from bench.parts import link_for
from bench.report import RESULTS, parser, write
from fsdp_compile import compile_step, explain, fully_shard
from fsdp_compile.explain.calibrate import Case, Rounds, device_cases, fitted, midmean, step_cases
from fsdp_compile.passes.cost.hardware import Hardware, Link, Source, device, with_figures

CPU = torch.device("cpu")
SHARDS, BATCH, CONTEXT = 4, 4, 128
SIZES: dict[str, dict[str, int]] = {
    "1.9 M": {"layers": 4, "heads": 3, "dim": 192},
    "10.9 M": {},
    "43 M": {"heads": 12, "dim": 768},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointing": "full"},
    "hybrid": {"strategy": "HYBRID_SHARD", "shard_size": SHARDS},
    "compile_step": {"compile_step": True},
}


class Trained:
    """A model of one size in one setting, sharded and compiled, with its optimizer."""

    def __init__(self, size: str, setting: str) -> None:
        self.workload = gpt(BATCH, CONTEXT, **SIZES[size], checkpointing=setting == "checkpointed")
        torch.manual_seed(0)
        mesh = (WORLD // SHARDS, SHARDS) if setting == "hybrid" else (WORLD,)
        self.model = fully_shard(self.workload.build(), mesh=init_device_mesh("cpu", mesh))
        self.forward: Callable[..., Any] = torch.compile(self.model, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.batch = self.workload.batch(0, 0)
        self.whole = compile_step(self.model, self.optimizer) if setting == "compile_step" else None

    def accumulate(self) -> None:
        self.forward(*self.batch).backward()

    def step(self) -> dict[str, float]:
        """Seconds of a whole step, and of what it waits."""
        LINK.reset()
        begin = LINK.clock()
        if self.whole is not None:
            self.whole(*self.batch)
        else:
            self.accumulate()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"step": LINK.clock() - begin, "exposed": LINK.summary()["exposed"]}


def figures(size: str, setting: str, hardware: Hardware) -> dict[str, float]:
    """What `explain` says of the same step."""
    workload = gpt(BATCH, CONTEXT, **SIZES[size])
    options = {"precision": "fp32", "clip": False, **SETTINGS[setting]}
    made: Any = explain(workload.build, world_size=WORLD, batch=BATCH, sequence=CONTEXT, hardware=hardware,
                        alternatives=False, name=size, **options)  # fmt: skip
    said = made.predictions[0]
    return {"step": said.step, "exposed": said.exposed, "peak": said.memory.peak}


def emulated(hardware: Hardware, latency: float, bandwidth: float) -> Hardware:
    """`hardware` whose ranks are connected by the emulated link, all alike."""
    wire = Link("emulated", latency, bandwidth, "bench/link.py", origin="measured")
    return replace(hardware, node=wire, network=wire, ranks_per_node=WORLD)


def cases() -> Iterator[Case]:
    """What `calibrate` times; small steps are on a link that takes no time."""
    yield from device_cases(CPU)
    for case in step_cases(fully_shard):
        yield replace(case, call=partial(on_free_link, case.call))


def on_free_link(call: Callable[[], object]) -> None:
    """What `call` does where transfers take no time."""
    latency, bandwidth = LINK.latency, LINK.bandwidth
    LINK.reset()
    LINK.configure(0.0, FREE)
    call()
    LINK.configure(latency, bandwidth)


def measured(size: str, ratio: float, rounds: int) -> tuple[Hardware, dict[str, dict[str, float]]]:
    """This machine with a link for this size, and what each setting takes on it: rounds of all alternate."""
    timed = Rounds(list(cases()), CPU)
    systems = {setting: Trained(size, setting) for setting in SETTINGS}
    LINK.configure(0.0, FREE)
    for system in systems.values():
        system.step()
    alone = statistics.median(systems["plain"].step()["step"] for _ in range(3))
    wire = link_for(ratio, alone, LINK.summary())
    LINK.configure(*wire)
    steps: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds):
        for setting in list(SETTINGS)[:: 1 if number % 2 else -1]:
            steps[setting].append(systems[setting].step())
            timed.round()
    found = {setting: {key: midmean([each[key] for each in those]) for key in ("step", "exposed")}
             for setting, those in steps.items()}  # fmt: skip
    for setting, system in systems.items():
        found[setting]["peak"] = peak(system.accumulate, system.model, system.optimizer)
    hardware = fitted(timed.cases, device("cpu"), Source("measured", "bench/foresight.py"))
    return emulated(hardware, *wire), found


def main() -> None:
    """Print a table and write `bench/results/foresight.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--ratio", type=float, default=0.6, help="of communication to computing: sets the link")
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments.add_argument("--again", action="store_true", help="predict anew what the newest results have measured")
    args = arguments.parse_args()
    print(f"{'size':8} {'setting':14} {'step ms':>16} {'error':>7} {'exposed ms':>16} {'of step':>8} {'peak MiB':>16}")
    if args.again:
        report = json.loads((RESULTS / "foresight.json").read_text())
        for row in report["rows"]:
            row["predicted"] = figures(row["size"], row["setting"], with_constants(report["constants"][row["size"]]))
            show(row)
    else:
        report = measure(args)
    if not args.dry:
        write("foresight", report)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All sizes, measured and predicted."""
    count_one_thread()
    rows: list[dict[str, Any]] = []
    constants: dict[str, dict[str, float]] = {}
    for size in args.sizes:
        hardware, found = measured(size, args.ratio, args.rounds)
        for setting, seen in found.items():
            said = figures(size, setting, hardware)
            rows.append({"size": size, "setting": setting, "measured": seen, "predicted": said})
            show(rows[-1])
        constants[size] = {name: value for name, value, _, source in hardware.figures() if source.origin == "measured"}
    return {"constants": constants, "rows": rows}


def with_constants(constants: dict[str, float]) -> Hardware:
    """This machine, by constants and a link that were noted."""
    peak = {name.removeprefix("peak."): value for name, value in constants.items() if name.startswith("peak.")}
    rest: dict[str, Any] = {name: value for name, value in constants.items() if "." not in name}
    made = with_figures(device("cpu"), Source("measured", "bench/foresight.py"), peak=peak, **rest)
    return emulated(made, constants["node.latency"], constants["node.bandwidth"])


def show(row: dict[str, Any]) -> None:
    was, said = row["measured"], row["predicted"]
    step, peak = said["step"] / was["step"] - 1, said["peak"] / was["peak"] - 1
    exposed = (said["exposed"] - was["exposed"]) / was["step"]
    cells = [f"{was['step'] * 1e3:7.1f} {said['step'] * 1e3:8.1f}", f"{step:+7.1%}",
             f"{was['exposed'] * 1e3:7.1f} {said['exposed'] * 1e3:8.1f}", f"{exposed:+8.1%}",
             f"{was['peak'] / 2**20:7.1f} {said['peak'] / 2**20:8.1f}", f"{peak:+7.1%}"]  # fmt: skip
    print(f"{row['size']:8} {row['setting']:14}", *cells, flush=True)
