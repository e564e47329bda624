"""Bytes that are moved by copies: by library calls of eager code, and by stores inside generated kernels."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from generated import Program

MOVERS = frozenset(
    (
        *("aten::copy_", "aten::cat", "aten::clone", "aten::_to_copy", "aten::_foreach_copy_", "aten::_chunk_cat"),
        *("aten::split_with_sizes_copy", "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"),
    )
)
_SIZES = (
    re.compile(r"assert_size_stride\((\w+), \(([\d, ]*)\)"),
    re.compile(r"^\s*(\w+) = empty_strided_\w+\(\(([\d, ]*)\)", re.M),
    re.compile(r"^\s*(\w+) = reinterpret_tensor\(\w+, \(([\d, ]*)\)", re.M),
)


class Copies(TorchDispatchMode):
    """Counts the bytes that library calls copy. Compiled blocks run uncompiled meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in MOVERS:
            self.nbytes += _written(name, result, args, kwargs or {})
        return result


def _written(name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that a call of `name` has written."""
    if name == "fsdp::all_gather_copy_in":
        return result[0].nbytes  # the shards side by side; the second is still to be gathered
    if name == "aten::_foreach_copy_":
        result = args[0]
    written = kwargs.get("out", result)
    return sum(tensor.nbytes for tensor in tree_leaves(written) if isinstance(tensor, Tensor))


def copied(run: Callable[[], Any]) -> int:
    """Bytes that library calls copy while `run` runs."""
    with torch.compiler.set_stance("force_eager"), Copies() as counter:
        run()
    return counter.nbytes


def moved_in(code: str) -> int:
    """Bytes of float32 parameters and gradients that a generated module stores as it loaded them."""
    program, sizes = Program(code), element_counts(code)

    def elements(*names: str) -> int:
        return min((sizes[name] for name in names if name in sizes), default=0)

    moved = sum(elements(move.source, move.target) for move in program.parameter_moves())
    bucketed = [step for step in program.steps if "_pre_bucket" in step.function]  # torch's: all that they are given
    return 4 * (moved + sum(elements(name) for step in bucketed for name in step.names))


def element_counts(code: str) -> dict[str, int]:
    """How many elements each variable of a generated module has."""
    return {
        name: math.prod(int(n) for n in re.findall(r"\d+", shape))
        for pattern in _SIZES
        for name, shape in pattern.findall(code)
    }


class GeneratedCode:
    """Collects the text of all modules that Inductor generates from now on."""

    def __init__(self) -> None:
        from torch._inductor.graph import GraphLowering

        self.codes: list[str] = []
        GraphLowering.save_output_code = self.codes.append  # a hook of torch's tests

    def moved(self) -> int:
        return sum(moved_in(code) for code in self.codes)
