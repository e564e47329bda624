"""The update of a whole model by an elementwise optimizer: one kernel for each flat shard, compiled once.

    update = CompiledUpdate(optimizer, fuses=True)
    updates = update.begin()       for each flat parameter what a compiled function will do to it in this step
    update.step_others(updates)    all other parameters step as they are
    updates[0].run()               one call of that function, which changes the shard and the state in place

What each element undergoes is recorded from the optimizer itself at every step (program.py). Only the operators are
compiled; learning rates, weight decays and bias corrections are inputs, so that no schedule compiles anything again.

Between steps everything is what an ordinary step leaves: `param_groups`, sharded state of each parameter, its own step
count. So ordinary steps may come in between, and state dicts are the ordinary ones.
"""

# Note [Two ways to run an update]
# Inductor fuses the operators into one loop over the segment, which is what makes the update fast. It rounds as it
# likes: results differ from those of the optimizer's own kernels in the last bits. Where the backend is to be exact
# (`aot_eager`, `eager`), the recorded operators run one by one, on each parameter by itself: the last elements of a
# tensor go through other instructions than the rest, so a kernel on the whole segment would differ in the last bit.

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.optim._torch import (
    announce_step,
    compile_graph,
    copy_to_each,
    has_step_hooks,
    note_step,
    step_without_hooks,
)
from fsdp_compile.optim.flat_step import ELEMENTWISE
from fsdp_compile.optim.program import NotRecordable, Recorded, UpdateProgram, check_fusible, fused, record, run_eagerly
from fsdp_compile.optim.segments import Segment, SegmentTable, is_scalar

State = dict[str, Any]  # of one parameter


class _Segment(Segment):
    """A segment and its optimizer state, in one tensor for each kind if it is fused.

    Attributes:
        param: the segment of the shard, as a tensor with a storage of its own: a compiled function takes several
            segments of one shard, and would copy inputs that share a storage.
        tensors: the state of the parameters' shape, by name: `[stop - start]` each.
        scalars: the rest of the state, by name: for each parameter a tensor of its own.
    """

    def __init__(self, flat: FlatParam, indices: list[int]) -> None:
        super().__init__(flat, indices)
        self.param: Tensor = torch.from_dlpack(flat.shard.detach()[self.start : self.stop])
        self.tensors: dict[str, Tensor] = {}
        self.scalars: dict[str, list[Tensor]] = {}
        self._values: list[Any] = []  # of the state when it was taken
        self._versions: list[int] = []  # of the scalars, after the last update
        self.example: State = {}  # of a parameter, with scalars as they are now

    def take_state(self, states: Sequence[State], joins: bool) -> bool:
        """See the state of the parameters as it is now; False if it differs in more than its elements.

        Args:
            joins: whether state of the parameters' shape becomes views of one tensor for each kind.
        """
        values = [value for state in states for value in state.values()]
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if same and [each._version for of in self.scalars.values() for each in of] == self._versions:
            return True
        self._values = []
        if any(state.keys() != states[0].keys() for state in states):
            return False
        self.tensors, self.scalars, self.example = {}, {}, {}
        for name, value in states[0].items():
            of_each = [state[name] for state in states]
            if is_scalar(value):
                if not all(map(is_scalar, of_each)) or value.device.type != "cpu":
                    return False
                if len(set(torch.stack(of_each).tolist())) > 1:
                    return False
                self.scalars[name] = of_each
                self.example[name] = value
            elif isinstance(value, ShardedTensor):
                if any(type(each) is not ShardedTensor or each.dtype != value.dtype for each in of_each):
                    return False
                self.example[name] = value.local
                if joins:
                    self.tensors[name] = self.joined(of_each)
            elif isinstance(value, Tensor) or any(each is not value for each in of_each):
                return False
            else:
                self.example[name] = value
        for name, tensor in self.tensors.items():
            for position, state in enumerate(states):
                state[name] = self.shown(position, tensor)
        self._values = [value for state in states for value in state.values()]
        self._record_versions()
        return True

    def write_scalars(self, scalars: dict[str, Tensor]) -> None:
        """Let each parameter have `scalars` as its state now."""
        for name, value in scalars.items():
            copy_to_each(self.scalars[name], value)
        self._record_versions()

    def _record_versions(self) -> None:
        self._versions = [each._version for of in self.scalars.values() for each in of]


class FlatUpdate:
    """The update of one flat parameter that is still to run in this step.

    Attributes:
        params: whatever it changes.
    """

    def __init__(self, owner: "CompiledUpdate", flat: FlatParam) -> None:
        self.flat, self._owner = flat, owner
        self.segments: list[_Segment] = []
        self.params: list[nn.Parameter] = []
        self.gradients: list[Tensor] = []
        self.recorded: list[Recorded] = []

    def add(self, segment: _Segment, gradient: Tensor | None, recorded: Recorded) -> None:
        """A segment of it, the gradient of that, if it is there yet, and what is to be done."""
        self.segments.append(segment)
        self.params += segment.params
        self.gradients += [] if gradient is None else [gradient]
        self.recorded.append(recorded)

    @torch.no_grad()
    def run(self, coefficient: Tensor | None = None) -> None:
        """Change the shard and the state of the segments, and free their gradients.

        Args:
            coefficient: what gradients are multiplied by, shape `()`; None: 1.
        """
        if self._owner.fuses:
            self._owner.run_fused(self.segments, self.gradients, self.recorded, coefficient)
        else:
            for segment, recorded in zip(self.segments, self.recorded, strict=True):
                self._run_eagerly(segment, recorded)
        for segment, recorded in zip(self.segments, self.recorded, strict=True):
            segment.write_scalars(recorded.state)
        torch.autograd.graph.increment_version(self.params)
        for param in self.params:
            param.grad = None
        self.flat.reduction.flat_gradient = None
        self.gradients.clear()
        torch.autograd.graph.increment_version(self.flat.shard)

    def run_with(self, gradient: Tensor) -> None:
        """As `run`, with the gradient of all parameters of the flat one, 1-D `[shard_numel]`, which arrives here."""
        if self._owner.fuses:
            self.gradients = [gradient[segment.start : segment.stop] for segment in self.segments]
        else:
            self.flat.reduction.flat_gradient = gradient
            self.flat.show_gradient()
        self.run()

    def _run_eagerly(self, segment: _Segment, recorded: Recorded) -> None:
        for param in segment.params:
            state = self._owner.optimizer.state.get(param, {})
            tensors: Any = [param, param.grad, *(state[name] for name in recorded.program.names)]
            if tensors[0].local.numel():
                run_eagerly(recorded, [each.local for each in tensors])


class _Signature(NamedTuple):
    """What a compiled function is made for."""

    programs: tuple[tuple[UpdateProgram, int], ...]
    scalars: tuple[int, ...]
    clips: bool
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


class CompiledUpdate:
    """Steps of `optimizer` by compiled functions where it is elementwise, else as it is.

    Args:
        optimizer: over parameters of sharded modules, and maybe others.
        fuses: whether Inductor compiles the update, or else the optimizer's own kernels run, one by one.
    """

    def __init__(self, optimizer: Optimizer, fuses: bool) -> None:
        self.optimizer, self.fuses = optimizer, fuses
        self._segments = SegmentTable(optimizer, _Segment)
        self._compiled: dict[_Signature, Callable[..., Any]] = {}
        self._programs: dict[Any, UpdateProgram] = {}  # one for all equal ones, by what they do
        self._scalars: dict[int, tuple[Recorded, Sequence[Tensor]]] = {}  # of the step that began last, by id

    @torch.no_grad()
    def begin(self) -> list[FlatUpdate]:
        """What compiled functions will do, in the order of the optimizer's parameters; `step_others` does the rest."""
        if not self.is_elementwise():
            return []
        announce_step(self.optimizer)
        updates = self._updates(has_gradients=True)
        for flat in {segment.flat for segments in self._segments.of_groups for segment in segments}:
            if flat not in updates or len(updates[flat].params) < len(flat.params):
                flat.show_gradient()
        return list(updates.values())

    @torch.no_grad()
    def before_backward(self) -> list[FlatUpdate]:
        """What compiled functions will do to gradients that are still to come (`FlatUpdate.run_with`)."""
        return list(self._updates(has_gradients=False).values()) if self.is_elementwise() else []

    def _updates(self, has_gradients: bool) -> dict[FlatParam, FlatUpdate]:
        self._segments.update()
        self._scalars.clear()
        updates: dict[FlatParam, FlatUpdate] = {}
        recorded: dict[Any, Recorded | None] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for segment in self._segments.of_groups[index]:
                gradient = segment.gradient() if has_gradients else None
                awaited = gradient is not None or not has_gradients
                step = self._recorded(index, group, segment, recorded) if awaited else None
                if step is not None:
                    updates.setdefault(segment.flat, FlatUpdate(self, segment.flat)).add(segment, gradient, step)
        return updates

    @torch.no_grad()
    def step_alone(self, flat: FlatParam, gradient: Tensor) -> None:
        """Let the parameters of `flat` step as they are, by a gradient, 1-D `[shard_numel]`, which is freed."""
        flat.reduction.flat_gradient = gradient
        flat.show_gradient()
        own = {id(param) for param in flat.params}
        with self._only(lambda param: id(param) in own):
            step_without_hooks(self.optimizer)
        for param in flat.params:
            param.grad = None

    @contextmanager
    def _only(self, is_chosen: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        """Let the optimizer have only the parameters that `is_chosen` says so in this block."""
        groups = self.optimizer.param_groups
        params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = list(filter(is_chosen, group["params"]))
            yield
        finally:
            for group, own in zip(groups, params, strict=True):
                group["params"] = own

    @torch.no_grad()
    def step_others(self, updates: Sequence[FlatUpdate]) -> None:
        """Let the parameters that none of `updates` changes step as they are."""
        if not self.is_elementwise():
            self.optimizer.step()
            return
        updated = {id(param) for update in updates for param in update.params}
        with self._only(lambda param: id(param) not in updated):
            if any(param.grad is not None for group in self.optimizer.param_groups for param in group["params"]):
                self.optimizer.step()
            else:
                note_step(self.optimizer)

    def has_hooks(self) -> bool:
        """Whether something is called before or after each step of the optimizer."""
        return has_step_hooks(self.optimizer)

    def is_elementwise(self) -> bool:
        """Whether recorded programs say what the optimizer does."""
        if type(self.optimizer) not in ELEMENTWISE or has_step_hooks(self.optimizer):
            return False
        groups = self.optimizer.param_groups
        if any(group.get("capturable") or group.get("differentiable") for group in groups):
            return False
        if self.fuses:
            return True
        # The exact way runs the operators of a step without foreach, which is what steps on the CPU do by default.
        params = [param for group in groups for param in group["params"]]
        chosen = any(group.get("foreach") or group.get("fused") for group in groups)
        return not chosen and all(param.device.type == "cpu" for param in params)

    def _recorded(self, index: int, group: dict[str, Any], segment: _Segment, known: dict[Any, Any]) -> Any:
        """What the step does to parameters of the segment; None: they step as they are. `known`: of this step."""
        states = [self.optimizer.state.get(param, {}) for param in segment.params]
        if not segment.take_state(states, joins=self.fuses):
            return None
        values = tuple(
            (name, value.dtype if isinstance(value, Tensor) and value.dim() else float(value))
            for name, value in segment.example.items()
            if isinstance(value, Tensor)
        )
        key = (index, segment.shard.dtype, values)
        if key not in known:
            known[key] = self._record(group, segment)
        return known[key]

    def _record(self, group: dict[str, Any], segment: _Segment) -> Recorded | None:
        try:
            recorded = record(self.optimizer, group, segment.example, segment.shard.dtype)
            if self.fuses:
                check_fusible(recorded.program)
        except NotRecordable:
            return None
        program = recorded.program
        return recorded._replace(program=self._programs.setdefault((program.names, program.operations), program))

    def run_fused(
        self,
        segments: Sequence[_Segment],
        gradients: Sequence[Tensor],
        recorded: Sequence[Recorded],
        coefficient: Tensor | None,
    ) -> None:
        """Update segments of one flat parameter by one call of a compiled function."""
        sets: dict[int, int] = {}  # by the id of what was recorded: parameters of one group share their scalars
        for each in recorded:
            sets.setdefault(id(each), len(sets))
        distinct = list({id(each): each for each in recorded}.values())
        signature = _Signature(
            tuple((each.program, sets[id(each)]) for each in recorded),
            tuple(len(each.scalars) for each in distinct),
            coefficient is not None,
            tuple(segment.stop - segment.start for segment in segments),
            tuple(segment.shard.dtype for segment in segments),
            segments[0].shard.device,
        )
        if not any(signature.sizes):
            return
        inputs: list[Tensor] = []
        for segment, gradient, each in zip(segments, gradients, recorded, strict=True):
            inputs += [segment.param, gradient, *(segment.tensors[name] for name in each.program.names)]
        if coefficient is not None:
            inputs.append(coefficient)
        for each in distinct:
            inputs += self._as_tensors(each, segments[0].shard.dtype)
        if signature not in self._compiled:
            function = fused(signature.programs, signature.scalars, signature.clips)
            self._compiled[signature] = compile_graph(function, inputs)
        self._compiled[signature](*inputs)

    def _as_tensors(self, recorded: Recorded, dtype: torch.dtype) -> Sequence[Tensor]:
        """The scalars of this step as tensors without dimensions, made once for all flat parameters."""
        if id(recorded) not in self._scalars:
            precise = torch.float64 if dtype == torch.float64 else torch.float32
            self._scalars[id(recorded)] = recorded, torch.tensor(recorded.scalars, dtype=precise).unbind()
        return self._scalars[id(recorded)][1]
