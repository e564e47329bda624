"""The parts of the command `fsdp-compile` that predict: their arguments, and what they print and write.

    fsdp-compile explain FILE.py:FUNCTION --gpus 8,64 --seq 8192 --hardware h100-80
    fsdp-compile calibrate OUT.json
    fsdp-compile plan FILE.py --link LINK --world-size N

Nothing here imports torch before a command runs.
"""

import argparse
import inspect
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_compile.config import ACTIVATIONS
from fsdp_compile.explain.prediction import OPTIMIZERS, PRECISIONS, RUNTIMES, STRATEGIES

if TYPE_CHECKING:
    from fsdp_compile.explain.explanation import Explanation

EXPLAIN = """Predict what a training step takes on clusters that need not exist here: time, tokens per second,
memory by part, whether it fits, what is exposed, and what else could be chosen. No GPU is needed."""
EXPLAIN_EXAMPLE = """FILE.py:FUNCTION names a function without arguments that returns the model, unsharded. It gets no
memory, so it may be larger than this machine. Inputs are tokens, and targets if forward takes two arguments; for other
models the file defines example_inputs(batch, sequence), which returns the arguments of a forward.

Several values with commas between them, as in --gpus 8,64, give one prediction for each combination.

examples:
  fsdp-compile explain llama.py:make --gpus 8,64,512,4096 --batch 1,2 --seq 8192 --hardware h100-80 --html step.html
  fsdp-compile explain llama.py:make --gpus 256 --seq 8192 --checkpointing "none,selective op,full" --json step.json"""
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

STANDARD_OUTPUT = Path("-")


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


def add_explain(explain: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    explain.set_defaults(run=run_explain)
    explain.add_argument("factory", nargs="?", metavar="FILE.py:FUNCTION", help="makes the model")
    cluster = explain.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=_numbers, metavar="N[,N...]", help="number of GPUs, one rank each (default: 8)")
    cluster.add_argument("--gpus-per-node", type=positive, metavar="N", help="default: as the hardware file says")
    cluster.add_argument("--network", metavar="LINK", help="between nodes, for each GPU: a link such as ib400, or "
                         "custom:<latency in s>,<bandwidth in bytes/s> (default: the hardware's)")  # fmt: skip
    cluster.add_argument("--hardware", metavar="NAME|FILE", help="a name such as h100-80, or a hardware file (JSON); "
                         "--hardware list prints the names (default: that of --calibration, or h100-80)")  # fmt: skip
    cluster.add_argument("--calibration", type=Path, metavar="FILE", help="what fsdp-compile calibrate has measured, "
                         "used in place of the hardware's own constants")  # fmt: skip
    step = explain.add_argument_group("step")
    step.add_argument("--batch", type=_numbers, metavar="N[,N...]", help="sequences per GPU and forward (default: 1)")
    step.add_argument("--seq", type=_numbers, metavar="N[,N...]", help="tokens of a sequence (default: 2048)")
    step.add_argument(
        "--accumulate", type=positive, metavar="N", help="forwards and backwards of one step (default: 1)"
    )
    step.add_argument("--strategy", type=_one_of(*STRATEGIES), metavar="S[,S...]", help=f"{', '.join(STRATEGIES)} "
                      "(default: FULL_SHARD)")  # fmt: skip
    step.add_argument("--shard-size", type=positive, metavar="N", help="ranks that store one copy of the parameters, "
                      "for hybrid strategies (default: those of a node)")  # fmt: skip
    step.add_argument("--keep", type=int, metavar="N", help="blocks that stay unsharded after forward (default: 0)")
    step.add_argument("--checkpointing", type=lambda text: text.split(","), metavar="C[,C...]",
                      help="none, full, 'selective op' or 'selective N' (default: none)")  # fmt: skip
    step.add_argument("--precision", type=_one_of(*PRECISIONS), metavar="P[,P...]", help=f"{', '.join(PRECISIONS)} "
                      "(default: bf16)")  # fmt: skip
    step.add_argument(
        "--reduce-dtype", choices=("float32", "bfloat16", "float16"), help="of gradients that are reduced"
    )
    step.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    step.add_argument("--clip", action=argparse.BooleanOptionalAction, help="clip gradients to a norm (default: yes)")
    step.add_argument("--compile-step", action="store_true", default=None, help="as compile_step runs it")
    step.add_argument("--runtime", choices=RUNTIMES, help="this package, or FSDP2 (default: fsdp_compile)")
    step.add_argument("--eager", dest="compiled", action="store_false", default=None, help="not compiled")
    written = explain.add_argument_group("output, beside the text that is printed")
    written.add_argument("--json", nargs="?", type=Path, const=STANDARD_OUTPUT, metavar="OUT", help="all fields; "
                         "without OUT, printed in place of the text")  # fmt: skip
    written.add_argument("--html", type=Path, metavar="OUT", help="one page: timeline, memory, scaling, alternatives")
    written.add_argument("--trace", type=Path, metavar="OUT", help="timelines for ui.perfetto.dev")
    written.add_argument("--no-alternatives", action="store_true", help="predict the settings that were named alone")


def add_calibrate(calibrate: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    calibrate.set_defaults(run=run_calibrate)
    calibrate.add_argument("out", type=Path, metavar="OUT.json", help="the hardware file to write")
    calibrate.add_argument("--hardware", metavar="NAME|FILE", help="where what is not measured comes from (default: "
                           "by the name of the device)")  # fmt: skip
    calibrate.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one")
    calibrate.add_argument("--seconds", type=positive, default=120, metavar="N", help="to spend on measuring, at most "
                           "300 (default: 120)")  # fmt: skip
    calibrate.add_argument("--name", help="of the hardware in the file (default: that of --hardware)")


def add_plan(plan: argparse.ArgumentParser) -> None:
    """The arguments of `plan`."""
    plan.set_defaults(run=run_plan)
    plan.add_argument("file", type=Path, metavar="FILE.py", help="defines make_model() and example_inputs()")
    plan.add_argument("--link", required=True, help="what connects the ranks, such as h100-nvlink, or "
                      "custom:<latency in s>,<bandwidth in bytes/s>")  # fmt: skip
    plan.add_argument("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    plan.add_argument("--device", help="what computes, such as h100 (default: this machine's)")
    plan.add_argument("--budget", type=positive, metavar="BYTES", help="memory that may be in use at once")
    plan.add_argument("--activations", choices=ACTIVATIONS, default="keep", help="what becomes of those of each block")
    plan.add_argument("--optimizer", choices=OPTIMIZERS, help="plan the step of compile_step with it")
    plan.add_argument("--clip", action="store_true", help="clip gradients in that step")
    plan.add_argument("--trace", type=Path, metavar="JSON", help="also write a timeline for ui.perfetto.dev")


# --- explain ----------------------------------------------------------------------------------------------------------

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
    for path in (args.json, args.html, args.trace):
        _check_folder(path)
    from fsdp_compile.api import explain

    explanation = explain(
        make_model,
        example_inputs,
        **{"world_size": 8, **given},
        hardware=args.hardware,
        calibration=args.calibration,
        alternatives=not args.no_alternatives,
    )
    _write(explanation, args)


def _write(explanation: "Explanation", args: argparse.Namespace) -> None:
    printed = args.json == STANDARD_OUTPUT
    print(explanation.to_json() if printed else explanation, end="")
    for path, render in (
        (None if printed else args.json, explanation.to_json),
        (args.html, explanation.to_html),
        (args.trace, explanation.to_trace),
    ):
        if path is not None:
            path.write_text(render(), encoding="utf-8")
            if not printed:
                print(f"wrote {path}")


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: expected its folder to exist, found none")


def load_factory(text: str) -> tuple[Callable[[], Any], Callable[..., Sequence[Any]] | None]:
    """The function that `FILE.py:FUNCTION` names, and the file's `example_inputs`, if it has one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text has another form, the file raises an error, or does not define the function.
    """
    make, inputs = load_functions(text)
    if inputs is not None and not _takes(inputs, 2):
        raise ValueError(f"{text}: expected a function example_inputs(batch, sequence) beside it, found {inputs!r}")
    return make, inputs


def load_functions(text: str) -> tuple[Callable[[], Any], Callable[..., Any] | None]:
    """As `load_factory`; `example_inputs` may have any arguments."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"FILE.py:FUNCTION: expected a file, a colon and the name of a function, found {text!r}")
    names = run_file(Path(path))
    if not callable(names.get(name)):
        raise ValueError(f"{path}: expected a function {name}() without arguments, found none")
    return names[name], names.get("example_inputs")


def _takes(function: Any, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def run_file(path: Path) -> dict[str, Any]:
    """The names that a Python file defines. ValueError if it raises an error."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a Python file, found none")
    try:
        return runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"{path}: expected a file that runs, found {type(error).__name__}: {error}") from error


def _list_hardware() -> None:
    from fsdp_compile.passes.cost.hardware import devices

    for name, each in devices().items():
        peak = each.peak.get("bfloat16", max(each.peak.values()))
        memory = "" if each.memory is None else f", {each.memory / 2**30:,.0f} GiB"
        print(f"{name:14} {peak / 1e12:,.1f} Tflop/s, {each.bandwidth / 1e12:,.3f} TB/s{memory}")


# --- plan -------------------------------------------------------------------------------------------------------------


def run_plan(args: argparse.Namespace) -> None:
    """Print the report on the plan of the model that a file defines."""
    from fsdp_compile.api import explain_plan

    names = run_file(args.file)
    for name in ("make_model", "example_inputs"):
        if not callable(names.get(name)):
            raise ValueError(f"{args.file}: expected a function {name}() without arguments, found none")
    report = explain_plan(
        names["make_model"],
        names["example_inputs"](),
        link=args.link,
        world_size=args.world_size,
        device=args.device,
        budget=args.budget,
        activations=args.activations,
        optimizer=args.optimizer,
        clip=args.clip,
    )
    print(report, end="")
    if args.trace:
        args.trace.write_text(report.to_trace())
        print(f"wrote {args.trace}")


# --- calibrate --------------------------------------------------------------------------------------------------------


def run_calibrate(args: argparse.Namespace) -> None:
    """Measure this machine and write a hardware file."""
    from fsdp_compile.api import fully_shard
    from fsdp_compile.explain.calibrate import calibrate
    from fsdp_compile.passes.cost.hardware import to_json

    _check_folder(args.out)
    made, rank = calibrate(args.device, args.hardware, args.seconds, fully_shard)
    if args.name is not None:
        made = replace(made, name=args.name)
    if rank == 0:
        args.out.write_text(to_json(made), encoding="utf-8")
        print(f"wrote {args.out}")
        for name, value, unit, source in made.figures():
            if source.origin in ("measured", "fitted"):
                print(f"  {name:22} {value:12.4g} {unit:9} {source.origin}")
