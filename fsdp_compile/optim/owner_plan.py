"""Which rank computes which complete matrix: a plan, as data, which is equal on all ranks and can be printed.

    plan = plan_owners(matrices, size=64, nodes=[rank // 8 for rank in range(64)])
    plan.owners[3]        the rank that computes matrix 3
    print(plan)           the load of each rank, and what is sent

It needs shapes alone, so that `explain` plans without ranks or memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

LAG = 2
"""How many stages are computed before the results of one are waited for: other ranks may compute later than this."""

_SPREAD = 1.03  # how far above the mean a rank's load may come, for the sake of what it stores
_WORSE = 1.05  # how much longer than the shortest plan one may take that sends less, or sends in the forward's order


@dataclass(frozen=True)
class Matrix:
    """A matrix that one rank computes.

    Attributes:
        name: of its parameter.
        shape: of the parameter.
        cost: operations that its owner executes.
        stored: the ranks that store some of it, each with its number of elements.
        stage: with which others it is exchanged; stages follow each other.
    """

    name: str
    shape: tuple[int, ...]
    cost: int
    stored: tuple[tuple[int, int], ...]
    stage: int = 0

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return sum(numel for _, numel in self.stored)


@dataclass(frozen=True)
class OwnerPlan:
    """Which rank owns each matrix.

    Attributes:
        matrices: in the order of the optimizer.
        owners: for each of them a rank.
        size: how many ranks there are.
        nodes: for each rank the node that it is on.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    size: int
    nodes: tuple[int, ...]

    @cached_property
    def loads(self) -> list[int]:
        """For each rank the cost of what it owns."""
        loads = [0] * self.size
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return loads

    @property
    def balance(self) -> float:
        """The largest load by the mean: 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.size / total if total else 1.0

    @cached_property
    def stages(self) -> list[list[int]]:
        """For each stage, in order, the cost of what each rank owns of it."""
        costs = {matrix.stage: [0] * self.size for matrix in sorted(self.matrices, key=lambda each: each.stage)}
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            costs[matrix.stage][owner] += matrix.cost
        return list(costs.values())

    @cached_property
    def length(self) -> int:
        """The cost of what is computed one after the other until all is updated, if exchanges took no time.

        More than the largest load where a rank waits for results of a stage that another one computes late.
        """
        now, ends = [0] * self.size, list[int]()
        for index, costs in enumerate(self.stages):
            now = [begin + cost for begin, cost in zip(now, costs, strict=True)]
            ends.append(max(now))
            if index >= LAG:
                now = [max(each, ends[index - LAG]) for each in now]
        return max(now, default=0)

    @cached_property
    def moved(self) -> tuple[int, int]:
        """How many elements go from ranks to owners; and how many of them to another node. As many return."""
        away, far = 0, 0
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            for rank, numel in matrix.stored:
                away += numel * (rank != owner)
                far += numel * (self.nodes[rank] != self.nodes[owner])
        return away, far

    @property
    def digest(self) -> str:
        """A short text that differs where plans do, for ranks to compare."""
        return sha256(repr((self.matrices, self.owners)).encode()).hexdigest()[:16]

    def lines(self) -> Iterator[str]:
        """What `print` shows: a summary, then a line for each rank."""
        total = sum(matrix.numel for matrix in self.matrices)
        away, far = self.moved
        share = f"{away / total:.0%}" if total else "0%"
        yield (
            f"{len(self.matrices)} matrices on {self.size} ranks, {sum(self.loads):.3g} operations, largest load "
            f"{self.balance:.3f} x the mean; {share} of {total:,} elements are sent, {far:,} to other nodes"
        )
        owned: list[list[Matrix]] = [[] for _ in range(self.size)]
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            owned[owner].append(matrix)
        for rank, own in enumerate(owned):
            names = ", ".join(matrix.name for matrix in own[:4]) + (", ..." if len(own) > 4 else "")
            yield f"rank {rank:3}  {self.loads[rank]:9.3g}  {len(own):4}  {names}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


# Note [How owners are chosen]
# Stage by stage, the most expensive matrix is dealt first, to a rank whose load then stays within 3 % of the mean of
# what has been dealt: to the one that stores most of it, then to others that store some, then to the least loaded one
# of the nodes that store most; if there is none, to the least loaded of all. So what is whole on a rank stays there
# where work allows it. Were the limit the mean of all stages, a rank that stores the largest matrix of each unit would
# own all of these in the first stages, and the others would wait for it: 16 blocks of a GPT on 8 ranks took 1.6 times
# as long. Where the plan takes 5 % longer than another one of the following, that is taken: each stage dealt to the
# least loaded ranks; all stages dealt together, in these two ways. All of this follows from shapes, so all ranks find
# the same.


def plan_owners(matrices: Sequence[Matrix], size: int, nodes: Sequence[int] = ()) -> OwnerPlan:
    """Deal `matrices` to `size` ranks (Note [How owners are chosen]).

    Args:
        matrices: of which all ranks store parts.
        size: how many ranks.
        nodes: for each rank the node that it is on; empty: all are on one.
    """
    places = tuple(nodes) or (0,) * size
    stages: dict[int, list[int]] = {}
    for index, matrix in enumerate(matrices):
        stages.setdefault(matrix.stage, []).append(index)
    by_stage = [stages[stage] for stage in sorted(stages)]
    everything = [list(range(len(matrices)))]
    found = [
        OwnerPlan(tuple(matrices), _Dealer(matrices, places, stays).deal(order), size, places)
        for order, stays in ((by_stage, True), (by_stage, False), (everything, True), (everything, False))
    ]
    limit = _WORSE * min(plan.length for plan in found)
    return next(plan for plan in found if plan.length <= limit)


class _Dealer:
    """Deals matrices; `stays`: to ranks that store them, if loads allow it."""

    def __init__(self, matrices: Sequence[Matrix], nodes: Sequence[int], stays: bool) -> None:
        self._matrices, self._nodes, self._stays = matrices, nodes, stays
        self._loads = [0] * len(nodes)
        self._limit = 0.0  # of a load, for the matrices that are dealt now
        self._on_node: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            self._on_node.setdefault(node, []).append(rank)

    def deal(self, order: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The owner of each matrix; `order`: indices that are dealt together."""
        owners = [0] * len(self._matrices)
        for indices in order:
            self._limit += _SPREAD * sum(self._matrices[index].cost for index in indices) / len(self._loads)
            for index in sorted(indices, key=lambda index: (-self._matrices[index].cost, index)):
                owners[index] = self._owner(self._matrices[index])
                self._loads[owners[index]] += self._matrices[index].cost
        return tuple(owners)

    def _owner(self, matrix: Matrix) -> int:
        if self._stays:
            nodes: dict[int, int] = {}
            for rank, numel in sorted(matrix.stored, key=lambda pair: (-pair[1], self._loads[pair[0]], pair[0])):
                if self._fits(rank, matrix):
                    return rank
                nodes[self._nodes[rank]] = nodes.get(self._nodes[rank], 0) + numel
            for node in sorted(nodes, key=lambda node: (-nodes[node], node)):
                rank = min(self._on_node[node], key=self._loads.__getitem__)
                if self._fits(rank, matrix):
                    return rank
        return min(range(len(self._loads)), key=self._loads.__getitem__)

    def _fits(self, rank: int, matrix: Matrix) -> bool:
        return self._loads[rank] + matrix.cost <= self._limit


def stages_of(costs: Sequence[int], size: int, most: int = 8) -> list[int]:
    """For each matrix, in the order of the forward, the stage with which it is exchanged.

    Stages have about the same cost, and on average at least one matrix for each of `size` ranks.
    """
    number = max(1, min(most, len(costs) // size))
    total, stages, done = sum(costs), [], 0
    for cost in costs:
        middle = done + cost / 2
        stages.append(min(number - 1, int(middle * number / total)) if total else 0)
        done += cost
    return stages
