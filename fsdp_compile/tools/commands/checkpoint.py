"""`fsdp-compile checkpoint`: list what a checkpoint holds, or write it in another format."""

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_compile.tools.options import Add, positive, printable

if TYPE_CHECKING:
    from fsdp_compile.checkpoint.convert import Source

FORMATS = ("dcp", "safetensors", "torch")
DESCRIPTION = "List what a checkpoint holds, or write it in another format."
EXAMPLE = """SRC is a folder of checkpoints (its newest counts), one checkpoint, a folder or file of
safetensors, or a file of torch.save.

examples:
  fsdp-compile checkpoint show checkpoints
  fsdp-compile checkpoint convert checkpoints model --format safetensors"""
SHOW = "List names, dtypes, shapes and bytes of all tensors, and the step."
CONVERT = "Write a checkpoint in another format, tensor by tensor."


def add_show(add: Add) -> None:
    """Add the options of `checkpoint show`."""
    add("source", type=Path, metavar="SRC", help="a checkpoint, or a folder of checkpoints")
    add("--fingerprint", action="store_true", help="read all tensors, and print what "
        "model.fingerprint() returns of a model with these parameters and no buffers")  # fmt: skip


# fmt: off
def add_convert(add: Add) -> None:
    """Add the options of `checkpoint convert`."""
    add("source", type=Path, metavar="SRC", help="a checkpoint, or a folder of checkpoints")
    add("target", type=Path, metavar="DST", help="a path that does not exist yet")
    add("--format", required=True, choices=FORMATS, help="of DST")
    add("--world-size", type=positive, help=argparse.SUPPRESS)
    add("--trust", action="store_true", help="load values of any type, which can run code, from "
        "torch.distributed.checkpoint (default: tensors and plain values)")
    add("--part", metavar="KEY", help="only what lies under this first key, such as model, without it (default: all; "
        "for safetensors: model, if there is such a key)")
# fmt: on


def run_show(args: argparse.Namespace) -> None:
    """Print what is there, a line for each tensor."""
    from fsdp_compile.checkpoint.convert import open_source
    from fsdp_compile.reproducibility import fingerprint_of

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
    if args.fingerprint:
        part = _usual_part(source, "safetensors")
        chosen = source.below(part) if part else source
        tensors = ((name, chosen.read(name)) for name in chosen.tensors if name not in chosen.tied)
        print(f"fingerprint {fingerprint_of(tensors)}" + (f" of {part}" if part else ""))


def run_convert(args: argparse.Namespace) -> None:
    """Write the checkpoint in another format."""
    from fsdp_compile.checkpoint.convert import convert, open_source

    if args.world_size is not None:
        why = "files of safetensors have 5 GB, and any number of ranks loads that of DCP"
        warnings.warn(f"--world-size has no effect any more, and version 0.4 will not take it: {why}", stacklevel=1)
    source = open_source(args.source, args.trust)
    part = args.part or _usual_part(source, args.format)
    chosen = source.below(part) if part else source
    convert(chosen, args.target, args.format)
    tensors, values = len(chosen.tensors), 0 if args.format == "safetensors" else len(chosen.values)
    left = len(source.keys) - tensors - values
    print(f"wrote {args.target}: {tensors} tensors, {chosen.nbytes:,} bytes"
          + (f", {len(chosen.tied)} of them tied to others" if chosen.tied else "")
          + (f", {values} other values" if values else "")
          + (f"; left out {left} entries" if left else ""))  # fmt: skip


def _usual_part(source: "Source", to: str) -> str | None:
    nested = any(keys[0] == "model" and len(keys) > 1 for keys in source.keys.values())
    return "model" if to == "safetensors" and nested else None
