"""The plan that recorded prices ask for, if it is worth a compilation."""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from fsdp_compile.learning.prices import Record, priced_by
from fsdp_compile.passes.plan.plan import Plan, PlanError, simulate
from fsdp_compile.passes.plan.safe import by_block, launched_early, safe_plan
from fsdp_compile.passes.plan.schedule import alternating, plans_by_rules, search_plan
from fsdp_compile.passes.plan.workload import Workload

SHORTER, SMALLER = 0.01, 0.03  # of the step and of its peak: what a new plan has to save
OFF = 1.0, 0.9, 1.1  # times as long as recorded the link takes, at which plans are judged
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

    The rule and what blocks compiled one by one do are among those that are compared. A record is of one step and
    tells of the link to some percent. Where collectives just fit behind computing, a plan that is the shortest by one
    exposes a third more by others. So a plan is judged by the mean of what it takes on links near the recorded one.

    Args:
        graphs: as they run, by direction.
        records: of one step of each.
        budget: bytes that may live at most; None: there is no limit.
        is_lean: whether plans need no more memory than the rule or the plan that runs.
    """
    plans, names, seconds, peaks = dict[str, Plan](), dict[str, str](), [0.0, 0.0], [0, 0]
    for direction, (estimated, current) in graphs.items():
        record = records[direction]
        near = [priced_by(estimated, record.seconds, record.link * off) for off in OFF]
        workload = near[0]
        rule, peak = alternating(workload), simulate(workload, current).peak
        most = budget if not is_lean else max(peak, simulate(workload, rule).peak)
        known = {current: "as it was", rule: "rule", by_block(workload): "blocks"}
        known |= {each.plan: "rule" for each in plans_by_rules(workload) if each.plan not in known}
        try:
            found = [search_plan(each, most) for each in near]
            known |= {each.plan: "searched" for each in found if each.plan not in known}
            known.setdefault(safe_plan(workload, most, found[0]).plan, "safe")
        except PlanError:  # recorded prices change no bytes, so that the rule or the plan that runs fits
            pass
        for plan, name in list(known.items()):
            known.setdefault(launched_early(workload, plan, simulate(workload, plan).peak), name)
        timed = {plan: [simulate(each, plan) for each in near] for plan in known}
        peaks_of = {plan: timelines[0].peak for plan, timelines in timed.items()}
        takes = {plan: statistics.fmean(each.makespan for each in timelines) for plan, timelines in timed.items()}
        fit = [plan for plan in known if most is None or peaks_of[plan] <= most] or [current]
        shortest = min(takes[plan] for plan in fit)
        alike = [plan for plan in fit if takes[plan] <= shortest * (1 + _ALIKE)]
        best = min(alike, key=lambda plan: (peaks_of[plan], takes[plan]))
        plans[direction], names[direction] = best, known[best]
        for at, plan in enumerate((current, best)):
            seconds[at] += takes[plan]
            peaks[at] = max(peaks[at], peaks_of[plan])
    return Replanned(plans, names, (seconds[0], seconds[1]), (peaks[0], peaks[1]))
