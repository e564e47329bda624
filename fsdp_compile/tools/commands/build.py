"""`fsdp-compile build`: compile a step for a number of ranks, on this machine alone."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_compile.tools.files import load_functions
from fsdp_compile.tools.options import Add, positive

DESCRIPTION = """Compile a training step for a number of ranks, on this machine alone: the ranks load the artifacts and
compile nothing."""
EXAMPLE = """FILE.py:FUNCTION names a function without arguments that returns what runs in training:
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


# fmt: off
def add_options(add: Add) -> None:
    """Add the options of the command."""
    add("factory", metavar="FILE.py:FUNCTION", help="makes what is compiled")
    add("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    add("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what computes (default: cpu)")
    add("--threads", type=positive, default=1, metavar="N", help="OMP_NUM_THREADS of each rank (default: 1, as "
        "torchrun sets it)")
    add("--steps", type=positive, default=3, metavar="N", help="steps to run, as later ones may need graphs of their "
        "own (default: 3)")
# fmt: on


def run(args: argparse.Namespace) -> None:
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
