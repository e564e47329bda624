"""Updates by optimizers of complete matrices, such as Muon: one rank computes each matrix, while others are on the way.

    updates = MatrixUpdates.of(optimizer)
    covered = updates.begin(optimizer)      momentum goes to the owners of matrices; the optimizer steps on all others
    updates.finish()                        owners compute, results return, parameters are updated

The optimizer's three functions run (matrix_optimizers.py): on the elements that each rank stores, on complete matrices,
and on those elements again. Matrices are exchanged in stages (`OwnerPlan.stages`):

    rank      | momentum of 0 | of 1, 2 | home | compute 0 | compute 1 | compute 2 | update 0 | home | update 1 | 2 |
    link                      [ in 0 ][ in 1 ][ in 2 ]     [ out 0 ]   [ out 1 ]   [ out 2 ]

home: matrices that lie on this rank are computed where it would wait.

State is the optimizer's own, sharded as the parameters are. No rank has a complete matrix that it does not own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import unit_of
from fsdp_compile.optim.matrix_exchange import Exchange, Ranges
from fsdp_compile.optim.matrix_optimizers import (
    Functions,
    MatrixShard,
    functions_of,
    local_data,
    local_gradient,
    matrix_shape,
    run_before,
    run_whole,
)
from fsdp_compile.optim.owner_plan import LAG, Matrix, OwnerPlan, plan_owners
from fsdp_compile.optim.segments import are_same, kept_gradient
from fsdp_compile.tensors.shard_spec import ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, moves


class Member:
    """A parameter whose matrices are computed by their owners.

    Args:
        group: the index of its parameter group.
        ranges: for each of its matrices what each rank stores, `owners`: who computes it; and in which `stage`, all.

    Attributes:
        flat: the flat parameter that it lies in, if any, and `within`: which elements of the shard it is.
        cut: for each of its matrices which part it is of what this rank stores.
        has_arrived: whether `before` has had the gradient of this step.
        sent: what it has returned; nothing where it was not called, as this rank has nothing of the parameter.
        updates: of each matrix what this rank stores of its update.
    """

    def __init__(
        self, param: ShardedTensor, group: int, ranges: Sequence[Ranges], owners: Sequence[int], stage: int
    ) -> None:
        self.param, self.group, self.ranges, self.owners, self.stage = param, group, ranges, owners, stage
        self.flat: FlatParam | None = None
        self.within = slice(0)
        if (managed := unit_of(param)) is not None:  # type: ignore[arg-type]  # is an nn.Parameter too
            self.flat, at = managed[0].in_flat(managed[1])
            if record := self.flat.records[at]:
                self.within = slice(record.offset, record.offset + record.numel)
        self.shard = MatrixShard(local_data(param), tuple(param.shape), param.spec)
        ends = list(accumulate((of_ranks[param.spec.ranks.rank][1] for of_ranks in ranges), initial=0))
        self.cut = [slice(begin, end) for begin, end in pairwise(ends)]
        self.has_arrived, self._is_idle = False, False
        self.sent = self.shard.param
        self.updates: dict[int, Tensor] = {}

    def run_before(self, functions: Functions, optimizer: Optimizer, grad: Tensor) -> None:
        """Compute what owners need, from `grad` in this rank's part, 1-D."""
        self.has_arrived = True
        self.shard.group = optimizer.param_groups[self.group]
        if not self._is_idle:
            self.shard.state = optimizer.state[self.param]
            self.sent = run_before(functions, self.shard, grad)

    def run_after(self, functions: Functions) -> None:
        """Update what this rank stores."""
        self.has_arrived = False
        if not self._is_idle:
            parts = [self.updates[at] for at in sorted(self.updates)]
            functions.after(self.shard, parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self.sent)
            numbers = any(type(each) is not ShardedTensor for each in self.shard.state.values())  # alike on all ranks
            self._is_idle = not numbers and not self.shard.param.numel()
            self.updates.clear()
            self.sent = self.sent.new_empty(0)  # of the dtype that is sent


class Stage:
    """Parameters of one process group, device and dtype that are exchanged together.

    Attributes:
        members: all of them.
        flats: the flat parameters that they lie in, and how many of them in each.
        number: which stage it is, in the order in which owners compute.
        at_home: matrices that lie on this rank and are still to be computed.
    """

    def __init__(self, members: Sequence[Member], functions: Functions) -> None:
        self.members, self._functions = members, functions
        self._name = f"matrices of {members[0].param.spec.named()} and {len(members) - 1} others"
        self.number, self.at_home = members[0].stage, list[int]()
        self.flats = {member.flat for member in members if member.flat is not None}
        self._matrices = [(member, at) for member in members for at in range(len(member.cut))]
        ranges = [each for member in members for each in member.ranges]
        owners = [each for member in members for each in member.owners]
        self._exchange = Exchange(members[0].param.spec.ranks, ranges, owners)
        self.has_ended = self._exchange.has_ended  # whether the host would not wait for the exchange

    def send(self) -> None:
        """Begin to send owners what they need; all members have arrived."""
        dtypes = {member.sent.dtype for member in self.members}
        if len(dtypes) > 1:
            raise TypeError(f"{self._functions.__class__.__name__}.before: expected one dtype for parameters of one, "
                            f"found {sorted(map(str, dtypes))}")  # fmt: skip
        self.at_home = self._exchange.at_home[:]
        self._exchange.send(self._sent, self.members[0].sent[:0], self._name)

    def _sent(self, index: int) -> Tensor:
        """What this rank stores of a matrix, behind `before`."""
        member, at = self._matrices[index]
        return member.sent[member.cut[at]]

    def update(self, index: int, matrix: Tensor) -> Tensor:
        """The update of a `matrix`, 1-D both, which its owner computes and overwrites; `index`: which one it is."""
        return run_whole(self._functions, self._matrices[index][0].shard, matrix)

    def compute_at_home(self) -> None:
        """Compute with the matrices that lie on this rank, once, at any time between `send` and `finish`."""
        for index in self.at_home:
            member, at = self._matrices[index]
            member.updates[at] = self.update(index, self._sent(index).clone())  # which may be state
        self.at_home = []

    def compute(self) -> None:
        """Compute with the other matrices that this rank owns, and begin to send the results."""
        updates = [self.update(index, matrix) for index, matrix in self._exchange.received()]
        self._exchange.send_back(updates, self.members[0].sent[:0], self._name)

    def finish(self) -> None:
        """Update the parameters."""
        self.compute_at_home()
        for index, update in self._exchange.returned():
            member, at = self._matrices[index]
            member.updates[at] = update
        for member in self.members:
            member.run_after(self._functions)
        torch.autograd.graph.increment_version([member.param for member in self.members])


class MatrixUpdates:
    """The updates of one optimizer that needs complete matrices: `of(optimizer)`.

    Attributes:
        plans: for each group of ranks who owns which matrix, since the first step.
        covers: for each flat parameter how many of its parameters can be updated here.
        stages: those whose updates have started, in the order in which they are computed.
    """

    _of: ClassVar[WeakKeyDictionary[Optimizer, "MatrixUpdates"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.plans: dict[ShardRanks, OwnerPlan] = {}
        self.covers: Counter[FlatParam] = Counter()
        self._planned: list[ShardedTensor | ShardSpec] = []  # parameters, and how they were sharded
        self._places: list[tuple[Any, ...]] = []  # of each of these parameters: ranges, owners, stage
        self._params: list[Any] = []  # all parameters, when this was prepared
        self._moves = -1  # `moves()` then
        self._members: dict[int, Member] = {}  # by the id of the parameter
        self._made: dict[tuple[int, ...], list[Stage]] = {}  # for some parameters, by their ids
        self.stages: list[Stage] = []
        self._expected: list[Stage] = []  # whose gradients arrive in this backward

    @classmethod
    def of(cls, optimizer: Optimizer) -> "MatrixUpdates":
        """Those of `optimizer`."""
        return cls._of.setdefault(optimizer, cls())

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, drops: bool = False) -> set[int]:
        """Begin the step of all parameters that have gradients, on all ranks the same, or had them in backward; return
        their ids. Others are the optimizer's own to update. `drops`: whether gradients are freed.

        Raises:
            RuntimeError: a gradient was accumulated under `no_sync` and not reduced; parameters are summoned; or ranks
                disagree about the parameters.
        """
        arrived = {id(each.param): each for stage in self._expected for each in stage.members if each.has_arrived}
        self.prepare(optimizer)
        self._members.update(arrived)  # also if others lie elsewhere since
        self._expected = []
        covered = {id(member.param) for stage in self.stages for member in stage.members}
        gradients = self._gradients(drops)
        chosen = [key for key, member in self._members.items()
                  if key in gradients or (member.has_arrived and key not in covered)]  # fmt: skip
        for stage in self._stages_of(optimizer, chosen):
            self._arrive(optimizer, stage.members, gradients)
            self._send(stage)
        return covered.union(chosen)

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, compares: bool = True) -> None:
        """Plan owners where parameters are new. `compares`: whether ranks do; else the plan is only looked at."""
        params = [each for group in optimizer.param_groups for each in (None, *group["params"])]
        if self._moves != moves() or not are_same(params, self._params):
            self._params, self._moves = params, moves()
            self._made.clear()
            pairs = ((each, index) for index, group in enumerate(optimizer.param_groups) for each in group["params"])
            # The optimizer updates others by itself.
            some = [(each, index) for each, index in pairs if isinstance(each, ShardedTensor) and each.numel() > 0
                    and each.spec.tensor_parallel is None]  # fmt: skip
            self._plan(optimizer, some, compares)
            members = [Member(*pair, *place) for pair, place in zip(some, self._places, strict=True)]
            self._members = {id(member.param): member for member in members}
            self.covers = Counter(member.flat for member in members if member.flat is not None)

    @torch.no_grad()
    def expect(self, optimizer: Optimizer, flats: Sequence[FlatParam]) -> None:
        """Let `arrive` come for each of `flats`: a stage is sent when all have come whose parameters it has."""
        keys = [key for key, member in self._members.items() if member.flat in flats]
        self._expected = list(self._stages_of(optimizer, keys))

    @torch.no_grad()
    def arrive(self, optimizer: Optimizer, flat: FlatParam, gradient: Tensor) -> None:
        """Take the gradient of a flat parameter that was expected, 1-D, and send what is complete."""
        some = [member for member in self._members.values() if member.flat is flat]
        self._arrive(optimizer, some, {id(member.param): gradient[member.within] for member in some})
        for stage in list(self._expected):
            if all(member.has_arrived for member in stage.members):
                self._expected.remove(stage)
                self._send(stage)

    def _arrive(self, optimizer: Optimizer, members: Iterable[Member], gradients: dict[int, Tensor]) -> None:
        functions = functions_of(optimizer)
        for member in members:
            if (grad := gradients.pop(id(member.param), None)) is not None:  # which may be freed
                member.run_before(functions, optimizer, grad)

    def _send(self, stage: Stage) -> None:
        self.stages.append(stage)
        stage.send()
        self.stages.sort(key=lambda stage: stage.number)

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        if self.stages or any(member.has_arrived for member in self._members.values()):
            self.stages, self._moves = [], -1

    def finish(self) -> None:
        """Compute and update, under `no_grad`."""
        stages = self.stages
        at_home = [stage for stage in stages if stage.at_home]  # computed where this rank would wait
        for index, stage in enumerate([*stages, *[None] * LAG]):
            if stage is not None:
                _compute_until(stage.has_ended, at_home)
                stage.compute()
            if index >= LAG:
                finished = stages[index - LAG]
                _compute_until(finished.has_ended, at_home)
                finished.finish()
        self.stages = []

    def _plan(self, optimizer: Optimizer, params: list[tuple[ShardedTensor, int]], compares: bool) -> None:
        """Plan who owns which matrix, where parameters, each with its group, or ranks are new.

        RuntimeError on all ranks if they have planned for different parameters.
        """
        given = [each for param, _ in params for each in (param, param.spec)]
        if are_same(given, self._planned):
            return
        self.plans, functions = {}, functions_of(optimizer)
        places: dict[int, tuple[Any, ...]] = {}
        by_ranks: dict[ShardRanks, list[tuple[ShardedTensor, int]]] = {}
        for pair in params:
            by_ranks.setdefault(pair[0].spec.ranks, []).append(pair)
        for ranks, some in by_ranks.items():
            matrices, of_each = list[Matrix](), list[tuple[ShardedTensor, tuple[Ranges, ...], int]]()
            for number, (param, index) in enumerate(some):
                shape = matrix_shape(functions, tuple(param.shape))
                cost, ranges = functions.cost(shape, optimizer.param_groups[index]), _ranges_of(param, prod(shape))
                of_each.append((param, ranges, len(matrices)))
                for at, of_ranks in enumerate(ranges):
                    stored = tuple((rank, numel) for rank, (_, numel) in enumerate(of_ranks) if numel)
                    name = param.spec.named() + (f" [{at}]" if len(ranges) > 1 else "")
                    matrices.append(Matrix(name, shape, cost, stored, number))
            plan = self.plans[ranks] = plan_owners(matrices, ranks.size)
            digest = sha256(repr((matrices, plan.owners)).encode()).hexdigest()
            digests = collectives.gather_objects((digest, len(matrices)), group_named(ranks.group)) if compares else []
            for rank, (found, number) in enumerate(digests):
                if found != digests[0][0]:
                    raise RuntimeError(
                        f"step: rank {rank} of {ranks.size} updates {number} matrices, and rank 0 {digests[0][1]}, or "
                        f"others; give the optimizer the same parameters in the same order and groups on all ranks"
                    )
            for param, ranges, at in of_each:
                places[id(param)] = ranges, plan.owners[at : at + len(ranges)], plan.stages[at]
        self._planned, self._places = given, [places[id(param)] for param, _ in params]

    def _gradients(self, drops: bool) -> dict[int, Tensor]:
        """What this rank stores of the gradients of those that have one, by the parameters' ids.
        `drops`: gradients that lie in no flat one are taken from the parameters.
        """
        found: dict[int, Tensor] = {}
        kept: dict[FlatParam | None, Tensor | None] = {None: None}
        for member in self._members.values():
            param, flat = member.param, member.flat
            if flat is not None and flat not in kept:
                kept[flat] = kept_gradient(flat)
            if (whole := kept[flat]) is not None:
                found[id(param)] = whole[member.within]
            elif (grad := param.grad) is not None and grad.dtype == param.dtype:  # else state has another one too
                found[id(param)] = local_gradient(param)
                if drops:
                    param.grad = None
        return found

    def _stages_of(self, optimizer: Optimizer, keys: Sequence[int]) -> list[Stage]:
        """The stages of some parameters, by their ids."""
        chosen = tuple(keys)
        if chosen not in self._made:
            alike: dict[Any, list[Member]] = {}
            for member in map(self._members.__getitem__, chosen):
                param = member.param
                key = (member.stage, param.spec.ranks, param.device, param.dtype)
                alike.setdefault(key, []).append(member)
            functions = proxy(functions_of(optimizer))  # an optimizer that is gone takes this along
            self._made[chosen] = [Stage(alike[key], functions) for key in sorted(alike, key=lambda key: key[0])]
        return self._made[chosen]


def _compute_until(has_ended: Callable[[], bool], at_home: list[Stage]) -> None:
    """Compute matrices that lie on this rank until an exchange has ended, or none are left."""
    while at_home and not has_ended():
        at_home.pop(0).compute_at_home()


def _ranges_of(param: ShardedTensor, numel: int) -> tuple[Ranges, ...]:
    """For each matrix of `numel` elements of a parameter what each rank stores."""
    if numel == param.numel():
        return (param.spec.ranges,)
    found = []
    for begin in range(0, param.numel(), numel):
        ends = [(max(first, begin), min(first + size, begin + numel)) for first, size in param.spec.ranges]
        found.append(tuple((low - begin, max(0, high - low)) for low, high in ends))
    return tuple(found)
