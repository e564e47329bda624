"""What compiling a GPT costs: unsharded, sharded, by block, and by block with FSDP2. Each figure has its own process.

CPU seconds of the step that compiles, the C++ compiler's included, and CPU time of a later step, whose tensors are so
small that it is nearly all host work; a fake process group. Caches are empty, imports are not counted. Medians of
rounds in which the variants alternate.

    unsharded               `torch.compile(model)`
    sharded                 the same, of a sharded model
    by block                `block.compile()` on the blocks of a sharded model
    fsdp2 by block          the same, with torch's `fully_shard` on each block and on the model
    compile_step by block   `compile_step(..., regional=True)` with AdamW

`--passes` measures instead what each of our passes takes on a whole graph: CPU seconds by number of blocks, the
exponent of a power law through them, and the sum beside what the unsharded model takes to compile. No code is
generated for the sharded model.
"""

import argparse
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.host_overhead import build, cpu_microseconds
from bench.report import parser, write
from fsdp_compile import compile_step
from fsdp_compile.passes.inductor import PASSES, Pass, config_of, pipelines, switched_off
from fsdp_compile.passes.pipeline import GraphContext

Figures = dict[str, float]
VARIANTS = ("unsharded", "sharded", "by block", "fsdp2 by block", "compile_step by block")


def in_process(*arguments: Any, **environment: str) -> Figures:
    """What this file prints in a fresh process of one thread, called with these arguments."""
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", "compile_time", *map(str, arguments)]
    run = subprocess.run(command, env={**os.environ, **alone, **environment}, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    return figures


def seconds() -> Figures:
    spent = {who: resource.getrusage(getattr(resource, f"RUSAGE_{who}")) for who in ("SELF", "CHILDREN")}
    used = {who: usage.ru_utime + usage.ru_stime for who, usage in spent.items()}
    return {"python": used["SELF"], "c++": used["CHILDREN"], "all": sum(used.values())}


def since(before: Figures) -> Figures:
    return {name: value - before[name] for name, value in seconds().items()}


# --- variants in one process ------------------------------------------------------------------------------------------


def measure(layers: int, variant: str) -> Figures:
    """CPU seconds of a first step, in this process and in its compilers; CPU milliseconds of a later step."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports, probes of the compiler
    torch._dynamo.reset()
    model: Any = build(layers, variant not in ("unsharded", "fsdp2 by block"))
    if variant == "compile_step by block":
        whole = compile_step(model, torch.optim.AdamW(model.parameters()), regional=True)
    else:
        for module in model.blocks if "by block" in variant else [model]:
            module.compile(fullgraph=True)
    for module in [*model.blocks, model] if variant == "fsdp2 by block" else ():
        fsdp2(module, mesh=init_device_mesh("cpu", (8,)))

    def step() -> None:
        if variant == "compile_step by block":
            whole(tokens, tokens)
            return
        model(tokens, tokens).backward()
        model.zero_grad()

    before = seconds()
    step()
    spent = since(before)
    with torch._dynamo.config.patch(error_on_recompile=True):
        cpu_microseconds(step, 5)  # settle
        later = statistics.median(cpu_microseconds(step, 20) for _ in range(9))
    dist.destroy_process_group()
    return {**spent, "step, ms": later / 1000}


def cold(layers: int, variant: str) -> Figures:
    """`measure` in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        none = {"TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        return in_process("--one", layers, variant, **none)


def compare(layers: int, rounds: int, variants: Sequence[str]) -> dict[str, Figures]:
    """Medians of each variant, and the ratios of ours to torch's."""
    found: dict[str, list[Figures]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, figures in found.items():
            figures.append(cold(layers, variant))
    rows = {name: {part: statistics.median(each[part] for each in of) for part in of[0]} for name, of in found.items()}
    for name, beside in (("sharded", "unsharded"), ("by block", "fsdp2 by block")):
        if name in rows and beside in rows:
            rows[f"{name} / {beside}"] = {part: value / rows[beside][part] for part, value in rows[name].items()}
    return rows


# --- our passes -------------------------------------------------------------------------------------------------------


def measure_passes(layers: int) -> Figures:
    """CPU seconds of each pass in the compilation of a whole graph, which ends before code is generated."""
    gc.disable()  # would count for a pass at random
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    spent: Counter[str] = Counter()

    def timed(each: Pass) -> Pass:
        def run(context: GraphContext) -> None:
            begin = time.process_time()
            each.run(context)
            spent[each.name] += time.process_time() - begin

        return replace(each, run=run, version="timed")

    compiler: Any = torch._inductor.compile_fx  # its types are narrower than what it takes

    def only_passes(gm: Any, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with V.set_fake_mode(compiler.fake_tensor_prop(gm, inputs)), torch.no_grad():
            view_to_reshape(gm)
            post_grad_passes(gm, False)
        values = [out.meta["val"] if isinstance(out, torch.fx.Node) else out for out in gm.graph.output_node().args[0]]

        def run(_: list[Any]) -> list[Any]:
            return [torch.empty(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for v in values]

        setattr(run, "_boxed_call", True)  # noqa: B010  (a function has no such attribute, for mypy)
        return run

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        patches = {**switched_off(), **pipelines(config_of({"link": "h100-ib400"}), tuple(map(timed, PASSES)))}
        return compiler.compile_fx(gm, inputs, inner_compile=only_passes, config_patches=patches)

    tokens = torch.zeros(1, 4, dtype=torch.long)
    torch.compile(build(layers, True), backend=backend, fullgraph=True)(tokens, tokens).backward()
    dist.destroy_process_group()
    return dict(spent)


def show_passes(depths: list[int]) -> None:
    """Print seconds by pass and depth with exponents, and their sum beside the unsharded model's compilation."""
    found = {layers: in_process("--one-passes", layers, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") for layers in depths}
    for figures in found.values():
        figures["all"] = sum(figures.values())
    print(f"{'CPU s, blocks':30}" + "".join(f"{layers:9}" for layers in depths) + f"{'exponent':>10}")
    for name in sorted(found[depths[-1]], key=found[depths[-1]].__getitem__):
        row = [found[layers][name] for layers in depths]
        exponent = statistics.linear_regression(list(map(math.log, depths)), list(map(math.log, row))).slope
        print(f"{name:30}" + "".join(f"{value:9.4f}" for value in row) + f"{exponent:10.2f}")
    for layers in depths:
        ours, whole = found[layers]["all"], cold(layers, "unsharded")["all"]
        print(f"{layers} blocks: passes {ours:.2f} s, unsharded {whole:.1f} s: {ours / whole:.1%}", flush=True)


def main() -> None:
    """Print a table and write `bench/results/compile_time.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:4])
    arguments.add_argument("--passes", action="store_true", help="measure our passes, and write nothing")
    arguments.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--one-passes", type=int, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1])))
    elif args.one_passes:
        print(json.dumps(measure_passes(args.one_passes)))
    elif args.passes:
        show_passes(args.layers)
    else:
        report = {str(layers): compare(layers, args.rounds, args.variants) for layers in args.layers}
        print(f"{'blocks':>6}  {'CPU s':26}" + "".join(f"{part:>10}" for part in ("python", "c++", "all", "step, ms")))
        for number, rows in report.items():
            for name, row in rows.items():
                print(f"{number:>6}  {name:26}" + "".join(f"{value:10.2f}" for value in row.values()))
        if not args.dry:
            write("compile_time", report)
