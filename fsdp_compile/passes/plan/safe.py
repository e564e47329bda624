"""A plan that stays good if prices are wrong, in the least memory.

Note [Plans for wrong prices]
Seconds of tasks and links may be off by a factor of two either way, together and apart. Only their ratio matters to a
plan, so it is judged with the link's prices at a quarter to four times those of tasks. At each ratio some known plan is
the shortest; what a plan takes longer than that, as a part of it, is its regret there. `safe_plan` looks for the plan
whose worst regret is the least, and then for one that needs less memory:

    references     the rule, and what blocks compiled one by one do: at no ratio may a plan expose more than 1.1 times
                   what the better of them exposes, nor more at the prices that are given
    regret         counts where tasks or the link are off, from half to twice. That both are, the opposite way, is less
                   likely: there it is enough to keep up with the references, or memory would be paid every day for
                   prices that nobody sees. A step with updates has no references, so that its regret counts everywhere
    candidates     these, other rules, the shortest plan by the prices, and plans of the scheduler at all ratios
    early          each candidate with launches as early as memory allows: the order on the link stays, so no price
                   makes that slower, and a link that is slower than priced does not wait for its work
    memory         of plans within 1 % of the least regret the one with the least peak, from the smallest limit on
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress, product
from math import inf
from typing import NamedTuple

from fsdp_compile.passes.plan.plan import Plan, Step, simulate
from fsdp_compile.passes.plan.schedule import (
    TOLERANCE,
    PlannedStep,
    Preference,
    Scheduler,
    alternating,
    keep_by_rule,
    limits_of,
    plans_by_rules,
    prefetch,
    search_plan,
)
from fsdp_compile.passes.plan.workload import UnitCost, Workload, smallest_budget

RATIOS = (1.0, 4.0, 2.0, 1.4, 0.5, 0.25)  # by which the link's prices may be off from those of tasks
_LIKELY = 0.5, 2.0  # from which ratio to which regret counts where there are references
_IN_ORDER = Preference()
_GATHER_FIRST = Preference(reduce_first=False)
_ONE_AHEAD = Preference(forward=1, backward=1)
_SCHEDULED = (  # at which ratio the scheduler makes plans, and by what it prefers
    *((ratio, each) for ratio in (1.0, 2.0) for each in (_IN_ORDER, _GATHER_FIRST, _ONE_AHEAD)),
    (1.4, _ONE_AHEAD), (4.0, _GATHER_FIRST), (1.0, _GATHER_FIRST._replace(forward=2, backward=2)),
)  # fmt: skip
_WORTH = 0.005  # of the step: what more memory than that of the rule has to save
_ALIKE = 0.01  # of the step: what less memory may cost
_WORSE = 1.1  # times what the better reference exposes that a plan may expose at wrong prices
_LIMITS = 12  # of memory, within which plans are looked for


def safe_plan(
    workload: Workload, budget: int | None = None, found: PlannedStep | None = None, is_lean: bool = False
) -> PlannedStep:
    """Return the plan that wrong prices hurt least; of plans as good within 1 % of the step that with the least peak.

    See Note [Plans for wrong prices].

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        found: what `search_plan` has found within the budget; None: search.
        is_lean: whether it never needs more memory than the rule; in a step with updates, which has no rule, than it
            needs and two of the largest units.

    Raises:
        PlanError: as of `search_plan`.
    """
    rule = None if workload.forward else simulate(workload, alternating(workload))  # the rule knows of no updates
    most = inf if budget is None else budget
    if is_lean:
        largest = max((unit.gathered for unit in workload.units), default=0)
        most = smallest_budget(workload) + 2 * largest if rule is None else rule.peak
    if rule is None or rule.peak >= most:
        return _Choice(workload, most, found).made()
    lean = _Choice(workload, rule.peak, found).made()
    more = _Choice(workload, most, found)
    if lean.seconds <= lean.bound / (1 - _WORTH) and more.is_allowed(lean.plan):
        return lean
    with_more = more.made()
    pays = with_more.seconds < lean.seconds * (1 - _WORTH) or not more.is_allowed(lean.plan)
    return with_more if pays else lean


def by_block(workload: Workload) -> Plan:
    """What blocks compiled one by one do: the next module is gathered, the reduces of the last one are under way."""
    of_modules = Counter(unit.module or unit.name for unit in workload.units)
    return prefetch(workload, 1, 1, True, max(of_modules.values(), default=1))


class _Judged(NamedTuple):
    """A plan, the units that it keeps unsharded, its peak, and what it takes at each of `RATIOS`."""

    plan: Plan
    keep: frozenset[int]
    peak: int
    seconds: tuple[float, ...]


class _Choice:
    """The plans that are known for a workload within `most` bytes, and which of them is taken."""

    def __init__(self, workload: Workload, most: float, found: PlannedStep | None) -> None:
        fits = found is not None and found.peak <= most
        self.found = found if fits and found else search_plan(workload, None if most == inf else int(most))
        self.workload, self.most, found = workload, most, self.found
        self.priced = {ratio: _with_link(workload, ratio) for ratio in RATIOS}
        self.computing = sum(task.seconds for task in workload.tasks)
        self.known: dict[Plan, _Judged] = {}
        self.least = [inf] * len(RATIOS)  # seconds of the shortest known plan at each ratio
        low, high = (0.0, inf) if workload.forward else _LIKELY
        self.counts = [low <= ratio <= high for ratio in RATIOS]  # whether a regret there does
        kept = frozenset(at for at, unit in enumerate(workload.units) if unit.name in found.keep_unsharded)
        self.keeps = [kept]
        self.rules: list[tuple[frozenset[int], Plan]] = []
        references: tuple[Plan, ...] = ()
        if not workload.forward:
            keep = keep_by_rule(workload)
            self.keeps = list(dict.fromkeys([kept, keep, workload.must_keep]))
            rule, *others = (each.plan for each in plans_by_rules(workload))
            references = by_block(workload), rule
            self.rules = [(keep, plan) for plan in (*references, *others)]
        for keep, plan in (*self.rules, (kept, found.plan)):
            self.see(keep, plan)
        seconds = [self.known[plan].seconds for plan in references if plan in self.known]
        self.references = [min(times) for times in zip(*seconds, strict=True)]
        limits = [limit for limit in limits_of(workload, {each.peak for each in self.known.values()}) if limit <= most]
        self.limits = limits[:: -(-len(limits) // _LIMITS)]
        self.limits += [] if self.limits[-1] == limits[-1] else [limits[-1]]

    def made(self) -> PlannedStep:
        """The plan that is taken."""
        best = self._chosen_plan()
        names = tuple(self.workload.units[unit].name for unit in sorted(best.keep))
        return replace(self.found, plan=best.plan, keep_unsharded=names, seconds=best.seconds[0], peak=best.peak)

    def is_allowed(self, plan: Plan) -> bool:
        """Whether a plan exposes no more than it may beside the references."""
        seconds = tuple(simulate(priced, plan).makespan for priced in self.priced.values())
        return self._excess_exposed(_Judged(plan, frozenset(), 0, seconds)) <= TOLERANCE

    def _chosen_plan(self) -> _Judged:
        self.look(self.limits[-1], inf)
        enough = self._regret(self._least_hurt()) + _ALIKE
        for limit in self.limits[:-1]:
            self.look(limit, enough)
            if self._least_hurt().peak <= limit:
                break
        return self._least_hurt()

    def look(self, limit: int, enough: float) -> None:
        """Make plans within `limit` bytes, and judge those that may have a regret of at most `enough`."""
        for keep, plan in self.rules:
            if plan in self.known and self.known[plan].peak <= limit:
                self.see(keep, launched_early(self.workload, plan, limit), enough)
        together = (1, 8) if self.workload.can_coalesce and self.workload.latency else (1,)
        for keep in self.keeps:
            if smallest_budget(self.workload, keep) > limit:
                continue
            schedulers = {ratio: Scheduler(priced, keep, limit) for ratio, priced in self.priced.items()}
            for (ratio, preference), count in product(_SCHEDULED, together):
                at = RATIOS.index(ratio)
                most = self.least[at] * (1 + enough) if self.counts[at] else inf
                if (made := schedulers[ratio].run(preference._replace(together=count), most)) is not None:
                    for least in dict.fromkeys((made.peak, limit)):
                        self.see(keep, launched_early(self.workload, made.plan, least), enough)

    def see(self, keep: frozenset[int], plan: Plan, enough: float = inf) -> None:
        """Judge a plan, unless it needs too much memory or has a regret above `enough`."""
        if plan in self.known:
            return
        seconds, peak = list[float](), 0
        for least, counts, priced in zip(self.least, self.counts, self.priced.values(), strict=True):
            timeline = simulate(priced, plan)
            seconds, peak = [*seconds, timeline.makespan], timeline.peak
            if peak > self.most or (counts and timeline.makespan > least * (1 + enough)):
                return
        self.known[plan] = _Judged(plan, keep, peak, tuple(seconds))
        self.least = list(map(min, self.least, seconds))

    def _least_hurt(self) -> _Judged:
        """Of plans that expose no more than they may, if there are any, with little regret, the one in least memory."""
        allowed = _near_lowest(self.known.values(), self._excess_exposed, TOLERANCE)
        alike = _near_lowest(allowed, self._regret, _ALIKE)
        smallest = min(each.peak for each in alike)
        return min((each for each in alike if each.peak <= smallest * (1 + TOLERANCE)), key=self._regret)

    def _regret(self, plan: _Judged) -> float:
        pairs = compress(zip(plan.seconds, self.least, strict=True), self.counts)
        return max(seconds / (least or 1.0) for seconds, least in pairs) - 1

    def _excess_exposed(self, plan: _Judged) -> float:
        """How much of the step a plan exposes more than it may, where that is the most."""
        over = [0.0]
        for ratio, seconds, usual in zip(RATIOS, plan.seconds, self.references, strict=False):
            may_expose = (usual - self.computing) * (1.0 if ratio == 1.0 else _WORSE)
            over.append((seconds - self.computing - may_expose) / (usual or 1.0))
        return max(over)


def _near_lowest(plans: Iterable[_Judged], of: Callable[[_Judged], float], above: float) -> list[_Judged]:
    """Those for which `of` is at most so much above the lowest."""
    found = {each: of(each) for each in plans}
    least = min(found.values())
    return [each for each, value in found.items() if value <= least + above]


def _with_link(workload: Workload, ratio: float) -> Workload:
    """`workload` on a link that takes so many times as long."""

    def scaled(unit: UnitCost) -> UnitCost:
        arrives = None if unit.arrives is None else unit.arrives * ratio
        seconds = {name: getattr(unit, name) * ratio for name in ("gather", "reduce", "replicate")}
        return replace(unit, **seconds, arrives=arrives)

    tasks = tuple(replace(task, all_reduce=task.all_reduce * ratio) for task in workload.tasks)
    units = tuple(map(scaled, workload.units))
    return replace(workload, tasks=tasks, units=units, latency=workload.latency * ratio)


def launched_early(workload: Workload, plan: Plan, limit: float) -> Plan:
    """`plan` with each launch as early as it may be without passing another one or taking more than `limit` bytes."""
    steps: list[list[Step]] = [[] for _ in range(len(workload.tasks) + 1)]
    for step in plan.steps:
        steps[step.at].append(step)
    memory, latest, freed = list(simulate(workload, plan).memory), 0, dict[str, int]()
    ready = {workload.units[unit].name: at for unit, _, at in workload.reduces()}
    costs = {unit.name: unit for unit in workload.units}
    for step in plan.of("gather", "free", "reduce"):
        if step.kind == "free":
            freed.update(dict.fromkeys(step.units, step.at))
            continue
        at, size = step.at, 0
        if step.kind == "reduce":
            first = max(ready[name] + 1 for name in step.units)
        else:
            size = sum(costs[name].gathered for name in step.units)
            is_fixed = at < workload.forward or any(costs[name].arrives is not None for name in step.units)
            begin = workload.forward or (workload.backward if at >= workload.backward else 0)
            first = at if is_fixed else max(begin, *(freed.get(name, 0) for name in step.units))
        while at > max(first, latest) and memory[at - 1] + size <= limit:
            at -= 1
            memory[at] += size
        if at < step.at:
            steps[step.at].remove(step)
            launches = [place for place, each in enumerate(steps[at], 1) if each.kind in ("gather", "reduce")]
            frees = sum(each.kind == "free" for each in steps[at])
            steps[at].insert(launches[-1] if launches else frees, step._replace(at=at))
        latest = at
    return Plan(tuple(step for those in steps for step in those))
