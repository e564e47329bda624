"""`fsdp-compile plan`: the plan that a compiled step would follow."""

import argparse
import warnings
from pathlib import Path
from typing import Any

from fsdp_compile.explain.prediction import OPTIMIZERS
from fsdp_compile.passes.cost.hardware import device, link
from fsdp_compile.tools.files import check_factory, load_factory, load_functions
from fsdp_compile.tools.options import Add, check_folders, positive, say, write_files

DESCRIPTION = """Print the plan that a compiled training step would follow: each collective, how much of it
computing hides and what limits it. No GPU, no other rank and no memory for the model are needed."""
EXAMPLE = """FILE.py:FUNCTION, and example_inputs(batch, sequence) in the same file, are as of explain; the
function may also return a model that is sharded.

example:
  fsdp-compile plan gpt.py:make --link h100-nvlink --world-size 8 --device h100 --trace step.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("factory", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--link", required=True, help="what connects the ranks, such as h100-nvlink, or "
        "custom:<latency in s>,<bandwidth in bytes/s>")
    add("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    add("--device", help="what computes, such as h100 (default: this machine's)")
    add("--batch", type=positive, default=1, metavar="N", help="sequences per rank and forward (default: 1)")
    add("--seq", type=positive, default=2048, metavar="N", help="tokens of a sequence (default: 2048)")
    add("--budget", type=positive, metavar="BYTES", help="memory that may be in use at once")
    add("--optimizer", choices=OPTIMIZERS, help="whose update follows")
    add("--clip", action="store_true", help="clip gradients before the update")
    add("--trace", type=Path, metavar="JSON", help="also write a timeline for ui.perfetto.dev")
# fmt: on


def run(args: argparse.Namespace) -> None:
    """Print the report on the plan of the model that a file makes."""
    check_folders(args.trace)
    link(args.link)
    if args.device is not None:
        device(args.device)
    given: Any
    is_old = args.factory.endswith(".py")
    check_factory(f"{args.factory}:make_model" if is_old else args.factory)
    say(f"planning {args.factory} on {args.world_size} ranks")
    if is_old:
        warnings.warn(f"plan {args.factory} becomes plan {args.factory}:make_model, and example_inputs takes (batch, "
                      "sequence); without them it works in this version for the last time", stacklevel=1)  # fmt: skip
        make_model, inputs = load_functions(f"{args.factory}:make_model")
        given = inputs() if inputs is not None else None
    else:
        make_model, given = load_factory(args.factory)
    from fsdp_compile.api import explain_plan

    options = ("link", "world_size", "device", "budget", "optimizer", "clip", "batch")
    chosen = {option: getattr(args, option) for option in options}
    report = explain_plan(make_model, given, sequence=args.seq, **chosen)
    print(report, end="")
    write_files({args.trace: report.to_trace})
