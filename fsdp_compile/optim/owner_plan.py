"""Which rank computes which complete matrix: a plan, as data, which is equal on all ranks.

    plan = plan_owners(matrices, size=64)
    plan.owners[3]        the rank that computes matrix 3
    print(plan)           how work is balanced, and what is sent

It needs shapes alone, so that `explain` plans without ranks or memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

LAG = 2
"""How many stages are computed before the results of one are waited for: other ranks may compute later than this."""

_SPREAD = 1.03  # how far above the mean a rank's load may come, for the sake of what it stores
_STAGES = 8  # at most


@dataclass(frozen=True)
class Matrix:
    """A matrix that one rank computes.

    Attributes:
        name: of its parameter.
        shape: of the parameter.
        cost: operations that its owner executes.
        stored: the ranks that store some of it, each with its number of elements.
        parameter: a number that matrices of one parameter share; they are exchanged together.
    """

    name: str
    shape: tuple[int, ...]
    cost: int
    stored: tuple[tuple[int, int], ...]
    parameter: int

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
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    size: int

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
    def stages(self) -> tuple[int, ...]:
        """For each matrix with which others it is exchanged: with those that other owners compute at about that time.

        There are at most eight stages. Of the time that all takes, the first one and the last one get half as much as
        each of the others, since nothing hides all of their exchanges.
        """
        intervals = min(_STAGES - 1, len(self.matrices) // self.size)
        done, middles = [0] * self.size, dict[int, list[int]]()  # twice the time at half of a matrix
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            middles.setdefault(matrix.parameter, []).append(2 * done[owner] + matrix.cost)
            done[owner] += matrix.cost
        last = max(1, 2 * max(done, default=0))
        means = {key: intervals * sum(each) / (len(each) * last) for key, each in middles.items()}
        return tuple(int(means[matrix.parameter] + 0.5) for matrix in self.matrices)

    @property
    def moved(self) -> int:
        """How many elements go from ranks to owners. As many return."""
        pairs = zip(self.matrices, self.owners, strict=True)
        return sum(numel for matrix, owner in pairs for rank, numel in matrix.stored if rank != owner)

    def __str__(self) -> str:
        total = sum(matrix.numel for matrix in self.matrices)
        return (
            f"{len(self.matrices)} matrices on {self.size} ranks, {sum(self.loads):.3g} operations, largest load "
            f"{self.balance:.3f} x the mean; {self.moved / total if total else 0:.0%} of {total:,} elements are sent"
        )


# Note [How owners are chosen]
# The most expensive matrix is dealt first, to a rank whose load then stays within 3 % of the mean: to the one that
# stores most of it, then to others that store some; if there is none, to the least loaded of all. So what is whole on a
# rank stays there where work allows it. All of this follows from shapes, so all ranks find the same. Of what was tried
# for GPTs, Llama 3 8B and 70B and experts on 2 to 256 ranks: to deal each to the least loaded rank sends more, and
# lowers the largest load by at most 3 % in 49 of 51 plans; to look for ranks on the nodes that store most changes what
# crosses nodes by -6 to 5 % of all elements on 16 to 128 ranks.
#
# Results of a stage are waited for by all ranks. Were stages cut by the order of the forward, a rank that owns the
# largest matrix of each of the first units would let the others wait: 16 blocks of a GPT on 8 ranks took 1.6 times as
# long. So stages are cut by the time at which owners compute (`OwnerPlan.stages`).
#
# Each rank computes what it owns in the order of the optimizer, which is that of the forward: what the next forward
# gathers first is updated first. To begin and end with small matrices, whose exchanges nothing hides, was tried: in 66
# of 120 predictions more was exposed, in 34 as much (GPTs, Llama 3 8B, experts; 2 to 64 ranks; an H100, a CPU).


def plan_owners(matrices: Sequence[Matrix], size: int) -> OwnerPlan:
    """Deal `matrices`, of which all ranks store parts, to `size` ranks (Note [How owners are chosen])."""
    loads, limit = [0] * size, _SPREAD * sum(matrix.cost for matrix in matrices) / size
    owners = [0] * len(matrices)
    for index in sorted(range(len(owners)), key=lambda index: (-matrices[index].cost, index)):
        matrix = matrices[index]
        near = sorted(matrix.stored, key=lambda pair: (-pair[1], loads[pair[0]], pair[0]))
        fitting = (rank for rank, _ in near if loads[rank] + matrix.cost <= limit)
        owner = owners[index] = next(fitting, min(range(size), key=loads.__getitem__))
        loads[owner] += matrix.cost
    return OwnerPlan(tuple(matrices), tuple(owners), size)
