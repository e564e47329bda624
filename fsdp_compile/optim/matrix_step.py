"""Updates by optimizers of complete matrices, such as Muon: one rank computes each matrix, while others are on the way.

    updates = MatrixUpdates.of(optimizer)
    covered = updates.begin(optimizer)      parameters that are updated here; the optimizer steps on the others itself
    updates.start()                         momentum; it goes to the owners of the matrices
    for stage in updates.finish(): ...      owners compute, results return, parameters are updated

The optimizer's three functions run (matrices.py): on the elements that each rank stores, on complete matrices, and on
those elements again. Matrices are exchanged in stages (Note [What is computed first]):

    rank      | momentum of 0 | of 1, 2 | home | compute 0 | compute 1 | compute 2 | update 0 | home | update 1 | 2 |
    link                      [ in 0 ][ in 1 ][ in 2 ]     [ out 0 ]   [ out 1 ]   [ out 2 ]

home: matrices that lie on this rank are computed where it would wait.

State is the optimizer's own, sharded as the parameters are. No rank has a complete matrix that it does not own.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from operator import is_
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import unit_of
from fsdp_compile.optim.matrices import functions_of, matrix_shape, takes_matrices
from fsdp_compile.optim.matrix_exchange import Ranges
from fsdp_compile.optim.matrix_stage import Member, Place, Stage
from fsdp_compile.optim.owner_plan import LAG, Matrix, OwnerPlan, plan_owners
from fsdp_compile.optim.owners import local_gradient
from fsdp_compile.optim.segments import kept_gradient
from fsdp_compile.tensors.shard_spec import ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, moves


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
        TypeError: `optimizer` is neither torch's Muon nor a `MatrixOptimizer`.
    """
    if not takes_matrices(optimizer):
        raise TypeError(
            f"optimizer: expected torch.optim.Muon or a MatrixOptimizer, found {type(optimizer).__name__}; subclass "
            f"fsdp_compile.optim.MatrixOptimizer, or see ByOwner.owners"
        )
    updates = MatrixUpdates.of(optimizer)
    updates.prepare(optimizer)
    return list(updates.plans.values())


class MatrixUpdates:
    """The updates of one optimizer that needs complete matrices: `of(optimizer)`.

    Attributes:
        plans: for each group of ranks who owns which matrix, since the first step.
        flats: for each parameter that can be updated here, by its id, the flat parameter that it lies in.
        covers: how many of these there are in each flat parameter.
        stages: those whose updates have started, in the order in which they are computed.
    """

    _of: ClassVar[WeakKeyDictionary[Optimizer, "MatrixUpdates"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.plans: dict[ShardRanks, OwnerPlan] = {}
        self.flats: dict[int, FlatParam] = {}
        self.covers: Counter[FlatParam] = Counter()
        self._planned: list[tuple[ShardedTensor, ShardSpec]] = []  # parameters, and how they were sharded: alive here
        self._places: dict[int, Place] = {}  # for each parameter, by its id
        self._groups: list[list[Any]] = []  # the parameters of each group, when this was prepared
        self._moves = -1  # `moves()` then
        self._params: dict[int, tuple[ShardedTensor, int]] = {}  # those that are updated here, by id, with their group
        self._slices: dict[int, slice | None] = {}  # for each of `flats` what this rank stores in the flat shard
        self._made: dict[tuple[int, ...], list[Stage]] = {}  # for some parameters, by their ids
        self.stages: list[Stage] = []
        self._waiting: list[tuple[Stage, dict[int, Tensor]]] = []  # to be started, with gradients
        self._expected: list[Stage] = []  # whose gradients arrive in this backward
        self._shown: list[Any] = []  # parameters whose `.grad` was taken by `begin`

    @classmethod
    def of(cls, optimizer: Optimizer) -> "MatrixUpdates":
        """Those of `optimizer`."""
        return cls._of.setdefault(optimizer, cls())

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> set[int]:
        """Prepare the step of all parameters that have gradients, on all ranks the same; return the ids of those that
        are updated here, also in backward. Others are the optimizer's own to update.

        Raises:
            RuntimeError: a gradient was accumulated under `no_sync` and not reduced; parameters are summoned; or ranks
                disagree about the parameters.
        """
        self.prepare(optimizer)
        self._shown.clear()
        expected, self._expected = self._expected, []
        gradients = self._gradients(param for param, _ in self._params.values())
        covered = {*gradients, *(id(param) for stage in self.stages for param in stage.params)}
        for stage in expected:
            if stage.arrived:
                stage.arrive({id(each): gradients.pop(id(each)) for each in stage.params if id(each) in gradients})
                covered |= stage.arrived
                self._waiting.append((stage if stage.is_ready else stage.part(), {}))
        for stage in self._stages_of(optimizer, gradients):
            self._waiting.append((stage, {id(param): gradients[id(param)] for param in stage.params}))
        return covered

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, per_node: int | None = None) -> set[int]:
        """Plan owners where parameters are new; return the ids of the parameters that can be updated here.

        Args:
            optimizer: of the matrices.
            per_node: ranks of a node, where a plan is only looked at; None: as this machine has, and ranks compare it.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        pairs = zip(groups, self._groups, strict=False)
        same = len(groups) == len(self._groups) and all(len(a) == len(b) and all(map(is_, a, b)) for a, b in pairs)
        if not same or self._moves != moves():
            self._groups, self._moves = [list(params) for params in groups], moves()
            self._made.clear()
            self._find_params()
            self._plan(optimizer, per_node)
        return set(self._params)

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
                self._send(stage)

    @torch.no_grad()
    def start(self, drops: bool = False) -> None:
        """Begin to send the matrices of `begin` to their owners. `drops`: whether their gradients are freed."""
        for param in self._shown if drops else ():
            param.grad = None
        self._shown.clear()
        waiting, self._waiting = self._waiting, []
        for stage, gradients in waiting:
            stage.arrive(gradients)
            gradients.clear()  # they may be freed
            self._send(stage)

    def _send(self, stage: Stage) -> None:
        self.stages.append(stage)
        stage.send()
        self.stages.sort(key=lambda stage: stage.number)

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        if self.stages or self._waiting or self._expected:
            self.stages, self._waiting, self._expected = [], [], []
            self._made.clear()

    def finish(self) -> Iterator[Stage]:
        """Compute and update, under `no_grad`; each stage as soon as its parameters are updated."""
        stages = self.stages
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
        self.stages = []

    # --- preparation --------------------------------------------------------------------------------------------------

    def _find_params(self) -> None:
        self._params, self.flats, self._slices = {}, {}, {}
        for index, params in enumerate(self._groups):
            for param in params:
                if not isinstance(param, ShardedTensor) or param.spec.tensor_parallel is not None:
                    continue
                self._params[id(param)] = param, index
                if (managed := unit_of(cast(nn.Parameter, param))) is not None:
                    self.flats[id(param)], at = managed[0].in_flat(managed[1])
                    record = self.flats[id(param)].records[at]
                    self._slices[id(param)] = slice(record.offset, record.offset + record.numel) if record else None
        self.covers = Counter(self.flats.values())

    def _plan(self, optimizer: Optimizer, per_node: int | None) -> None:
        """Plan who owns which matrix, where parameters or ranks are new; all ranks compare that."""
        given = [(param, param.spec) for param, _ in self._params.values()]
        pairs = zip(given, self._planned, strict=False)
        if len(given) == len(self._planned) and all(a is b and mine is its for (a, mine), (b, its) in pairs):
            return
        self._places, self.plans, functions = {}, {}, functions_of(optimizer)
        by_ranks: dict[ShardRanks, list[tuple[ShardedTensor, int]]] = {}
        for param, index in self._params.values():
            by_ranks.setdefault(param.spec.ranks, []).append((param, index))
        for ranks, some in by_ranks.items():
            matrices, places = list[Matrix](), list[tuple[ShardedTensor, tuple[Ranges, ...], int]]()
            for number, (param, index) in enumerate(some):
                shape = matrix_shape(functions, tuple(param.shape))
                cost, ranges = functions.cost(shape, optimizer.param_groups[index]), _ranges_of(param, prod(shape))
                places.append((param, ranges, len(matrices)))
                for at, of_ranks in enumerate(ranges):
                    stored = tuple((rank, numel) for rank, (_, numel) in enumerate(of_ranks) if numel)
                    name = param.spec.named() + (f" [{at}]" if len(ranges) > 1 else "")
                    matrices.append(Matrix(name, shape, cost, stored, number))
            plan = self.plans[ranks] = plan_owners(matrices, ranks.size, _nodes_of(ranks, per_node))
            if per_node is None:
                _compare_plans(plan, ranks)
            for param, ranges, at in places:
                self._places[id(param)] = Place(ranges, plan.owners[at : at + len(ranges)], plan.stages[at])
        self._planned = given

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
                found[key] = whole[:0] if within is None else whole[within]
            elif (grad := param.grad) is not None and grad.dtype == param.dtype:  # else state has another one too
                is_alike = type(grad) is ShardedTensor and grad.spec is param.spec
                found[key] = grad.local if is_alike else local_gradient(param)
                self._shown.append(param)
        return found

    def _stages_of(self, optimizer: Optimizer, keys: Iterable[int]) -> list[Stage]:
        """The stages of some parameters, by their ids."""
        chosen = tuple(keys)
        if chosen not in self._made:
            alike: dict[Any, list[Member]] = {}
            for param, index in map(self._params.__getitem__, chosen):
                place = self._places[id(param)]
                key = (place.stage, param.spec.ranks, param.device, param.dtype)
                alike.setdefault(key, []).append(Member(param, index, place, self.flats.get(id(param))))
            some = sorted(alike.items(), key=lambda pair: pair[0][0])
            self._made[chosen] = [Stage(members, optimizer) for _, members in some]
        return self._made[chosen]


def _compute_until(has_ended: Callable[[], bool], at_home: list[Stage]) -> None:
    """Compute matrices that lie on this rank until an exchange has ended, or none are left."""
    while at_home and not has_ended():
        at_home.pop(0).compute_at_home()


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
