"""What the order of blocks exposes, beside blocks compiled one by one and plans searched by right and wrong prices.

One process plays rank 0 of 8 on the emulated link and counts CPU seconds. At each ratio of communication to computing
the link is the same for all; the plans are made for the right prices, and for tasks and a link that are priced so many
times as long, together and apart. Only their ratio matters to a plan, so that five of the nine combinations tell all.

    exposed     ms of a step, medians of rounds in which all take turns
    step        ms of forward and backward; what the host does beside a transfer hides it, but counts here
    of searched what the default exposes more than the plan by the right prices, as a part of the step
    peak        MB that forward and backward allocate at most, without what the emulation holds

    python -m bench first_plan [--ratios 0.3 0.6 0.9] [--rounds 5] [--model gpt] [--off 1 0.25]
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.emulated import count_one_thread
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.report import parser, write
from fsdp_compile.api import fully_shard, shard_module
from fsdp_compile.compare.memory import curve

SPEED = 1.5  # of this CPU beside the hardware file: where none is told, a plan is made for this
OFF = (1.0, 0.25, 0.5, 2.0, 4.0)  # how many times as long the link takes as it is priced, relative to tasks


def systems(
    model: str, wire: tuple[float, float], speed: float, prices: Sequence[float]
) -> dict[str, tuple[torch.nn.Module, Callable[..., Any]]]:
    """Models and how to call them, by name; with the link that plans are made for."""

    def sharded() -> Any:
        torch.manual_seed(0)
        return shard_module(WORKLOADS[model]().build(), forward_prefetch=True)

    made: dict[str, Any] = {}
    by_block = sharded()
    for block in WORKLOADS[model]().blocks(by_block):
        block.compile(fullgraph=True)
    made["blocks"] = by_block, by_block
    plans: dict[str, dict[str, Any]] = {"default": {}}
    for off in prices:
        latency, bandwidth = wire[0] / off, wire[1] * off
        plans[f"off by {off:g}"] = {"link": f"custom:{latency:.3g},{bandwidth:.4g}", "device": f"cpu:{speed:.3g}"}
    for name, options in plans.items():
        whole = sharded()
        made[name] = whole, torch.compile(whole, fullgraph=True, backend="fsdp_compile", options=options)
    return made


def step(run: Callable[..., Any], model: torch.nn.Module, batch: Any) -> tuple[float, float]:
    """Seconds of forward and backward, and of what waits sleep in them."""
    LINK.reset()
    begin = LINK.clock()
    run(*batch).backward()
    seconds = LINK.clock() - begin
    model.zero_grad()
    return seconds, LINK.summary()["exposed"]


def row(model: str, ratio: float, rounds: int, speed: float, prices: Sequence[float]) -> dict[str, Any]:
    """All systems at one ratio."""
    batch = WORKLOADS[model]().batch(0, 0)
    LINK.configure(0.0, FREE)
    torch._dynamo.reset()
    whole: Any = fully_shard(WORKLOADS[model]().build())
    plain: Any = torch.compile(whole, fullgraph=True, backend="fsdp_compile")
    computing = statistics.median(step(plain, whole, batch)[0] for _ in range(5 + 2))
    wire = link_for(ratio, computing, LINK.summary())
    made = systems(model, wire, speed, prices)
    peaks = {}
    for name, (each, run) in made.items():
        step(run, each, batch)
        peaks[name] = max(total for _, total in curve(lambda run=run: run(*batch).backward(), torch.device("cpu")))
        each.zero_grad()
    LINK.configure(*wire)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(rounds):
        for name in list(made)[:: 1 if number % 2 else -1]:
            taken[name].append(step(made[name][1], made[name][0], batch))
    steps, found = (
        {name: statistics.median(each[which] for each in those) for name, those in taken.items()} for which in (0, 1)
    )
    more = (found["default"] - found["off by 1"]) / (computing + found["off by 1"])
    figures = {"steps": steps, "exposed": found, "more": more, "peaks": peaks}
    return {"model": model, "ratio": ratio, "computing": computing, **figures}


def main() -> None:
    """Print a table and write `bench/results/first_plan.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=WORKLOADS, default="gpt")
    arguments.add_argument("--ratios", nargs="+", type=float, default=[0.3, 0.6, 0.9])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--speed", type=float, default=SPEED, help="of this CPU beside the hardware file")
    arguments.add_argument(
        "--off", nargs="+", type=float, default=OFF, help="1 and others; seven models of Llama need 14 GB"
    )
    args = arguments.parse_args()
    count_one_thread()
    rows = []
    for ratio in args.ratios:
        rows.append(found := row(args.model, ratio, args.rounds, args.speed, args.off))
        print(f"{ratio}: computing {found['computing'] * 1e3:.0f} ms, default {found['more']:+.2%} of searched")
        for name, seconds in found["exposed"].items():
            taken, peak = found["steps"][name] * 1e3, found["peaks"][name] / 1e6
            print(f"  {name:14} {seconds * 1e3:7.1f} ms exposed of {taken:7.1f}, peak {peak:6.1f} MB", flush=True)
    if not args.dry:
        write("first_plan", {"rows": rows})
