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
from itertools import chain, repeat
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, moves, set_local

State = dict[str, Any]
_LOCAL, _SHARD, _VERSION = map(operator.attrgetter, ("local", "shard", "_version"))
_GRAD, _STATE, _FLAT, _KEPT = map(operator.attrgetter, ("grad", "state", "flat", "reduction.flat_gradient"))
_LEFT, _VALUES = operator.attrgetter("left"), operator.methodcaller("values")
_END = (object(),)


def are_same(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether two lists have the same objects."""
    return all(map(operator.is_, chain(found, _END), chain(expected, _END)))


def _values(states: Iterable[State]) -> Iterator[Any]:
    """All values of some `states`."""
    return chain.from_iterable(map(_VALUES, states))


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
        state: of `param`: tensors that the parameters' own are views of, 1-D `[stop - start]`, and counts.
        counts: where the counts lie, and which segment this one is there.
        left: the values of `state`, when it became theirs, and `known`: the values of theirs then.
    """

    def __init__(self, flat: FlatParam, indices: list[int], group: int) -> None:
        self.flat, self.shard, self.group = flat, flat.shard, group
        self.params, self._all = [flat.params[index] for index in indices], flat.params
        self.specs = [flat.specs[index] for index in indices]
        records = [flat.records[index] for index in indices]
        stored = [record for record in records if record]
        start = stored[0].offset if stored else 0
        stop = stored[-1].offset + stored[-1].numel if stored else 0
        if len(indices) == len(flat.params):  # with padding, whose zeros stay: of one size on all ranks
            start, stop = 0, flat.shard.numel()
        offsets = [record.offset - start if record else 0 for record in records]
        self._within = [slice(offset, offset + spec.numel) for offset, spec in zip(offsets, self.specs, strict=True)]
        self._elements = slice(start, stop)
        self._is_whole = stop - start == flat.shard.numel()
        self.param = nn.Parameter(self.part_of(flat.shard.detach()), requires_grad=False)
        self.state: State = {}
        self.counts: dict[Counts, int] = {}
        self.left: list[Any] = []
        self.known: KnownValues | None = None

    def is_current(self) -> bool:
        """Whether the flat parameter still has this shard and these parameters, and is not released."""
        return self.shard is self.flat.shard and self._all is self.flat.params and self.flat.deferred is not None

    def flat_gradient(self) -> Tensor | None:
        """The tensor, laid out as the shard, that has the gradients of all parameters; None if there is none."""
        if self.flat.reduction.flat_gradient is not None:
            return kept_gradient(self.flat)
        flats = FlatGradient.behind(self.params, self.specs)
        return flats[0].grad if len(flats) == 1 and is_laid_out_as(flats[0].grad, self.shard) else None

    def part_of(self, flat: Tensor) -> Tensor:
        """The elements of the segment in a tensor that is laid out as the shard."""
        return flat if self._is_whole else flat[self._elements]

    def is_known(self, states: Mapping[Any, State]) -> bool:
        """Whether `state` is still that of all parameters; `states`: theirs."""
        is_same = self.known is not None and self.known.are_in(states, may_have_moved=True)
        return is_same and all(counts.are_equal(at) for counts, at in self.counts.items())

    def join(self, states: Sequence[State]) -> State | None:
        """The `states` of the parameters as one of `param`; None if they differ in more than their elements."""
        if any(state.keys() != states[0].keys() for state in states):
            return None
        joined = {name: self._joined([state[name] for state in states]) for name in states[0]}
        return None if any(value is _UNLIKE for value in joined.values()) else joined

    def _joined(self, values: list[Any]) -> Any:
        """One value in the place of those of all parameters, or `_UNLIKE`."""
        first = values[0]
        if len({(type(each), getattr(each, "dtype", None), getattr(each, "device", None)) for each in values}) > 1:
            return _UNLIKE
        if type(first) is ShardedTensor:
            if not all(each.spec.same_ranges(spec) for each, spec in zip(values, self.specs, strict=True)):
                return _UNLIKE
            whole = torch.zeros(self.param.shape, dtype=first.dtype, device=first.device)
            for each, within in zip(values, self._within, strict=True):
                whole[within] = each.local
            return whole
        is_count = type(first) is Tensor and not any(each.dim() for each in values)
        return first if is_count and len(set(torch.stack(values).tolist())) == 1 else _UNLIKE

    def show(self, state: State, states: Mapping[Any, State]) -> None:
        """Let the `states` of the parameters show `state`, a new one of `param`; `Counts` are to follow."""
        self.state, self.counts = state, {}
        for name, value in state.items():
            of_each = [value] * len(self.params)
            if isinstance(value, Tensor) and value.dim():
                of_each = [states[param].get(name) for param in self.params]
                for i, (within, spec) in enumerate(zip(self._within, self.specs, strict=True)):
                    if type(of_each[i]) is ShardedTensor:  # somebody may hold it
                        set_local(of_each[i], value[within], spec)
                    else:
                        of_each[i] = ShardedTensor(value[within], spec)
            for param, own in zip(self.params, of_each, strict=True):
                states[param][name] = own


_UNLIKE: Any = ("unlike",)
Ready = Sequence[tuple[Segment, Tensor]]
"""Segments that can be updated as one parameter, each with its gradient, 1-D `[stop - start]`."""


class Counts:
    """Step counts, or other 0-d tensors of the state, of the parameters of several segments, in one tensor.

    A step changes the first of each segment; `spread` gives what that is then to the others.
    """

    def __init__(self, name: str, segments: Sequence[Segment], states: Mapping[Any, State]) -> None:
        sizes, like = [len(segment.params) for segment in segments], segments[0].state[name]
        self._all = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        first = chain.from_iterable([sum(sizes[:at])] * size for at, size in enumerate(sizes))
        self._first = torch.tensor(list(first), device=like.device)
        self._parts = [part.data for part in self._all.split(sizes)]  # `.data`: each counts versions by itself
        for at, (segment, part) in enumerate(zip(segments, self._parts, strict=True)):
            segment.counts[self] = at
            of_each = part.fill_(segment.state[name]).unbind()
            segment.state[name] = of_each[0]
            for param, own in zip(segment.params, of_each, strict=True):
                states[param][name] = own
        self._versions = list(map(_VERSION, self._parts))

    def spread(self, at: int | None = None) -> None:
        """Give what the first of each segment, or of the one `at`, is to all others of it."""
        if at is None:
            self._all.copy_(self._all.index_select(0, self._first))
            self._versions = list(map(_VERSION, self._parts))
        else:
            self._parts[at].fill_(self._parts[at][0])
            self._versions[at] = self._parts[at]._version

    def are_equal(self, at: int | None = None) -> bool:
        """Whether those of each segment, or of the one `at`, are. To look at those on a device would wait for it."""
        some = slice(None) if at is None else slice(at, at + 1)
        if not self._all.is_cpu and list(map(_VERSION, self._parts[some])) == self._versions[some]:
            return True
        if at is None:
            return self._all.equal(self._all.index_select(0, self._first))
        return bool(self._parts[at].eq(self._parts[at][0]).all())


def share(new: Mapping[Segment, State], states: Mapping[Any, State]) -> None:
    """Let the parameters' `states` show the `new` state of each of these segments."""
    alike: dict[Any, list[Segment]] = {}
    for segment, state in new.items():
        segment.show(state, states)
        for name, value in state.items():
            if isinstance(value, Tensor) and not value.dim():
                alike.setdefault((name, value.dtype, value.device), []).append(segment)
    for (name, *_), some in alike.items():
        Counts(name, some, states)
    for segment in new:
        segment.left = list(segment.state.values())
        segment.known = KnownValues({param: states.get(param) or {} for param in segment.params})


class KnownValues:
    """The state of parameters, to find by identity whether it has been exchanged since."""

    def __init__(self, states: Mapping[Any, State]) -> None:
        self._keys, self._values = list(states), list(_values(states.values()))
        self._sharded = [each for each in self._values if type(each) is ShardedTensor]
        self._locals = list(map(_LOCAL, self._sharded))
        self._refs = list(map(ref, self._sharded))  # torch.utils.swap_tensors, which is no move, raises

    def are_in(self, states: Mapping[Any, State], may_have_moved: bool) -> bool:
        """Whether `states` has the same parameters and values, over the same memory."""
        is_same = are_same(states, self._keys) and are_same(_values(states.values()), self._values)
        return is_same and (not may_have_moved or are_same(map(_LOCAL, self._sharded), self._locals))


class Segments:
    """The segments of one optimizer, which all that step on it share: `of(optimizer)`."""

    _of: ClassVar[WeakKeyDictionary[Optimizer, "Segments"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._params: list[list[nn.Parameter]] = []  # of each group, when the segments were made
        self._alone: list[list[nn.Parameter]] = []  # of each group, those in no segment
        self._plain: list[nn.Parameter] = []  # of all groups, those that were not sharded
        self._moves = 0  # `moves()` when last looked at
        self._joined: list[nn.Parameter] = []  # those of the segments
        self._specs: list[ShardSpec] = []  # of `_joined`
        self._flats: list[FlatParam] = []  # that the segments are of, by first appearance
        self._known: KnownValues | None = None  # the optimizer's state, when all segments were ready; none moved since
        self._counts: list[Counts] = []  # of all segments, likewise
        self.is_off = False  # whether a step on each parameter by itself was asked for
        self.hook: Any = None  # a `RemovableHandle`, of the last step that has begun (flat.py)

    @classmethod
    def of(cls, optimizer: Optimizer, known: bool = False) -> "Segments":
        """The segments of `optimizer`, made again if parameters or shards were replaced; `known`: if it has none."""
        if (segments := cls._of.get(optimizer)) is None:
            segments = cls._of[optimizer] = cls()
        elif known and segments.all:
            return segments
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(segments._params) and all(map(are_same, groups, segments._params))
        if segments._moves != moves():  # else each lies where it lay, in the same shard
            segments._moves, segments._known = moves(), None
            same = same and not any(isinstance(param, ShardedTensor) for param in segments._plain)
            same = same and all(segment.is_current() for segment in segments.all)
        if not same:
            segments._divide(groups)
        return segments

    def _divide(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._params, self.all = [list(params) for params in groups], []
        self._plain = [param for params in groups for param in params if not isinstance(param, ShardedTensor)]
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
        joined = set(map(id, self._joined))
        self._alone = [[param for param in params if id(param) not in joined] for params in groups]
        self._specs = [spec for segment in self.all for spec in segment.specs]
        self._flats = list(dict.fromkeys(segment.flat for segment in self.all))
        self._known = None

    def others(self, ready: Ready, chosen: Sequence[Segment] | None = None) -> list[list[nn.Parameter]]:
        """For each group the parameters, of the `chosen` segments or of all, that are in none of `ready`."""
        found = [[] if chosen else list(alone) for alone in self._alone]
        done = {segment for segment, _ in ready}
        for segment in chosen or self.all:
            found[segment.group] += segment.params if segment not in done else ()
        return found if any(found) else []

    def ready(self, optimizer: Optimizer, chosen: Sequence[Segment] | None = None) -> Ready:
        """The `chosen` segments, or of all, that can be updated as one parameter, each with its gradient.

        They are those whose gradients lie side by side, whose parameters lie in the shard, and whose state is alike.
        """
        if self.is_off or any(group.get("differentiable") for group in optimizer.param_groups):
            return []
        if chosen is None and self._are_unchanged(optimizer):
            grads = list(map(self._flat_gradients().get, map(_FLAT, self.all)))
            whole = [(each, each.part_of(grad)) for each, grad in zip(self.all, grads, strict=True) if grad is not None]
            if len(whole) == len(self.all):
                return whole
        ready: list[tuple[Segment, Tensor]] = []
        new: dict[Segment, State] = {}
        with torch.no_grad():
            for segment in self.all if chosen is None else chosen:
                gradient = segment.flat_gradient()
                if gradient is None or not segment.flat.binding.is_bound():
                    continue
                states = {param: optimizer.state.get(param) or {} for param in segment.params}
                if not segment.is_known(states):
                    if (joined := segment.join([*states.values()])) is None:
                        continue
                    new[segment] = joined
                ready.append((segment, segment.part_of(gradient)))
            share(new, optimizer.state)
        if chosen is None and len(ready) == len(self.all):
            self._known, self._moves = KnownValues(optimizer.state), moves()
            self._counts = list(dict.fromkeys(chain.from_iterable(segment.counts for segment in self.all)))
            for counts in self._counts:
                counts.spread()
        else:
            self._known = None  # others, or parameters of others, are updated by themselves
        return ready

    def _are_unchanged(self, optimizer: Optimizer) -> bool:
        """Whether parameters lie where they lay when all segments were ready, and have the state that they had."""
        is_same = self._known is not None and self._known.are_in(optimizer.state, may_have_moved=False)
        return is_same and all(map(Counts.are_equal, self._counts))

    def _flat_gradients(self) -> dict[FlatParam, Tensor]:
        """Gradients that are laid out as flat shards, of those that the segments are of."""
        found: dict[FlatParam, Tensor] = {}
        flats, params, specs = self._flats, self._joined, self._specs
        if not are_same(map(_KEPT, flats), repeat(None, len(flats))):
            found = {flat: grad for flat in flats if (grad := kept_gradient(flat)) is not None}
            missing = [segment for segment in self.all if segment.flat not in found]
            flats = list(dict.fromkeys(segment.flat for segment in missing))
            params = [param for segment in missing for param in segment.params]
            specs = [spec for segment in missing for spec in segment.specs]
        behind = FlatGradient.behind(params, specs)
        if len(behind) == len(flats):  # one of each, as each spec is of one
            found.update(zip(flats, map(_GRAD, behind), strict=True))
        return found

    # --- one step -----------------------------------------------------------------------------------------------------

    def show(
        self,
        optimizer: Optimizer,
        ready: Ready,
        others: Sequence[Sequence[nn.Parameter]] = (),
        fused: Sequence[bool] = (),
    ) -> None:
        """Let the step that runs update the segments `ready` as one parameter each; `others`, of each group, one by
        one. To be called by the step's closure, behind what that does otherwise.

        Args:
            fused: for each group whether torch's fused kernels update it; empty: as the group says.
        """
        state: defaultdict[Any, State] = defaultdict(dict, optimizer.state if others else ())
        state.update((segment.param, segment.state) for segment, _ in ready)
        shown = []
        for index, group in enumerate(optimizer.param_groups):
            group = {**group, "fused": True} if fused and fused[index] else group
            joined = [segment.param for segment, _ in ready if segment.group == index]
            shown += [{**group, "params": params} for params in (joined, others[index] if others else ()) if params]
        for segment, gradient in ready:
            segment.param.grad = gradient
        end = partial(self._end, optimizer, [segment for segment, _ in ready], optimizer.state, len(state))
        optimizer.param_groups, optimizer.state = _OneLoop(optimizer, shown, end), state

    def _end(self, optimizer: Optimizer, stepped: Sequence[Segment], own: Any, size: int) -> None:
        """Give parameters what a step has left of the segments that it has `stepped`, and the optimizer its `own`
        state. `size`: how many parameters the step has found state of.
        """
        shown, optimizer.state = optimizer.state, own
        for segment in stepped:
            segment.param.grad = None
        is_new = len(shown) > size or not are_same(
            _values(map(_STATE, stepped)), chain.from_iterable(map(_LEFT, stepped))
        )
        if self._known is not None and not is_new:
            for counts in self._counts:
                counts.spread()
        else:
            self._end_each(optimizer, stepped, shown if is_new else {})
        written = self._joined if len(stepped) == len(self.all) else [each for some in stepped for each in some.params]
        torch.autograd.graph.increment_version([*written, *map(_SHARD, stepped)])

    @torch.no_grad()
    def _end_each(self, optimizer: Optimizer, stepped: Iterable[Segment], shown: Mapping[Any, State]) -> None:
        self._known, own = None, optimizer.state
        new = {segment: segment.state for segment in stepped if not are_same(segment.state.values(), segment.left)}
        made = {id(param) for segment in new for param in segment.params}
        for param in chain.from_iterable(group["params"] for group in optimizer.param_groups) if shown else ():
            if id(param) in made:  # state is made in the order of the groups, as by ordinary steps
                own.setdefault(param, {})
            elif param in shown:
                own[param] = shown[param]
        for segment in stepped:
            for counts, at in segment.counts.items() if segment not in new else ():
                counts.spread(at)
        share(new, own)


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
