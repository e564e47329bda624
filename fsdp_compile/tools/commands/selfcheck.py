"""`fsdp-compile selfcheck`: whether the package works here."""

import argparse
import os
from pathlib import Path

from fsdp_compile.tools.options import Add, check_folders, write_files

DESCRIPTION = "Check this installation: values, order, memory, streams and speed of a small sharded model."
EXAMPLE = """It runs on one process or on the ranks of torchrun, on GPUs if there are any. The exit status is
1 if a row fails; a bug report should have the file that --json writes.

--names looks for everything that the package uses of torch's private names, and compares arguments of functions. It
takes seconds and needs no other rank. A torch that is newer than what the package was tested on is worth this check.

examples:
  fsdp-compile selfcheck --names
  torchrun --nproc-per-node 2 -m fsdp_compile selfcheck --json selfcheck.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("--names", action="store_true", help="look for the private names of torch that are used, and nothing else")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Print the rows, or what is found of torch, file by file; 1 if a row fails or something is missing."""
    import torch

    if not args.names:
        return _selfcheck(args)
    from fsdp_compile.torch_names import TESTED_TORCH, check_all, is_untested

    tested = ", newer than all that were tested" if is_untested(torch.__version__) else ""
    print(f"torch {torch.__version__}{tested}; tested on {', '.join(TESTED_TORCH)}")
    found = check_all()
    for file, names in found.items():
        print(f"  {file:22} {len(names.names):3} names, {len(names.calls):2} calls, {len(names.faults)} faults")
        print("".join(f"    {fault}\n" for fault in names.faults), end="")
    faults = sum(len(names.faults) for names in found.values())
    print("all found" if not faults else f"{faults} faults: use a torch that was tested, or a newer fsdp_compile")
    return min(faults, 1)


def _selfcheck(args: argparse.Namespace) -> int:
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
