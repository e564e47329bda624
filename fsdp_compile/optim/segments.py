"""Segments: runs of parameters that an optimizer updates as one tensor.

A segment is a run of parameters that lie side by side in a flat shard and belong to one parameter group. An elementwise
optimizer treats them alike, so it may treat them as one tensor:

    flat shard      | a a a . b b b b c c c |        .: padding
    the segment     | ----------------------|        one parameter, its gradient, and one tensor for each kind of state

Between steps everything is as an ordinary step leaves it: `param_groups`, the state of each parameter, whose tensors
are views of the segment's, and step counts. So ordinary steps may come in between, and state dicts are ordinary ones.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharded_tensor import FlatGradient, ShardedTensor, set_local
from fsdp_compile.core.unit import unit_of

State = dict[str, Any]
_LOCAL = operator.attrgetter("local")


class Segment:
    """Parameters of one group that lie side by side in a flat shard, and their state.

    Attributes:
        params: the parameters, in the order of the shard.
        group: the index of their parameter group.
        param: all of them as one plain parameter, 1-D `[stop - start]`, which shares their memory.
        tensors: state of the parameters' shape, by name, 1-D `[stop - start]` each.
        counts: 0-d tensors of the state, by name: those of all parameters, 1-D `[len(params)]`, with equal elements.
        state: the state of `param`: `tensors`, the first of each of `counts`, and what is equal for all parameters.
    """

    def __init__(self, flat: FlatParam, indices: list[int], group: int) -> None:
        self.flat, self.shard, self.group = flat, flat.shard, group
        self.params, self._all = [flat.params[index] for index in indices], flat.params
        self._specs = [flat.specs[index] for index in indices]
        records = [flat.records[index] for index in indices]
        stored = [record for record in records if record]
        self.start = stored[0].offset if stored else 0
        self.stop = stored[-1].offset + stored[-1].numel if stored else 0
        if len(indices) == len(flat.params):  # with padding, whose zeros stay: of one size on all ranks
            self.start, self.stop = 0, flat.shard.numel()
        self._offsets = [record.offset - self.start if record else 0 for record in records]
        self.param = nn.Parameter(flat.shard.detach()[self.start : self.stop], requires_grad=False)
        self._forget()

    @cached_property
    def data(self) -> Tensor:
        """The memory of `param` as a storage of its own: a compiled function would copy inputs that share one."""
        return torch.from_dlpack(self.shard.detach()[self.start : self.stop])

    def is_current(self) -> bool:
        """Whether the flat parameter still has this shard and these parameters."""
        flat = self.flat
        return self.shard is flat.shard and self._all is flat.params and flat.deferred is not None  # None: released

    def gradient(self) -> Tensor | None:
        """The gradients of all parameters as one tensor, 1-D; None if they do not lie side by side."""
        kept = self.flat.reduction.flat_gradient
        return self._of_shard(kept) if kept is not None else self.gradient_in(FlatGradient.of_each(self.params))

    def gradient_in(self, flats: list[FlatGradient]) -> Tensor | None:
        """As `gradient`, if `flats` are those of the parameters."""
        return self._of_shard(flats[0].grad) if flats and flats.count(flats[0]) == len(flats) else None

    def _of_shard(self, gradient: Tensor) -> Tensor | None:
        if gradient.dtype != self.shard.dtype or gradient.shape != self.shard.shape:
            return None
        return gradient if self.param.numel() == gradient.numel() else gradient[self.start : self.stop]

    # --- state --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.state: State = {}
        self._shared: _Values | None = None  # the parameters' state, as `_share` left it
        self._left: list[Any] = []  # the values of `state`
        self._versions: list[int] = []  # of `counts`

    def take_state(self, optimizer: Optimizer) -> bool:
        """Let the parameters' state be views of `tensors`; return False if it differs in more than its elements."""
        states = {param: optimizer.state.get(param) or {} for param in self.params}
        if self._shared is not None and self._shared.are_in(states) and self.has_equal_counts():
            return True
        of_each = list(states.values())
        self._forget()
        joined: State = {}
        if any(state.keys() != of_each[0].keys() for state in of_each):
            return False
        if not all(self._join(name, [state[name] for state in of_each], joined) for name in of_each[0]):
            return False
        self._share(joined, states)
        return True

    def _join(self, name: str, values: list[Any], joined: State) -> bool:
        """Put one kind of state of all parameters into `joined`, in one tensor or value; return whether that is it."""
        first = values[0]
        if isinstance(first, Tensor):
            if any(type(each) is not type(first) or each.dtype != first.dtype for each in values):
                return False
            if any(each.device != first.device for each in values):
                return False
        if type(first) is ShardedTensor:
            if not all(each.spec.same_ranges(spec) for each, spec in zip(values, self._specs, strict=True)):
                return False
            joined[name] = torch.zeros(self.stop - self.start, dtype=first.dtype, device=first.device)
            for each, offset in zip(values, self._offsets, strict=True):
                joined[name][offset : offset + each.local.numel()] = each.local
            return True
        if type(first) is Tensor:
            if any(each.dim() for each in values) or len(set(torch.stack(values).tolist())) > 1:
                return False
        elif not isinstance(first, (int, float, str, type(None))) or any(each != first for each in values):
            return False
        joined[name] = first
        return True

    def has_equal_counts(self) -> bool:
        """Whether each of `counts` still has equal elements."""
        return all(map(self._are_equal, self.counts.values(), self._versions))

    def _are_equal(self, counts: Tensor, version: int) -> bool:
        if counts._version == version and not counts.is_cpu:  # to look would wait for the device
            return True
        values = counts.tolist()
        return bool(values.count(values[0]) == len(values))

    def _share(self, joined: State, states: dict[nn.Parameter, State]) -> None:
        """Let the parameters' `states` show what `joined` has: a state of `param`."""
        self._forget()
        self.state = joined
        for name, value in joined.items():
            of_each: list[Any] = [value] * len(states)
            if isinstance(value, Tensor) and value.dim():
                self.tensors[name] = value
                ends = zip(self._offsets, self._specs, strict=True)
                views = [value[offset : offset + spec.numel] for offset, spec in ends]
                of_each = [state.get(name) for state in states.values()]
                for i, (view, spec) in enumerate(zip(views, self._specs, strict=True)):
                    if type(of_each[i]) is ShardedTensor:  # somebody may hold it
                        set_local(of_each[i], view, spec)
                    else:
                        of_each[i] = ShardedTensor(view, spec)
            elif isinstance(value, Tensor):
                self.counts[name] = value.detach().expand(len(states)).clone()
                of_each = list(self.counts[name].unbind())
                joined[name] = of_each[0]
            for state, own in zip(states.values(), of_each, strict=True):
                state[name] = own
        self._shared = _Values(states)
        self.note_counts()
        self._left = list(joined.values())

    def note_counts(self) -> None:
        """Expect the present versions of `counts`."""
        self._versions = [counts._version for counts in self.counts.values()]

    def begin(self, optimizer: Optimizer, gradient: Tensor) -> None:
        """Let `optimizer` find `param` with a gradient, 1-D, and the state that was taken."""
        self.param.grad, optimizer.state[self.param] = gradient, self.state

    def has_new_state(self) -> bool:
        """Whether a step has made state of `param`, or replaced some."""
        return not _are_same(self.state.values(), self._left)

    def end(self, optimizer: Optimizer, has_new_state: bool) -> None:
        """Give the parameters what a step has left in the state of `param`."""
        self.param.grad = None
        del optimizer.state[self.param]
        if has_new_state:
            self._share(self.state, {param: optimizer.state.setdefault(param, {}) for param in self.params})
            return
        for counts in self.counts.values() if len(self.params) > 1 else ():
            counts.fill_(counts[0])
        self.note_counts()


class _Values:
    """The state of parameters, to find by identity whether it has been exchanged since."""

    def __init__(self, states: Mapping[Any, Any]) -> None:
        self._keys, self._states = list(states), list(states.values())
        self._dicts = [state for state in self._states if isinstance(state, dict)]
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._sharded = [each for each in self._values if type(each) is ShardedTensor]
        self._locals = list(map(_LOCAL, self._sharded))

    def are_in(self, states: Mapping[Any, Any]) -> bool:
        """Whether `states` has the same parameters and values, over the same memory."""
        return (
            _are_same(states, self._keys)
            and _are_same(states.values(), self._states)
            and _are_same(chain.from_iterable(map(dict.values, self._dicts)), self._values)
            and _are_same(map(_LOCAL, self._sharded), self._locals)
        )


def _are_same(found: Iterable[Any], expected: list[Any]) -> bool:
    """Whether two lists have the same objects."""
    found = list(found)
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


class Segments:
    """The segments of one optimizer, which all that step on it share: `of(optimizer)`."""

    _of: ClassVar[WeakKeyDictionary[Optimizer, "Segments"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._params: list[list[nn.Parameter]] = []  # of each group, when the segments were made
        self._joined: list[nn.Parameter] = []  # those of the segments
        self._state: _Values | None = None  # of the whole optimizer, while all segments are ready

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Segments":
        """The segments of `optimizer`; made again if parameters or shards were replaced."""
        segments = cls._of.get(optimizer)
        if segments is None:
            segments = cls._of[optimizer] = cls()
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(segments._params) and all(map(_are_same, groups, segments._params))
        if not same or not all(segment.is_current() for segment in segments.all):
            segments._divide(groups)
        return segments

    def _divide(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._params, self.all = [list(params) for params in groups], []
        for group, params in enumerate(groups):
            of_flats: dict[FlatParam, list[int]] = {}
            for param in params:
                managed = unit_of(param)
                if managed is not None and isinstance(param, ShardedTensor):
                    flat, index = managed[0].in_flat(managed[1])
                    of_flats.setdefault(flat, []).append(index)
            for flat, indices in of_flats.items():
                indices.sort()
                ends = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1] + 1]
                for start, stop in zip([0, *ends], [*ends, len(indices)], strict=True):
                    self.all.append(Segment(flat, indices[start:stop], group))
        self._joined = [param for segment in self.all for param in segment.params]
        self._state = None

    def ready(self, optimizer: Optimizer, chosen: Sequence[Segment] | None = None) -> list[tuple[Segment, Tensor]]:
        """The `chosen` segments, or of all, that can be updated as one parameter, each with its gradient, 1-D.

        They are those whose gradients lie side by side, whose parameters lie in the shard, and whose state is alike.
        """
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return []
        if chosen is None and self._state is not None and self._state.are_in(optimizer.state):
            flats = iter(FlatGradient.of_each(self._joined))
            ready = [
                (segment, gradient)
                for segment in self.all
                if (gradient := segment.gradient_in(list(islice(flats, len(segment.params))))) is not None
                and segment.flat.is_bound()
            ]
            if len(ready) == len(self.all) and all(segment.has_equal_counts() for segment in self.all):
                return ready
        ready = [
            (segment, gradient)
            for segment in (self.all if chosen is None else chosen)
            if (gradient := segment.gradient()) is not None
            if segment.flat.is_bound() and segment.take_state(optimizer)
        ]
        self._state = _Values(optimizer.state) if len(ready) == len(self.all) else None
        return ready

    @torch.no_grad()
    def end(self, optimizer: Optimizer, ready: Sequence[Segment], had_state: Sequence[Any]) -> None:
        """Give parameters what a step has left in the state of segments; `had_state`: before it, in order."""
        new = [segment for segment in ready if segment.has_new_state()]
        if new:  # state is made in the order of the groups, as by ordinary steps
            self._state = None
            made = {id(param) for segment in new for param in segment.params}
            before = set(map(id, had_state))
            for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if id(param) not in before and (id(param) in made or param in optimizer.state):
                    optimizer.state[param] = optimizer.state.pop(param, {})
        for segment in ready:
            segment.end(optimizer, segment in new)
        torch.autograd.graph.increment_version([param for segment in ready for param in segment.params])
        torch.autograd.graph.increment_version([segment.shard for segment in ready])


# Note [One loop over other groups]
# Hooks of users run around the step, schedulers wrap it, a closure runs within it. All of these find the optimizer's
# own groups and state. Only the loop over `param_groups`, with which each step of torch's elementwise optimizers goes
# on behind the closure, finds segments. So the step is given a closure, which calls the user's, if any, and then puts a
# list in the place of `param_groups` that shows other groups to one loop. When that loop begins, the optimizer has its
# own list again; when it ends, also by an exception, state and gradients of segments go back to the parameters. A step
# without such a loop would be an ordinary one. What else was thought of:
#   - Hooks before and behind the step that exchange groups: hooks of users, closures and exceptions come in between.
#   - A function in the place of `optimizer.step`: who holds the method, or has wrapped it before, does not call that.
#   - Sharded parameters that answer `_foreach_*` and `_fused_*` by one operator on the flat shard: what the step does
#     in Python for each parameter stays, which is most of it, and all of it where `foreach` and `fused` are off.
#   - A second optimizer over segments: state, options that users change and `grad_scale` are those of the first.


class _OneLoop(list[dict[str, Any]]):
    """The groups of an optimizer; the first loop over them finds `shown` (Note [One loop over other groups])."""

    def __init__(self, optimizer: Optimizer, shown: list[dict[str, Any]], end: Callable[[], None]) -> None:
        super().__init__(optimizer.param_groups)
        self._optimizer, self._own, self._shown, self._end = optimizer, optimizer.param_groups, shown, end

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._optimizer.param_groups = self._own
        return self._loop()

    def _loop(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._shown
        finally:
            self._end()


@torch.no_grad()
def show_segments(
    optimizer: Optimizer,
    chosen: Sequence[Segment] | None = None,
    params: Sequence[Sequence[nn.Parameter]] | None = None,
) -> None:
    """Let the step that runs update each of the `chosen` segments that is ready as one parameter; None: all.

    The others of `params`, for each group, it updates one by one; None: those of the optimizer. To be called by the
    step's closure, behind what that does otherwise.
    """
    params = params or [group["params"] for group in optimizer.param_groups]
    segments = Segments.of(optimizer)
    found = segments.ready(optimizer, chosen)
    ready = [segment for segment, _ in found]
    covered: set[int] = set()
    if not ready:
        if all(own is group["params"] for own, group in zip(params, optimizer.param_groups, strict=True)):
            return
    elif sum(len(segment.params) for segment in ready) == sum(map(len, params)):
        params = [()] * len(params)
    else:
        covered = {id(param) for segment in ready for param in segment.params}
    shown = []
    for index, (group, own) in enumerate(zip(optimizer.param_groups, params, strict=True)):
        rest = [param for param in own if id(param) not in covered] if covered else own
        joined = [segment.param for segment in ready if segment.group == index]
        shown += [{**group, "params": each} for each in (joined, rest) if each]
    end = partial(segments.end, optimizer, ready, list(optimizer.state))
    for segment, gradient in found:
        segment.begin(optimizer, gradient)
    optimizer.param_groups = _OneLoop(optimizer, shown, end)
