"""`fsdp-compile explain`: predict a step on other clusters."""

import argparse
from pathlib import Path

from fsdp_compile.explain.prediction import (
    OPTIMIZERS,
    PRECISIONS,
    RUNTIMES,
    STRATEGIES,
    WIRE_FORMATS,
    hardware_of,
    settings_of,
)
from fsdp_compile.tools.files import check_factory, load_factory
from fsdp_compile.tools.options import STANDARD_OUTPUT, Add, check_folders, numbers, one_of, positive, say, write_files

# Options by the fields of `Setting`; those that were not given keep the field's default.
FIELDS = {"gpus": "world_size", "batch": "batch", "seq": "sequence", "strategy": "strategy", "keep": "keep",
          "checkpointing": "checkpointing", "accumulate": "accumulation", "precision": "precision",
          "optimizer": "optimizer", "clip": "clip", "gpus_per_node": "ranks_per_node", "shard_size": "shard_size",
          "compiled": "compiled", "network": "network", "runtime": "runtime",
          "reduce_dtype": "reduce_dtype", "wire_gather": "wire_gather", "wire_reduce": "wire_reduce"}  # fmt: skip

DESCRIPTION = """Predict what a training step takes on clusters that need not exist here: time, tokens per second,
memory by part, whether it fits, what is exposed, and what else could be chosen. No GPU is needed."""
EXAMPLE = """FILE.py:FUNCTION names a function without arguments that returns the model, unsharded. It gets no
memory, so it may be larger than this machine. Inputs are tokens, and targets if forward takes two arguments; for other
models the file defines example_inputs(batch, sequence), which returns the arguments of a forward.

Several values with commas between them, as in --gpus 8,64, give one prediction for each combination.

examples:
  fsdp-compile explain llama.py:make --gpus 8,64,512,4096 --batch 1,2 --seq 8192 --hardware h100-80 --trace step.trace
  fsdp-compile explain llama.py:make --gpus 256 --seq 8192 --checkpointing "none,selective op,full" --json step.json"""


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("factory", nargs="?", metavar="FILE.py:FUNCTION", help="makes the model")
    add("--gpus", type=numbers, metavar="N[,N...]", help="number of GPUs, one rank each (default: 8)")
    add("--gpus-per-node", type=positive, metavar="N", help="default: as the hardware file says")
    add("--network", metavar="LINK", help="between nodes, for each GPU: a link such as ib400, or "
        "custom:<latency in s>,<bandwidth in bytes/s> (default: the hardware's)")
    add("--hardware", metavar="NAME|FILE", help="a name such as h100-80, or a hardware file (JSON); --hardware list "
        "prints the names (default: h100-80)")
    add("--batch", type=numbers, metavar="N[,N...]", help="sequences per GPU and forward (default: 1)")
    add("--seq", type=numbers, metavar="N[,N...]", help="tokens of a sequence (default: 2048)")
    add("--accumulate", type=positive, metavar="N", help="forwards and backwards of one step (default: 1)")
    add("--strategy", type=one_of(*STRATEGIES), metavar="S[,S...]", help=f"{', '.join(STRATEGIES)} (default: "
        "FULL_SHARD)")
    add("--shard-size", type=positive, metavar="N", help="ranks that store one copy of the parameters, for hybrid "
        "strategies (default: those of a node)")
    add("--keep", type=int, metavar="N", help="blocks that stay unsharded after forward (default: 0)")
    add("--checkpointing", type=lambda text: text.split(","), metavar="C[,C...]", help="none, full, 'selective op' or "
        "'selective N' (default: none)")
    add("--precision", type=one_of(*PRECISIONS), metavar="P[,P...]", help=f"{', '.join(PRECISIONS)} (default: bf16)")
    add("--reduce-dtype", choices=("float32", "bfloat16", "float16"), help="of gradients that are reduced")
    add("--wire-gather", choices=WIRE_FORMATS, help="the format in which parameters are sent (default: in full)")
    add("--wire-reduce", choices=WIRE_FORMATS, help="the format in which gradients are sent (default: in full)")
    add("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    add("--clip", action=argparse.BooleanOptionalAction, help="clip gradients to a norm (default: yes)")
    add("--runtime", choices=RUNTIMES, help="this package, or FSDP2 (default: fsdp_compile)")
    add("--eager", dest="compiled", action="store_false", default=None, help="not compiled")
    add("--json", nargs="?", type=Path, const=STANDARD_OUTPUT, metavar="OUT", help="write all fields; without OUT, "
        "print them in place of the text")
    add("--trace", type=Path, metavar="OUT", help="write timelines for ui.perfetto.dev")
    add("--no-alternatives", action="store_true", help="predict the settings that were named alone")
# fmt: on


def run(args: argparse.Namespace) -> None:
    """Print and write the predictions for a model."""
    given = {field: getattr(args, option) for option, field in FIELDS.items() if getattr(args, option) is not None}
    if args.hardware == "list":
        return _list_hardware()
    if args.factory is None:
        raise ValueError("FILE.py:FUNCTION: name the file and the function that makes the model")
    check_folders(args.json, args.trace)
    check_factory(args.factory)
    settings = {"world_size": 8, **given}
    hardware = hardware_of(args.hardware)
    found = len(settings_of(settings, hardware))
    say(f"tracing {args.factory} for {found} setting{'s'[: found > 1]} on {hardware.name}")
    make_model, example_inputs = load_factory(args.factory)
    from fsdp_compile.api import explain

    report = explain(make_model, example_inputs, hardware=hardware, **settings, alternatives=not args.no_alternatives)
    printed = args.json == STANDARD_OUTPUT
    print(report.to_json() if printed else report, end="")
    written = {None if printed else args.json: report.to_json, args.trace: report.to_trace}
    write_files(written, says=not printed)


def _list_hardware() -> None:
    from fsdp_compile.passes.cost.hardware import devices

    for name, each in devices().items():
        peak = each.peak.get("bfloat16", max(each.peak.values()))
        memory = "" if each.memory is None else f", {each.memory / 2**30:,.0f} GiB"
        print(f"{name:14} {peak / 1e12:,.1f} Tflop/s, {each.bandwidth / 1e12:,.3f} TB/s{memory}")
