"""Elementwise optimizers on flat shards: `flat_step`, and `FlatStep`, which `compile_step` uses.

A segment is a run of parameters that lie side by side in a flat shard and belong to one parameter group. The optimizer
treats them alike, so it may treat them as one tensor:

    flat shard      | a a a . b b b b c c c |        .: padding
    the segment     | ----------------------|        one parameter, its gradient, and one tensor for each kind of state

`flat_step(optimizer)`    the optimizer's own `step` sees each segment as one parameter
`FlatStep.begin()`        updates of single flat parameters, which `compile_step` runs one by one:
    fused                 one compiled kernel per flat shard, of operators that program.py records in every step
    exact                 the optimizer's own `step` on the parameters of one flat parameter

Between steps everything is as an ordinary step leaves it: `param_groups`, sharded state of each parameter (a view of
the segment's), and step counts. So ordinary steps may come in between, and state dicts are ordinary ones.
"""

# Note [Fused and exact updates]
# Inductor fuses the operators into one loop over the segment, which is what makes the update fast, but its results
# differ from those of the optimizer's own kernels in the last bits. Where the backend is exact (`aot_eager`, `eager`),
# the optimizer steps on each parameter by itself: kernels compute the last elements of a tensor with other instructions
# than the rest, so one call on the whole segment would differ in the last bit too.

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_tensor import FlatGradient, ShardedTensor
from fsdp_compile.core.unit import unit_of
from fsdp_compile.optim._torch import (
    announce_step,
    compile_graph,
    copy_to_each,
    has_step_hooks,
    norm_of_each,
    note_step,
    step_without_hooks,
)
from fsdp_compile.optim.program import NotRecordable, Recorded, UpdateProgram, fused, record

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop)
"""Optimizers that update each element by its own gradient and state alone, and keep zeros where all of these are."""
ELEMENTWISE_NAMES = ", ".join(kind.__name__ for kind in ELEMENTWISE)
_VERSION = operator.attrgetter("_version")


def flat_step(optimizer: Optimizer) -> Optimizer:
    """Let `optimizer.step()` update flat shards instead of single parameters, where it can; return `optimizer`.

        optimizer = flat_step(torch.optim.AdamW(model.parameters(), lr=1e-3))

    This saves host time: nearly all of a step is Python code that runs per parameter. Results differ in the last bit of
    some elements, as kernels compute the last few elements of a tensor with other instructions. The first step is an
    ordinary one, which makes the state. Parameters are updated one by one where gradients do not lie side by side or
    where state differs (after a gradient was None in some step, or was assigned).

    Args:
        optimizer: of one of the classes in `ELEMENTWISE` exactly; subclasses may do anything.

    Raises:
        TypeError: `optimizer` is of another class.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise TypeError(
            f"optimizer: flat_step takes optimizers that update elementwise ({ELEMENTWISE_NAMES}), not "
            f"{type(optimizer).__name__}; call its own step"
        )
    flat = FlatStep(optimizer, fuses=False)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flat.step()
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # of this instance alone
    return optimizer


class Segment:
    """Parameters of one group that lie side by side in a flat shard, and their state.

    Attributes:
        params: the parameters, in the order of the shard.
        group: the index of their parameter group.
        param: all of them as one plain parameter, 1-D `[stop - start]`, which shares their memory.
        tensors: state of the parameters' shape, by name, 1-D `[stop - start]` each.
        scalars: other tensors of the state, by name: one for each parameter, or one that they share.
        state: the state of `param`: `tensors`, and other state of the first parameter.
    """

    def __init__(self, flat: FlatParam, indices: list[int], group: int) -> None:
        self.flat, self.shard, self.group, self._indices = flat, flat.shard, group, indices
        self.params = [flat.params[index] for index in indices]
        records = [flat.records[index] for index in indices]
        stored = [record for record in records if record]
        self.start = stored[0].offset if stored else 0
        self.stop = stored[-1].offset + stored[-1].numel if stored else 0
        if len(indices) == len(flat.params):  # with padding, whose zeros stay: of one size on all ranks
            self.start, self.stop = 0, flat.shard.numel()
        self._offsets = [record.offset - self.start if record else None for record in records]
        # With a storage of its own: a compiled function would copy inputs that share one.
        self.data = torch.from_dlpack(flat.shard.detach()[self.start : self.stop])
        self.param = nn.Parameter(self.data, requires_grad=False)
        self._forget()

    def _forget(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.scalars: dict[str, list[Tensor]] = {}
        self.state: dict[str, Any] = {}
        self._values: list[Any] = []  # of the state when it was taken
        self._counted: list[Tensor] = []  # all scalars
        self._versions: list[int] = []  # theirs, after the last update

    def gradient(self) -> Tensor | None:
        """The gradients of all parameters as one tensor, 1-D; None if they do not lie side by side."""
        gradient = self.flat.reduction.flat_gradient
        if gradient is None and (flat := FlatGradient.of(self.params)) is not None:
            gradient = flat.grad
        if gradient is None or gradient.dtype != self.shard.dtype or gradient.shape != self.shard.shape:
            return None
        return gradient[self.start : self.stop]

    def take_state(self, states: Sequence[dict[str, Any]], shares: bool = False) -> bool:
        """Turn the parameters' state into views of `tensors`; return False if it differs in more than its elements.

        With `shares`, parameters share one scalar of each kind from then on: no step copies it to each of them.
        """
        values = list(chain.from_iterable(map(dict.values, states)))
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if same and list(map(_VERSION, self._counted)) == self._versions:
            return True
        self._forget()
        if any(state.keys() != states[0].keys() for state in states):
            return False
        for name, value in states[0].items():
            of_each = [state[name] for state in states]
            if isinstance(value, ShardedTensor):
                if any(type(each) is not ShardedTensor or each.dtype != value.dtype for each in of_each):
                    return False
                joined = torch.zeros(self.stop - self.start, dtype=value.dtype, device=value.local.device)
                for each, offset in zip(of_each, self._offsets, strict=True):
                    if offset is not None:
                        joined[offset : offset + each.local.numel()] = each.local
                self.state[name] = self.tensors[name] = joined
                continue
            if isinstance(value, Tensor):
                if any(type(each) is not Tensor or each.dim() for each in of_each):
                    return False
                if len(set(torch.stack(of_each).tolist())) > 1:
                    return False
                if shares:
                    of_each = [value]
                    for state in states:
                        state[name] = value
                self.scalars[name] = of_each
            elif any(each != value for each in of_each):
                return False
            self.state[name] = value
        for index, offset, state in zip(self._indices, self._offsets, states, strict=True):
            spec = self.flat.specs[index]
            for name, tensor in self.tensors.items():
                state[name] = ShardedTensor(tensor[offset or 0 : (offset or 0) + spec.numel], spec)
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._counted = list(chain.from_iterable(self.scalars.values()))
        self.record_versions()
        return True

    def record_versions(self) -> None:
        """Expect the scalars' present values: `take_state` looks again after any other change."""
        self._versions = list(map(_VERSION, self._counted))


def _give_own_scalars(states: Iterable[dict[str, Any]]) -> None:
    """Copy scalars that parameters share since `flat_step`: one would count the steps of all of them."""
    seen: set[int] = set()
    for state in states:
        for name, value in state.items():
            if isinstance(value, Tensor) and id(value) in seen:
                state[name] = value.clone()
            seen.add(id(value))


@dataclass(eq=False)
class FlatUpdate:
    """The update of one flat parameter that is still to run in this step.

    Attributes:
        segments: what it changes.
        params: their parameters.
        gradients: of the segments, 1-D; empty until they are there.
        recorded: what is fused for each segment; if empty, the optimizer's own step runs.
    """

    flat: FlatParam
    step: "FlatStep"
    segments: list[Segment] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)

    def add(self, segment: Segment, gradient: Tensor | None = None, recorded: Recorded | None = None) -> None:
        """Update one more segment."""
        self.segments.append(segment)
        self.params += segment.params
        self.gradients += [] if gradient is None else [gradient]
        self.recorded += [] if recorded is None else [recorded]

    @torch.no_grad()
    def run(self, coefficient: Tensor | None = None) -> None:
        """Change the shard and the state of the segments; multiply gradients by `coefficient` first; free them."""
        if self.recorded:
            self.step.run_fused(self, coefficient)
            for segment, recorded in zip(self.segments, self.recorded, strict=True):
                for name, of_each in segment.scalars.items():
                    copy_to_each(of_each, recorded.state[name])
                segment.record_versions()
            self.gradients.clear()
            torch.autograd.graph.increment_version([*self.params, self.flat.shard])
        else:
            self.flat.show_gradient()
            self.step.step_on(self.segments)
        self.flat.reduction.flat_gradient = None
        for param in self.params:
            param.grad = None

    def run_with(self, gradient: Tensor) -> None:
        """As `run`, with `gradient` of the flat parameter, 1-D `[shard_numel]`."""
        if self.recorded:
            self.gradients = [gradient[segment.start : segment.stop] for segment in self.segments]
        else:
            self.flat.reduction.flat_gradient = gradient
        self.run()


class FlatStep:
    """Updates flat shards by an optimizer: all of them by `step`, or each by itself:

        updates = flat_step.begin()        the update of each flat parameter in this step
        flat_step.step_others(updates)     steps on all other parameters
        updates[0].run()                   changes the shard and the state in place

    Args:
        optimizer: over parameters of sharded modules, and maybe others.
        fuses: whether Inductor compiles single updates; otherwise they are exact (Note [Fused and exact updates]).
    """

    def __init__(self, optimizer: Optimizer, fuses: bool) -> None:
        self.optimizer, self.fuses = optimizer, fuses
        self._segments: list[Segment] = []
        self._params: list[list[nn.Parameter]] = []  # of each group, when its segments were made
        self._has_begun = False
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._programs: dict[Any, UpdateProgram] = {}  # one for all equal ones, by what they do

    def _divide(self) -> None:
        """Divide the groups into segments; again if parameters or shards were replaced."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        same = len(groups) == len(self._params) and all(
            len(now) == len(before) and all(map(operator.is_, now, before))
            for now, before in zip(groups, self._params, strict=True)
        )
        if same and all(segment.shard is segment.flat.shard for segment in self._segments):
            return
        self._params, self._segments = [list(params) for params in groups], []
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
                    self._segments.append(Segment(flat, indices[start:stop], group))

    def _states(self, segment: Segment) -> list[dict[str, Any]]:
        return list(map(self.optimizer.state.get, segment.params, repeat({})))

    @contextmanager
    def _stepping(self, params: Iterable[list[nn.Parameter]]) -> Iterator[None]:
        """Temporarily restrict the optimizer's groups to `params`."""
        groups = self.optimizer.param_groups
        own = [group["params"] for group in groups]
        try:
            for group, chosen in zip(groups, params, strict=True):
                group["params"] = chosen
            yield
        finally:
            for group, params_of_group in zip(groups, own, strict=True):
                group["params"] = params_of_group

    def step_on(self, segments: Sequence[Segment]) -> None:
        """The optimizer's own step on the parameters of some segments, without step hooks."""
        chosen: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for segment in segments:
            chosen[segment.group] += segment.params
            _give_own_scalars(self._states(segment))
        with self._stepping(chosen):
            step_without_hooks(self.optimizer)

    def step(self) -> None:
        """The optimizer's own step, which sees each segment as one parameter where it can."""
        optimizer, step = self.optimizer, type(self.optimizer).step
        self._divide()
        ready: list[Segment] = []
        updated: set[int] = set()
        changed: list[Tensor] = []
        for segment in self._segments if optimizer.state else ():  # the first step makes the state
            gradient, states = segment.gradient(), self._states(segment)
            if gradient is not None and all(states) and segment.take_state(states, shares=True):
                segment.param.grad = gradient
                ready.append(segment)
                updated.update(map(id, segment.params))
                changed += [*segment.params, segment.shard]
            else:
                _give_own_scalars(states)
        params = [[param for param in group["params"] if id(param) not in updated] for group in optimizer.param_groups]
        for segment in ready:
            params[segment.group].append(segment.param)
            optimizer.state[segment.param] = segment.state
        try:
            with self._stepping(params):
                step(optimizer)
        finally:
            for segment in ready:
                del optimizer.state[segment.param]
                segment.param.grad = None
                segment.record_versions()
            torch.autograd.graph.increment_version(changed)

    # --- updates of single flat parameters ----------------------------------------------------------------------------

    def can_update(self) -> bool:
        """Whether flat parameters can be updated one by one; if not, the optimizer steps as it is."""
        if type(self.optimizer) not in ELEMENTWISE or has_step_hooks(self.optimizer):
            return False
        return not any(group.get("capturable") or group.get("differentiable") for group in self.optimizer.param_groups)

    @torch.no_grad()
    def begin(self) -> list[FlatUpdate]:
        """The updates of this step, in the order of the optimizer's parameters; call `step_others` for the rest."""
        if not self.can_update():
            return []
        announce_step(self.optimizer)
        self._divide()
        updates = self._updates(has_gradients=True)
        for flat in {segment.flat for segment in self._segments}:
            if flat not in updates or len(updates[flat].params) < len(flat.params):
                flat.show_gradient()
        self._has_begun = True
        return list(updates.values())

    @torch.no_grad()
    def before_backward(self) -> dict[FlatParam, FlatUpdate]:
        """For each flat parameter the update by a gradient that is still to come (`FlatUpdate.run_with`)."""
        self._divide()
        updates = self._updates(has_gradients=False) if self.can_update() else {}
        complete = {flat: update for flat, update in updates.items() if len(update.params) == len(flat.params)}
        own: dict[FlatParam, FlatUpdate] = {}
        for segment in self._segments:
            if segment.flat not in complete:
                own.setdefault(segment.flat, FlatUpdate(segment.flat, self)).add(segment)
        return complete | own

    def _updates(self, has_gradients: bool) -> dict[FlatParam, FlatUpdate]:
        updates: dict[FlatParam, FlatUpdate] = {}
        known: dict[Any, Recorded | None] = {}
        is_stateless = self._has_begun and not any(self.optimizer.state.values())
        for segment in self._segments:
            gradient, recorded = None, None
            if self.fuses:
                gradient = segment.gradient() if has_gradients else None
                if gradient is not None or not has_gradients:
                    recorded = self._recorded(segment, known)
                is_ready = recorded is not None
            else:  # the first step of a parameter makes its state, in the order of all parameters
                is_ready = not has_gradients or is_stateless or all(self._states(segment))
            if is_ready:
                updates.setdefault(segment.flat, FlatUpdate(segment.flat, self)).add(segment, gradient, recorded)
        return updates

    @torch.no_grad()
    def step_others(self, updates: Sequence[FlatUpdate]) -> None:
        """Step on the parameters that none of `updates` changes."""
        if not self.can_update():
            self.optimizer.step()
            return
        updated = {id(param) for update in updates for param in update.params}
        groups = self.optimizer.param_groups
        others = [[param for param in group["params"] if id(param) not in updated] for group in groups]
        with self._stepping(others):
            if any(param.grad is not None for params in others for param in params):
                self.optimizer.step()
            else:
                note_step(self.optimizer)

    def _recorded(self, segment: Segment, known: dict[Any, Recorded | None]) -> Recorded | None:
        """What the step does to the segment, `known` to this step; None: the optimizer's own step runs."""
        if not segment.take_state(self._states(segment)):
            return None
        tensors = {name: value for name, value in segment.state.items() if isinstance(value, Tensor)}
        if any(not each.dim() and each.device.type != "cpu" for each in tensors.values()):
            return None
        values = tuple((name, each.dtype if each.dim() else float(each)) for name, each in tensors.items())
        key = (segment.group, segment.shard.dtype, values)
        if key not in known:
            known[key] = None
            group = self.optimizer.param_groups[segment.group]
            with suppress(NotRecordable):
                recorded = record(self.optimizer, group, segment.state, segment.shard.dtype)
                own = recorded.program
                known[key] = recorded._replace(program=self._programs.setdefault((own.names, own.operations), own))
        return known[key]

    def run_fused(self, update: FlatUpdate, coefficient: Tensor | None) -> None:
        """Update the segments of one flat parameter by one call of a compiled function."""
        segments, recorded = update.segments, update.recorded
        sizes = tuple(segment.stop - segment.start for segment in segments)
        if not any(sizes):
            return
        distinct = {id(each): each for each in recorded}  # parameters of one group share their scalars
        sets = {key: position for position, key in enumerate(distinct)}
        programs = tuple((each.program, sets[id(each)]) for each in recorded)
        scalars = tuple(len(each.scalars) for each in distinct.values())
        clips, shard = coefficient is not None, update.flat.shard
        inputs: list[Tensor] = []
        for segment, gradient, each in zip(segments, update.gradients, recorded, strict=True):
            inputs += [segment.data, gradient, *(segment.tensors[name] for name in each.program.names)]
        if coefficient is not None:
            inputs.append(coefficient)
        for each in distinct.values():
            inputs += each.scalars
        key = (programs, scalars, clips, sizes, shard.dtype, shard.device)
        if key not in self._compiled:
            self._compiled[key] = compile_graph(fused(programs, scalars, clips), inputs)
        self._compiled[key](*inputs)


# Note [Where the norm is computed]
# Clipping needs the norm of all gradients before it changes the first one, so no update can begin before the last
# reduce has ended. At the end the norm costs one read of each gradient shard, in one kernel on a GPU, which takes less
# than the all-reduce that follows. In the backward graph the sums of squares would be further outputs, also for loops
# that do not clip.
#
# Each rank sees for itself which gradients lie side by side in a flat shard. What it sends does not depend on that: one
# number for each group of ranks, in the order of their names.


def gradient_norm(params: Iterable[nn.Parameter], updates: Sequence[FlatUpdate]) -> Tensor:
    """The 2-norm of the gradients of all `params` together, over all ranks; equal on all of them, with shape `()`.

    Equals `torch.nn.utils.get_total_norm` up to rounding, as it sums over flat shards, whose padding is zero. Takes one
    all-reduce for each group of ranks; the host does not wait.

    Args:
        params: those that are clipped.
        updates: the updates of flat shards, of these parameters.
    """
    groups: dict[Any, tuple[ShardSpec, list[Tensor]]] = {}
    others: list[Tensor] = []  # what is not sharded as its parameter, such as plain gradients

    def add(tensor: Tensor, spec: ShardSpec) -> None:
        key = spec.reducing_groups, str(tensor.device), torch.promote_types(tensor.dtype, torch.float32)
        groups.setdefault(key, (spec, []))[1].extend([tensor] if tensor.numel() else [])

    covered: set[int] = set()
    for update in updates:
        if any(spec.tensor_parallel for spec in update.flat.specs):
            update.flat.show_gradient()  # its parameters are reduced over groups of their own
            continue
        for gradient in update.gradients:
            add(gradient, update.flat.specs[0])
        covered.update(map(id, update.params))
    for param in params:
        grad: Any = None if id(param) in covered else param.grad
        if type(grad) is ShardedTensor:
            add(grad.local, grad.spec)
        elif grad is not None:
            others.append(grad)
    sums = [] if groups and not others else [nn.utils.get_total_norm(others).square()]
    for key in sorted(groups, key=str):
        (spec, tensors), (_, device, dtype) = groups[key], key
        norms = norm_of_each(tensors, dtype) if tensors else [torch.zeros((), dtype=dtype, device=device)]
        sums.append(spec.all_reduce(torch.stack(list(norms)).square().sum(), "sum"))
    return torch.stack([total.to(sums[0]) for total in sums]).sum().sqrt()
