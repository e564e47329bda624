"""Which rank computes which complete matrix: a plan, as data, which is equal on all ranks and can be printed.

    plan = plan_owners(matrices, size=64, nodes=[rank // 8 for rank in range(64)])
    plan.owners[3]        the rank that computes matrix 3
    print(plan)           the load of each rank, and what is sent

It needs shapes alone, so that `explain` plans without ranks or memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain

LAG = 2
"""How many stages are computed before the results of one are waited for: other ranks may compute later than this."""

_SPREAD = 1.03  # how far above the mean a rank's load may come, for the sake of what it stores
_WORSE = 1.05  # how much longer than the other plan the one may take that sends less
_STAGES = 8  # at most


@dataclass(frozen=True)
class Matrix:
    """A matrix that one rank computes.

    Attributes:
        name: of its parameter.
        shape: of the parameter.
        cost: operations that its owner executes.
        stored: the ranks that store some of it, each with its number of elements.
        parameter: a number that matrices of one parameter share; they are exchanged together. None: it is alone.
    """

    name: str
    shape: tuple[int, ...]
    cost: int
    stored: tuple[tuple[int, int], ...]
    parameter: int | None = None

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

    @property
    def _order(self) -> Iterator[int]:
        """The matrices, owner by owner, each in the order in which it computes (Note [What is computed first])."""
        owned: list[list[int]] = [[] for _ in range(self.size)]
        for index, owner in enumerate(self.owners):
            owned[owner].append(index)
        for own in owned:
            small = min((self.matrices[index].numel for index in own), default=0)
            last = [index for index in own if self.matrices[index].numel == small and 8 * index >= len(self.matrices)]
            rest = [index for index in own if index not in last[-1:]]
            first = min(rest, key=lambda index: self.matrices[index].numel, default=-1)
            yield from chain(sorted(rest, key=lambda index: (index != first, index)), last[-1:])

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """For each matrix with which others it is exchanged: with those that other owners compute at about that time.

        There are at most eight stages. Of the time that all takes, the first one and the last one get half as much as
        each of the others, since nothing hides all of their exchanges.
        """
        intervals = min(_STAGES - 1, len(self.matrices) // self.size)
        done, middles = [0] * self.size, dict[tuple[bool, int], list[int]]()  # twice the time at half of a matrix
        for index in self._order:
            matrix, owner = self.matrices[index], self.owners[index]
            middles.setdefault(_together(matrix, index), []).append(2 * done[owner] + matrix.cost)
            done[owner] += matrix.cost
        last = max(1, 2 * max(done, default=0))
        means = {key: intervals * sum(each) / (len(each) * last) for key, each in middles.items()}
        return tuple(int(means[_together(*pair[::-1])] + 0.5) for pair in enumerate(self.matrices))

    @cached_property
    def length(self) -> int:
        """The cost of what is computed one after the other until all is updated, if exchanges took no time.

        More than the largest load where a rank waits for results of a stage that another one computes late.
        """
        of_stages: dict[int, list[int]] = {stage: [0] * self.size for stage in sorted(set(self.stages))}
        for matrix, owner, stage in zip(self.matrices, self.owners, self.stages, strict=True):
            of_stages[stage][owner] += matrix.cost
        now, ends = [0] * self.size, list[int]()
        for index, costs in enumerate(of_stages.values()):
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


def _together(matrix: Matrix, index: int) -> tuple[bool, int]:
    """What matrices that are exchanged together share; `index`: of the matrix."""
    return (False, index) if matrix.parameter is None else (True, matrix.parameter)


# Note [How owners are chosen]
# The most expensive matrix is dealt first, to a rank whose load then stays within 3 % of the mean: to the one that
# stores most of it, then to others that store some, then to the least loaded one of the nodes that store most; if there
# is none, to the least loaded of all. So what is whole on a rank stays there where work allows it. If all takes 5 %
# longer then than if each goes to the least loaded rank, that is done. All of this follows from shapes, so all ranks
# find the same.
#
# Results of a stage are waited for by all ranks. Were stages cut by the order of the forward, a rank that owns the
# largest matrix of each of the first units would let the others wait: 16 blocks of a GPT on 8 ranks took 1.6 times as
# long. So stages are cut by the time at which owners compute (`OwnerPlan.stages`).
#
# Note [What is computed first]
# Each rank computes what it owns in the order of the optimizer, which is that of the forward: what the next forward
# gathers first is updated first. Nothing hides all of the first exchange to owners, nor of the last one back, so these
# should be short: a rank ends with its smallest matrix, if that is not of the first eighth of the model, which the next
# forward waits for, and begins with the smallest of the others.


def plan_owners(matrices: Sequence[Matrix], size: int, nodes: Sequence[int] = ()) -> OwnerPlan:
    """Deal `matrices` to `size` ranks (Note [How owners are chosen]).

    Args:
        matrices: of which all ranks store parts.
        size: how many ranks.
        nodes: for each rank the node that it is on; empty: all are on one.
    """
    places = tuple(nodes) or (0,) * size
    near, plain = (OwnerPlan(tuple(matrices), _deal(matrices, places, stays), size, places) for stays in (True, False))
    return near if near.length <= _WORSE * plain.length else plain


def _deal(matrices: Sequence[Matrix], nodes: Sequence[int], stays: bool) -> tuple[int, ...]:
    """The owner of each matrix; `stays`: a rank that stores some of it, if loads allow it."""
    loads, limit = [0] * len(nodes), _SPREAD * sum(matrix.cost for matrix in matrices) / len(nodes)
    on_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_node.setdefault(node, []).append(rank)

    def candidates(matrix: Matrix) -> Iterator[int]:
        far = Counter[int]()
        for rank, numel in sorted(matrix.stored, key=lambda pair: (-pair[1], loads[pair[0]], pair[0])):
            yield rank
            far[nodes[rank]] += numel
        for node in sorted(far, key=lambda node: (-far[node], node)):
            yield min(on_node[node], key=loads.__getitem__)

    owners = [0] * len(matrices)
    for index in sorted(range(len(owners)), key=lambda index: (-matrices[index].cost, index)):
        cost, near = matrices[index].cost, candidates(matrices[index]) if stays else iter(())
        fitting = (rank for rank in near if loads[rank] + cost <= limit)
        owners[index] = next(fitting, min(range(len(loads)), key=loads.__getitem__))
        loads[owners[index]] += cost
    return tuple(owners)
