"""`fsdp-compile calibrate`: measure this machine."""

import argparse
from dataclasses import replace
from pathlib import Path

from fsdp_compile.tools.options import Add, check_folders, positive, say, write_files

DESCRIPTION = """Measure this machine and write a hardware file: matrix products by size, attention by length, fused
chains, the optimizer's update, launches and, with several ranks, collectives by size."""
EXAMPLE = """Measuring alternates between all cases, so that what disturbs the machine disturbs all alike.

examples:
  fsdp-compile calibrate this_machine.json
  torchrun --nproc-per-node 8 -m fsdp_compile calibrate this_node.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("out", type=Path, metavar="OUT.json", help="the hardware file to write")
    add("--hardware", metavar="NAME|FILE", help="where what is not measured comes from (default: by the device's name)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--seconds", type=positive, default=120, metavar="N", help="it takes, at most 300 (default: 120)")
    add("--name", help="of the hardware in the file (default: that of --hardware)")
# fmt: on


def run(args: argparse.Namespace) -> None:
    """Measure this machine and write a hardware file."""
    check_folders(args.out)
    say(f"measuring this machine in {args.seconds} seconds, the first of which compile")
    from fsdp_compile.explain.calibrate import calibrate
    from fsdp_compile.passes.cost.hardware import to_json

    made, rank = calibrate(args.device, args.hardware, args.seconds)
    if args.name is not None:
        made = replace(made, name=args.name)
    if rank == 0:
        write_files({args.out: lambda: to_json(made)})
        for name, value, unit, source in made.figures():
            if source.origin in ("measured", "fitted"):
                print(f"  {name:22} {value:12.4g} {unit:9} {source.origin}")
