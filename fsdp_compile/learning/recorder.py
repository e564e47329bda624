"""The clock of one step: when a graph launches collectives, waits for them, and begins matrix products.

A graph that is recorded is the one that always runs: nothing is in it to be timed. Collectives that generated code
calls on process groups itself come by as ranges (`comm.collectives.profiled`), all that it calls on torch by a dispatch
mode that is on for this one call. On the CPU a moment is what the clock says; on a GPU it is an event in the stream,
and nobody waits for it before the moments are asked for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsdp_compile.comm.collectives import watchers
from fsdp_compile.learning._torch import TorchDispatchMode
from fsdp_compile.learning.prices import WAITS, Mark

Moment = Any  # seconds, or a `torch.cuda.Event`
DIRECTIONS = ("forward", "backward")
_RANGES = {"all_gather": "gather", "wait_all_gather": "wait", "reduce": "reduce", "wait_reduce": "wait_reduce"}
_LAUNCHES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_to_all": "reduce"}
_DEPTH = 4  # nodes of autograd between an output and the graph's own

clock: Callable[[], float] = time.perf_counter


class StepClock:
    """Times one call of a compiled graph, and the backward of it.

    Args:
        device: that computes.

    Attributes:
        spans: by direction, when the graph began and ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: dict[str, tuple[Moment, Moment]] = {}
        self._noted: dict[str, list[tuple[str, Moment, Moment]]] = {}

    def run(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        """`call(*args)`, timed; its backward will be."""
        with self._record_direction("forward"):
            outputs = call(*args)
        node = next(filter(None, map(_graph_node, _tensors_in(outputs))), None)
        if node is not None:
            stack = ExitStack()

            def begin(_grads: Any) -> None:
                prehook.remove()
                stack.enter_context(self._record_direction("backward"))

            def end(_inputs: Any, _outputs: Any) -> None:
                hook.remove()
                stack.close()

            prehook, hook = node.register_prehook(begin), node.register_hook(end)
        return outputs

    def seconds(self) -> tuple[float, float] | None:
        """What both directions took, and what their collectives were waited for; None unless both have ended."""
        if self.spans.keys() != set(DIRECTIONS):
            return None
        marks = [mark for direction in DIRECTIONS for mark in self.marks(direction)]
        waits = sum(mark.end - mark.begin for mark in marks if mark.kind in WAITS)
        return sum(_seconds_between(begin, end) for begin, end in self.spans.values()), waits

    def marks(self, direction: str) -> list[Mark]:
        """What the graph of that direction has called, in seconds from its beginning."""
        origin, last = self.spans[direction]
        _wait_for_moment(last)
        noted = [("begin", origin, origin), *self._noted[direction], ("end", last, last)]
        return [
            Mark(kind, _seconds_between(origin, begin), _seconds_between(origin, end)) for kind, begin, end in noted
        ]

    @contextmanager
    def _record_direction(self, direction: str) -> Iterator[None]:
        noted = self._noted[direction] = []
        with ExitStack() as stack:
            watch = _Watch(self.now, noted)
            stack.enter_context(watch)
            watchers.append(watch.range)
            stack.callback(watchers.remove, watch.range)
            begin = self.now()
            yield
            self.spans[direction] = begin, self.now()

    def now(self) -> Moment:
        """This moment of what computes."""
        if self.device.type != "cuda":
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Watch(TorchDispatchMode):
    """Notes what is launched, waited for and begun, as (kind, begin, end) in `noted`."""

    def __init__(self, now: Callable[[], Moment], noted: list[tuple[str, Moment, Moment]]) -> None:
        super().__init__()
        self.now, self.noted = now, noted
        self.range = self._note_range  # one object, to be found again
        self._in_flight: dict[int, str] = {}  # what was launched by torch's operators, by address of its result

    @contextmanager
    def _note_range(self, phase: str) -> Iterator[None]:
        begin = self.now()
        yield
        if phase in _RANGES:
            self.noted.append((_RANGES[phase], begin, self.now()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            return self._note_collective(func, args, kwargs or {})
        if func.overloadpacket in flop_registry:
            begin = self.now()
            self.noted.append(("product", begin, begin))
        return func(*args, **(kwargs or {}))

    def _note_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, begin = func.overloadpacket.__name__, self.now()
        result = func(*args, **kwargs)
        kind = next((kind for prefix, kind in _LAUNCHES.items() if name.startswith(prefix)), None)
        if kind is not None:
            self._in_flight.update((tensor.data_ptr(), kind) for tensor in _tensors_in(result))
        elif name == "wait_tensor" and (launched := self._in_flight.pop(args[0].data_ptr(), None)) is not None:
            kind = "wait" if launched == "gather" else "wait_reduce"
        if kind is not None:
            self.noted.append((kind, begin, self.now()))
        return result


def _tensors_in(outputs: Any) -> list[Tensor]:
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [each for each in several if isinstance(each, Tensor)]


def _graph_node(output: Tensor) -> Any:
    """The node of autograd that runs the backward of the compiled graph; None if `output` has none near it."""
    nodes = [output.grad_fn]
    for _ in range(_DEPTH):
        for node in filter(None, nodes):
            if node.name() == "CompiledFunctionBackward":
                return node
        nodes = [following for node in filter(None, nodes) for following, _ in node.next_functions]
    return None


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        return float(end) - begin
    _wait_for_moment(end)
    return float(begin.elapsed_time(end)) / 1e3


def _wait_for_moment(moment: Moment) -> None:
    if not isinstance(moment, float):
        moment.synchronize()
