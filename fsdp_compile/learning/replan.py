"""The plan that recorded prices ask for, if it is worth a compilation."""

from collections.abc import Mapping
from typing import NamedTuple

from fsdp_compile.learning.prices import Record, priced_by
from fsdp_compile.passes.plan.plan import Plan, PlanError, simulate
from fsdp_compile.passes.plan.safe import by_block, launched_early, safe_plan
from fsdp_compile.passes.plan.schedule import alternating, plans_by_rules, search_plan
from fsdp_compile.passes.plan.workload import Workload

SHORTER, SMALLER = 0.01, 0.03  # of the step and of its peak: what a new plan has to save
_ALIKE = 0.004  # of the step: how much longer a plan may be that needs less memory


class Graph(NamedTuple):
    """A graph in one direction as it runs: what it computes, by the prices of its plan, and the plan."""

    workload: Workload
    plan: Plan


class Replanned(NamedTuple):
    """Plans by recorded prices.

    Attributes:
        plans: by direction.
        names: by direction, what the plan is: "rule", "blocks", "searched", "safe" or "as it was".
        seconds: that graphs take by these prices, as they run and by the new plans, all directions together.
        peaks: bytes that live at most, likewise.
    """

    plans: dict[str, Plan]
    names: dict[str, str]
    seconds: tuple[float, float]
    peaks: tuple[int, int]

    @property
    def pays(self) -> bool:
        """Whether the new plans save enough time or memory to be compiled."""
        (before, after), (most, least) = self.seconds, self.peaks
        return after <= before * (1 - SHORTER) or (least <= most * (1 - SMALLER) and after <= before * (1 + _ALIKE))


def replanned(
    graphs: Mapping[str, Graph], records: Mapping[str, Record], budget: int | None = None, is_lean: bool = False
) -> Replanned:
    """The plans that are the shortest by recorded prices; of those as short within 0.4 % that in the least memory.

    The rule and what blocks compiled one by one do are among those that are compared.

    Args:
        graphs: as they run, by direction.
        records: of one step of each.
        budget: bytes that may live at most; None: there is no limit.
        is_lean: whether plans need no more memory than the rule or the plan that runs.
    """
    plans, names, seconds, peaks = dict[str, Plan](), dict[str, str](), [0.0, 0.0], [0, 0]
    for direction, (estimated, current) in graphs.items():
        record = records[direction]
        workload = priced_by(estimated, record.seconds, record.link)
        rule, now = alternating(workload), simulate(workload, current)
        most = budget if not is_lean else max(now.peak, simulate(workload, rule).peak)
        known = {current: "as it was", rule: "rule", by_block(workload): "blocks"}
        known |= {each.plan: "rule" for each in plans_by_rules(workload) if each.plan not in known}
        try:
            found = search_plan(workload, most)
            known.setdefault(found.plan, "searched")
            known.setdefault(safe_plan(workload, most, found).plan, "safe")
        except PlanError:  # recorded prices change no bytes, so that the rule or the plan that runs fits
            pass
        for plan, name in list(known.items()):
            known.setdefault(launched_early(workload, plan, simulate(workload, plan).peak), name)
        timed = {plan: simulate(workload, plan) for plan in known}
        fit = [plan for plan, each in timed.items() if most is None or each.peak <= most] or [current]
        shortest = min(timed[plan].makespan for plan in fit)
        alike = [plan for plan in fit if timed[plan].makespan <= shortest * (1 + _ALIKE)]
        best = min(alike, key=lambda plan: (timed[plan].peak, timed[plan].makespan))
        plans[direction], names[direction] = best, known[best]
        for at, each in enumerate((now, timed[best])):
            seconds[at] += each.makespan
            peaks[at] = max(peaks[at], each.peak)
    return Replanned(plans, names, (seconds[0], seconds[1]), (peaks[0], peaks[1]))
