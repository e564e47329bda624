"""`fsdp-compile plan`: the plan that a compiled step would follow."""

import argparse
from pathlib import Path

from fsdp_compile.config import ACTIVATIONS
from fsdp_compile.explain.prediction import OPTIMIZERS
from fsdp_compile.tools.files import function_in, run_file
from fsdp_compile.tools.options import Add, positive, write_files

DESCRIPTION = """Print the plan that a compiled training step would follow: each collective, how much of it
computing hides and what limits it. No GPU, no other rank and no memory for the model are needed."""
EXAMPLE = """FILE.py defines two functions without arguments. make_model() returns the model, sharded or not;
example_inputs() returns the tuple of arguments for its forward.

example:
  fsdp-compile plan gpt.py --link h100-nvlink --world-size 8 --device h100 --trace step.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("file", type=Path, metavar="FILE.py", help="defines make_model() and example_inputs()")
    add("--link", required=True, help="what connects the ranks, such as h100-nvlink, or "
        "custom:<latency in s>,<bandwidth in bytes/s>")
    add("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    add("--device", help="what computes, such as h100 (default: this machine's)")
    add("--budget", type=positive, metavar="BYTES", help="memory that may be in use at once")
    add("--activations", choices=ACTIVATIONS, default="keep", help="what becomes of those of each block")
    add("--optimizer", choices=OPTIMIZERS, help="plan the step of compile_step with it")
    add("--clip", action="store_true", help="clip gradients in that step")
    add("--trace", type=Path, metavar="JSON", help="also write a timeline for ui.perfetto.dev")
# fmt: on


def run(args: argparse.Namespace) -> None:
    """Print the report on the plan of the model that a file defines."""
    from fsdp_compile.api import explain_plan

    names = run_file(args.file)
    make_model, example_inputs = (function_in(names, name, args.file) for name in ("make_model", "example_inputs"))
    options = ("link", "world_size", "device", "budget", "activations", "optimizer", "clip")
    chosen = {option: getattr(args, option) for option in options}
    report = explain_plan(make_model, example_inputs(), **chosen)
    print(report, end="")
    write_files({args.trace: report.to_trace})
