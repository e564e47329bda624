"""The command `fsdp-compile`.

    fsdp-compile explain FILE.py:FUNCTION --gpus 8,64 --seq 8192 --hardware h100-80
    fsdp-compile calibrate OUT.json
    fsdp-compile plan FILE.py --link LINK --world-size N
    fsdp-compile build FILE.py:FUNCTION OUT --world-size N
    fsdp-compile checkpoint show SRC
    fsdp-compile checkpoint convert SRC DST --format dcp|safetensors|torch

Exit status: 0; 1 if a file is damaged or cannot be read or written; 2 if the arguments make no sense. Functions import
what they need themselves, so that `--help` answers at once, without torch.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_compile.cli_build import BUILD, BUILD_EXAMPLE, add_build
from fsdp_compile.cli_explain import (
    CALIBRATE,
    CALIBRATE_EXAMPLE,
    EXPLAIN,
    EXPLAIN_EXAMPLE,
    PLAN,
    PLAN_EXAMPLE,
    add_calibrate,
    add_explain,
    add_plan,
    positive,
)

if TYPE_CHECKING:
    from fsdp_compile.checkpoint.convert import Source

FORMATS = ("dcp", "safetensors", "torch")

HELP = """examples:
  fsdp-compile explain gpt.py:make_model --gpus 8,64 --batch 4 --seq 1024 --hardware h100-80
  fsdp-compile plan gpt.py --link h100-nvlink --world-size 8
  fsdp-compile build train.py:make artifacts --world-size 8
  fsdp-compile checkpoint show checkpoints

`fsdp-compile COMMAND --help` says more."""
CHECKPOINT = "List what a checkpoint holds, or write it in another format."
CHECKPOINT_EXAMPLE = """SRC is a folder of checkpoints (its newest counts), one checkpoint, a folder or file of
safetensors, or a file of torch.save.

examples:
  fsdp-compile checkpoint show checkpoints
  fsdp-compile checkpoint convert checkpoints model --format safetensors"""
SHOW = "List names, dtypes, shapes and bytes of all tensors, and the step."
CONVERT = "Write a checkpoint in another format, with one tensor in memory at a time."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            args.run(args)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return 0
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        return _refuse(error, 2)
    except OSError as error:
        return _refuse(error, 1)
    except Exception as error:
        from fsdp_compile.checkpoint import CheckpointError  # imports torch

        if isinstance(error, CheckpointError):
            return _refuse(error, 1)
        raise
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; argparse ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Tools for sharded models.", epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    add_explain(_add(groups, "explain", EXPLAIN, EXPLAIN_EXAMPLE))
    add_calibrate(_add(groups, "calibrate", CALIBRATE, CALIBRATE_EXAMPLE))
    add_plan(_add(groups, "plan", PLAN, PLAN_EXAMPLE))
    add_build(_add(groups, "build", BUILD, BUILD_EXAMPLE))
    checkpoint = _add(groups, "checkpoint", CHECKPOINT, CHECKPOINT_EXAMPLE)
    commands = checkpoint.add_subparsers(required=True, metavar="show|convert")
    show = _add(commands, "show", SHOW, "example:\n  fsdp-compile checkpoint show checkpoints")
    show.set_defaults(run=run_show)
    change = _add(commands, "convert", CONVERT, CHECKPOINT_EXAMPLE)
    change.set_defaults(run=run_convert)
    for command in (show, change):
        command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or a folder of checkpoints")
    change.add_argument("target", type=Path, metavar="DST", help="a path that does not exist yet")
    change.add_argument("--format", required=True, choices=FORMATS, help="of DST")
    change.add_argument("--world-size", type=positive, default=1, metavar="N", help="spread over N files (default: 1)")
    change.add_argument("--trust", action="store_true", help="load values of any type, which can run code, from "
                        "torch.distributed.checkpoint (default: tensors and plain values)")  # fmt: skip
    change.add_argument("--part", metavar="KEY", help="only what lies under this first key, such as model, without it "
                        "(default: all; for safetensors: model, if there is such a key)")  # fmt: skip
    return parser.parse_args(arguments)


def _add(commands: "argparse._SubParsersAction", name: str, description: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=re.split(r"[.:]", description)[0].replace("\n", " ").lower(),
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _refuse(error: Exception, status: int) -> int:
    from fsdp_compile.checkpoint.untrusted import printable

    print(f"fsdp-compile: error: {printable(str(error))}", file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    from fsdp_compile.checkpoint.untrusted import printable

    print(f"fsdp-compile: warning: {printable(str(message))}", file=sys.stderr)


# --- show -------------------------------------------------------------------------------------------------------------


def run_show(args: argparse.Namespace) -> None:
    """Print what is there, a line for each tensor."""
    from fsdp_compile.checkpoint.convert import open_source
    from fsdp_compile.checkpoint.untrusted import printable

    source = open_source(args.source)
    rows = [("tensor", "dtype", "shape", "bytes")]
    for name, tensor in source.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "()"
        rows.append((printable(name), str(tensor.dtype).removeprefix("torch."), shape, f"{tensor.nbytes:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, dtype, shape, size in rows:
        print(f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}")
    if source.values:
        print(f"\nother values: {', '.join(map(printable, source.values))}")
    step = "not known" if source.step is None else source.step
    print(f"\n{len(source.tensors)} tensors, {source.nbytes:,} bytes, step {step}, "
          f"{source.format} in {len(source.files)} file(s)")  # fmt: skip


# --- convert ----------------------------------------------------------------------------------------------------------


def run_convert(args: argparse.Namespace) -> None:
    """Write the checkpoint in another format, with a progress bar on a terminal."""
    from fsdp_compile.checkpoint.convert import convert, open_source

    if args.format == "torch" and args.world_size > 1:
        raise ValueError(f"--world-size {args.world_size}: --format torch writes one file; leave it out")
    source = open_source(args.source, args.trust)
    part = args.part or _usual_part(source, args.format)
    chosen = source.below(part) if part else source
    convert(chosen, args.target, args.format, args.world_size, progress_bar(chosen.nbytes))
    tensors, values = len(chosen.tensors), 0 if args.format == "safetensors" else len(chosen.values)
    left = len(source.keys) - tensors - values
    print(f"wrote {args.target}: {tensors} tensors, {chosen.nbytes:,} bytes"
          + (f", {values} other values" if values else "")
          + (f"; left out {left} entries" if left else ""))  # fmt: skip


def _usual_part(source: "Source", to: str) -> str | None:
    nested = any(keys[0] == "model" and len(keys) > 1 for keys in source.keys.values())
    return "model" if to == "safetensors" and nested else None


def progress_bar(total: int) -> Callable[[int], None]:
    """A function to call with the number of bytes just written: it draws a bar if stderr is a terminal."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if sys.stderr.isatty():
            share = done / total if total else 1.0
            bar = f"\r[{'#' * int(40 * share):<40}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            print(bar, end="\n" if done >= total else "", file=sys.stderr, flush=True)

    return advance
