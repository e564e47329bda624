"""Whole-graph against regional compilation of a sharded GPT: what compiling costs, and what a step costs the host.

    whole       torch.compile(model)
    regional    block.compile() for each block, in a model that runs eagerly

CPU seconds of a first step with cold caches, the C++ compiler's included, one process for each figure; then CPU time of
a step whose tensors are tiny, so that nearly all of it is host work. A fake process group: collectives return at once.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

from bench.compile_time import _seconds

VARIANTS = ("whole", "regional")
REPEAT, ROUNDS = 20, 9  # steps of a round; the figure is the median of rounds


def measure(layers: int, variant: str) -> dict[str, float]:
    """Compile and run; CPU seconds of compiling, in all processes, and CPU milliseconds of a later step."""
    import statistics

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.host_overhead import build, cpu_microseconds

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports, probes of the compiler
    torch._dynamo.reset()
    tokens, model = torch.zeros(1, 4, dtype=torch.long), build(layers, sharded=True)
    for module in [model] if variant == "whole" else model.blocks:
        module.compile(fullgraph=True)

    def step() -> None:
        model(tokens, tokens).backward()
        model.zero_grad()

    before = _seconds()["all"]
    step()
    compiling = _seconds()["all"] - before
    with torch._dynamo.config.patch(error_on_recompile=True):
        cpu_microseconds(step, 5)  # settle
        steps = statistics.median(cpu_microseconds(step, REPEAT) for _ in range(ROUNDS))
    dist.destroy_process_group()
    return {"compile s": compiling, "step ms": steps / 1000}


def in_fresh_process(layers: int, variant: str) -> dict[str, float]:
    """`measure` with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        cold = {"TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.regional", "--one", str(layers), variant]
        out = subprocess.run(command, env={**os.environ, **cold, **alone}, stdout=subprocess.PIPE, check=True).stdout
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def main() -> None:
    """Print a table and write `bench/results/regional.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1])))
        return
    report = {str(layers): {name: in_fresh_process(layers, name) for name in VARIANTS} for layers in args.layers}
    print(f"{'blocks':>6}  {'CPU time':10}{'compile s':>12}{'step ms':>12}")
    for layers, rows in report.items():
        for name, row in rows.items():
            print(f"{layers:>6}  {name:10}{row['compile s']:12.1f}{row['step ms']:12.2f}")
    target = pathlib.Path(__file__).parent / "results" / "regional.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({**report, "machine": platform.machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
