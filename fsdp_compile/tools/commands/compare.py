"""`fsdp-compile compare`: systems side by side on a user's model."""

import argparse
import os
from functools import partial
from pathlib import Path

from fsdp_compile.explain.prediction import WIRE_FORMATS, hardware_of
from fsdp_compile.tools.files import check_factory, load_factory
from fsdp_compile.tools.options import Add, check_folders, one_of, positive, say, write_files
from fsdp_compile.tools.server import start_server

COMPARED = ("eager", "compiled", "step", "fsdp2", "fsdp2-compiled", "ddp", "unsharded")
DESCRIPTION = """\
Train a model with this package, FSDP2, DDP and unsharded, side by side on this machine: speed, first step,
memory and losses of each, beside what explain predicts."""
EXAMPLE = """FILE.py:FUNCTION, and example_inputs(batch, sequence) in the same file, are as of explain, but here
the model is made and trained. Each system runs in processes of its own, and they take turns. One that cannot train the
model says so in its row.

  eager            fully_shard(model)
  compiled         torch.compile(fully_shard(model))
  step             compile_step(fully_shard(model), optimizer)
  fsdp2            torch's fully_shard of each repeated block, and of the model: the same units
  fsdp2-compiled   the same, each block compiled before
  ddp              torch.compile(DistributedDataParallel(model))
  unsharded        torch.compile(model), on each rank for its own batch: what communication costs nothing

Under torchrun the ranks are its own, on one node or several; without it --ranks starts them here.

examples:
  fsdp-compile compare llama.py:make --ranks 2 --batch 2 --seq 128
  torchrun --nproc-per-node 8 -m fsdp_compile compare llama.py:make --seq 4096 --systems compiled,fsdp2-compiled"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("factory", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--ranks", type=positive, metavar="N", help="to start on this machine (default: one for each GPU, or 2)")
    add("--systems", type=one_of(*COMPARED), default=[*COMPARED], metavar="S[,S...]", help=f"{', '.join(COMPARED)} "
        "(default: all)")
    add("--steps", type=positive, default=20, metavar="N", help="steps of each system that count (default: 20)")
    add("--rounds", type=positive, default=3, metavar="N", help="turns into which they are divided (default: 3)")
    add("--batch", type=positive, default=1, metavar="N", help="sequences per rank and step (default: 1)")
    add("--seq", type=positive, default=256, metavar="N", help="tokens of a sequence (default: 256)")
    add("--precision", choices=("fp32", "bf16"), help="to compute in (default: bf16 on GPUs, else fp32)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPUs, if there are any")
    add("--wire-gather", choices=WIRE_FORMATS, help="this package sends parameters in this format (default: in full)")
    add("--wire-reduce", choices=WIRE_FORMATS, help="likewise gradients")
    add("--hardware", metavar="NAME|FILE", help="of predictions (default: by the device's name)")
    add("--json", type=Path, metavar="OUT", help="write all figures")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Print and write what each system makes of the model; 1 if none could."""
    check_folders(args.json)
    hardware = hardware_of(args.hardware) if args.hardware else None
    factory, batch, sequence = args.factory, args.batch, args.seq
    check_factory(factory)
    systems, rounds = list(dict.fromkeys(args.systems)), min(args.rounds, args.steps)
    slow = [each for each in systems if each not in ("eager", "fsdp2")]
    say(f"comparing {', '.join(systems)} in {rounds} rounds, {args.steps} steps of each"
        + (f"; the first round takes minutes, in which {', '.join(slow)} compile" if slow else ""))  # fmt: skip
    make, example_inputs = load_factory(factory)
    import torch

    gpus = torch.cuda.device_count()
    kind = args.device or ("cuda" if gpus else "cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else args.ranks or gpus or 2
    if kind == "cuda" and here > gpus:
        raise ValueError(f"--ranks {here}: expected at most {gpus}, one for each GPU here; --device cpu needs no GPU")
    if "RANK" in os.environ and args.ranks not in (None, int(os.environ["WORLD_SIZE"])):
        raise ValueError(f"--ranks {args.ranks}: expected {os.environ['WORLD_SIZE']}, as torchrun has started; "
                         "leave it out")  # fmt: skip
    start_server(factory)
    from fsdp_compile.compare.case import case_in_file
    from fsdp_compile.compare.rounds import compare
    from fsdp_compile.compare.systems import Task

    bf16 = args.precision == "bf16" or (args.precision is None and kind == "cuda")
    task = Task(batch, sequence, bf16, kind, args.wire_gather, args.wire_reduce)
    load = partial(case_in_file, factory, batch, sequence)
    found = compare(factory, load, (make, example_inputs), task, here, systems=systems, steps=args.steps,
                    rounds=rounds, hardware=hardware)  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        print(found, end="")
        write_files({args.json: found.to_json})
    return 0 if found.ran else 1
