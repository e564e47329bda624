"""What compiling a GPT costs: unsharded, sharded, and sharded with `block.compile()`. Each figure has its own process.

CPU seconds of the step that compiles, the C++ compiler's included, and CPU time of a later step, whose tensors are so
small that it is nearly all host work; a fake process group. Caches are empty. Medians of rounds in which the variants
alternate.

`--ranks 2 4` measures instead what compiling costs so many gloo ranks, each with a cache folder of its own: what one of
them takes that compiles alone, which a fake process group plays, and what all of them take together with and without
`share_artifacts`. With `--shard 2` they use hybrid sharding, with shard groups of two ranks. "codes" counts the
different sets of generated modules among the ranks: 1 where all run the same code.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.host_overhead import build, cpu_microseconds
from bench.report import parser, write
from fsdp_compile import fully_shard

Figures = dict[str, float]
VARIANTS = ("unsharded", "sharded", "by block")


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
    model: Any = build(layers, variant != "unsharded")
    for module in model.blocks if variant == "by block" else [model]:
        module.compile(fullgraph=True)

    def step() -> None:
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


def compare(layers: int, rounds: int) -> dict[str, Figures]:
    """Medians of each variant, and the ratio of the sharded model's to the unsharded one's."""
    found: dict[str, list[Figures]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, figures in found.items():
            with tempfile.TemporaryDirectory() as caches:
                cold = {"TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
                figures.append(in_process("--one", layers, variant, **cold))
    parts = found["sharded"][0]
    medians = {name: {p: statistics.median(each[p] for each in found[name]) for p in parts} for name in found}
    return {**medians, "ratio": {part: medians["sharded"][part] / medians["unsharded"][part] for part in parts}}


# --- ranks ------------------------------------------------------------------------------------------------------------


def measure_rank(layers: int, rank: int, world_size: int, shard: int, alone: int, folder: str) -> Figures:
    """As `measure`, of a gloo rank of the sharded model, over groups of `shard` ranks; `alone`: no others exist."""
    torch.set_num_threads(1)
    store = FakeStore() if alone else dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("fake" if alone else "gloo", rank=rank, world_size=world_size, store=store)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # imports
    sharding = {}
    if shard < world_size:
        mesh = dist.init_device_mesh("cpu", (world_size // shard, shard))
        sharding = {"mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    compiled = torch.compile(fully_shard(build(layers, False), **sharding), fullgraph=True)
    before = seconds()
    compiled(tokens, tokens).backward()
    spent = since(before)
    dist.barrier()
    dist.destroy_process_group()
    return spent


def on_ranks(layers: int, world_size: int, shard: int, share: bool, alone: bool = False) -> Figures:
    """CPU seconds of all ranks together, or of one `alone`, with empty caches each, and how many codes they run."""
    running = range(1 if alone else world_size)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world_size) as pool:

        def run(rank: int) -> Figures:
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{rank}", "FSDP_COMPILE_SHARE_ARTIFACTS": str(int(share))}
            numbers = (layers, rank, world_size, min(shard, world_size), int(alone))
            return in_process("--rank", *numbers, folder, TORCHINDUCTOR_VEC_ISA_OK="1", **own)

        def code(rank: int) -> frozenset[str]:
            """Digests of the modules that Inductor has generated."""
            return frozenset(
                hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).glob(f"{rank}/*/*.py")
            )

        ranks = list(pool.map(run, running))
        codes = set(map(code, running))
    return {**{part: sum(each[part] for each in ranks) for part in ranks[0]}, "codes": len(codes)}


def compare_ranks(layers: int, sizes: list[int], shard: int) -> dict[str, Figures]:
    """CPU seconds of one rank that compiles alone, and of all ranks."""
    rows: dict[str, Figures] = {}
    for size in sizes:
        one = on_ranks(layers, size, shard, share=False, alone=True)
        found = {f"one of {size} ranks, alone": one}
        for share in (True, False):
            found[f"{size} ranks{', share_artifacts' * share}"] = on_ranks(layers, size, shard, share)
        rows |= {name: {**row, "of one": row["all"] / one["all"]} for name, row in found.items()}
    return rows


def show_ranks(layers: int, rows: dict[str, Figures]) -> None:
    print(f"{layers} blocks, CPU s{'':16}" + "".join(f"{part:>10}" for part in next(iter(rows.values()))))
    for name, row in rows.items():
        print(f"{name:32}" + "".join(f"{value:10.2f}" for value in row.values()))


def main() -> None:
    """Print a table and write `bench/results/compile_time.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--ranks", type=int, nargs="+", help="compare so many ranks, and write nothing")
    arguments.add_argument("--shard", type=int, default=sys.maxsize, help="ranks of a shard group (default: all)")
    arguments.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1])))
    elif args.rank:
        *numbers, folder = args.rank
        print(json.dumps(measure_rank(*map(int, numbers), folder)))
    elif args.ranks:
        for layers in args.layers:
            show_ranks(layers, compare_ranks(layers, args.ranks, args.shard))
    else:
        report = {str(layers): compare(layers, args.rounds) for layers in args.layers}
        print(f"{'blocks':>6}  {'CPU s':10}" + "".join(f"{part:>10}" for part in ("python", "c++", "all", "step, ms")))
        for number, rows in report.items():
            for name, row in rows.items():
                print(f"{number:>6}  {name:10}" + "".join(f"{value:10.2f}" for value in row.values()))
        if not args.dry:
            write("compile_time", report)
