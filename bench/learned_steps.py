"""Exposed time of training steps on the emulated link, where a plan for wrong prices learns.

One process plays rank 0 of 8 and counts CPU seconds. Plans are made for a link that takes so many times as long or as
short, and a CPU of the hardware file's speed. Each of the models trains `--steps` steps; two more follow the rule and
the plan for the right prices. A compilation takes as long as some dozens of these steps, which are short, and on a busy
machine longer. So that steps can be compared, training waits for it, unless `--beside` lets it go on.

    exposed     ms of a step, medians: of the first five steps that count, of the last ten; of the rule; of the plan for
                the right prices, which is the last one's search
    recording   how much longer the steps take that are recorded, beside the medians of those around them
    changes     what was learned, as `fsdp_compile.learning.install.explain` tells it

    over        by how much of the step the last steps expose more than 1.05 times what the right prices' plan does

    python -m bench learned_steps [--model gpt] [--ratios 0.6 0.9] [--off 0.25 4] [--steps 140] [--beside]
"""

import statistics
import time
from typing import Any

import torch

from bench.first_plan import SPEED, step
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.pictures import IMAGES, STYLE, plt
from bench.planned_step import count_one_thread
from bench.report import parser, write
from fsdp_compile import fully_shard
from fsdp_compile.learning import graphs, install, recorder

SKIPPED = 2  # steps that compile
NEAR = 5  # steps before and after a recorded one, beside which it is timed


def made(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A model, and how to call it."""
    torch.manual_seed(0)
    whole = fully_shard(WORKLOADS[model]().build(), forward_prefetch=True)
    return whole, torch.compile(whole, fullgraph=True, backend="fsdp_compile", options=options)


def wait_for_copy(learning: graphs.Learning) -> None:
    """Until the copy of this process, if there is one, has planned or compiled."""
    while (child := learning._child) is not None and child.status == "compiling":
        time.sleep(0.1)


def row(model: str, ratio: float, off: float, steps: int, beside: bool, computing: float | None) -> dict[str, Any]:
    """What one model learns."""
    batch = WORKLOADS[model]().batch(0, 0)
    LINK.configure(0.0, FREE)
    torch._dynamo.reset()
    install.learned.clear()
    whole, plain = made(model, {"link": None})
    measured = statistics.median(step(plain, whole, batch)[0] for _ in range(5 + SKIPPED))
    computing = computing or measured
    latency, bandwidth = link_for(ratio, computing, LINK.summary())
    runs = {}
    for name, factor, learns in (("learns", off, True), ("right", 1.0, False), ("rule", 0.0, False)):
        wrong = f"custom:{latency * factor:.3g},{bandwidth / (factor or 1):.4g}"
        chosen = {"link": wrong, "device": f"cpu:{SPEED:g}"} if factor else {"link": None}
        runs[name] = made(model, {**chosen, "learn": learns})
        step(runs[name][1], runs[name][0], batch)
    LINK.configure(latency, bandwidth)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    recorded = []
    for number in range(steps):
        for name in ("learns", *(("right", "rule") if number >= steps - 10 else ())):
            learning = next(iter(install.learned.values()))
            if not beside:
                wait_for_copy(learning)
            before = len(learning._recorded)
            found[name].append(step(runs[name][1], runs[name][0], batch))
            recorded += [number] if name == "learns" and len(learning._recorded) > before else []
    exposed = {name: [seconds for _, seconds in each] for name, each in found.items()}
    whole_steps = [seconds for seconds, _ in found["learns"]]
    others = {at: [step for near, step in enumerate(whole_steps) if near not in recorded and abs(near - at) <= NEAR]
              for at in recorded}  # fmt: skip
    cost = [whole_steps[at] / statistics.median(near) - 1 for at, near in others.items() if near]
    last, right, took = (statistics.median(each[-10:]) for each in (exposed["learns"], exposed["right"], whole_steps))
    return {
        "model": model, "ratio": ratio, "off": off, "computing": computing, "steps": exposed["learns"],
        "first": statistics.median(exposed["learns"][:5]), "last": last, "right": right,
        "rule": statistics.median(exposed["rule"]), "over": (last - 1.05 * right) / took,
        "recording": statistics.median(cost) if cost else None,
        "changes": [*learning.history, learning.under_way],
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """Exposed milliseconds by step, a panel for each row; lines are the rule and the plan for the right prices."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(rows), figsize=(3.2 * len(rows), 2.6), sharey=True, squeeze=False)
        for axes, found in zip(panels[0], rows, strict=True):
            axes.plot([seconds * 1e3 for seconds in found["steps"]], c="#e07a5f", lw=1.0, label="the plan that learns")
            for name, colour, title in (("rule", "#9aa5b1", "rule"), ("right", "#5b8def", "plan for the right prices")):
                axes.axhline(found[name] * 1e3, c=colour, lw=1.0, ls="--", label=title)
            axes.set_title(f"at {found['ratio']:g}, link priced {found['off']:g} times", loc="left", fontsize=9)
            axes.set_xlabel("step")
        panels[0][0].set_ylabel("exposed, ms")
        panels[0][0].set_ylim(bottom=0.0)
        panels[0][-1].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(IMAGES / "learned_steps.png")


def main() -> None:
    """Print a table, write `bench/results/learned_steps.json` and draw docs/images/learned_steps.png."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=WORKLOADS, default="gpt")
    arguments.add_argument("--ratios", nargs="+", type=float, default=[0.6, 0.9])
    arguments.add_argument("--off", nargs="+", type=float, default=[0.25, 4.0])
    arguments.add_argument("--steps", type=int, default=140)
    arguments.add_argument("--beside", action="store_true", help="train while another plan is compiled")
    arguments.add_argument("--computing", type=float, help="seconds of forward and backward, to choose the link by; "
                           "unless given it is measured, and no second run finds its code in the caches")  # fmt: skip
    args = arguments.parse_args()
    count_one_thread()
    recorder.clock, graphs.schedule.alone = LINK.clock, True
    rows = []
    for ratio in args.ratios:
        for off in args.off:
            rows.append(found := row(args.model, ratio, off, args.steps, args.beside, args.computing))
            print(f"{args.model} {ratio} x {off:g}: exposed {found['first'] * 1e3:.1f} ms, learned "
                  f"{found['last'] * 1e3:.1f}, right prices {found['right'] * 1e3:.1f}, rule "
                  f"{found['rule'] * 1e3:.1f}; computing {found['computing'] * 1e3:.1f}, over "
                  f"{found['over']:+.1%}", flush=True)  # fmt: skip
            if found["recording"] is not None:
                print(f"  recording {found['recording']:+.1%}")
            for line in found["changes"]:
                print(f"  {line}")
            print("  by step:", *(f"{each * 1e3:.0f}" for each in found["steps"]), flush=True)
    if not args.dry:
        write("learned_steps", {"rows": rows})
        draw(rows)
