"""What `torch.compile` costs a sharded GPT over the unsharded one: cold caches, one process for each figure.

CPU seconds that compiling forward and backward takes, the C++ compiler's included; a fake process group. Medians of
rounds in which the variants take turns.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile

Figures = dict[str, float]


def measure(layers: int, sharded: bool) -> Figures:
    """CPU seconds of a first step: of this process, and of the compilers that it starts."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.host_overhead import build

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports, probes of the compiler
    torch._dynamo.reset()
    compiled = torch.compile(build(layers, sharded), fullgraph=True)
    before = _seconds()
    compiled(tokens, tokens).backward()
    after = _seconds()
    dist.destroy_process_group()
    return {name: after[name] - before[name] for name in after}


def _seconds() -> Figures:
    spent = {who: resource.getrusage(getattr(resource, f"RUSAGE_{who}")) for who in ("SELF", "CHILDREN")}
    seconds = {who: usage.ru_utime + usage.ru_stime for who, usage in spent.items()}
    return {"python": seconds["SELF"], "c++": seconds["CHILDREN"], "all": sum(seconds.values())}


def in_fresh_process(layers: int, sharded: bool) -> Figures:
    """`measure` with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        cold = {"TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.compile_time", "--one", str(layers), str(int(sharded))]
        out = subprocess.run(command, env={**os.environ, **cold, **alone}, stdout=subprocess.PIPE, check=True).stdout
    figures: Figures = json.loads(out.splitlines()[-1])
    return figures


def compare(layers: int, rounds: int) -> dict[str, Figures]:
    """Medians for the unsharded and the sharded model, and their ratio."""
    found: dict[str, list[Figures]] = {"unsharded": [], "sharded": []}
    for _ in range(rounds):
        for name, figures in found.items():
            figures.append(in_fresh_process(layers, name == "sharded"))
    parts = found["sharded"][0]
    medians = {name: {p: statistics.median(each[p] for each in found[name]) for p in parts} for name in found}
    return {**medians, "ratio": {part: medians["sharded"][part] / medians["unsharded"][part] for part in parts}}


def main() -> None:
    """Print a table and write `bench/results/compile_time.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], bool(args.one[1]))))
        return
    report = {str(layers): compare(layers, args.rounds) for layers in args.layers}
    print(f"{'blocks':>6}  {'CPU s':10}" + "".join(f"{part:>10}" for part in ("python", "c++", "all")))
    for layers, rows in report.items():
        for name, row in rows.items():
            print(f"{layers:>6}  {name:10}" + "".join(f"{value:10.2f}" for value in row.values()))
    target = pathlib.Path(__file__).parent / "results" / "compile_time.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({**report, "machine": platform.machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
