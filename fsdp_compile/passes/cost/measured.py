"""Seconds of calls that were measured, by operator, shapes and dtypes; as JSON, to keep between runs."""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile.passes.graph.node_kinds import formula_of

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # an operator, its arguments, its keyword arguments


@dataclass(frozen=True)
class Measured:
    """A table of measured seconds; `key()` makes its keys."""

    seconds: Mapping[str, float]

    def of(self, node: fx.Node) -> float | None:
        """Seconds of the call that a node of a graph is; None: not measured."""
        return self.seconds.get(key(*_call(node))) if node.op == "call_function" else None

    def save(self, path: "str | pathlib.Path") -> None:
        """Write the table as JSON: a key, its seconds."""
        pathlib.Path(path).write_text(json.dumps(dict(sorted(self.seconds.items())), indent=1) + "\n")

    @classmethod
    def load(cls, path: "str | pathlib.Path") -> "Measured":
        """Read what `save` wrote. ValueError if the file holds something else."""
        found = json.loads(pathlib.Path(path).read_text())
        if not isinstance(found, dict) or not all(isinstance(each, int | float) for each in found.values()):
            raise ValueError(f"{path}: expected a JSON object of keys and seconds, found something else")
        return cls(found)

    @classmethod
    def run(cls, calls: Iterable[Call], device: torch.device | str = "cpu", repeats: int = 5) -> "Measured":
        """Run each different call once to warm up, then `repeats` times, and note the median.

        Args:
            calls: `(op, args, kwargs)`; of tensors, fake ones too, only size, stride and dtype matter.
            device: where to run.
            repeats: measured runs of each call.
        """
        different = {key(*call): call for call in calls}
        return cls({name: _median(call, torch.device(device), repeats) for name, call in different.items()})


def calls_of(nodes: Iterable[fx.Node]) -> Iterator[Call]:
    """The calls worth measuring: of operators with a formula for their operations, with known sizes."""
    for node in nodes:
        if node.op == "call_function" and formula_of(node):
            call = _call(node)
            if not any(_is_symbolic(each) for each in tree_leaves(call[1:])):
                yield call


def key(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """As in `aten.mm.default(bfloat16[8, 16], bfloat16[16, 4])`."""
    given = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
    return f"{op}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)


def _call(node: fx.Node) -> Call:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return node.target, args, kwargs


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


def _median(call: Call, device: torch.device, repeats: int) -> float:
    op, args, kwargs = call
    args, kwargs = tree_map_only(torch.Tensor, lambda each: _real(each, device), (args, kwargs))
    took = _on_cuda if device.type == "cuda" else _on_cpu
    with torch.no_grad():
        op(*args, **kwargs)
        return statistics.median(took(lambda: op(*args, **kwargs)) for _ in range(repeats))


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with memory: numbers about 0, or zeros, which are valid indices."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.normal_() if tensor.dtype.is_floating_point else made.zero_()


def _on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_cuda(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
