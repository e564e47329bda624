"""Updates by optimizers of complete matrices, such as Muon: one rank computes each matrix, while others are on the way.

    updates = MatrixUpdates.of(optimizer)
    covered = updates.begin(optimizer)      parameters that are updated here; the optimizer steps on the others itself
    updates.start()                         momentum; it goes to the owners of the matrices
    for stage in updates.finish(): ...      owners compute, results return, parameters are updated

The optimizer's own operators run, cut in parts (matrix_program.py): on the elements that each rank stores, on complete
matrices, and on those elements again. Matrices are exchanged in stages (Note [What is computed first]):

    rank      | momentum of 0 | of 1, 2 | home | compute 0 | compute 1 | compute 2 | update 0 | home | update 1 | 2 |
    link                      [ in 0 ][ in 1 ][ in 2 ]     [ out 0 ]   [ out 1 ]   [ out 2 ]

home: matrices that lie on this rank are computed where it would wait.

State is the optimizer's own, sharded as the parameters are. No rank has a complete matrix that it does not own.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import is_
from typing import Any, ClassVar, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import unit_of
from fsdp_compile.optim.matrix_exchange import Ranges
from fsdp_compile.optim.matrix_program import MatrixProgram, NotRecordable
from fsdp_compile.optim.matrix_recorder import MatrixRecorder
from fsdp_compile.optim.matrix_stage import Family, Member, Part, Place, Stage, run_before, run_beside
from fsdp_compile.optim.owner_plan import LAG, Matrix, OwnerPlan, plan_owners
from fsdp_compile.optim.owners import local_gradient
from fsdp_compile.optim.segments import KnownValues, kept_gradient
from fsdp_compile.optim.traced_numbers import options_of
from fsdp_compile.tensors.shard_spec import ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, moves

_ROUND = 1 << 22  # elements of this rank for which what comes before the exchange is computed at once
_NOTHING = torch.empty(0)


class NeedsWholeMatrices(Protocol):
    """What an optimizer declares whose step computes with complete matrices, beside elementwise operators.

    Attributes:
        needs_whole_matrices: True: a parameter is computed as a whole, whatever its dimensions. 2: a parameter of more
            dimensions is a batch of matrices, as of experts, and what becomes of each follows from that one alone.
    """

    needs_whole_matrices: bool | int


def takes_matrices(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is torch's Muon, or declares `needs_whole_matrices`."""
    return type(optimizer) is Muon or bool(getattr(optimizer, "needs_whole_matrices", False))


def _matrix_shape(optimizer: Optimizer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what one rank computes of a parameter; ones stand for the dimensions of a batch."""
    declared = getattr(optimizer, "needs_whole_matrices", True)
    if declared is True or len(shape) <= declared:
        return shape
    return (*[1] * (len(shape) - declared), *shape[-declared:])


def _ranges_of(param: ShardedTensor, numel: int) -> tuple[Ranges, ...]:
    """For each matrix of `numel` elements of a parameter what each rank stores."""
    if numel == param.numel():
        return (param.spec.ranges,)
    found = []
    for begin in range(0, param.numel(), numel):
        ends = [(max(first, begin), min(first + size, begin + numel)) for first, size in param.spec.ranges]
        found.append(tuple((low - begin, high - low) if low < high else (0, 0) for low, high in ends))
    return tuple(found)


def owner_plans(optimizer: Optimizer) -> list[OwnerPlan]:
    """Which rank computes which matrix of `optimizer`: a plan for each group of ranks, equal on all of them.

    Takes one comparison of ranks if parameters are new; `print` shows a plan.

    Raises:
        RuntimeError: ranks disagree about the parameters.
        TypeError: `optimizer` is neither torch's Muon nor declares `needs_whole_matrices`.
    """
    if not takes_matrices(optimizer):
        raise TypeError(
            f"optimizer: expected torch.optim.Muon or one that declares needs_whole_matrices, found "
            f"{type(optimizer).__name__}"
        )
    updates = MatrixUpdates.of(optimizer)
    updates.prepare(optimizer)
    return list(updates.plans.values())


class _Known:
    """What parameters, state and options a step was prepared for: while these stay, the next one is prepared too."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._moves, self._state = moves(), KnownValues(optimizer.state)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether parameters lie where they lay, and have the same state."""
        groups = optimizer.param_groups
        if self._moves != moves() or len(groups) != len(self._params) or not self._state.are_in(optimizer.state):
            return False
        pairs = zip(groups, self._params, strict=True)
        return all(len(group["params"]) == len(own) and all(map(is_, group["params"], own)) for group, own in pairs)


class MatrixUpdates:
    """The updates of one optimizer that needs complete matrices: `of(optimizer)`.

    Attributes:
        plans: for each group of ranks who owns which matrix, since the first step.
        flats: for each parameter that can be updated here, by its id, the flat parameter that it lies in.
        covers: how many of these there are in each flat parameter.
    """

    _of: ClassVar[WeakKeyDictionary[Optimizer, "MatrixUpdates"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.plans: dict[ShardRanks, OwnerPlan] = {}
        self.flats: dict[int, FlatParam] = {}
        self.covers: Counter[FlatParam] = Counter()
        self._planned: list[tuple[ShardedTensor, ShardSpec]] = []  # parameters, and how they were sharded: alive here
        self._places: dict[int, Place] = {}  # for each parameter, by its id
        self._recorders: dict[Any, MatrixRecorder | None] = {}
        self._families: list[tuple[int, MatrixRecorder, Family]] = []  # with the index of their group
        self._params: list[ShardedTensor] = []  # in the order of the optimizer
        self._family_of: dict[int, Family] = {}  # for each of them, by its id
        self._known: _Known | None = None
        self._slices: dict[int, slice | None] = {}  # for each of `flats` what this rank stores in the flat shard
        self._stored: list[tuple[int, FlatParam, slice]] = []  # those of which that is not nothing
        self._made: dict[tuple[int, ...], list[Stage]] = {}  # for some parameters, by their ids
        self._stages: list[Stage] = []  # on the way, in the order in which they are computed
        self._waiting: list[tuple[Stage, dict[int, Tensor]]] = []  # to be started, with gradients
        self._expected: list[Stage] = []  # whose gradients arrive in this backward
        self._shown: list[Any] = []  # parameters whose `.grad` was taken by `begin`

    @classmethod
    def of(cls, optimizer: Optimizer) -> "MatrixUpdates":
        """Those of `optimizer`."""
        return cls._of.setdefault(optimizer, cls())

    @property
    def programs(self) -> dict[int, MatrixProgram]:
        """For each parameter that can be updated here, by its id, what the step does."""
        return {key: family.program for key, family in self._family_of.items()}

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, is_prepared: bool = False) -> set[int]:
        """Prepare the step of all parameters that have gradients, on all ranks the same; return the ids of those that
        are updated here, also in backward. Others are the optimizer's own to update. `is_prepared`: by `prepare`.

        Raises:
            RuntimeError: a gradient was accumulated under `no_sync` and not reduced; parameters are summoned; or ranks
                disagree about the parameters.
        """
        if not is_prepared:
            self.prepare(optimizer)
        self._shown.clear()
        expected, self._expected = self._expected, []
        kept = None if expected or self._stages else self._kept_gradients()
        if kept is not None:
            for stage in self._stages_of(optimizer, self._family_of):
                self._waiting.append((stage, {key: kept[key] for key in stage.stored}))
            return set(self._family_of)
        gradients = self._gradients(self._params)
        covered = {*gradients, *(id(param) for stage in self._stages for param in stage.params)}
        for stage in expected:
            if stage.arrived:
                stage.arrive({id(each): gradients.pop(id(each)) for each in stage.params if id(each) in gradients})
                covered |= stage.arrived
                self._waiting.append((stage if stage.is_ready else stage.part(), {}))
        for stage in self._stages_of(optimizer, gradients):
            self._waiting.append((stage, {key: gradients[key] for key in stage.stored}))
        return covered

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, per_node: int | None = None) -> set[int]:
        """Record what the step does and plan owners; return the ids of the parameters that can be updated here.

        Args:
            optimizer: of the matrices.
            per_node: ranks of a node, where a plan is only looked at; None: as this machine has, and ranks compare it.
        """
        if self._known is None or not self._known.holds(optimizer) or not self._record_again(optimizer):
            self._made.clear()
            self._find_families(optimizer)
            self._plan([(param, self._family_of[id(param)].program) for param in self._params], per_node)
            with_numbers = any(family.program.scalars for _, _, family in self._families)
            self._known = None if with_numbers else _Known(optimizer)
        return set(self._family_of)

    def expect(self, optimizer: Optimizer, params: Iterable[Any]) -> None:
        """Let `arrive` come for each of `params`, which `prepare` has returned: stages are sent when all have come."""
        self._expected = list(self._stages_of(optimizer, map(id, params)))

    @torch.no_grad()
    def arrive(self, params: Sequence[Any]) -> None:
        """Take the gradients of some of the parameters that were expected, and send what is complete."""
        gradients = self._gradients(params)
        for stage in list(self._expected):
            mine = {id(param): gradients[id(param)] for param in stage.params if id(param) in gradients}
            if mine:
                stage.arrive(mine)
            if stage.is_ready:
                self._expected.remove(stage)
                self._send([(stage, {})])

    @torch.no_grad()
    def start(self, drops: bool = False) -> None:
        """Begin to send the matrices of `begin` to their owners: the first stage by itself, as nothing hides it.
        `drops`: whether their gradients are freed.
        """
        for param in self._shown if drops else ():
            param.grad = None
        self._shown.clear()
        waiting, self._waiting = self._waiting, []
        while waiting:
            size = _ROUND if self._stages else 0
            ends = [*accumulate(sum(each.numel() for each in gradients.values()) for _, gradients in waiting)]
            number = max(1, sum(end <= size for end in ends))
            some, waiting = waiting[:number], waiting[number:]
            self._send(some)

    def _send(self, waiting: Sequence[tuple[Stage, dict[int, Tensor]]]) -> None:
        """Compute what owners need of some stages at once, and send it."""
        gradients: dict[int, Tensor] = {}
        groups: list[tuple[Family, Sequence[Part]]] = []
        for stage, own in waiting:
            gradients |= own
            groups += stage.groups if own else []
            own.clear()  # they may be freed
        run_before(groups, gradients)
        gradients.clear()
        for stage, _ in waiting:
            self._stages.append(stage)
            stage.send()
        self._stages.sort(key=lambda stage: stage.number)

    @property
    def stages(self) -> Sequence[Stage]:
        """Those whose updates have started."""
        return self._stages

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        if self._stages or self._waiting or self._expected:
            self._stages, self._waiting, self._expected = [], [], []
            self._made.clear()

    def finish(self) -> Iterator[Stage]:
        """Compute and update, under `no_grad`; each stage as soon as its parameters are updated."""
        stages = self._stages
        run_beside([group for stage in stages for group in stage.groups])
        at_home = [stage for stage in stages if stage.has_home]  # computed where this rank would wait
        for index, stage in enumerate([*stages, *[None] * LAG]):
            if stage is not None:
                _compute_until(stage.has_ended, at_home)
                stage.compute()
            if index >= LAG:
                finished = stages[index - LAG]
                _compute_until(finished.has_ended, at_home)
                finished.finish()
                yield finished
        self._stages = []

    # --- preparation --------------------------------------------------------------------------------------------------

    def _record_again(self, optimizer: Optimizer) -> bool:
        """Let programs have the options of this step; return whether nothing else has changed in them."""
        options = [options_of(group) for group in optimizer.param_groups]
        for index, recorder, family in self._families:
            try:
                program = recorder.program(optimizer, optimizer.param_groups[index], options[index], {})
            except NotRecordable:
                return False
            if program is not family.program:
                if not program.exchanges_as(family.program):
                    return False
                family.program = program
        return True

    def _find_families(self, optimizer: Optimizer) -> None:
        found: dict[tuple[MatrixProgram, torch.device], tuple[int, MatrixRecorder, Family]] = {}
        self._params, self._family_of, self.flats, self._slices = [], {}, {}, {}
        for index, group in enumerate(optimizer.param_groups):
            options = options_of(group)
            for param in group["params"]:
                if not isinstance(param, ShardedTensor) or param.spec.tensor_parallel is not None:
                    continue
                recorded = self._program(optimizer, index, options, param)
                if recorded is None:
                    continue
                recorder, program = recorded
                family = found.setdefault((program, param.device), (index, recorder, Family([], program)))[2]
                family.params.append(param)
                self._params.append(param)
                self._family_of[id(param)] = family
                if (managed := unit_of(cast(nn.Parameter, param))) is not None:
                    self.flats[id(param)], at = managed[0].in_flat(managed[1])
                    record = self.flats[id(param)].records[at]
                    self._slices[id(param)] = slice(record.offset, record.offset + record.numel) if record else None
        self._families, self.covers = list(found.values()), Counter(self.flats.values())
        self._stored = [(key, self.flats[key], own) for key, own in self._slices.items() if own is not None]

    def _program(
        self, optimizer: Optimizer, index: int, options: Any, param: ShardedTensor
    ) -> tuple[MatrixRecorder, MatrixProgram] | None:
        state = optimizer.state.get(param) or {}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
        if any(type(each) is not ShardedTensor or not each.spec.same_ranges(param.spec) for each in tensors.values()):
            return None
        dtypes = tuple((name, value.dtype) for name, value in tensors.items())
        key = (index, param.shape, param.dtype, tuple(state), dtypes)
        try:
            if key not in self._recorders:
                shape = tuple(param.shape)
                self._recorders[key] = MatrixRecorder(shape, _matrix_shape(optimizer, shape), param.dtype, state)
            recorder = self._recorders[key]
            if recorder is None:
                return None
            return recorder, recorder.program(optimizer, optimizer.param_groups[index], options, state)
        except NotRecordable:
            self._recorders[key] = None
            return None

    def _plan(self, programs: Sequence[tuple[ShardedTensor, MatrixProgram]], per_node: int | None) -> None:
        """Plan who owns which matrix, where parameters or ranks are new; all ranks compare that."""
        given = [(param, param.spec) for param, _ in programs]
        pairs = zip(given, self._planned, strict=False)
        if len(given) == len(self._planned) and all(a is b and mine is its for (a, mine), (b, its) in pairs):
            return
        self._places, self.plans = {}, {}
        by_ranks: dict[ShardRanks, list[tuple[ShardedTensor, MatrixProgram]]] = {}
        for param, program in programs:
            by_ranks.setdefault(param.spec.ranks, []).append((param, program))
        for ranks, some in by_ranks.items():
            split = [_ranges_of(param, prod(program.shape)) for param, program in some]
            matrices, begins = list[Matrix](), list[int]()
            for (param, program), ranges in zip(some, split, strict=True):
                begins.append(len(matrices))
                matrices += _matrices(param, program, ranges, len(begins))
            plan = self.plans[ranks] = plan_owners(matrices, ranks.size, _nodes_of(ranks, per_node))
            if per_node is None:
                _compare_plans(plan, ranks)
            for (param, _), ranges, at in zip(some, split, begins, strict=True):
                self._places[id(param)] = Place(ranges, plan.owners[at : at + len(ranges)], plan.stages[at])
        self._planned = given

    def _kept_gradients(self) -> dict[int, Tensor] | None:
        """`_gradients` of all parameters of which this rank stores something, if all lie in flat parameters whose
        gradients were left in one tensor; else None.
        """
        kept = {flat: kept_gradient(flat) for flat in self.covers}
        if len(self.flats) < len(self._params) or any(each is None for each in kept.values()):
            return None
        return {key: kept[flat][own] for key, flat, own in self._stored}  # type: ignore[index]  # none is None

    def _gradients(self, params: Iterable[Any]) -> dict[int, Tensor]:
        """What this rank stores of the gradients of those of `params` that have one, by the parameters' ids."""
        found: dict[int, Tensor] = {}
        kept: dict[FlatParam, Tensor | None] = {}
        for param in params:
            key, flat = id(param), self.flats.get(id(param))
            if flat is not None and flat not in kept:
                kept[flat] = kept_gradient(flat)
            if flat is not None and (whole := kept[flat]) is not None:
                within = self._slices[key]
                found[key] = _NOTHING if within is None else whole[within]
            elif (grad := param.grad) is not None and grad.dtype == param.dtype:  # else state has another one too
                is_alike = type(grad) is ShardedTensor and grad.spec is param.spec
                found[key] = grad.local if is_alike else local_gradient(param)
                self._shown.append(param)
        return found

    def _stages_of(self, optimizer: Optimizer, keys: Iterable[int]) -> list[Stage]:
        """The stages of some parameters, by their ids; their state is made, and its numbers are those of this step."""
        chosen = tuple(keys)
        if chosen not in self._made:
            known = set(chosen)
            alike: dict[Any, dict[Family, list[ShardedTensor]]] = {}
            for _, _, family in self._families:
                program = family.program
                dtypes = tuple(tuple(program.dtypes[at] for at in part) for part in (program.sent, program.returned))
                for param in family.params:
                    if id(param) in known:
                        key = (self._places[id(param)].stage, param.spec.ranks, param.device, dtypes)
                        alike.setdefault(key, {}).setdefault(family, []).append(param)
            some = sorted(alike.items(), key=lambda pair: pair[0][0])
            self._made[chosen] = [self._stage(optimizer, of_families) for _, of_families in some]
        for _, _, family in self._families:
            for param in family.params if family.program.scalars else ():
                if id(param) in chosen:
                    _set_numbers(optimizer.state[param], family.program)
        return self._made[chosen]

    def _stage(self, optimizer: Optimizer, of_families: Mapping[Family, Sequence[ShardedTensor]]) -> Stage:
        members = list[Member]()
        for family, params in of_families.items():
            for param in params:
                state = _state_of(optimizer, param, family.program)
                members.append(Member(param, family, self._places[id(param)], state, self.flats.get(id(param))))
        return Stage(members, f"matrices of {members[0].param.spec.named()} and {len(members) - 1} others")


def _compute_until(has_ended: Callable[[], bool], at_home: list[Stage]) -> None:
    """Compute matrices that lie on this rank until an exchange has ended, or none are left."""
    while at_home and not has_ended():
        at_home.pop(0).compute_at_home()


def _state_of(optimizer: Optimizer, param: ShardedTensor, program: MatrixProgram) -> dict[str, Tensor]:
    """What this rank stores of the state of a parameter, which is made where there is none."""
    state = optimizer.state[param]
    for name, position in program.state.items():
        if name not in state:
            zeros = torch.zeros(param.spec.numel, dtype=program.dtypes[position], device=param.device)
            state[name] = ShardedTensor(zeros, param.spec)
    return {name: state[name].local for name in program.state}


def _set_numbers(state: dict[str, Any], program: MatrixProgram) -> None:
    """Give the state of a parameter the numbers that the step leaves."""
    for name, value in program.scalars.items():
        if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.clone() if isinstance(value, Tensor) else value


def _matrices(param: ShardedTensor, program: MatrixProgram, ranges: Sequence[Ranges], number: int) -> list[Matrix]:
    """What a plan needs to know of the matrices of `param`, which has this `number`."""
    found = []
    for index, of_ranks in enumerate(ranges):
        stored = tuple((rank, numel) for rank, (_, numel) in enumerate(of_ranks) if numel)
        name = param.spec.named() + (f" [{index}]" if len(ranges) > 1 else "")
        found.append(Matrix(name, program.shape, program.flops, stored, number))
    return found


def _nodes_of(ranks: ShardRanks, per_node: int | None) -> list[int]:
    """For each of `ranks` the node that it is on, as torchrun places them, of so many ranks."""
    if ranks.size == 1:  # what the group's other ranks store is the same
        return [0]
    per_node = (
        per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.accelerator.device_count() or ranks.size
    )
    return [rank // per_node for rank in torch.distributed.get_process_group_ranks(group_named(ranks.group))]


def _compare_plans(plan: OwnerPlan, ranks: ShardRanks) -> None:
    """RuntimeError on all ranks if they have planned for different parameters."""
    digests = collectives.gather_objects((plan.digest, len(plan.matrices)), group_named(ranks.group))
    for rank, (digest, number) in enumerate(digests):
        if digest != digests[0][0]:
            raise RuntimeError(
                f"step: rank {rank} of {ranks.size} updates {number} matrices, and rank 0 {digests[0][1]}, or others; "
                f"give the optimizer the same parameters in the same order and groups on all ranks"
            )
