"""The shortest step by trying everything: an oracle for the planner that shares none of its reasoning.

Before each task any of these may be done, any number of times: gather the next units, reduce the next ready ones, wait
for the oldest reduce. All keep or re-gather choices, all merges. Only states that were met before are not tried again.
"""

from heapq import heapify, heappop, heappush
from itertools import combinations

from fsdp_compile.passes.plan.workload import Workload


def shortest(workload: Workload, budget: float = float("inf"), merge: int = 2) -> float:
    """Seconds of the shortest plan within `budget` bytes; infinity if there is none."""
    open_choices = workload.may_keep
    subsets = (set(s) for n in range(len(open_choices) + 1) for s in combinations(open_choices, n))
    machines = [_Machine(workload, workload.must_keep | kept, budget, merge) for kept in subsets]
    # task, gathers, reduces, now, link, replicas, done times of gathers, pending reduces (done, count), live bytes
    heap = []
    for index, machine in enumerate(machines):
        start = (0, 0, 0, 0.0, 0.0, 0.0, (), (), 0)
        heap.append((machine.at_least(start), 0, start, index))
    heapify(heap)
    seen = set()
    while heap:  # in order of what is the least that can follow: the first end is the shortest
        seconds, _, state, index = heappop(heap)
        machine = machines[index]
        if machine.is_end(state):
            return seconds
        if (state, index) not in seen:
            seen.add((state, index))
            for after in machine.next(state):
                heappush(heap, (machine.at_least(after), -after[0], after, index))
    return float("inf")


class _Machine:
    def __init__(self, workload: Workload, kept: frozenset[int], budget: float, merge: int) -> None:
        self.w, self.budget, self.merge = workload, budget, merge
        self.gathers, self.reduces = workload.gathers(kept), workload.reduces()
        self.left = [sum(task.seconds for task in workload.tasks[k:]) for k in range(len(workload.tasks) + 1)]

    def at_least(self, state) -> float:
        k, g, r, now, link, rep, *_ = state
        units = self.w.units
        unsent = sum(units[unit].gather for unit, _, _ in self.gathers[g:])
        unsent += sum(units[unit].reduce for unit, _, _ in self.reduces[r:])
        return max(now + self.left[k], link + unsent, rep)

    def is_end(self, state) -> bool:
        return state[0] == len(self.w.tasks) and not state[7] and state[2] == len(self.reduces)

    def next(self, state):
        k, g, r, now, link, rep, done, pending, live = state
        w, between = self.w, self.w.between[k]
        if live + between > self.budget:
            return
        for m in range(1, self.merge + 1):
            units = [unit for unit, first, _ in self.gathers[g : g + m] if k >= w.backward or first < w.backward]
            if len(units) == m:
                end = max(now, link) + w.latency + sum(w.units[unit].gather for unit in units)
                size = sum(w.units[unit].gathered for unit in units)
                yield k, g + m, r, now, end, rep, (*done, *[end] * m), pending, live + size
            units = [unit for unit, _, last in self.reduces[r : r + m] if last < k]
            if len(units) == m:
                end = max(now, link) + w.latency + sum(w.units[unit].reduce for unit in units)
                yield k, g, r + m, now, end, rep, done, (*pending, (end, m)), live
        if pending:
            (end, m), *rest = pending
            first = r - sum(count for _, count in pending)
            units = [w.units[unit] for unit, _, _ in self.reduces[first : first + m]]
            later, slow = max(now, end), sum(unit.replicate for unit in units)
            also = max(later, rep) + slow + w.latency if slow else rep
            yield k, g, r, later, link, also, done, tuple(rest), live - sum(unit.packed for unit in units)
        if k < len(w.tasks) and all(first > k for _, first, _ in self.gathers[g:]):
            yield from self._compute(state)

    def _compute(self, state):
        k, g, r, now, link, rep, done, pending, live = state
        w = self.w
        waited = [unit for unit, _, _ in self.reduces[: r - sum(count for _, count in pending)]]
        if not set(w.tasks[k].reduced) & {unit for unit, _, _ in self.reduces} <= set(waited):
            return
        live += sum(w.units[unit].packed for unit, first, _ in self.reduces if first == k)
        if live + w.tasks[k].memory > self.budget:
            return
        needed = [end for end, (_, first, _) in zip(done, self.gathers[:g], strict=True) if first <= k]
        now = max([now, *needed, *([rep] if w.tasks[k].reduced else [])])
        now += w.tasks[k].seconds
        live -= sum(w.units[unit].gathered for unit, _, last in self.gathers[:g] if last == k)
        yield k + 1, g, r, now, link, rep, done, pending, live
