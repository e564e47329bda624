"""The command `fsdp-compile`: explain, compare, check, calibrate, plan, build, selfcheck, checkpoint show and convert.

Exit status: 0; 1 if a check fails, or a file is damaged or cannot be read or written; 2 if arguments are invalid.
Functions import what they need themselves: importing torch takes seconds, and `--help` answers at once without it.
"""

import argparse
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_compile.config import ACTIVATIONS
from fsdp_compile.explain.prediction import OPTIMIZERS, PRECISIONS, RUNTIMES, STRATEGIES
from fsdp_compile.tools.files import run_file

if TYPE_CHECKING:
    from fsdp_compile.checkpoint.convert import Source

FORMATS = ("dcp", "safetensors", "torch")
TORCHTITAN = "torchtitan:"  # before MODULE:CONFIG, where FILE.py:FUNCTION may be
STANDARD_OUTPUT = Path("-")
CHECKED = ("eager", "blocks", "aot_eager", "inductor", "step")
COMPARED = ("eager", "compiled", "step", "fsdp2", "fsdp2-compiled", "ddp", "unsharded")

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

EXPLAIN = """Predict what a training step takes on clusters that need not exist here: time, tokens per second,
memory by part, whether it fits, what is exposed, and what else could be chosen. No GPU is needed."""
EXPLAIN_EXAMPLE = """FILE.py:FUNCTION names a function without arguments that returns the model, unsharded. It gets no
memory, so it may be larger than this machine. Inputs are tokens, and targets if forward takes two arguments; for other
models the file defines example_inputs(batch, sequence), which returns the arguments of a forward.

Several values with commas between them, as in --gpus 8,64, give one prediction for each combination.

examples:
  fsdp-compile explain llama.py:make --gpus 8,64,512,4096 --batch 1,2 --seq 8192 --hardware h100-80 --html step.html
  fsdp-compile explain llama.py:make --gpus 256 --seq 8192 --checkpointing "none,selective op,full" --json step.json"""
COMPARE = """Train a model with this package, FSDP2, DDP and unsharded, side by side on this machine: speed, first step,
memory and losses of each, beside what explain predicts."""
COMPARE_EXAMPLE = """FILE.py:FUNCTION, and example_inputs(batch, sequence) in the same file, are as of explain, but here
the model is made and trained. Each system runs in processes of its own, and they take turns. One that cannot train the
model says so in its row.

  eager            fully_shard(model)
  compiled         torch.compile(fully_shard(model))
  step             compile_step(fully_shard(model), optimizer)
  fsdp2            torch's fully_shard of each repeated block, and of the model: the same units
  fsdp2-compiled   the same, each block compiled before
  ddp              torch.compile(DistributedDataParallel(model))
  unsharded        torch.compile(model), on each rank for its own batch: what communication costs nothing

Under torchrun the ranks are its own, on one node or several; without it --ranks starts them here.

examples:
  fsdp-compile compare llama.py:make --ranks 2 --batch 2 --seq 128 --html compare.html
  fsdp-compile compare --torchtitan my_titan:debug --systems eager,compiled,fsdp2,fsdp2-compiled
  torchrun --nproc-per-node 8 -m fsdp_compile compare llama.py:make --seq 4096 --systems compiled,fsdp2-compiled"""
CHECK = """Check whether a model trains sharded as it does unsharded: all outputs, losses, gradients, buffers,
parameters and states of the optimizer, in each step, by each way of running it."""
CHECK_EXAMPLE = """FILE.py:FUNCTION, and example_inputs(batch, sequence) in the same file, are as of compare; the file
may also define loss(output), optimizer(params), and shard(model), which calls fully_shard with arguments.

  eager            fully_shard(model)
  blocks           the same, each unit below the model compiled; blocks:BACKEND by another backend than aot_eager
  aot_eager        torch.compile(fully_shard(model), backend="aot_eager"); likewise inductor, and other backends
  step             compile_step(fully_shard(model), optimizer, backend="aot_eager"); step:BACKEND by another one

The second step accumulates. After the last one each way saves a checkpoint, and other ranks load it and go on.

The exit status is 1 if a way differs by more than rounding explains: the report then names the first module whose
output or gradient differs, with both values. A bug report should have the file that --json writes.

examples:
  fsdp-compile check llama.py:make --batch 2 --seq 16 --json check.json
  fsdp-compile check llama.py:make --ways eager,aot_eager --resume-on 0
  torchrun --nproc-per-node 4 -m fsdp_compile check llama.py:make"""
CALIBRATE = """Measure this machine and write a hardware file: matrix products by size, attention by length, fused
chains, the optimizer's update, launches and, with several ranks, collectives by size."""
CALIBRATE_EXAMPLE = """Measuring alternates between all cases, so that what disturbs the machine disturbs all alike.

examples:
  fsdp-compile calibrate this_machine.json
  torchrun --nproc-per-node 8 -m fsdp_compile calibrate this_node.json"""
PLAN = """Print the plan that a compiled training step would follow: each collective, how much of it
computing hides and what limits it. No GPU, no other rank and no memory for the model are needed."""
PLAN_EXAMPLE = """FILE.py defines two functions without arguments. make_model() returns the model, sharded or not;
example_inputs() returns the tuple of arguments for its forward.

example:
  fsdp-compile plan gpt.py --link h100-nvlink --world-size 8 --device h100 --trace step.json"""

BUILD = """Compile a training step for a number of ranks, on this machine alone: the ranks load the artifacts and
compile nothing."""
BUILD_EXAMPLE = """FILE.py:FUNCTION names a function without arguments that returns what runs in training:
  a model             sharded or not; as torch.compile(model) runs it, forward and backward
  what compile_step, or torch.compile, returned, or any function that runs steps: as it is
FILE.py also defines example_inputs(), without arguments: a tuple of arguments, a dict of arguments by name, or a pair
of both; what training passes by name is to be passed by name here. The process group exists when these are called, and
its backend is "fake"; training code that is not to run belongs under if __name__ == "__main__".

Settings of compilation are those of the environment, as in training. --device cuda needs one GPU of the kind that
training runs on, and ranks for which their GPU is cuda:0, as torchrun --virtual-local-rank starts them. Libraries for
the CPU serve the same kind of processor, with the same C++ compiler and number of threads.

Artifacts are code: load none from a place that you do not trust.

examples:
  fsdp-compile build train.py:make artifacts --world-size 8
  FSDP_COMPILE_ARTIFACTS=artifacts torchrun --nproc-per-node 8 train.py"""

SELFCHECK = "Check this installation: values, order, memory, streams and speed of a small sharded model."
SELFCHECK_EXAMPLE = """It runs on one process or on the ranks of torchrun, on GPUs if there are any. The exit status is
1 if a row fails; a bug report should have the file that --json writes.

--names looks for everything that the package uses of torch's private names, and compares arguments of functions. It
takes seconds and needs no other rank. A torch that is newer than what the package was tested on is worth this check.

examples:
  fsdp-compile selfcheck --names
  torchrun --nproc-per-node 2 -m fsdp_compile selfcheck --json selfcheck.json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            return args.run(args) or 0
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
        if args.run not in (run_show, run_convert):
            raise  # of the user's own code, so with a traceback
        said = str(error).partition("\nException raised from ")[0]  # torch adds a trace of its own functions
        doing = f"{args.source}: reading it or writing it again failed"  # as a strange file or a full disk lets torch
        return _refuse(RuntimeError(f"{doing}: {type(error).__name__}: {said}"), 1)


def positive(text: str) -> int:
    """A whole number of at least 1, as argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def _one_of(*known: str) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        for each in text.split(","):
            if each not in known:
                raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, found {each!r}")
        return text.split(",")

    return read


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; argparse ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Tools for sharded models.", epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fsdp-compile {version('fsdp_compile')}")
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_explain(_command(groups, "explain", EXPLAIN, EXPLAIN_EXAMPLE, run_explain).add_argument)
    _add_compare(_command(groups, "compare", COMPARE, COMPARE_EXAMPLE, run_compare).add_argument)
    _add_check(_command(groups, "check", CHECK, CHECK_EXAMPLE, run_check).add_argument)
    _add_calibrate(_command(groups, "calibrate", CALIBRATE, CALIBRATE_EXAMPLE, run_calibrate).add_argument)
    _add_plan(_command(groups, "plan", PLAN, PLAN_EXAMPLE, run_plan).add_argument)
    _add_build(_command(groups, "build", BUILD, BUILD_EXAMPLE, run_build).add_argument)
    _add_selfcheck(_command(groups, "selfcheck", SELFCHECK, SELFCHECK_EXAMPLE, run_selfcheck).add_argument)
    checkpoint = _command(groups, "checkpoint", CHECKPOINT, CHECKPOINT_EXAMPLE)
    commands = checkpoint.add_subparsers(required=True, metavar="show|convert")
    show = _command(commands, "show", SHOW, "example:\n  fsdp-compile checkpoint show checkpoints", run_show)
    change = _command(commands, "convert", CONVERT, CHECKPOINT_EXAMPLE, run_convert)
    show.add_argument("--fingerprint", action="store_true", help="read all tensors, and print what "
                      "model.fingerprint() returns of a model with these parameters and no buffers")  # fmt: skip
    for command in (show, change):
        command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or a folder of checkpoints")
    _add_convert(change.add_argument)
    return parser.parse_args(arguments)


def _command(
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


Add = Callable[..., Any]  # adds an argument


# fmt: off
def _add_explain(add: Add) -> None:
    add("factory", nargs="?", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--gpus", type=_numbers, metavar="N[,N...]", help="number of GPUs, one rank each (default: 8)")
    add("--gpus-per-node", type=positive, metavar="N", help="default: as the hardware file says")
    add("--network", metavar="LINK", help="between nodes, for each GPU: a link such as ib400, or "
        "custom:<latency in s>,<bandwidth in bytes/s> (default: the hardware's)")
    add("--hardware", metavar="NAME|FILE", help="a name such as h100-80, or a hardware file (JSON); --hardware list "
        "prints the names (default: that of --calibration, or h100-80)")
    add("--calibration", type=Path, metavar="FILE", help="what fsdp-compile calibrate has measured, used in place of "
        "the hardware's own constants")
    add("--batch", type=_numbers, metavar="N[,N...]", help="sequences per GPU and forward (default: 1)")
    add("--seq", type=_numbers, metavar="N[,N...]", help="tokens of a sequence (default: 2048)")
    add("--accumulate", type=positive, metavar="N", help="forwards and backwards of one step (default: 1)")
    add("--strategy", type=_one_of(*STRATEGIES), metavar="S[,S...]", help=f"{', '.join(STRATEGIES)} (default: "
        "FULL_SHARD)")
    add("--shard-size", type=positive, metavar="N", help="ranks that store one copy of the parameters, for hybrid "
        "strategies (default: those of a node)")
    add("--keep", type=int, metavar="N", help="blocks that stay unsharded after forward (default: 0)")
    add("--checkpointing", type=lambda text: text.split(","), metavar="C[,C...]", help="none, full, 'selective op' or "
        "'selective N' (default: none)")
    add("--precision", type=_one_of(*PRECISIONS), metavar="P[,P...]", help=f"{', '.join(PRECISIONS)} (default: bf16)")
    add("--reduce-dtype", choices=("float32", "bfloat16", "float16"), help="of gradients that are reduced")
    add("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    add("--clip", action=argparse.BooleanOptionalAction, help="clip gradients to a norm (default: yes)")
    add("--compile-step", action="store_true", default=None, help="as compile_step runs it")
    add("--runtime", choices=RUNTIMES, help="this package, or FSDP2 (default: fsdp_compile)")
    add("--eager", dest="compiled", action="store_false", default=None, help="not compiled")
    add("--json", nargs="?", type=Path, const=STANDARD_OUTPUT, metavar="OUT", help="write all fields; without OUT, "
        "print them in place of the text")
    add("--html", type=Path, metavar="OUT", help="write one page: timeline, memory, scaling, alternatives")
    add("--trace", type=Path, metavar="OUT", help="write timelines for ui.perfetto.dev")
    add("--no-alternatives", action="store_true", help="predict the settings that were named alone")


def _add_compare(add: Add) -> None:
    add("factory", nargs="?", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--torchtitan", metavar="MODULE:CONFIG", help="the model of a torchtitan config instead, such as "
        "llama3:llama3_debugmodel, with its batch and sequence")
    add("--ranks", type=positive, metavar="N", help="to start on this machine (default: one for each GPU, or 2)")
    add("--systems", type=_one_of(*COMPARED), default=[*COMPARED], metavar="S[,S...]", help=f"{', '.join(COMPARED)} "
        "(default: all)")
    add("--steps", type=positive, default=20, metavar="N", help="steps of each system that count (default: 20)")
    add("--rounds", type=positive, default=3, metavar="N", help="turns into which they are divided (default: 3)")
    add("--batch", type=positive, metavar="N", help="sequences per rank and step (default: 1)")
    add("--seq", type=positive, metavar="N", help="tokens of a sequence (default: 256)")
    add("--precision", choices=("fp32", "bf16"), help="to compute in (default: bf16 on GPUs, else fp32)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPUs, if there are any")
    add("--hardware", metavar="NAME|FILE", help="of predictions (default: by the device's name)")
    add("--json", type=Path, metavar="OUT", help="write all figures")
    add("--html", type=Path, metavar="OUT", help="write one page, with pictures of speed and losses")
    add("--svg", type=Path, metavar="OUT", help="write the picture of speed alone")


def _add_check(add: Add) -> None:
    add("factory", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--ranks", type=positive, default=2, metavar="N", help="to start on this machine (default: 2)")
    add("--ways", type=lambda text: text.split(","), default=[*CHECKED], metavar="W[,W...]", help="default: "
        f"{','.join(CHECKED)}")
    add("--steps", type=positive, default=3, metavar="N", help="of the optimizer (default: 3)")
    add("--accumulate", type=positive, default=2, metavar="N", help="micro-batches of the second step (default: 2)")
    add("--resume-on", type=int, metavar="N", help="ranks that load a checkpoint and go on (default: one more than "
        "--ranks, or torchrun's; 0: none)")
    add("--batch", type=positive, default=2, metavar="N", help="sequences per rank and forward (default: 2)")
    add("--seq", type=positive, default=16, metavar="N", help="tokens of a sequence (default: 16)")
    add("--device", choices=("cuda", "cpu"), default="cpu", help="cuda needs a GPU for each rank (default: cpu)")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")


def _add_calibrate(add: Add) -> None:
    add("out", type=Path, metavar="OUT.json", help="the hardware file to write")
    add("--hardware", metavar="NAME|FILE", help="where what is not measured comes from (default: by the device's name)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--seconds", type=positive, default=120, metavar="N", help="to measure, at most 300 (default: 120)")
    add("--name", help="of the hardware in the file (default: that of --hardware)")


def _add_plan(add: Add) -> None:
    add("file", type=Path, metavar="FILE.py", help="defines make_model() and example_inputs()")
    add("--link", required=True, help="what connects the ranks, such as h100-nvlink, or "
        "custom:<latency in s>,<bandwidth in bytes/s>")
    add("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    add("--device", help="what computes, such as h100 (default: this machine's)")
    add("--budget", type=positive, metavar="BYTES", help="memory that may be in use at once")
    add("--activations", choices=ACTIVATIONS, default="keep", help="what becomes of those of each block")
    add("--optimizer", choices=OPTIMIZERS, help="plan the step of compile_step with it")
    add("--clip", action="store_true", help="clip gradients in that step")
    add("--trace", type=Path, metavar="JSON", help="also write a timeline for ui.perfetto.dev")


def _add_build(add: Add) -> None:
    add("factory", metavar="FILE.py:FUNCTION", help="makes what is compiled")
    add("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    add("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what computes (default: cpu)")
    add("--threads", type=positive, default=1, metavar="N", help="OMP_NUM_THREADS of each rank (default: 1, as "
        "torchrun sets it)")
    add("--steps", type=positive, default=3, metavar="N", help="steps to run, as later ones may need graphs of their "
        "own (default: 3)")


def _add_selfcheck(add: Add) -> None:
    add("--names", action="store_true", help="look for the private names of torch that are used, and nothing else")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    add("--json", type=Path, metavar="OUT", help="write the report, on rank 0")
    add("--html", type=Path, metavar="OUT", help="write it as a page, with a picture of speeds")


def _add_convert(add: Add) -> None:
    add("target", type=Path, metavar="DST", help="a path that does not exist yet")
    add("--format", required=True, choices=FORMATS, help="of DST")
    add("--world-size", type=positive, default=1, metavar="N", help="spread over N files (default: 1)")
    add("--trust", action="store_true", help="load values of any type, which can run code, from "
        "torch.distributed.checkpoint (default: tensors and plain values)")
    add("--part", metavar="KEY", help="only what lies under this first key, such as model, without it (default: all; "
        "for safetensors: model, if there is such a key)")
# fmt: on


def _refuse(error: Exception, status: int) -> int:
    _show(error, kind="error")
    return status


def _show(message: object, *_: object, kind: str = "warning", **__: object) -> None:
    from fsdp_compile.checkpoint.untrusted import printable

    print(f"fsdp-compile: {kind}: {printable(str(message))}", file=sys.stderr)


# Options by the fields of `Setting`; those that were not given keep the field's default.
FIELDS = {"gpus": "world_size", "batch": "batch", "seq": "sequence", "strategy": "strategy", "keep": "keep",
          "checkpointing": "checkpointing", "accumulate": "accumulation", "precision": "precision",
          "optimizer": "optimizer", "clip": "clip", "gpus_per_node": "ranks_per_node", "shard_size": "shard_size",
          "compiled": "compiled", "network": "network", "runtime": "runtime", "compile_step": "compile_step",
          "reduce_dtype": "reduce_dtype"}  # fmt: skip


def run_explain(args: argparse.Namespace) -> None:
    """Print and write the predictions for a model."""
    given = {field: getattr(args, option) for option, field in FIELDS.items() if getattr(args, option) is not None}
    if args.hardware == "list":
        return _list_hardware()
    if args.factory is None:
        raise ValueError("FILE.py:FUNCTION: name the file and the function that makes the model")
    make_model, example_inputs = load_factory(args.factory)
    _check_folders(args.json, args.html, args.trace)
    from fsdp_compile.api import explain

    settings = {"world_size": 8, **given, "hardware": args.hardware, "calibration": args.calibration}
    report = explain(make_model, example_inputs, **settings, alternatives=not args.no_alternatives)
    printed = args.json == STANDARD_OUTPUT
    print(report.to_json() if printed else report, end="")
    written = {None if printed else args.json: report.to_json, args.html: report.to_html, args.trace: report.to_trace}
    _write(written, says=not printed)


def _check_folders(*paths: Path | None) -> None:
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: expected its folder to exist, found none")
        if path.is_dir():
            raise ValueError(f"{path}: expected the name of a file, found a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path}: expected a place that can be written to, found one that cannot")


def _write(files: dict[Path | None, Callable[[], str]], says: bool = True) -> None:
    """Write what was asked for, and say so."""
    for path, render in files.items():
        if path is not None:
            path.write_text(render(), encoding="utf-8")
            if says:
                print(f"wrote {path}")


def run_compare(args: argparse.Namespace) -> int:
    """Print and write what each system makes of the model; 1 if none could."""
    if (args.factory is None) == (args.torchtitan is None):
        raise ValueError("expected either FILE.py:FUNCTION or --torchtitan MODULE:CONFIG")
    factory, batch, sequence = args.factory, args.batch or 1, args.seq or 256
    if args.torchtitan is not None:
        from fsdp_compile.integrations.torchtitan.compared import config_of

        training = config_of(args.torchtitan).training
        factory, batch = f"{TORCHTITAN}{args.torchtitan}", args.batch or training.local_batch_size
        sequence = args.seq or training.seq_len
    make, example_inputs = load_factory(factory)
    _check_folders(args.json, args.html, args.svg)
    import torch

    from fsdp_compile.compare.rounds import compare, launch
    from fsdp_compile.compare.systems import Task
    from fsdp_compile.explain.predict import hardware_of

    gpus = torch.cuda.device_count()
    kind = args.device or ("cuda" if gpus else "cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "RANK" in os.environ else args.ranks or gpus or 2
    if kind == "cuda" and here > gpus:
        raise ValueError(f"--ranks {here}: expected at most {gpus}, one for each GPU here; --device cpu needs no GPU")
    if "RANK" in os.environ and args.ranks not in (None, int(os.environ["WORLD_SIZE"])):
        raise ValueError(f"--ranks {args.ranks}: expected {os.environ['WORLD_SIZE']}, as torchrun has started; "
                         "leave it out")  # fmt: skip
    hardware = hardware_of(args.hardware, None) if args.hardware else None
    bf16 = args.precision == "bf16" or (args.precision is None and kind == "cuda")
    task = Task(batch, sequence, bf16, kind)
    launched = launch(here)
    found = compare(factory, make, example_inputs, task, launched, systems=list(dict.fromkeys(args.systems)),
                    steps=args.steps, rounds=args.rounds, hardware=hardware)  # fmt: skip
    if launched.speaks:
        print(found, end="")
        _write({args.json: found.to_json, args.html: found.to_html, args.svg: found.to_svg})
    return 0 if found.ran else 1


def run_check(args: argparse.Namespace) -> int:
    """Print and write whether the model trains alike; 1 if it does not."""
    _check_folders(args.json)
    from fsdp_compile.tools.check import check_file
    from fsdp_compile.tools.check_training import InFile

    options = {name: getattr(args, name) for name in ("steps", "accumulate", "resume_on")}
    path, name = split_factory(args.factory)
    report = check_file(InFile(path, name, args.batch, args.seq), args.ways, args.ranks, args.device, **options)
    if os.environ.get("RANK", "0") == "0":
        print(report, end="")
        _write({args.json: report.to_json})
    return 0 if report.holds else 1


def load_factory(text: str) -> tuple[Callable[[], Any], Callable[..., Sequence[Any]] | None]:
    """The function that `FILE.py:FUNCTION` names, and the file's `example_inputs`, if it has one; behind `TORCHTITAN`
    those of a torchtitan config.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text has another form, the file raises an error, or does not define the function.
    """
    if text.startswith(TORCHTITAN):
        from fsdp_compile.integrations.torchtitan.compared import factory

        return factory(text.removeprefix(TORCHTITAN))
    make, inputs = load_functions(text)
    try:
        if inputs is not None:
            inspect.signature(inputs).bind(1, 1)
    except (TypeError, ValueError):
        expected = "a function example_inputs(batch, sequence) beside it"
        raise ValueError(f"{text}: expected {expected}, found {inputs!r}") from None
    return make, inputs


def load_functions(text: str) -> tuple[Callable[[], Any], Callable[..., Any] | None]:
    """As `load_factory`; `example_inputs` may have any arguments."""
    path, name = split_factory(text)
    names = run_file(Path(path))
    return _function(names, name, path), names.get("example_inputs")


def split_factory(text: str) -> tuple[str, str]:
    """File and function of `FILE.py:FUNCTION`. ValueError if the text has another form."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"FILE.py:FUNCTION: expected a file, a colon and the name of a function, found {text!r}")
    return path, name


def _function(names: dict[str, Any], name: str, path: str | Path) -> Callable[..., Any]:
    if not callable(names.get(name)):
        raise ValueError(f"{path}: expected a function {name}() without arguments, found none")
    return names[name]


def _list_hardware() -> None:
    from fsdp_compile.passes.cost.hardware import devices

    for name, each in devices().items():
        peak = each.peak.get("bfloat16", max(each.peak.values()))
        memory = "" if each.memory is None else f", {each.memory / 2**30:,.0f} GiB"
        print(f"{name:14} {peak / 1e12:,.1f} Tflop/s, {each.bandwidth / 1e12:,.3f} TB/s{memory}")


def run_plan(args: argparse.Namespace) -> None:
    """Print the report on the plan of the model that a file defines."""
    from fsdp_compile.api import explain_plan

    names = run_file(args.file)
    make_model, example_inputs = (_function(names, name, args.file) for name in ("make_model", "example_inputs"))
    options = ("link", "world_size", "device", "budget", "activations", "optimizer", "clip")
    chosen = {option: getattr(args, option) for option in options}
    report = explain_plan(make_model, example_inputs(), **chosen)
    print(report, end="")
    _write({args.trace: report.to_trace})


def run_calibrate(args: argparse.Namespace) -> None:
    """Measure this machine and write a hardware file."""
    from fsdp_compile.api import fully_shard
    from fsdp_compile.explain.calibrate import calibrate
    from fsdp_compile.passes.cost.hardware import to_json

    _check_folders(args.out)
    made, rank = calibrate(args.device, args.hardware, args.seconds, fully_shard)
    if args.name is not None:
        made = replace(made, name=args.name)
    if rank == 0:
        _write({args.out: lambda: to_json(made)})
        for name, value, unit, source in made.figures():
            if source.origin in ("measured", "fitted"):
                print(f"  {name:22} {value:12.4g} {unit:9} {source.origin}")


def run_build(args: argparse.Namespace) -> None:
    """Run the step and write what compiling it has left behind."""
    if args.out.exists():
        raise FileExistsError(f"{args.out}: expected a folder that does not exist yet, found one; choose another")
    if not args.out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{args.out}: expected its folder to exist, found none")
    import torch

    from fsdp_compile.config import CompileConfig
    from fsdp_compile.passes.artifacts import build

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: expected a GPU here, as kernels are built and chosen on one, found none")
    if CompileConfig.from_environment().artifacts is not None:
        raise ValueError("FSDP_COMPILE_ARTIFACTS: expected it not to be set, found artifacts to load; unset it")
    make, example_inputs = load_functions(args.factory)
    if example_inputs is None:
        raise ValueError(f"{args.factory}: expected a function example_inputs() beside it, found none")
    torch.set_num_threads(args.threads)
    written = build(lambda: _step(make(), example_inputs), args.steps, args.world_size, args.device, args.out)
    print(f"wrote {args.out}: {written}")


def _step(made: Any, example_inputs: Callable[[], Any]) -> Callable[[], None]:
    """A step of what a user's function made: that itself; of a model, forward and backward."""
    import torch
    from torch import nn

    from fsdp_compile.api import fully_shard
    from fsdp_compile.fsdp_module import FSDPModule
    from fsdp_compile.passes._torch import tree_leaves

    if not callable(made):
        raise ValueError(f"FUNCTION: expected a model or a function that runs a step, found {type(made).__name__}")
    is_model, run = isinstance(made, nn.Module), made
    if is_model and not hasattr(made, "_orig_mod"):
        run = made if any(isinstance(each, FSDPModule) for each in made.modules()) else fully_shard(made)
        run = torch.compile(run) if run._compiled_call_impl is None else run

    def step() -> None:
        args, kwargs = _arguments(example_inputs())
        output = run(*args, **kwargs)
        if is_model:
            tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
            if not tensors:
                raise ValueError("FUNCTION: expected a model whose output depends on its parameters, found another")
            torch.stack([each.float().sum() for each in tensors]).sum().backward()
            run.zero_grad()

    return step


def _arguments(given: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(given, tuple) and [type(each) for each in given] == [tuple, dict]:
        return given
    if not isinstance(given, (tuple, list, dict)):
        raise ValueError(f"example_inputs: expected a tuple, a dict, or a pair of both, found {type(given).__name__}")
    return ((), given) if isinstance(given, dict) else (given, {})


def run_selfcheck(args: argparse.Namespace) -> int:
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

    _check_folders(args.json, args.html)
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    with process_group(device):
        report = selfcheck(device)
        if dist.get_rank() == 0:
            print(report)
            _write({args.json: report.to_json, args.html: report.to_html}, says=False)
    return 0 if report.holds else 1


def run_show(args: argparse.Namespace) -> None:
    """Print what is there, a line for each tensor."""
    from fsdp_compile.checkpoint.convert import open_source
    from fsdp_compile.checkpoint.untrusted import printable
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
          + (f", {len(chosen.tied)} of them tied to others" if chosen.tied else "")
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
