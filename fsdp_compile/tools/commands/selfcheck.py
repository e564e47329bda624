"""`fsdp-compile selfcheck`: whether the package works here."""

import argparse
import os
from pathlib import Path

from fsdp_compile.tools.options import Add, check_folders, write_files

DESCRIPTION = "Check this installation: values, order, memory, streams and speed of a small sharded model."
EXAMPLE = """It runs on one process or on the ranks of torchrun, on GPUs if there are any. The exit status is
1 if a row fails; a bug report should have the file that --json writes.

example:
  torchrun --nproc-per-node 2 -m fsdp_compile selfcheck --json selfcheck.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Print the rows; 1 if one fails."""
    import torch
    import torch.distributed as dist

    from fsdp_compile.selfcheck import process_group, selfcheck

    check_folders(args.json)
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    with process_group(device):
        report = selfcheck(device)
        if dist.get_rank() == 0:
            print(report)
            write_files({args.json: report.to_json}, says=False)
    return 0 if report.holds else 1
