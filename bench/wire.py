"""Steps with wire formats on the emulated link: forward and backward of a compiled GPT, rank 0 of 8, beside FSDP2.

For each ratio of communication to computing the link is chosen for the plan in full precision: what this plan sends on
it takes so many times as long as its step on a free link. The model is then compiled for that link with each wire, and
all take turns. Seconds are those of CPU time that the process computes, and of transfers that it waits for.

    step       ms of a forward and a backward, the median over turns; relative to that in full precision
    sent       MB that the rank sends in a step
    link       ms in which the link is busy; of these, waits are exposed
    computes   ms of the step less what it waits: with the coding of messages
    turned     which part of the link's saved time the step is shorter by
    bound      ms of the step in full less all that it waits for: no format can be faster, however few bytes it has
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from bench import link
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.report import commit, parser, write
from bench.systems import Setup, prepare
from fsdp_compile import Wire, fully_shard
from fsdp_compile.compare.rounds import rotated

WORLD = 8
WIRES: dict[str, Any] = {
    "full": None,
    "bf16": "bf16",
    "int8": "int8",
    "fp8": "fp8",
    "fp8 and bf16": Wire("fp8", "bf16"),
}
COLUMNS = ("step", "sent", "link", "exposed")


class Stepped:
    """A model with a wire, or blocks of FSDP2 compiled one by one, with the help that bench/README.md names."""

    def __init__(self, name: str, model: str) -> None:
        self.workload, self.name, self.number = WORKLOADS[model](), name, 0
        self.run: Callable[..., Any]
        torch.manual_seed(0)
        self.model = self.workload.build()
        self.after_backward: Callable[[], None] = lambda: None
        if name == "FSDP2":
            blocks, mesh = self.workload.blocks(self.model), init_device_mesh("cpu", (WORLD,))
            names = [name for name, each in self.model.named_modules() if each in set(blocks)]
            setup = Setup(torch.device("cpu"), mesh, blocking=True, block_names=names)
            prepared = prepare("fsdp2_compile", self.model, blocks, setup)
            self.run, self.after_backward = prepared.forward, prepared.after_backward
        else:
            fully_shard(self.model, wire=WIRES[name])

    def compile(self, latency: float, bandwidth: float) -> None:
        """From here on steps are planned for this link; one is taken, on a free link."""
        if self.name != "FSDP2":
            options = {"link": f"custom:{latency},{bandwidth}"}
            self.run = torch.compile(self.model, fullgraph=True, backend="fsdp_compile", options=options)
        LINK.configure(0.0, FREE)
        self()

    def __call__(self) -> dict[str, float]:
        """Seconds of one step, MB sent."""
        batch = self.workload.batch(self.number, 0)
        self.number += 1
        LINK.reset()
        begin = LINK.clock()
        self.run(*batch).backward()
        self.after_backward()
        seconds = LINK.clock() - begin
        self.model.zero_grad()
        seen = LINK.summary()
        sent = sum(call.nbytes for call in LINK.calls) / 1e6
        return {"step": seconds, "sent": sent, "link": seen["busy"], "exposed": seen["exposed"]}


def turns(all_of_them: list[Stepped], number: int) -> dict[str, dict[str, float]]:
    """By name the medians of steps that take turns; of each two that are not counted come first."""
    for each in all_of_them:
        each()
        each()
    by_name = {each.name: each for each in all_of_them}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in by_name}
    for turn in range(number):
        for name in rotated(list(by_name), turn):
            steps[name].append(by_name[name]())
    return {name: {key: statistics.median(step[key] for step in each) for key in COLUMNS}
            for name, each in steps.items()}  # fmt: skip


def fitting_link(full: Stepped, ratio: float, number: int) -> tuple[float, float]:
    """Latency and bandwidth on which what the plan in full precision sends takes `ratio` times its computing.

    Plans differ between links: one that is planned for a slow link may send less.
    """
    latency, bandwidth = 2e-5, 1e9
    for _ in range(3):
        full.compile(latency, bandwidth)
        free = turns([full], number)["full"]["step"]
        full()
        before, (latency, bandwidth) = bandwidth, link_for(ratio, free, LINK.summary())
        if abs(bandwidth / before - 1) < 0.1:
            break
    return latency, bandwidth


def with_arithmetic(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The rows with what follows from them and from that of full precision."""
    full = rows["full"]
    for row in rows.values():
        row["relative"] = row["step"] / full["step"]
        row["computes"] = row["step"] - row["exposed"]
        row["bound"] = (full["step"] - full["exposed"]) / full["step"]
        saved = full["link"] - row["link"]
        row["turned"] = (full["step"] - row["step"]) / saved if saved > 0 else 0.0
    return rows


def main() -> None:
    """Print a table and write `bench/results/wire.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.3, 2.0, 4.0])
    arguments.add_argument("--wires", nargs="+", default=[*WIRES, "FSDP2"], help="the first is full")
    arguments.add_argument("--model", default="gpt")
    args = arguments.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(WORLD, 0.0, FREE)
    LINK.count_cpu_time()
    found: dict[str, dict[str, Any]] = {}
    for ratio in args.ratios:
        torch._dynamo.reset()
        made = [Stepped(name, args.model) for name in args.wires]
        latency, bandwidth = fitting_link(made[0], ratio, args.rounds)
        for each in made:
            each.compile(latency, bandwidth)
        LINK.configure(latency, bandwidth)
        rows = found[str(ratio)] = with_arithmetic(turns(made, args.rounds))
        print(f"communication {ratio} times computing, {bandwidth / 1e6:.0f} MB/s; "
              f"without any wait {rows['full']['bound']:.2f} of the step in full")  # fmt: skip
        for name, row in rows.items():
            times = "  ".join(f"{key} {1e3 * row[key]:7.1f}" for key in ("step", "link", "exposed", "computes"))
            print(f"  {name:14} relative {row['relative']:5.2f}  {times}  sent {row['sent']:6.1f}  "
                  f"turned {row['turned']:5.2f}", flush=True)  # fmt: skip
    if not args.dry:
        write("wire", {"commit": commit(), "rows": found})


if __name__ == "__main__":
    main()
