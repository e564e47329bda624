"""The command line of train_gpt.py."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

TOLERANCE = {False: (1e-3, 2e-2), True: (2e-2, 5e-2)}  # bf16 -> relative, over the first 20 steps and at the end


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Read the command line; every refusal says what was found and what to do."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--data", type=Path, metavar="FILE", help="train on its bytes (default: the text of Python's own help)")
    option("--steps", type=int, default=60, help="steps of each run (default: %(default)s)")
    option("--layers", type=int, default=4, help="blocks of the model (default: %(default)s, 7.2 M parameters)")
    option("--batch", type=int, default=4, help="sequences per rank and step (default: %(default)s)")
    option("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    option("--seed", type=int, default=0, help="of the weights and of the batches (default: %(default)s)")
    option("--eager-only", action="store_true", help="leave out the compiled run")
    option("--compile-only", action="store_true", help="leave out the eager run")
    option("--backend", default="inductor", help="torch.compile's backend (default: %(default)s)")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where each rank has a GPU")
    option("--bf16", action="store_true", help=bf16_help())
    option("--checkpointing", action="store_true", help="recompute each block's activations in backward")
    option("--warmup", type=int, default=0, help="steps over which the learning rate rises (default: %(default)s)")
    option("--save", type=Path, metavar="FOLDER", help="save checkpoints there, the last two of each run")
    option("--every", type=int, default=20, help="steps from one checkpoint to the next (default: %(default)s)")
    option("--resume", action="store_true", help="go on from the newest checkpoints in --save, if there are any")
    option("--out", type=Path, default=Path("train_gpt.png"), metavar="PNG", help="picture (default: %(default)s)")
    args = parser.parse_args()
    check(args)
    return args


def bf16_help() -> str:
    """Say which tolerance holds with and without rounding to bfloat16."""
    (early, end), (early16, end16) = TOLERANCE[False], TOLERANCE[True]
    return (
        f"compute in bfloat16 (autocast); the two losses may then differ by {early16:.0%}% in the first 20 steps and "
        f"{end16:.0%}% at the end (mean of the last 5), instead of {early:.1%}% and {end:.0%}%"
    )


def check(args: argparse.Namespace) -> None:
    """Refuse, before any process group exists, what cannot run."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    for name in ("steps", "layers", "batch"):
        if getattr(args, name) < 1:
            refuse(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.every < 1 or args.warmup < 0:
        refuse(f"--every must be at least 1 and --warmup at least 0, got --every {args.every} --warmup {args.warmup}")
    if args.resume and not args.save:
        refuse("--resume needs --save FOLDER, to know from where")
    if args.eager_only and args.compile_only:
        refuse("--eager-only with --compile-only leaves nothing to run; give at most one of them")
    if args.data and not args.data.is_file():
        refuse(f"--data {args.data}: no such file")
    if args.device == "cuda" and gpus < ranks:
        refuse(f"--device cuda: found {gpus} GPUs for {ranks} ranks on this machine, each needs one; try --device cpu")
    if not args.out.absolute().parent.is_dir():
        refuse(f"--out {args.out}: its folder does not exist")


def refuse(message: str) -> NoReturn:
    """End the program; every rank says why, for torchrun stops the others as soon as one has ended."""
    print(f"train_gpt.py: error: {message}", file=sys.stderr)
    sys.exit(2)
