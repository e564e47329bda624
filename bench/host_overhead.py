"""CPU time of a compiled step outside kernels and collectives: sharded against `torch.compile` of the unsharded model.

A GPT whose tensors are tiny, so that a step is nearly all host work; a fake process group, whose collectives return at
once. In microseconds of CPU time per step, the variants interleaved:

    guards        a forward whose compiled graph does nothing: Dynamo's guards, inputs, outputs
    step          forward and backward compiled by Inductor, zero_grad: guards, wrappers, autograd, tiny kernels
    collectives   the same gathers, exchanges and waits as generated code has them, called by themselves
    without them  what a step adds beyond these calls

The eager loop as people write it, unsharded, sharded, by torch's FSDP1 with `use_orig_params` and by its FSDP2:
milliseconds of CPU time of forward, backward, clipping and the steps of several optimizers, without a call that would
make them faster.

As gloo, which the fake group stands for, would copy, a gather is 8 broadcasts.
"""

import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.report import parser, write
from fsdp_compile import fully_shard
from fsdp_compile.comm.direct import DirectCollectives
from fsdp_compile.core.unit import unit_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig

Step = Callable[[], Any]
TOKENS = torch.zeros(1, 4, dtype=torch.long)


def build(layers: int, sharded: bool) -> torch.nn.Module:
    """A GPT with `layers` blocks of width 16."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=16, context=4, layers=layers, heads=1, dim=16, tied=False))
    return fully_shard(model) if sharded else model


def do_nothing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend whose graph computes nothing and returns a constant loss."""
    return lambda *args: (torch.zeros(()),)


def guards_only(layers: int, sharded: bool) -> Step:
    """A compiled call without a graph behind it."""
    compiled = torch.compile(build(layers, sharded), backend=do_nothing, fullgraph=True)

    def step() -> None:
        with torch.no_grad():
            compiled(TOKENS, TOKENS)

    return step


def whole_step(layers: int, sharded: bool) -> Step:
    """Forward, backward and zero_grad."""
    model = build(layers, sharded)
    compiled = torch.compile(model, fullgraph=True)

    def step() -> None:
        compiled(TOKENS, TOKENS).backward()
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
                collectives.all_gather(shard, unit.group.size, unit.group.name, out=full)
                collectives.wait(full)
            collectives.wait(collectives.all_to_all(full, [], [], unit.group.name))  # what is compiled on the CPU

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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "Adam": torch.optim.Adam,
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
}


def eager_loops(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time of each part of an eager step, interleaved: {part: {variant: median}}."""
    unsharded = build(layers, False)
    policy = ModuleWrapPolicy({Block})
    fsdp1 = FSDP1(build(layers, False), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    models = {"unsharded": unsharded, "sharded": build(layers, True), "FSDP1": fsdp1, "FSDP2": build(layers, False)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(models["FSDP2"].modules())):
        if isinstance(module, (Block, GPT)):
            fsdp2(module, mesh=mesh)
    optimizers = {
        variant: {name: make(model.parameters()) for name, make in OPTIMIZERS.items()}
        for variant, model in models.items()
    }
    spent: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 2):
        for (variant, model), name in itertools.product(models.items(), OPTIMIZERS):
            by_torch = partial(clip_grad_norm_, list(model.parameters()))
            by_model = getattr(model, "clip_grad_norm_", by_torch)
            loss: list[Any] = []
            parts: dict[str, Step] = {
                "forward": lambda model=model, loss=loss: loss.append(model(TOKENS, TOKENS)),
                "backward": lambda loss=loss: loss[0].backward(),
                "clip by torch": partial(by_model if model is fsdp1 else by_torch, 1.0),  # only its own is right
                "clip by the model": partial(by_model, 1.0),
                name: optimizers[variant][name].step,
                "zero_grad": optimizers[variant][name].zero_grad,
            }
            for part, run in parts.items():
                taken = cpu_microseconds(run, 1) / 1e3
                if number > 1:
                    spent.setdefault(part, {}).setdefault(variant, []).append(taken)
    return {
        part: {name: statistics.median(values) for name, values in variants.items()} for part, variants in spent.items()
    }


def print_eager(loops: dict[str, dict[str, float]]) -> None:
    """A line for each part, a column for each variant."""
    print(f"\n{'eager loop, ms':28}" + "".join(f"{name:>12}" for name in loops["forward"]))
    for part, spent in loops.items():
        print(f"    {part:24}" + "".join(f"{each:12.2f}" for each in spent.values()))


def main() -> None:
    """Print a table and write `bench/results/host_overhead.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--eager", action="store_true", help="the eager loop alone; writes nothing")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    if args.eager:
        print_eager(eager_loops(args.layers, args.rounds))
        return
    figures = {
        "guards": compare(guards_only, args.layers, args.rounds, repeat=200),
        "step": compare(whole_step, args.layers, args.rounds, repeat=20),
        "collectives": compare(collectives_only, args.layers, args.rounds, repeat=20),
    }
    figures["without them"] = {name: figures["step"][name] - spent for name, spent in figures["collectives"].items()}
    print(f"{'us of CPU time per step':28}{'unsharded':>12}{'sharded':>12}{'added per block':>18}")
    for name, row in figures.items():
        print(f"{name:28}{row['unsharded']:12.1f}{row['sharded']:12.1f}{row['added per block']:18.2f}")
    loops = eager_loops(args.layers, args.rounds)
    print_eager(loops)
    if not args.dry:
        write("host_overhead", {"layers": args.layers, **figures, "eager loop, ms": loops})
    dist.destroy_process_group()
