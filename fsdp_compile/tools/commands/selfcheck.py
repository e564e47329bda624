"""`fsdp-compile selfcheck`: whether the package works here."""

import argparse
import os
from pathlib import Path

from fsdp_compile.tools.options import Add, check_folders, say, say_row, write_files
from fsdp_compile.tools.server import start_server

DESCRIPTION = "Check this installation: values, speed and memory of a small model, as check and compare show them."
EXAMPLE = """It runs on each GPU here, on two processes if there is none, or on the ranks of torchrun. The exit status
is 1 if something fails; a bug report should have the file that --json writes.

example:
  torchrun --nproc-per-node 2 -m fsdp_compile selfcheck --json selfcheck.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Print what came out; 1 if something fails."""
    check_folders(args.json)
    start_server()
    say("checking this installation, which takes minutes")
    import torch

    from fsdp_compile.selfcheck import selfcheck

    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = selfcheck(kind, torch.cuda.device_count() if kind == "cuda" else 2, say_row)
    if os.environ.get("RANK", "0") == "0":
        print(report, end="")
        write_files({args.json: report.to_json}, says=False)
    return 0 if report.holds else 1
