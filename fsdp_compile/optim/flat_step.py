"""`flat_step`: optimizers whose update is elementwise step on flat shards, one plain tensor for many parameters.

    optimizer = flat_step(torch.optim.AdamW(model.parameters(), lr=1e-3))

Nearly all of the host time of an optimizer step is Python code that runs for each parameter. Parameters that lie side
by side in a flat shard and are in one parameter group are updated alike, so the optimizer may see them as one tensor:

    flat shard      | a a a . b b b b c c c |        .: padding
    the optimizer   | ----------------------|        one parameter, its gradient, and one tensor for each kind of state

Everything else is as without it: the same class steps, `param_groups` hold the model's parameters, and `state[param]`
has sharded tensors, which are views of the state of the flat shard.
"""

import operator
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.optim.segments import Segment, SegmentTable, is_scalar

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)
"""Optimizers that update each element by its own gradient and state alone, and keep zeros where all of these are."""


def flat_step(optimizer: Optimizer) -> Optimizer:
    """Let `optimizer.step()` update flat shards instead of single parameters, where it can; return `optimizer`.

    Results are those without it, but for the last bit of some elements: kernels compute the last few elements of a
    tensor with other instructions. The first step is an ordinary one, which makes the state. A step updates those
    parameters one by one whose gradients do not lie side by side, or whose state differs (after a gradient was None in
    some step, or after one of them was assigned).

    Args:
        optimizer: of one of the classes in `ELEMENTWISE` exactly; subclasses may do anything.

    Raises:
        TypeError: `optimizer` is of another class.
    """
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"optimizer: expected one that updates elementwise, {names}, found {type(optimizer).__name__}; let it step "
            f"as it is"
        )
    flat = _FlatOptimizer(optimizer)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flat.step()
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this instance alone
    return optimizer


class _Segment(Segment):
    """A segment that the optimizer sees as one parameter.

    Attributes:
        param: all parameters as one plain parameter, 1-D, which shares their memory.
        state: the optimizer's state of `param`.
        views: what the optimizer has as the state of each of `params`: views of `state`.
    """

    def __init__(self, flat: FlatParam, indices: list[int]) -> None:
        super().__init__(flat, indices)
        self.param = nn.Parameter(flat.shard.detach()[self.start : self.stop])
        self.state: dict[str, Any] = {}
        self.views: list[Any] = []

    def take_state(self, states: list[dict[str, Any]]) -> bool:
        """Make the state of `param` of the parameters' own; False if that differs in more than its elements."""
        self.state, self.views = {}, states
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return False
        for name, value in first.items():
            values = [state[name] for state in states]
            if isinstance(value, ShardedTensor):
                if any(type(each) is not ShardedTensor or each.dtype != value.dtype for each in values):
                    return False
                self.state[name] = self.joined(values)
            elif isinstance(value, Tensor):
                if any(each.shape != () or not torch.equal(each, value) for each in values):
                    return False
                self.state[name] = value
            elif any(each != value for each in values):
                return False
            else:
                self.state[name] = value
        return True

    def show_state(self, optimizer: Optimizer) -> None:
        """Let the optimizer's state of each parameter be views of that of `param`."""
        for position, param in enumerate(self.params):
            optimizer.state[param] = {
                name: self.shown(position, value)
                if isinstance(value, Tensor) and value.shape == self.param.shape and value.dim()
                else value
                for name, value in self.state.items()
            }
        self.views = [optimizer.state[param] for param in self.params]

    def release_state(self, optimizer: Optimizer) -> None:
        """Let each parameter have scalars of its own, such as its number of steps: it is going to be updated alone."""
        for param, view in zip(self.params, self.views, strict=False):
            state: dict[str, Any] = optimizer.state.get(param, {})
            if state is view:
                state.update((name, value.clone()) for name, value in state.items() if is_scalar(value))
        self.views = []


class _FlatOptimizer:
    """An optimizer and the segments that it steps on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.segments = SegmentTable(optimizer, _Segment)

    def step(self) -> None:
        """One step of the optimizer."""
        optimizer = self.optimizer
        step = type(optimizer).step
        if not optimizer.state:  # the first step makes the state
            step(optimizer)
            return
        self.segments.update()
        ready = [[segment for segment in segments if self._prepare(segment)] for segments in self.segments.of_groups]
        if not any(ready):
            step(optimizer)
            return
        params, states = [group["params"] for group in optimizer.param_groups], optimizer.state
        try:
            flat_states: defaultdict[Any, Any] = defaultdict(dict)
            for group, segments, own in zip(optimizer.param_groups, ready, params, strict=True):
                covered = {id(param) for segment in segments for param in segment.params}
                alone = [param for param in own if id(param) not in covered]
                group["params"] = [segment.param for segment in segments] + alone
                flat_states.update((segment.param, segment.state) for segment in segments)
                flat_states.update((param, states[param]) for param in alone if param in states)
            optimizer.state = flat_states
            step(optimizer)
        finally:
            for group, own in zip(optimizer.param_groups, params, strict=True):
                group["params"] = own
            single = {id(param) for own in params for param in own}
            states.update((param, state) for param, state in optimizer.state.items() if id(param) in single)
            optimizer.state = states
            for segment in (segment for segments in ready for segment in segments):
                segment.param.grad = None
                torch.autograd.graph.increment_version([*segment.params, segment.shard])

    def _prepare(self, segment: _Segment) -> bool:
        """Give the segment its gradient and its state; whether it can be stepped on."""
        gradient = segment.gradient()
        if gradient is None:
            segment.release_state(self.optimizer)
            return False
        states = list(map(self.optimizer.state.get, segment.params))
        if len(segment.views) != len(states) or not all(map(operator.is_, states, segment.views)):
            if not all(states) or not segment.take_state(states):  # type: ignore[arg-type]  # all are there
                segment.views = []
                return False
            segment.show_state(self.optimizer)
        segment.param.grad = gradient
        return True
