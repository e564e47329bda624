"""Elementwise optimizers on flat shards: each `optimizer.step()`, and `FlatStep`, which `compile_step` uses.

`optimizer.step()`        updates each segment (segments.py) as one parameter; `flat_step` turns that off
`FlatStep.begin()`        updates of single flat parameters, which `compile_step` runs one by one:
    fused                 one compiled kernel per flat shard, of operators that program.py records in every step
    exact                 what `optimizer.step()` does to one flat parameter
"""

# Note [Fused and exact updates]
# Inductor fuses the operators into one loop over the segment, which is what makes the update fast, but its results
# differ from those of the optimizer's own kernels in the last bits. Where the backend is exact (`aot_eager`, `eager`),
# those kernels run, on the segments that `optimizer.step()` chooses. On a CPU the choice shows in the last bit: kernels
# compute the last few elements of a tensor with other instructions than the rest.

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.core._torch import norms
from fsdp_compile.core.exact_sums import exact_sums, powers_of_norm
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim._torch import (
    announce_step,
    compile_graph,
    has_step_hooks,
    note_step,
    step_without_hooks,
)
from fsdp_compile.optim.matrix_step import MatrixUpdates, takes_matrices
from fsdp_compile.optim.program import NotRecordable, Recorded, UpdateProgram, fused
from fsdp_compile.optim.recorded_steps import RecordedSteps
from fsdp_compile.optim.segments import KnownStep, Segment, Segments, kept_gradient, show_segments
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_rules import plain
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, gradients

_SPECS, _TENSOR_PARALLEL = map(operator.attrgetter, ("specs", "tensor_parallel"))

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop)
"""Optimizers that update each element by its own gradient and state alone, and keep zeros where all of these are."""
ELEMENTWISE_NAMES = ", ".join(kind.__name__ for kind in ELEMENTWISE)


def flat_step(optimizer: Optimizer, enabled: bool = True) -> Optimizer:
    """Choose whether `optimizer.step()` updates flat shards where it can, as it does by default; return `optimizer`.

    Steps on flat shards save host time: nearly all of a step is Python code that runs per parameter. On a CPU, results
    of the two ways differ in the last bit of some elements, as kernels compute the last few elements of a tensor with
    other instructions than the rest.

    Args:
        optimizer: of one of the classes in `ELEMENTWISE` exactly, or Muon; others always step as they are.
        enabled: if False, `optimizer` updates each parameter by itself. Then every rank gathers and computes each
            matrix of Muon.

    Raises:
        TypeError: `optimizer` is of another class.
    """
    if type(optimizer) not in ELEMENTWISE and not takes_matrices(optimizer):
        raise TypeError(
            f"optimizer: flat_step takes optimizers that update elementwise ({ELEMENTWISE_NAMES}) and Muon, not "
            f"{type(optimizer).__name__}; call its own step"
        )
    Segments.of(optimizer).is_off = not enabled
    return optimizer


@functools.cache
def step_on_flat_shards() -> None:
    """From now on let elementwise optimizers update flat shards; registered once per process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have `_give_closure` called behind the hooks of users. Without `args`, `compile_step` steps by itself."""
    if torch.compiler.is_compiling() or not args or not (type(optimizer) in ELEMENTWISE or takes_matrices(optimizer)):
        return
    segments = Segments.of(optimizer, is_hint=True)
    if segments.hook is not None:  # another hook has raised
        segments.hook.remove()
        segments.hook = None
    if (segments.all or takes_matrices(optimizer)) and not segments.is_off:
        segments.hook = optimizer.register_step_pre_hook(functools.partial(_give_closure, segments))


def _give_closure(segments: Segments, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the step a closure that calls the user's, then shows it segments (Note [One loop over other groups])."""
    if len(args) > 2 or not kwargs.keys() <= {"closure"}:
        return None  # the step raises
    closure = args[1] if len(args) == 2 else kwargs.get("closure")
    given: dict[str, Any] = {}

    def begin() -> Any:
        given.clear()  # hooks behind the step see what the user gave
        given.update({} if closure is None else {"closure": closure})
        if segments.hook is not None:
            segments.hook.remove()
            segments.hook = None
        loss = None if closure is None else closure()
        if takes_matrices(optimizer):
            _update_matrices(optimizer)
        else:
            show_segments(optimizer)
        return loss

    if takes_matrices(optimizer) and closure is None:  # a step of users may take none, or not call it
        begin()
        return None
    given["closure"] = begin
    return args[:1], given


def _update_matrices(optimizer: Optimizer) -> None:
    """Update what is computed from complete matrices, and let the step that runs find the other parameters."""
    updates = MatrixUpdates.of(optimizer)
    covered = updates.begin(optimizer)
    if covered:
        try:
            updates.start()
            deque(updates.finish(), maxlen=0)
        finally:
            updates.drop()
        groups = [group["params"] for group in optimizer.param_groups]
        show_segments(optimizer, (), [[param for param in of if id(param) not in covered] for of in groups])


@dataclass(eq=False)
class FlatUpdate:
    """The update of one flat parameter. It is made again only where something has changed since the last step.

    Attributes:
        segments: what it changes.
        params: their parameters.
        gradient: of the flat parameter, 1-D; None until it is there, and where the optimizer's own step runs.
        recorded: what is fused for each segment; if empty, the optimizer's own step runs.
        program: what is compiled, and what it takes beside gradient and scalars; None before the first run.
    """

    flat: FlatParam
    step: "FlatStep"
    segments: list[Segment] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    gradient: Tensor | None = None
    recorded: list[Recorded] = field(default_factory=list)
    program: "_Compiled | None" = None

    def add(self, segment: Segment, recorded: Recorded | None = None) -> None:
        """Update one more segment."""
        self.segments.append(segment)
        self.params += segment.params
        self.recorded += [] if recorded is None else [recorded]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the segments, 1-D; none where they are not there."""
        return [] if self.gradient is None else [segment.part_of(self.gradient) for segment in self.segments]

    def find_gradient(self) -> bool:
        """Look for `gradient`; return whether that of all segments is one."""
        self.gradient = kept_gradient(self.flat)
        if self.gradient is None:
            first, *others = (segment.flat_gradient() for segment in self.segments)
            self.gradient = first if all(each is first for each in others) else None
        return self.gradient is not None

    @torch.no_grad()
    def run(self, coefficient: Tensor | None = None) -> None:
        """Change the shard and the state of the segments; multiply gradients by `coefficient` first; free them."""
        if self.recorded:
            self.step.run_fused(self, coefficient)
            self.gradient = None
            torch.autograd.graph.increment_version([*self.params, self.flat.shard])
        else:
            self.flat.binding.show_gradient()
            self.step.step_on(self.segments)
        self.flat.reduction.flat_gradient = None
        for param in self.params:
            param.grad = None

    def run_with(self, gradient: Tensor) -> None:
        """As `run`, with `gradient` of the flat parameter, 1-D `[shard_numel]`."""
        if self.recorded:
            self.gradient = gradient
        else:
            self.flat.reduction.flat_gradient = gradient
        self.run()


class _Compiled(NamedTuple):
    """A compiled update, and what it takes in every step. `key`: what it was compiled for; equal ones share it."""

    key: tuple[Any, ...]
    call: Callable[..., Any]
    state: list[Tensor]


class _Scalars(NamedTuple):
    """What updates take that were recorded alike.

    Attributes:
        programs: for each segment what it does, and with which set of scalars: segments of one group share theirs.
        numbers: how many scalars there are in each set.
        scalars: all of them, set by set.
        recorded: of the segments.
    """

    programs: tuple[tuple[UpdateProgram, int], ...]
    numbers: tuple[int, ...]
    scalars: list[Tensor]
    recorded: list[Recorded]

    @classmethod
    def of(cls, recorded: list[Recorded]) -> "_Scalars":
        distinct = {id(each): each for each in recorded}
        at = {key: position for position, key in enumerate(distinct)}
        programs = tuple((each.program, at[id(each)]) for each in recorded)
        numbers = tuple(len(each.scalars) for each in distinct.values())
        return cls(programs, numbers, [scalar for each in distinct.values() for scalar in each.scalars], recorded)


class FlatStep:
    """Updates flat shards by an optimizer, one by one:

        updates = flat_step.begin()        the update of each flat parameter in this step
        flat_step.step_others(updates)     steps on all other parameters
        updates[0].run()                   changes the shard and the state in place

    Args:
        optimizer: over parameters of sharded modules, and maybe others.
        fuses: whether Inductor compiles single updates; otherwise they are exact (Note [Fused and exact updates]).
    """

    def __init__(self, optimizer: Optimizer, fuses: bool) -> None:
        self.optimizer, self.fuses = optimizer, fuses
        self._has_begun = False
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._steps: dict[Any, RecordedSteps] = {}  # by the group of segments, and what their state is
        self._programs: dict[Any, UpdateProgram] = {}  # one for all equal ones, by what they do
        self._like: list[Segment] = []  # for each segment of `_kept` the first one with equal state
        self._kept: list[FlatUpdate] = []  # the updates of all segments, if all were recorded
        self._known: KnownStep | None = None  # for which these are
        self._ran: list[FlatUpdate] = []  # those of this step
        self._sets: dict[tuple[int, ...], _Scalars] = {}  # of this step, by the ids of what is recorded

    @property
    def segments(self) -> list[Segment]:
        """All segments of the optimizer."""
        return Segments.of(self.optimizer).all

    def step_on(self, segments: Sequence[Segment], params: Sequence[Sequence[nn.Parameter]] | None = None) -> None:
        """The optimizer's own step on some segments, without step hooks; on other `params` of each group as well."""
        chosen = [list(params[index]) if params else [] for index in range(len(self.optimizer.param_groups))]
        for segment in segments if params is None else ():
            chosen[segment.group] += segment.params
        joined = () if Segments.of(self.optimizer).is_off else segments
        step_without_hooks(self.optimizer, lambda: show_segments(self.optimizer, joined, chosen))

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
        updates = self._updates(has_gradients=True)
        self._has_begun = True
        return updates

    @torch.no_grad()
    def before_backward(self) -> dict[FlatParam, FlatUpdate]:
        """For each flat parameter the update by a gradient that is still to come (`FlatUpdate.run_with`)."""
        self._ran = []
        updates = self._updates(has_gradients=False) if self.can_update() else []
        complete = {update.flat: update for update in updates if len(update.params) == len(update.flat.params)}
        own: dict[FlatParam, FlatUpdate] = {}
        for segment in Segments.of(self.optimizer).all:
            if segment.flat not in complete:
                own.setdefault(segment.flat, FlatUpdate(segment.flat, self)).add(segment)
        return complete | own

    @torch.no_grad()
    def finish(self) -> None:
        """Note what the updates have left: numbers of the state, such as step counts."""
        ran, self._ran = self._ran, []
        segments = Segments.of(self.optimizer)
        pairs = [(segment, each.state) for update in ran
                 for segment, each in zip(update.segments, update.recorded, strict=True)]  # fmt: skip
        if len(pairs) == len(segments.all) and self._known is not None and self._known is segments.known:
            self._known.set_counts(pairs)
            return
        self._forget()
        for segment, state in pairs:
            segment.set_counts(state)

    def drop(self) -> None:
        """Forget what updates were expected to leave, after a failure."""
        self._forget()
        self._ran = []

    def _forget(self) -> None:
        self._like, self._kept, self._known = [], [], None

    def _has_run_all(self, segments: Segments) -> bool:
        return sum(len(update.segments) for update in self._ran) == len(segments.all)

    def _updates(self, has_gradients: bool) -> list[FlatUpdate]:
        segments = Segments.of(self.optimizer)
        self._sets = {}
        if self.fuses:
            if self._ran and self._has_run_all(segments):
                return []
            return self._renewed(segments, has_gradients) or self._recorded_updates(segments, has_gradients)
        # the first step of a parameter makes its state, in the order of all parameters
        begins = not has_gradients or (self._has_begun and not any(self.optimizer.state.values()))
        updates: dict[FlatParam, FlatUpdate] = {}
        for segment in segments.all:
            if begins or all(map(self.optimizer.state.get, segment.params)):
                updates.setdefault(segment.flat, FlatUpdate(segment.flat, self)).add(segment)
        return list(updates.values())

    def _renewed(self, segments: Segments, has_gradients: bool) -> list[FlatUpdate]:
        """The updates of the last step with what this one does, if it has updated all and nothing has changed since:
        segments that were alike still are. Else [].
        """
        if self._known is None or self._known is not segments.known or not segments.knows(self.optimizer):
            return []
        if has_gradients and not all(update.find_gradient() for update in self._kept):
            return []
        known: dict[Any, Recorded | None] = {}
        of_first = {segment: self._recorded(segment, known) for segment in dict.fromkeys(self._like)}
        if None in of_first.values():
            return []
        recorded: list[Any] = list(map(of_first.__getitem__, self._like))
        end = 0
        for update in self._kept:
            begin, end = end, end + len(update.segments)
            update.recorded = recorded[begin:end]
        return self._kept

    def _recorded_updates(self, segments: Segments, has_gradients: bool) -> list[FlatUpdate]:
        """The updates of the segments that have gradients, and whose step can be recorded."""
        known: dict[Any, Recorded | None] = {}
        taken, found = list[Segment](), list[Recorded | None]()
        updates: dict[Any, FlatUpdate] = {}  # of one flat parameter there are several if its gradients are of several
        for segment in segments.all:
            gradient = segment.flat_gradient() if has_gradients else None
            before = segment.shared
            lacks = has_gradients and gradient is None
            found.append(recorded := None if lacks else self._recorded(segment, known))
            taken += [segment] if segment.shared is not before else []
            if recorded is not None:
                update = updates.setdefault((segment.flat, id(gradient)), FlatUpdate(segment.flat, self))
                update.gradient = gradient
                update.add(segment, recorded)
        self._forget()
        if found and None not in found:
            segments.note(self.optimizer, taken)
            self._known = segments.known
            first: dict[int, Segment] = {}
            self._kept = list(updates.values())
            of_each = [(each, of) for update in self._kept
                       for each, of in zip(update.recorded, update.segments, strict=True)]  # fmt: skip
            self._like = [first.setdefault(id(each), of) for each, of in of_each]
        return list(updates.values())

    @torch.no_grad()
    def step_others(self, updates: Sequence[FlatUpdate]) -> None:
        """Step on the parameters that none of `updates` changes."""
        if not self.can_update():
            self.optimizer.step()
            return
        updated = {id(param) for update in updates for param in update.params}
        params = [group["params"] for group in self.optimizer.param_groups]
        others = [[param for param in of_group if id(param) not in updated] for of_group in params]
        if any(others):
            segments = Segments.of(self.optimizer).all
            self.step_on([segment for segment in segments if id(segment.params[0]) not in updated], others)
        note_step(self.optimizer)

    def _recorded(self, segment: Segment, known: dict[Any, Recorded | None]) -> Recorded | None:
        """What the step does to the segment, `known` to this step; None: the optimizer's own step runs."""
        if not segment.take_state(self.optimizer):
            return None
        tensors = {name: value for name, value in segment.state.items() if isinstance(value, Tensor)}
        if any(not each.dim() and each.device.type != "cpu" for each in tensors.values()):
            return None
        values = tuple((name, each.dtype if each.dim() else float(each)) for name, each in tensors.items())
        key = (segment.group, segment.shard.dtype, values)
        if key not in known:
            known[key] = None
            group = self.optimizer.param_groups[segment.group]
            kind = (
                segment.group,
                segment.shard.dtype,
                *((name, each.dtype, each.dim()) for name, each in tensors.items()),
            )
            steps = self._steps.setdefault(kind, RecordedSteps(self._programs))
            with suppress(NotRecordable):
                known[key] = steps.step(self.optimizer, group, segment.state, segment.shard.dtype)
        return known[key]

    def run_fused(self, update: FlatUpdate, coefficient: Tensor | None) -> None:
        """Update the segments of one flat parameter by one call of a compiled function."""
        self._ran.append(update)
        ids = tuple(map(id, update.recorded))
        if ids not in self._sets:
            self._sets[ids] = _Scalars.of(update.recorded)
        programs, numbers, scalars, _ = self._sets[ids]
        rest: list[Any] = [update.gradient, *([] if coefficient is None else [coefficient]), *scalars]
        key = (programs, numbers, coefficient is not None)
        if update.program is None or update.program.key != key:
            update.program = self._compile(update, key, rest)
        update.program.call(*update.program.state, *rest)

    def _compile(self, update: FlatUpdate, key: tuple[Any, ...], rest: Sequence[Tensor]) -> _Compiled:
        """Compile an update, unless an equal one was. `rest`: what it takes behind the shard and state of segments."""
        shard, state = update.flat.shard, list[Tensor]()
        for segment, each in zip(update.segments, update.recorded, strict=True):
            state += [segment.data, *(segment.tensors[name] for name in each.program.names)]
        spans = tuple((segment.start, segment.stop) for segment in update.segments)
        if all(start == stop for start, stop in spans):
            return _Compiled(key, lambda *_: None, [])
        compiled_for = (key, spans, shard.shape, shard.dtype, shard.device)
        if compiled_for not in self._compiled:
            programs, numbers, clips = key
            self._compiled[compiled_for] = compile_graph(fused(programs, numbers, clips, spans), [*state, *rest])
        return _Compiled(key, self._compiled[compiled_for], state)


# Note [Where the norm is computed]
# Clipping needs the norm of all gradients before it changes the first one, so no update can begin before the last
# reduce has ended. At the end the norm costs one read of each gradient shard, in one kernel on a GPU, which takes less
# than the all-reduce that follows. In the backward graph the sums of squares would be further outputs, also for loops
# that do not clip.
#
# Each rank sees for itself which gradients lie side by side in a flat shard. What it sends does not depend on that: one
# number for each group of ranks, device and dtype, in the order of their names.


def gradient_norm(params: Iterable[nn.Parameter], updates: Sequence[FlatUpdate] = (), order: float = 2.0) -> Tensor:
    """The norm of the gradients of all `params` together, over all ranks; equal on all of them, with shape `()`.

    Equals `torch.nn.utils.get_total_norm` up to rounding, in float32 or wider, as it sums over flat shards, whose
    padding is zero. Takes one all-reduce for each group of ranks, device and dtype, two where sums are exact; the host
    does not wait.

    Args:
        params: those that are clipped.
        updates: the updates of flat shards, of these parameters.
        order: above 0, or infinity.
    """
    groups: dict[Any, tuple[ShardSpec | None, list[Tensor]]] = {}  # no spec: what is not sharded as its parameter

    def add(tensor: Tensor, spec: ShardSpec | None) -> None:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        key = spec and spec.reducing_groups, str(tensor.device), tensor.dtype, dtype
        groups.setdefault(key, (spec, []))[1].extend([tensor] if tensor.numel() else [])

    covered: set[int] = set()
    for update in updates:
        if any(spec.tensor_parallel for spec in update.flat.specs):
            update.flat.binding.show_gradient()  # its parameters are reduced over groups of their own
            continue
        for gradient in update.gradients:
            add(gradient, update.flat.specs[0])
        covered.update(map(id, update.params))
    grads = gradients([param for param in params if id(param) not in covered] if covered else params)
    sharded: list[Any] = [grad for grad in grads if type(grad) is ShardedTensor]
    flats = FlatGradient.all_of(sharded)
    if any(map(_TENSOR_PARALLEL, chain.from_iterable(map(_SPECS, flats)))):
        flats = []
    for flat in flats:
        add(flat.grad, flat.specs[0])
    for grad in () if flats else sharded:
        add(grad.local, grad.spec)
    for grad in grads if len(sharded) < len(grads) else ():
        if type(grad) is not ShardedTensor:
            add(plain(grad), None)
    is_largest = math.isinf(order)
    totals: list[Tensor] = []
    for key in sorted(groups, key=str):
        (spec, tensors), (_, device, _, dtype) = groups[key], key
        if spec is not None and spec.ranks.same_bits and not is_largest:
            sums = exact_sums(
                [tensors], functools.partial(powers_of_norm, order=order), torch.device(device), spec.all_reduce
            )
            totals += sums.to(dtype).unbind()
            continue
        found = norms(tensors, order, dtype) if tensors else [torch.zeros((), dtype=dtype, device=device)]
        of_each = torch.stack(found)
        total = of_each.max() if is_largest else of_each.pow(order).sum()
        totals.append(total if spec is None else spec.all_reduce(total, "max" if is_largest else "sum"))
    if not totals:
        return torch.zeros(())
    widest = functools.reduce(torch.promote_types, {total.dtype for total in totals})
    joined = torch.stack([total.to(totals[0].device, widest) for total in totals])
    return joined.max() if is_largest else joined.sum().pow(1 / order)
