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
from fsdp_compile.core.unit import unit_of

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

_GRAD = operator.attrgetter("grad")


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


class _Segment:
    """Parameters of one group that lie side by side in a flat shard.

    Attributes:
        params: the parameters, in the order of the shard.
        param: all of them as one plain parameter, 1-D, which shares their memory.
        state: the optimizer's state of `param`.
        shown: what the optimizer has as the state of each of `params`: views of `state`.
    """

    def __init__(self, flat: FlatParam, indices: list[int]) -> None:
        self.flat, self.shard, self.indices = flat, flat.shard, indices
        self.params = [flat.params[index] for index in indices]
        stored = [record for index in indices if (record := flat.records[index])]
        self.start = stored[0].offset if stored else 0
        self.stop = stored[-1].offset + stored[-1].numel if stored else 0
        self.offsets = [record.offset if (record := flat.records[index]) else None for index in indices]
        self.param = nn.Parameter(flat.shard.detach()[self.start : self.stop])
        self.state: dict[str, Any] = {}
        self.shown: list[Any] = []

    def gradient(self) -> Tensor | None:
        """The gradients of all parameters as one tensor, 1-D; None if they do not lie side by side."""
        grads = list(map(_GRAD, self.params))
        if set(map(type, grads)) != {ShardedTensor} or grads[0].dtype != self.shard.dtype:
            return None
        base = grads[0].local._base
        if base is None or base.shape != self.shard.shape or not base.is_contiguous():
            return None
        start = base.storage_offset()
        for grad, offset in zip(grads, self.offsets, strict=True):
            local = grad.local
            if local._base is not base or (offset is not None and local.storage_offset() != start + offset):
                return None
        gradient: Tensor = base[self.start : self.stop]
        return gradient

    def take_state(self, states: list[dict[str, Any]]) -> bool:
        """Make the state of `param` of the parameters' own; False if that differs in more than its elements."""
        self.state, self.shown = {}, states
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return False
        for name, value in first.items():
            values = [state[name] for state in states]
            if isinstance(value, ShardedTensor):
                if any(type(each) is not ShardedTensor or each.dtype != value.dtype for each in values):
                    return False
                self.state[name] = self._joined(values)
            elif isinstance(value, Tensor):
                if any(each.shape != () or not torch.equal(each, value) for each in values):
                    return False
                self.state[name] = value
            elif any(each != value for each in values):
                return False
            else:
                self.state[name] = value
        return True

    def _joined(self, values: list[ShardedTensor]) -> Tensor:
        joined = torch.zeros_like(self.param, dtype=values[0].dtype, requires_grad=False)
        for value, offset in zip(values, self.offsets, strict=True):
            if offset is not None:
                at = offset - self.start
                joined[at : at + value.local.numel()] = value.local
        return joined

    def show_state(self, optimizer: Optimizer) -> None:
        """Let the optimizer's state of each parameter be views of that of `param`."""
        for position, (param, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            spec = self.flat.specs[self.indices[position]]
            at = 0 if offset is None else offset - self.start
            shown = {
                name: ShardedTensor(value[at : at + spec.numel], spec)
                if isinstance(value, Tensor) and value.shape == self.param.shape and value.dim()
                else value
                for name, value in self.state.items()
            }
            optimizer.state[param] = shown
        self.shown = [optimizer.state[param] for param in self.params]

    def release_state(self, optimizer: Optimizer) -> None:
        """Let each parameter have scalars of its own, such as its number of steps: it is going to be updated alone."""
        for param, shown in zip(self.params, self.shown, strict=False):
            state: dict[str, Any] = optimizer.state.get(param, {})
            if state is shown:
                state.update((name, value.clone()) for name, value in state.items() if _is_scalar(value))
        self.shown = []


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and value.dim() == 0


class _FlatOptimizer:
    """An optimizer and the segments that it steps on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.segments: list[list[_Segment]] = []  # of each parameter group
        self._params: list[list[nn.Parameter]] = []  # of each group, when its segments were made

    def step(self) -> None:
        """One step of the optimizer."""
        optimizer = self.optimizer
        step = type(optimizer).step
        if not optimizer.state:  # the first step makes the state
            step(optimizer)
            return
        self._find_segments()
        ready = [[segment for segment in segments if self._prepare(segment)] for segments in self.segments]
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

    def _find_segments(self) -> None:
        """Divide the groups into segments, again if parameters or their shards are other ones now."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        same = len(groups) == len(self._params) and all(
            len(now) == len(before) and all(map(operator.is_, now, before))
            for now, before in zip(groups, self._params, strict=True)
        )
        if same and all(s.shard is s.flat.shard for segments in self.segments for s in segments):
            return
        self._params = [list(params) for params in groups]
        self.segments = [_segments(params) for params in groups]

    def _prepare(self, segment: _Segment) -> bool:
        """Give the segment its gradient and its state; whether it can be stepped on."""
        gradient = segment.gradient()
        if gradient is None:
            segment.release_state(self.optimizer)
            return False
        states = list(map(self.optimizer.state.get, segment.params))
        if len(segment.shown) != len(states) or not all(map(operator.is_, states, segment.shown)):
            if not all(states) or not segment.take_state(states):  # type: ignore[arg-type]  # all are there
                segment.shown = []
                return False
            segment.show_state(self.optimizer)
        segment.param.grad = gradient
        return True


def _segments(params: list[nn.Parameter]) -> list[_Segment]:
    """Parameters of one group as segments: those of a flat parameter with no parameter of another group in between."""
    of_flats: dict[FlatParam, list[int]] = {}
    for param in params:
        managed = unit_of(param)
        if managed is not None and isinstance(param, ShardedTensor):
            flat, index = managed[0].in_flat(managed[1])
            of_flats.setdefault(flat, []).append(index)
    segments = []
    for flat, indices in of_flats.items():
        indices.sort()
        run = [indices[0]]
        for index in indices[1:]:
            if index != run[-1] + 1:
                segments.append(_Segment(flat, run))
                run = []
            run.append(index)
        segments.append(_Segment(flat, run))
    return segments
