"""The command `fsdp-compile`.

    fsdp-compile checkpoint show SRC
    fsdp-compile checkpoint convert SRC DST --format dcp|safetensors|torch [--world-size N] [--part model]

SRC is a folder of checkpoints (its newest counts), one checkpoint, a folder or file of safetensors, or a file of
torch.save. Exit status: 0; 1 if a file is damaged or cannot be read or written; 2 if the arguments make no sense.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_compile.checkpoint import CheckpointError
from fsdp_compile.checkpoint.convert import TARGETS, Source, convert, open_source


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            args.run(args)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return 0
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        return _refuse(error, 2)
    except (CheckpointError, OSError) as error:
        return _refuse(error, 1)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; argparse ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Tools for sharded models.")
    checkpoint = parser.add_subparsers(required=True, metavar="checkpoint").add_parser("checkpoint")
    commands = checkpoint.add_subparsers(required=True, metavar="show|convert")
    show = commands.add_parser("show", help="list names, dtypes, shapes and bytes, and the step")
    show.set_defaults(run=run_show)
    change = commands.add_parser("convert", help="write it in another format, one tensor in memory at a time")
    change.set_defaults(run=run_convert)
    for command in (show, change):
        command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or a folder of checkpoints")
    change.add_argument("target", type=Path, metavar="DST", help="a path that does not exist yet")
    change.add_argument("--format", required=True, choices=TARGETS, help="of DST")
    change.add_argument("--world-size", type=_positive, default=1, metavar="N", help="spread over N files (default: 1)")
    change.add_argument("--part", metavar="KEY", help="only what lies under this first key, such as model, without it "
                        "(default: all; for safetensors: model, if there is such a key)")  # fmt: skip
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _refuse(error: Exception, status: int) -> int:
    print(f"fsdp-compile: error: {error}", file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"fsdp-compile: warning: {message}", file=sys.stderr)


# --- show -------------------------------------------------------------------------------------------------------------


def run_show(args: argparse.Namespace) -> None:
    """Print what is there, a line for each tensor."""
    source = open_source(args.source)
    rows = [("tensor", "dtype", "shape", "bytes")]
    for spec in source.tensors.values():
        shape = " x ".join(map(str, spec.shape)) or "()"
        rows.append((spec.name, str(spec.dtype).removeprefix("torch."), shape, f"{spec.nbytes:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, dtype, shape, size in rows:
        print(f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}")
    if source.values:
        print(f"\nother values: {', '.join(source.values)}")
    step = "not known" if source.step is None else source.step
    print(f"\n{len(source.tensors)} tensors, {source.nbytes:,} bytes, step {step}, "
          f"{source.format} in {len(source.files)} file(s)")  # fmt: skip


# --- convert ----------------------------------------------------------------------------------------------------------


def run_convert(args: argparse.Namespace) -> None:
    """Write the checkpoint in another format, with a progress bar on a terminal."""
    if args.format == "torch" and args.world_size > 1:
        raise ValueError(f"--world-size {args.world_size}: --format torch writes one file; leave it out")
    source = open_source(args.source)
    part = args.part or _usual_part(source, args.format)
    chosen = source.below(part) if part else source
    convert(chosen, args.target, args.format, args.world_size, progress_bar(chosen.nbytes))
    tensors, values = len(chosen.tensors), 0 if args.format == "safetensors" else len(chosen.values)
    left = len(source.keys) - tensors - values
    print(f"wrote {args.target}: {tensors} tensors, {chosen.nbytes:,} bytes"
          + (f", {values} other values" if values else "")
          + (f"; left out {left} entries" if left else ""))  # fmt: skip


def _usual_part(source: Source, to: str) -> str | None:
    nested = any(keys[0] == "model" and len(keys) > 1 for keys in source.keys.values())
    return "model" if to == "safetensors" and nested else None


def progress_bar(total: int) -> Callable[[int], None]:
    """A function that is told of bytes done and draws them; where stderr is no terminal it draws nothing."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if sys.stderr.isatty():
            share = done / total if total else 1.0
            bar = f"\r[{'#' * int(40 * share):<40}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            print(bar, end="\n" if done >= total else "", file=sys.stderr, flush=True)

    return advance
