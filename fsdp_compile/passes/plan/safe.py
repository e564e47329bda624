"""A plan that stays good if prices are wrong.

Note [Plans for wrong prices]
Seconds of tasks and links may be off by a factor of two. A plan that launches just in time then leaves the link idle
before it, and one that prefers reduces may be wrong about what is urgent. `safe_plan` does three things about it.
It launches as early as memory allows: the order on the link stays, so no price makes that slower. Of plans that are
equally short by the given prices it takes one that is safe: if the prices of the link are off by up to four from those
of tasks, it takes no longer than the rule, by more than 0.9 % or a quarter of what it gains. If there is none, it takes
the shortest one that is safe, as the rule is. And it has no more buffers alive than the rule, unless that pays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp_compile.passes.plan.plan import Plan, Step, simulate
from fsdp_compile.passes.plan.schedule import (
    TOLERANCE,
    PlannedStep,
    Preference,
    Scheduler,
    alternating,
    keep_by_rule,
    search_plan,
)
from fsdp_compile.passes.plan.workload import UnitCost, Workload, smallest_budget

_RATIOS = (4.0, 0.25, 2.8, 0.35, 2.0, 0.5, 1.4, 0.7)  # by which the prices of the link may be off from those of tasks
_WORSE = 0.009  # of the step: what a plan may take longer than the rule if prices are off
_WORTH = 0.005  # of the step: what more memory than that of the rule has to save


def safe_plan(
    workload: Workload, budget: int | None = None, found: PlannedStep | None = None, is_lean: bool = False
) -> PlannedStep:
    """Return a plan as short as `search_plan` finds that is no worse than the rule if prices are wrong.

    It has no more buffers alive than the rule, unless they make the step shorter by half a percent. See Note [Plans for
    wrong prices].

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        found: what `search_plan` has found; None: search.
        is_lean: whether it never has more buffers alive than the rule; in a step with updates, which has no rule, than
            it needs and two of the largest units.

    Raises:
        PlanError: as of `search_plan`.
    """
    rule = None if workload.forward else simulate(workload, alternating(workload))  # the rule knows of no updates
    if rule is None and is_lean:
        budget = smallest_budget(workload) + 2 * max((unit.gathered for unit in workload.units), default=0)
    if rule is None or (budget is not None and rule.peak > budget):
        found = found or search_plan(workload, budget)
        return _early(workload, workload, found, found.plan, _kept(workload, found), budget or found.peak)
    lean = _as_lean_as_the_rule(workload, rule.peak)
    best = _safest(workload, lean, search_plan(lean, rule.peak), rule.makespan, rule.peak)
    if best.seconds > best.bound / (1 - _WORTH) and not is_lean:
        found = found or search_plan(workload, budget)
        if found.seconds < best.seconds * (1 - _WORTH):
            more = _safest(workload, workload, found, rule.makespan, max(rule.peak, found.peak))
            best = more if more.seconds < best.seconds * (1 - _WORTH) else best
    return best


def _as_lean_as_the_rule(workload: Workload, peak: int) -> Workload:
    """`workload` with so much memory in each task that a plan within `peak` has no more buffers than the rule."""
    empty = replace(workload, tasks=tuple(replace(task, memory=0) for task in workload.tasks))
    beneath = peak - simulate(empty, alternating(empty)).peak
    tasks = tuple(replace(task, memory=max(task.memory, beneath)) for task in workload.tasks)
    return replace(workload, tasks=tasks)


def _kept(workload: Workload, found: PlannedStep) -> frozenset[int]:
    return frozenset(at for at, unit in enumerate(workload.units) if unit.name in found.keep_unsharded)


def _safest(workload: Workload, lean: Workload, found: PlannedStep, usual: float, limit: int) -> PlannedStep:
    """Of plans for `lean` within `limit` bytes that are safe the first as short as `found`, or else the shortest."""
    keep, rule = _kept(workload, found), alternating(workload)
    priced = [_with_link(lean, ratio) for ratio in _RATIOS]
    least = [simulate(each, rule).makespan for each in priced]
    best: PlannedStep | None = None
    tried = set[Plan]()
    for kept, plan in _alike(lean, found.plan, rule, keep, limit, priced):
        if plan in tried:
            continue
        tried.add(plan)
        made = _early(workload, lean, found, plan, kept, limit)
        if simulate(lean, made.plan).peak > limit or (best is not None and made.seconds >= best.seconds):
            continue
        longer = 1 + max(_WORSE, (1 - made.seconds / usual) / 4 if usual else 0.0)
        if all(simulate(each, made.plan).makespan <= most * longer for each, most in zip(priced, least, strict=True)):
            best = made
            if best.seconds <= found.seconds * (1 + TOLERANCE):
                break
    return best or found


def _alike(
    workload: Workload, plan: Plan, rule: Plan, keep: frozenset[int], limit: int, priced: Sequence[Workload]
) -> Iterator[tuple[frozenset[int], Plan]]:
    """Units that are kept unsharded, and a plan: those that are known, and others by the scheduler at other prices."""
    yield keep, plan
    yield keep_by_rule(workload), rule
    yield keep, alternating(workload, keep)
    for each in (*priced, workload):
        scheduler = Scheduler(each, keep, limit)
        for preference in (Preference(), Preference(reduce_first=False), Preference(forward=1, backward=1)):
            if (made := scheduler.run(preference)) is not None:
                yield keep, made.plan


def _early(
    workload: Workload, lean: Workload, found: PlannedStep, plan: Plan, keep: frozenset[int], limit: int
) -> PlannedStep:
    """`plan` with launches as early as `limit` bytes allow by the memory of `lean`, and what it takes."""
    plan = launched_early(lean, plan, limit)
    timeline, names = simulate(workload, plan), tuple(workload.units[unit].name for unit in sorted(keep))
    return replace(found, plan=plan, keep_unsharded=names, seconds=timeline.makespan, peak=timeline.peak)


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
