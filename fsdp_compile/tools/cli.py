"""The command `fsdp-compile`: explain, compare, check, calibrate, plan, selfcheck, checkpoint show and convert.

Exit status: 0; 1 if a check fails, or a file is damaged or cannot be read or written; 2 if arguments are invalid.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_compile import __version__
from fsdp_compile.tools.commands import calibrate, check, checkpoint, compare, explain, plan, selfcheck
from fsdp_compile.tools.options import printable

COMMANDS: dict[str, Any] = {
    "explain": explain,
    "compare": compare,
    "check": check,
    "calibrate": calibrate,
    "plan": plan,
    "selfcheck": selfcheck,
}
"""In the order in which `--help` lists them; `checkpoint`, which has commands of its own, comes last."""

HELP = """examples:
  fsdp-compile explain gpt.py:make_model --gpus 8,64 --batch 4 --seq 1024 --hardware h100-80
  fsdp-compile plan gpt.py:make_model --link h100-nvlink --world-size 8
  fsdp-compile checkpoint show checkpoints

`fsdp-compile COMMAND --help` says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_message
            return args.run(args) or 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return 0
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        return _report_error(error, 2)
    except OSError as error:
        return _report_error(error, 1)
    except Exception as error:
        from fsdp_compile.checkpoint import CheckpointError  # imports torch

        if isinstance(error, CheckpointError):
            return _report_error(error, 1)
        if args.run not in (checkpoint.run_show, checkpoint.run_convert):
            raise  # of the user's own code, so with a traceback
        said = str(error).partition("\nException raised from ")[0]  # torch adds a trace of its own functions
        doing = f"{args.source}: reading it or writing it again failed"  # as a strange file or a full disk lets torch
        return _report_error(RuntimeError(f"{doing}: {type(error).__name__}: {said}"), 1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; argparse ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Tools for sharded models.", epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fsdp-compile {__version__}")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, each in COMMANDS.items():
        each.add_options(_add_command(groups, name, each.DESCRIPTION, each.EXAMPLE, each.run).add_argument)
    under = _add_command(groups, "checkpoint", checkpoint.DESCRIPTION, checkpoint.EXAMPLE)
    commands = under.add_subparsers(required=True, metavar="show|convert")
    example = "example:\n  fsdp-compile checkpoint show checkpoints"
    checkpoint.add_show(_add_command(commands, "show", checkpoint.SHOW, example, checkpoint.run_show).add_argument)
    change = _add_command(commands, "convert", checkpoint.CONVERT, checkpoint.EXAMPLE, checkpoint.run_convert)
    checkpoint.add_convert(change.add_argument)
    return parser.parse_args(arguments)


def _add_command(
    commands: "argparse._SubParsersAction",
    name: str,
    description: str,
    example: str,
    run: Callable[[argparse.Namespace], int | None] | None = None,
) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=re.split(r"[.:]", description)[0].replace("\n", " ").lower(),
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)
    return made


def _report_error(error: Exception, status: int) -> int:
    _print_message(error, kind="error")
    return status


def _print_message(message: object, *_: object, kind: str = "warning", **__: object) -> None:
    print(f"fsdp-compile: {kind}: {printable(str(message))}", file=sys.stderr)
