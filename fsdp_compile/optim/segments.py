"""Segments: runs of parameters that an optimizer updates as one tensor.

A segment is a run of parameters that lie side by side in a flat shard and belong to one parameter group. An elementwise
optimizer treats them alike, so it may treat them as one tensor:

    flat shard      | a a a . b b b b c c c |        .: padding
    the segment     | ----------------------|        one parameter, its gradient, and one tensor for each kind of state

Between steps everything is as an ordinary step leaves it: `param_groups`, the state of each parameter, whose tensors
are views of the segment's, and step counts. So ordinary steps may come in between, and state dicts are ordinary ones.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, moves, set_local

State = dict[str, Any]
_LOCAL, _SHARD, _VERSION = map(operator.attrgetter, ("local", "shard", "_version"))
_VALUES = operator.methodcaller("values")


def is_laid_out_as(grad: Tensor, shard: Tensor) -> bool:
    """Whether a gradient can be that of a flat shard."""
    return grad.dtype == shard.dtype and grad.shape == shard.shape


def kept_gradient(flat: FlatParam) -> Tensor | None:
    """The gradient of a flat parameter if it was left in one tensor, laid out as the shard."""
    grad = flat.reduction.flat_gradient
    return grad if grad is not None and is_laid_out_as(grad, flat.shard) else None


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
        self.specs = [flat.specs[index] for index in indices]
        records = [flat.records[index] for index in indices]
        stored = [record for record in records if record]
        self.start = stored[0].offset if stored else 0
        self.stop = stored[-1].offset + stored[-1].numel if stored else 0
        if len(indices) == len(flat.params):  # with padding, whose zeros stay: of one size on all ranks
            self.start, self.stop = 0, flat.shard.numel()
        self._offsets = [record.offset - self.start if record else 0 for record in records]
        self._is_whole = self.stop - self.start == flat.shard.numel()
        self.param = nn.Parameter(flat.shard.detach()[self.start : self.stop], requires_grad=False)
        self._forget()

    def is_current(self) -> bool:
        """Whether the flat parameter still has this shard and these parameters."""
        flat = self.flat
        return self.shard is flat.shard and self._all is flat.params and flat.deferred is not None  # None: released

    def flat_gradient(self) -> Tensor | None:
        """The tensor, laid out as the shard, that has the gradients of all parameters; None if there is none."""
        if self.flat.reduction.flat_gradient is not None:
            return kept_gradient(self.flat)
        flats = FlatGradient.behind(self.params, self.specs)
        return flats[0].grad if len(flats) == 1 and is_laid_out_as(flats[0].grad, self.shard) else None

    def part_of(self, flat: Tensor) -> Tensor:
        """The elements of the segment in a tensor that is laid out as the shard."""
        return flat if self._is_whole else flat[self.start : self.stop]

    # --- state --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.state: State = {}
        self.joint: list[JointCounts] = []  # those that `counts` lie in, of several segments
        self.shared: KnownValues | None = None  # the parameters' state, as `_share` left it
        self._left: list[Any] = []  # the values of `state`
        self._versions: list[int] = []  # of `counts`

    def take_state(self, optimizer: Optimizer) -> bool:
        """Let the parameters' state be views of `tensors`; return False if it differs in more than its elements."""
        states = {param: optimizer.state.get(param) or {} for param in self.params}
        if self.shared is not None and self.shared.are_in(states) and self.has_equal_counts():
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
            if not all(each.spec.same_ranges(spec) for each, spec in zip(values, self.specs, strict=True)):
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
        pairs = zip(self.counts.values(), self._versions, strict=True)
        # To look at the others would wait for the device.
        seen = (counts.tolist() for counts, version in pairs if counts.is_cpu or counts._version != version)
        return all(values.count(values[0]) == len(values) for values in seen)

    def _share(self, joined: State, states: dict[nn.Parameter, State]) -> None:
        """Let the parameters' `states` show what `joined` has: a state of `param`."""
        self._forget()
        self.state = joined
        for name, value in joined.items():
            of_each: list[Any] = [value] * len(states)
            if isinstance(value, Tensor) and value.dim():
                self.tensors[name] = value
                ends = zip(self._offsets, self.specs, strict=True)
                views = [value[offset : offset + spec.numel] for offset, spec in ends]
                of_each = [state.get(name) for state in states.values()]
                for i, (view, spec) in enumerate(zip(views, self.specs, strict=True)):
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
        self._note_state(states)

    def move_counts(self, name: str, counts: Tensor, states: Mapping[Any, State]) -> None:
        """Let one of `counts` lie in other memory, right after `_share`: nobody holds the parameters' own yet."""
        counts.copy_(self.counts[name])
        self.counts[name], of_each = counts, list(counts.unbind())
        self.state[name] = of_each[0]
        for param, own in zip(self.params, of_each, strict=True):
            states[param][name] = own
        self._note_state({param: states[param] for param in self.params})

    def _note_state(self, states: Mapping[Any, State]) -> None:
        self.shared, self._left = KnownValues(states), list(self.state.values())
        self.note_counts()

    def note_counts(self) -> None:
        """Expect the present versions of `counts`."""
        self._versions = [counts._version for counts in self.counts.values()]

    def has_new_state(self) -> bool:
        """Whether a step has made state of `param`, or replaced some."""
        return not _are_same(self.state.values(), self._left)

    def end(self, states: dict[Any, State]) -> bool:
        """Give the parameters' `states` what a step has left in `state`; return whether some is new."""
        if self.has_new_state():
            self._share(self.state, {param: states[param] for param in self.params})
            return True
        for counts in self.counts.values() if len(self.params) > 1 else ():
            counts.fill_(counts[0])
        self.note_counts()
        return False


Ready = Sequence[tuple[Segment, Tensor]]
"""Segments that can be updated as one parameter, each with its gradient, 1-D `[stop - start]`."""


class JointCounts:
    """Step counts, or other 0-d tensors of the state, of the parameters of several segments, in one tensor.

    A step changes the first of each segment; `spread` gives what that is then to all others.
    """

    def __init__(self, name: str, segments: Sequence[Segment], states: Mapping[Any, State]) -> None:
        sizes = [len(segment.params) for segment in segments]
        self.name = name
        self._all = segments[0].counts[name]
        self._parts = [self._all]
        if len(segments) > 1:
            self._all = self._all.new_empty(sum(sizes))
            self._parts = [part.data for part in self._all.split(sizes)]  # `.data`: each counts versions by itself
        first = chain.from_iterable([sum(sizes[:at])] * size for at, size in enumerate(sizes))
        self._first = torch.tensor(list(first), device=self._all.device)  # for each element that of its segment
        self._expected = torch.empty_like(self._all)
        for segment, part in zip(segments, self._parts, strict=True):
            if part is not self._all:
                segment.move_counts(name, part, states)
            segment.joint.append(self)
        self.spread()

    @staticmethod
    def join(segments: Sequence[Segment], states: Mapping[Any, State]) -> None:
        """Join what is alike in `segments`, whose state was shared just now."""
        alike: dict[Any, list[Segment]] = {}
        for segment in segments:
            for name, counts in segment.counts.items():
                alike.setdefault((name, counts.dtype, counts.device), []).append(segment)
        for (name, *_), some in alike.items():
            JointCounts(name, some, states)

    def spread(self) -> None:
        """Give what the first of each segment is to all others."""
        torch.index_select(self._all, 0, self._first, out=self._expected)
        self._all.copy_(self._expected)
        self._versions = None if self._all.is_cpu else list(map(_VERSION, self._parts))

    def are_unchanged(self) -> bool:
        """Whether nobody has changed them since."""
        if self._versions is not None and list(map(_VERSION, self._parts)) == self._versions:
            return True  # to look would wait for the device
        return self._all.equal(self._expected)


class KnownValues:
    """The state of parameters, to find by identity whether it has been exchanged since."""

    def __init__(self, states: Mapping[Any, State]) -> None:
        self._keys, self._values = list(states), list(chain.from_iterable(map(_VALUES, states.values())))
        self._sharded = [each for each in self._values if type(each) is ShardedTensor]
        self._moves, self._locals = moves(), list(map(_LOCAL, self._sharded))
        self._refs = list(map(ref, self._sharded))  # torch.utils.swap_tensors, which is no move, raises

    def are_in(self, states: Mapping[Any, State]) -> bool:
        """Whether `states` has the same parameters and values, over the same memory."""
        if not _are_same(states, self._keys):
            return False
        if not _are_same(chain.from_iterable(map(_VALUES, states.values())), self._values):
            return False
        if self._moves != moves():
            if not _are_same(map(_LOCAL, self._sharded), self._locals):
                return False
            self._moves = moves()
        return True


_END = (object(),)


def _are_same(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether two lists have the same objects."""
    return all(map(operator.is_, chain(found, _END), chain(expected, _END)))


class KnownStep:
    """What was found when all segments of an optimizer were ready: while that stays, they are ready in the next step.

    Attributes:
        moves: where parameters lay, by its number (`sharded_tensor.moves`).
        state: of the whole optimizer.
        shown: the state of the segments, as a step finds it.
        left: all values of `shown`.
        joint: the counts.
    """

    def __init__(self, segments: Sequence[Segment], optimizer: Optimizer) -> None:
        self.moves, self.state = moves(), KnownValues(optimizer.state)
        self.shown: dict[Any, State] = {segment.param: segment.state for segment in segments}
        self.left = list(chain.from_iterable(map(_VALUES, self.shown.values())))
        for segment in segments:
            if not segment.joint:
                JointCounts.join([segment], optimizer.state)
        self.joint = list(dict.fromkeys(chain.from_iterable(segment.joint for segment in segments)))
        for joint in self.joint:
            joint.spread()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether parameters lie where they lay, and have this state."""
        return (
            self.moves == moves()
            and self.state.are_in(optimizer.state)
            and all(map(JointCounts.are_unchanged, self.joint))
        )


def _number_sharded(groups: Iterable[Iterable[nn.Parameter]]) -> int:
    return sum(isinstance(param, ShardedTensor) for param in chain.from_iterable(groups))


class Segments:
    """The segments of one optimizer, which all that step on it share: `of(optimizer)`."""

    _of: ClassVar[WeakKeyDictionary[Optimizer, "Segments"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._params: list[list[nn.Parameter]] = []  # of each group, when the segments were made
        self._moves = self._sharded = 0  # `moves()` when last looked at, and how many parameters were sharded
        self._joined: list[nn.Parameter] = []  # those of the segments
        self._specs: list[ShardSpec] = []  # of `_joined`
        self._flats: list[FlatParam] = []  # that the segments are of, by first appearance
        self.known: KnownStep | None = None
        self.is_off = False  # whether a step on each parameter by itself was asked for
        self.hook: RemovableHandle | None = None  # of the step that begins (flat.py)

    @classmethod
    def of(cls, optimizer: Optimizer, is_hint: bool = False) -> "Segments":
        """The segments of `optimizer`, made again if parameters or shards were replaced; `is_hint`: if it had none."""
        segments = cls._of.get(optimizer)
        if segments is None:
            segments = cls._of[optimizer] = cls()
        elif is_hint and segments.all:
            return segments
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(segments._params) and all(map(_are_same, groups, segments._params))
        if segments._moves != moves():  # else each lies where it lay, in the same shard
            segments._moves = moves()
            same = same and segments._sharded == _number_sharded(groups)
            same = same and all(segment.is_current() for segment in segments.all)
        if not same:
            segments._divide(groups)
        return segments

    def _divide(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._params, self._sharded, self.all = [list(params) for params in groups], _number_sharded(groups), []
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
        self._specs = [spec for segment in self.all for spec in segment.specs]
        self._flats = list(dict.fromkeys(segment.flat for segment in self.all))
        self.known = None

    def others(self, ready: Ready, chosen: Sequence[Segment] | None = None) -> list[list[nn.Parameter]]:
        """For each group the parameters, of the `chosen` segments or of all, that are in none of `ready`."""
        if chosen is None and len(ready) == len(self.all) and len(self._joined) == sum(map(len, self._params)):
            return []
        covered = {id(param) for segment, _ in ready for param in segment.params}
        params = self._params
        if chosen is not None:
            params = [
                [param for each in chosen if each.group == at for param in each.params] for at in range(len(params))
            ]
        found = [[param for param in some if id(param) not in covered] for some in params]
        return found if any(found) else []

    def ready(self, optimizer: Optimizer, chosen: Sequence[Segment] | None = None) -> Ready:
        """The `chosen` segments, or of all, that can be updated as one parameter, each with its gradient.

        They are those whose gradients lie side by side, whose parameters lie in the shard, and whose state is alike.
        """
        if self.is_off or any(group.get("differentiable") for group in optimizer.param_groups):
            return []
        if chosen is None and self.known is not None and self.known.holds(optimizer):
            grads: dict[FlatParam, Tensor | None] = dict.fromkeys(self._flats)
            if any(flat.reduction.flat_gradient is not None for flat in grads):
                grads = {flat: kept_gradient(flat) for flat in grads}
            if missing := [segment for segment in self.all if grads[segment.flat] is None]:
                flats, params, specs = dict.fromkeys(self._flats), self._joined, self._specs
                if len(missing) < len(self.all):
                    flats = dict.fromkeys(segment.flat for segment in missing)
                    params = [param for segment in missing for param in segment.params]
                    specs = [spec for segment in missing for spec in segment.specs]
                behind = FlatGradient.behind(params, specs)
                if len(behind) == len(flats):  # one of each, as each spec is of one
                    grads.update((flat, each.grad) for flat, each in zip(flats, behind, strict=True))
            whole = [(each, each.part_of(grad)) for each in self.all if (grad := grads[each.flat]) is not None]
            if len(whole) == len(self.all):
                return whole
        ready: list[tuple[Segment, Tensor]] = []
        shared: list[Segment] = []
        wanted = self.all if chosen is None else chosen
        with torch.no_grad():
            for segment in wanted:
                before = segment.shared
                gradient = segment.flat_gradient()
                if gradient is not None and segment.flat.binding.is_bound() and segment.take_state(optimizer):
                    ready.append((segment, segment.part_of(gradient)))
                    shared += [segment] if segment.shared is not before else []
            JointCounts.join(shared, optimizer.state)
        if len(ready) == len(self.all):
            self.known = KnownStep(self.all, optimizer)
        elif len(ready) < len(wanted):
            self.known = None  # others of their parameters are updated one by one
        return ready

    def end(self, optimizer: Optimizer, ready: Ready, own: Any, size: int) -> None:
        """Give parameters what a step has left of `ready`, and the optimizer its `own` state.

        `size`: how many parameters the step has found state of.
        """
        shown, optimizer.state = optimizer.state, own
        segments = [segment for segment, _ in ready]
        for segment in segments:
            segment.param.grad = None
        now = chain.from_iterable(map(_VALUES, self.known.shown.values() if self.known is not None else ()))
        if self.known is not None and len(shown) == size and _are_same(now, self.known.left):
            for joint in self.known.joint:
                joint.spread()
        else:
            self.known = None
            self._end_each(optimizer, segments, shown, len(shown) > size)
        written = self._joined if len(ready) == len(self.all) else [each for some in segments for each in some.params]
        torch.autograd.graph.increment_version([*written, *map(_SHARD, segments)])

    @torch.no_grad()
    def _end_each(self, optimizer: Optimizer, ready: Sequence[Segment], shown: Any, has_more: bool) -> None:
        own = optimizer.state
        made = {id(param) for segment in ready if segment.has_new_state() for param in segment.params}
        if made or has_more:  # state is made in the order of the groups, as by ordinary steps
            for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if id(param) in made:
                    own.setdefault(param, {})
                elif param in shown:
                    own[param] = shown[param]
        JointCounts.join([segment for segment in ready if segment.end(own)], own)


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


def show_segments(
    optimizer: Optimizer,
    ready: Ready,
    others: Sequence[Sequence[nn.Parameter]] = (),
    fused: Sequence[bool] = (),
) -> None:
    """Let the step that runs update the segments `ready` as one parameter each; `others`, of each group, one by one.

    To be called by the step's closure, behind what that does otherwise.

    Args:
        fused: for each group whether torch's fused kernels update it; empty: as the group says.
    """
    segments = Segments.of(optimizer)
    groups, known = optimizer.param_groups, segments.known
    if known is not None and not others:
        state = defaultdict(dict, known.shown)
    else:
        state = defaultdict(dict, optimizer.state)
        state.update((segment.param, segment.state) for segment, _ in ready)
    shown = []
    for index, group in enumerate(groups):
        group = {**group, "fused": True} if fused and fused[index] else group
        joined = [segment.param for segment, _ in ready if segment.group == index]
        shown += [{**group, "params": params} for params in (joined, others[index] if others else ()) if params]
    for segment, gradient in ready:
        segment.param.grad = gradient
    end = partial(segments.end, optimizer, ready, optimizer.state, len(state))
    optimizer.param_groups, optimizer.state = _OneLoop(optimizer, shown, end), state
