"""What the commands share: how options are read, and files written."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = Path("-")

Add = Callable[..., Any]  # adds an argument


def positive(text: str) -> int:
    """A whole number of at least 1, as argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them, as argparse's `type`."""
    return [positive(each) for each in text.split(",")]


def one_of(*known: str) -> Callable[[str], list[str]]:
    """argparse's `type` of words among `known` with commas between them."""

    def read(text: str) -> list[str]:
        for each in text.split(","):
            if each not in known:
                raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, found {each!r}")
        return text.split(",")

    return read


def check_folders(*paths: Path | None) -> None:
    """Raise ValueError or FileNotFoundError if one of these files cannot be written."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: expected its folder to exist, found none")
        if path.is_dir():
            raise ValueError(f"{path}: expected the name of a file, found a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path}: expected a place that can be written to, found one that cannot")


def write_files(files: dict[Path | None, Callable[[], str]], says: bool = True) -> None:
    """Write what was asked for, and say so."""
    for path, render in files.items():
        if path is not None:
            path.write_text(render(), encoding="utf-8")
            if says:
                print(f"wrote {path}")


def say(text: str) -> None:
    """Let rank 0 tell on the terminal's error stream what goes on, so that a reader of the output does not get it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"fsdp-compile: {text}", file=sys.stderr, flush=True)


def say_row(row: object) -> None:
    """Print a row on stderr as soon as it is known: a user who stops the command has the rows so far."""
    if os.environ.get("RANK", "0") == "0":
        print(row, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape the characters of `text` that are not printable, which a terminal might take for commands."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
