"""`python -m bench`: measure every part that this machine can, write `bench/results/` and pictures.

python -m bench                      all parts for this machine, then the report
python -m bench gloo link            some of them (`--list` names them)
python -m bench report               tables and pictures of the newest results
python -m bench page                 docs/measurements.md anew: every command that it names, then the report
python -m bench runs CSV             a table of training runs beside predictions; `fit` fits constants to reported ones
python -m bench NAME --help          planner, host_overhead, compile_time or another command with options of its own

Each part is a model, a link and the systems that run side by side on it.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import report
from bench.link import FREE
from bench.models import WORKLOADS
from bench.rounds import Side
from bench.worker import Spec

LATENCY = 20e-6  # seconds of a collective's launch on the emulated link
CHECKED = 20  # the step at which losses are compared
TOLERANCE = {False: 1e-3, True: 1e-2}  # relative, by bf16: systems cast at different places

CPU_SYSTEMS = ("unsharded", "ddp", "fsdp2", "fsdp2_compile", "simple_fsdp", "ours", "ours_blocks", "ours_compiled")


@dataclass(frozen=True)
class Part:
    """One measurement; names that are not explained are those of `worker.Spec`."""

    about: str  # a line for readers
    mode: str
    model: str
    systems: tuple[str, ...] = CPU_SYSTEMS
    world: int = 2
    device: str = "cpu"
    bf16: bool = False
    ratios: tuple[float, ...] = ()  # emulated link: communication over compute, one setting each
    rounds: int = 7  # how many turns each system has at each ratio
    steps: int = 3  # of a turn
    cpu_time: bool = False
    looks: tuple[str, ...] = ()  # what else is measured: "calls", "copies", "memory"


PEERS = ("unsharded", "fsdp2", "fsdp2_compile", "simple_fsdp", "ours", "ours_compiled")
ON_CUDA = (
    *("unsharded", "fsdp1", "fsdp2", "fsdp2_compile", "fsdp2_compile:ends", "simple_fsdp"),
    *("ours", "ours_blocks", "ours_compiled"),
)
LOW_PRECISION = tuple(
    f"ours_compiled:{kind}{off}" for kind in ("autocast", "float8") for off in ("", "+smallest_gather")
)

PARTS = {
    "gloo": Part("GPT, two gloo ranks of one core each, fp32", "gloo", "gpt", looks=("copies",)),
    "link": Part(
        "GPT, emulated link, 8 ranks, fp32", "link", "gpt", (*PEERS, "ours_blocks", "ours_planned"), 8,
        ratios=(0.3, 0.6, 0.9), looks=("calls", "memory"),
    ),
    "link_1024": Part("the same, 1024 ranks", "link", "gpt", PEERS, 1024, ratios=(0.6,), looks=("calls",)),
    "link_autocast": Part(
        "the same, 8 ranks, bf16: by param_dtype, by autocast and in float8, with and without smallest_gather", "link",
        "gpt", (*PEERS, *LOW_PRECISION), 8, bf16=True, ratios=(0.3, 0.6, 0.9), looks=("calls", "memory"),
    ),
    "memory": Part(
        "GPT on 8 tokens, 64 ranks: parameters and gradients are all the memory there is", "link", "gpt_few_tokens",
        ("fsdp2", "fsdp2_compile", "simple_fsdp", "ours", "ours_compiled"), 64, rounds=0, looks=("memory",),
    ),
    "memory_step": Part(
        "the same, 8 ranks: the loop's forward and backward, and whole steps with the optimizer", "link",
        "gpt_few_tokens", ("ours_compiled", "ours_step", "ours_step:in_backward"), 8, rounds=0, looks=("memory",),
    ),
    "cuda_link": Part(
        "Llama 3 8B blocks, four of them, 4,096 tokens, emulated link, 64 ranks, bf16", "link", "llama", ON_CUDA, 64,
        "cuda", True, (0.3, 0.6, 0.9), looks=("calls", "memory"),
    ),
    "cuda_step": Part(
        "the same, whole steps, with what plans them", "link", "llama",
        ("unsharded", "fsdp2_compile:ends", "ours_compiled", "ours_planned", "ours_step"), 64,
        "cuda", True, (0.3, 0.6, 0.9), rounds=3, looks=("calls", "memory"),
    ),
    "nccl": Part("Llama 3 8B blocks, four of them, NCCL, bf16", "nccl", "llama", ON_CUDA, 0, "cuda", True),
    "smoke": Part(
        "a tiny GPT, to see that all of this runs", "link", "gpt_small", ("fsdp2", "ours"), 8, ratios=(0.6,), rounds=2,
        steps=2, looks=("calls", "copies", "memory"),
    ),
}  # fmt: skip

ON_THE_CPU = ("gloo", "link", "memory")
"""What `python -m bench` runs without a GPU."""


def run(name: str, part: Part) -> dict[str, Any]:
    """Measure a part; what the report reads."""
    common = (part.model, part.mode, part.device, part.bf16, part.world)
    specs = [Spec(system, *common, cpu_time=part.cpu_time) for system in part.systems]
    settings = (0.0, *part.ratios) if part.mode == "link" and part.rounds else (0.0,)
    with Side(name, specs, len(settings) * part.rounds + len(part.looks)) as side:
        asked = {key: getattr(part, key) for key in ("about", "model", "mode", "world", "device", "bf16")}
        workload = WORKLOADS[part.model]()
        ranks = part.world if part.mode in ("gloo", "nccl") else 1
        per_step = {"unit": "tokens", "number": workload.per_step * ranks}
        found = {**asked, "first": side.first, "failed": side.failed, "per_step": per_step, "settings": []}
        if part.rounds:
            side.ask("train", steps=2)
        for ratio in settings if part.rounds else ():
            found["settings"].append(_at(side, part, ratio, found))
        for look in part.looks:
            side.say(look)
            found[look] = side.ask(look)
    if part.mode in ("gloo", "nccl"):
        check_losses({name: found["settings"][0]["systems"][name]["losses"] for name in side.running}, part.bf16)
    return found


def _at(side: Side, part: Part, ratio: float, found: dict[str, Any]) -> dict[str, Any]:
    """One setting of the link: the free one first, from which the others are chosen."""
    setting: dict[str, Any] = {"ratio": ratio}
    if part.mode == "link":
        latency, bandwidth = (0.0, FREE) if ratio == 0 else link_for(ratio, found["compute"], found["sent"])
        side.ask("configure", latency=latency, bandwidth=bandwidth)
        setting.update(latency=latency, bandwidth=bandwidth)
        side.ask("train", steps=1)
    steps = side.rounds(part.rounds, part.steps)
    setting["systems"] = {name: summarise(rounds) for name, rounds in steps.items()}
    if part.mode == "link" and ratio == 0:
        reference = "ours_compiled" if "ours_compiled" in side.running else "ours"
        ceiling = "unsharded" if "unsharded" in side.running else reference
        found["compute"] = setting["systems"][ceiling]["backward"]
        found["sent"] = side.running[reference].ask("calls")["summary"]
    elif part.mode == "link":
        name = "ours_compiled" if "ours_compiled" in side.running else "ours"
        free = found["settings"][0]["systems"][name]
        setting["bound"] = least(side.running[name].ask("calls"), free)
    return setting


def link_for(ratio: float, compute: float, sent: dict[str, Any]) -> tuple[float, float]:
    """Latency and bandwidth of a link on which the calls in `sent` take `ratio` times `compute` seconds."""
    calls = sum(number for kinds in sent["calls"].values() for number in kinds.values())
    nbytes = sum(number for kinds in sent["bytes"].values() for number in kinds.values())
    latency = min(LATENCY, ratio * compute / calls / 4)  # at most a quarter of the time
    return latency, nbytes / (ratio * compute - latency * calls)


def least(seen: dict[str, Any], free: dict[str, float]) -> dict[str, float]:
    """Lower bounds of a step and of its exposed time, for any order with gathers before their use and reduces after it.

    That is "step", of which "unavoidable" is exposed: the first gather, the last reduce, and what computing is too
    short for. "dependent" is what is exposed at least where the root unit (embedding, head) computes next to nothing
    and all are gathered again: the first two gathers of each pass and the last two reduces have nothing to hide behind.
    `seen` are a step's calls (`Worker.calls`), `free` seconds where the link takes no time.
    """
    took = [(call["kind"], call["end"] - call["begin"]) for call in seen["list"]]
    ahead = [seconds for kind, seconds in took[: seen["calls"]] if kind == "all_gather"]
    again = [seconds for kind, seconds in took[seen["calls"] :] if kind == "all_gather"]
    reduces = [seconds for kind, seconds in took if kind != "all_gather"]
    first, last, forward, backward = ahead[0], reduces[-1], sum(ahead), sum(again) + sum(reduces)
    computing = free["forward"], free["backward"] - free["forward"]
    bound = first + max(computing[0], forward - first) + max(computing[1], backward - last) + last
    rest = free["step"] - free["backward"]
    return {
        "step": bound + rest,
        "unavoidable": bound - sum(computing),
        "dependent": sum((*ahead[:2], *again[:2], *reduces[-2:])),
        "communication": forward + backward,
    }


def summarise(rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds of the mean step; spread; every loss."""
    found: dict[str, Any] = {}
    for key in ("step", "forward", "backward", "exposed"):
        means = sorted(statistics.fmean(step[key] for step in steps) for steps in rounds)
        found[key] = statistics.median(means)
        if key == "step":
            found["spread"] = [means[0], means[-1]]
    found["losses"] = [step["loss"] for steps in rounds for step in steps]
    return found


def check_losses(losses: dict[str, Sequence[float]], bf16: bool) -> None:
    """Raise RuntimeError if a peer's losses of the first 20 steps differ from ours by more than `TOLERANCE`."""
    ours = next(name for name in reversed(list(losses)) if name.startswith("ours"))
    for name, found in losses.items():
        if name == "unsharded":  # trains on its own rank's batch alone
            continue
        for number, (a, b) in enumerate(zip(losses[ours], found, strict=True)):
            if number < CHECKED and not abs(a - b) <= TOLERANCE[bf16] * abs(a):  # false for nan too
                raise RuntimeError(f"step {number}: expected losses as of {ours}, {a}, found {b} of {name}")


def runnable(part: Part) -> str:
    """Why a part cannot run here, or nothing."""
    if part.device == "cuda" and not torch.cuda.is_available():
        return "needs a GPU"
    return "needs several GPUs" if part.mode == "nccl" and torch.cuda.device_count() < 2 else ""


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("names", nargs="*", help="parts, `report`, or `page` alone")
    arguments.add_argument("--list", action="store_true", help="name all parts")
    arguments.add_argument("--rounds", type=int, help="rounds of each setting")
    arguments.add_argument("--systems", nargs="+", help="only these systems")
    arguments.add_argument("--cpu-time", action="store_true", help="emulated link: count CPU seconds; not for DDP")
    args = arguments.parse_args()
    if args.list:
        print("\n".join(f"{name:12} {part.about}" for name, part in PARTS.items()))
        return
    names = args.names or [*ON_THE_CPU, "cuda_link", "cuda_step", "nccl", "report"]
    if names == ["page"]:
        report.write_page()
        names = ["report"]
    if unknown := set(names) - {*PARTS, "report"}:
        sys.exit(f"bench: error: {', '.join(sorted(unknown))}: no such part; --list names them")
    for name in names:
        if name == "report":
            write_report()
        elif reason := runnable(PARTS[name]):
            print(f"{name}: left out, {reason}", file=sys.stderr)
        else:
            measure(name, args)


def measure(name: str, args: argparse.Namespace) -> None:
    part = PARTS[name]
    systems, cpu_time = tuple(args.systems or part.systems), args.cpu_time and part.mode == "link"
    part = replace(part, rounds=args.rounds or part.rounds, systems=systems, cpu_time=cpu_time)
    if part.mode == "link" and not {"ours", "ours_compiled"} & set(part.systems):
        sys.exit("bench: error: --systems: name ours or ours_compiled too; what they send makes the link's speed")
    found = run(name, part)
    print(f"\n{report.tables({name: {**found, 'commit': report.commit(), **report.here()}})}\n")
    if not args.dry:
        print(f"{name}: written to {report.save(name, found)}", file=sys.stderr)


def write_report() -> None:
    """Tables, pictures and traces of the newest results."""
    from bench import pictures  # needs matplotlib, which all else does without

    newest = {name: part for name, part in report.load().items() if name in PARTS}  # of those there still are
    (report.RESULTS / "tables.md").write_text(report.tables(newest) + "\n")
    for name, part in newest.items():
        report.write_traces(name, part)
        for path in pictures.draw(name, part):
            print(path, file=sys.stderr)
