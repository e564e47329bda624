"""`fsdp-compile check`: whether a model trains sharded as it does unsharded."""

import argparse
import difflib
import os
from functools import partial
from pathlib import Path

from fsdp_compile.tools.files import check_factory
from fsdp_compile.tools.options import Add, check_folders, positive, say, say_row, write_files
from fsdp_compile.tools.server import start_server

CHECKED = ("eager", "blocks", "aot_eager", "inductor", "step")
DESCRIPTION = """Check whether a model trains sharded as it does unsharded: all outputs, losses, gradients, buffers,
parameters and states of the optimizer, in each step, by each way of running it."""
EXAMPLE = """FILE.py:FUNCTION, and example_inputs(batch, sequence) in the same file, are as of compare; the file
may also define loss(output), optimizer(params), and shard(model), which calls fully_shard with arguments.

  eager            fully_shard(model)
  blocks           the same, each unit below the model compiled; blocks:BACKEND by another backend than aot_eager
  aot_eager        torch.compile(fully_shard(model), backend="aot_eager"); likewise inductor, and other backends
  step             compile_step(fully_shard(model), optimizer, backend="aot_eager"); step:BACKEND by another one

The second step accumulates. After the last one each way saves a checkpoint, and other ranks load it and go on.

The exit status is 1 if a way differs by more than rounding explains: the report then names what differs
first, such as the output of a module, with both values. A bug report should have the file that --json writes.

examples:
  fsdp-compile check llama.py:make --batch 2 --seq 16 --json check.json
  fsdp-compile check llama.py:make --ways eager,aot_eager --resume-on 0
  torchrun --nproc-per-node 4 -m fsdp_compile check llama.py:make"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("factory", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--ranks", type=positive, default=2, metavar="N", help="to start on this machine (default: 2)")
    add("--ways", type=ways, default=[*CHECKED], metavar="W[,W...]", help="default: "
        f"{','.join(CHECKED)}")
    add("--steps", type=positive, default=3, metavar="N", help="of the optimizer (default: 3)")
    add("--accumulate", type=positive, default=2, metavar="N", help="micro-batches of the second step (default: 2)")
    add("--resume-on", type=int, metavar="N", help="ranks that load a checkpoint and go on (default: one more than "
        "--ranks, or torchrun's; 0: none)")
    add("--batch", type=positive, default=2, metavar="N", help="sequences per rank and forward (default: 2)")
    add("--seq", type=positive, default=16, metavar="N", help="tokens of a sequence (default: 16)")
    add("--device", choices=("cuda", "cpu"), default="cpu", help="cuda needs a GPU for each rank (default: cpu)")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")
# fmt: on


def ways(text: str) -> list[str]:
    """argparse's `type` of ways: a misspelt one is told before torch, which knows all backends, is imported."""
    for part in text.replace(",", ":").split(":"):
        close = difflib.get_close_matches(part, CHECKED, 1, 0.75)
        if close and part not in CHECKED:
            expected = f"{', '.join(CHECKED)} or another backend"
            raise argparse.ArgumentTypeError(f"expected {expected}, found {part!r}; did you mean {close[0]}?")
    return text.split(",")


def run(args: argparse.Namespace) -> int:
    """Print and write whether the model trains alike; 1 if it does not."""
    check_folders(args.json)
    check_factory(args.factory)
    if "RANK" not in os.environ:
        start_server(args.factory)
        ranks = args.ranks + 1 if args.resume_on is None else args.resume_on
        later = f", then again from a checkpoint on {ranks}" if ranks else ""
        say(f"checking {args.factory} by {', '.join(args.ways)} on {args.ranks} ranks{later}")
    from fsdp_compile.compare.case import case_in_file
    from fsdp_compile.tools.check import check_loaded

    options = {name: getattr(args, name) for name in ("steps", "accumulate", "resume_on")}
    is_first = os.environ.get("RANK", "0") == "0"

    load = partial(case_in_file, args.factory, args.batch, args.seq)
    report = check_loaded(load, args.ways, args.ranks, args.device, found=say_row, **options)
    if is_first:
        print(report, end="")
        write_files({args.json: report.to_json})
    return 0 if report.holds else 1
