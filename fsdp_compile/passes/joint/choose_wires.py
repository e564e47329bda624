"""Choose the formats of `wire="auto"`: full precision wherever giving it up would save next to nothing.

    1. all in their narrowest formats: the shortest step that is predicted
    2. all in full, if that takes at most 1 % more
    3. else one by one, or many at once where that is as good, in full, or in the next wider format, as long as the step
       that is predicted stays within 1 % of the shortest; the quickest collectives first, so that few stay narrow
    4. all in full after all, if what is left saves less than 1 %

So nothing loses precision that communicates while others compute anyway. What a step takes is judged by the plans that
are known, those of 1, 2 and of each round of 3, because making one takes a second. Without a link nothing is known of
seconds, and all is sent in full.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import fx

from fsdp_compile.comm.formats import FORMATS, allowed_formats, ratio
from fsdp_compile.passes.agreement import decide_together, shape_of
from fsdp_compile.passes.graph.nodes import set_tag, tag_of, tagged
from fsdp_compile.passes.graph.prices import Prices, prices_of
from fsdp_compile.passes.graph.work import size_of
from fsdp_compile.passes.pipeline import GraphContext, log
from fsdp_compile.passes.plan.plan import Plan, PlanError, simulate
from fsdp_compile.passes.plan.schedule import search_plan as safe_plan
from fsdp_compile.passes.plan.workload import Workload

WORTH = 0.01  # of a step, for which precision is given up

Slot = tuple[Literal["gather", "reduce"], int]
"""The gather or the reduce of a unit, by its number in tags."""

Formats = Mapping[Slot, str]
"""By slot its format; empty: in full."""


def choose_wires(context: GraphContext) -> None:
    """Give the collectives of units that leave it open a format, or none."""
    graph = context.graph
    is_open = [start for start in tagged(graph, "gather", "reduce") if allowed_formats(tag_of(start).wire)]
    slots: dict[Slot, list[fx.Node]] = {}
    for start in is_open:
        slots.setdefault(_slot_of(start), []).append(start)
    if slots:
        allowed = {slot: ("", *allowed_formats(tag_of(starts[0]).wire)) for slot, starts in slots.items()}
        prices = prices_of(graph, context.config)
        chosen = dict.fromkeys(slots, "") if prices is None else _agreed_formats(context, prices, slots, allowed)
        for slot, starts in slots.items():
            _set_format(starts, chosen[slot])
    _name_by_format(graph)
    _log_formats(graph)


# Note [Names say the format]
# Compilers keep code by the text of graphs, which has names but no tags, and what is sent in a format is rewritten
# behind that (post_grad/messages.py). So names differ where formats do: else a model would run with the code of another
# one, or of a run before, that has other formats. Without this pass nothing is sent in a format.
def _name_by_format(graph: fx.Graph) -> None:
    """See Note [Names say the format]."""
    names = {node.name for node in graph.nodes}
    for start in tagged(graph, "gather", "reduce"):
        if tag_of(start).wire in FORMATS:
            name = f"{start.name}_{tag_of(start).wire}"
            while name in names:
                name += "_"
            names.add(name)
            start.name = name


def _slot_of(start: fx.Node) -> Slot:
    tag = tag_of(start)
    return ("gather" if tag.kind == "gather" else "reduce"), tag.unit


def _set_format(starts: Sequence[fx.Node], wire: str) -> None:
    for start in starts:
        set_tag(start, replace(tag_of(start), wire=wire))


def _agreed_formats(
    context: GraphContext,
    prices: Prices,
    slots: Mapping[Slot, Sequence[fx.Node]],
    allowed: Mapping[Slot, Sequence[str]],
) -> dict[Slot, str]:
    """The formats on which ranks agree: those that the first of them chooses."""
    step = _Step(context.graph, prices, slots, allowed)

    def make() -> dict[str, Any]:
        found = widest(step.quickest_first(), _Prediction(step, context.config.budget))
        return {f"{kind} {unit}": format for (kind, unit), format in found.items()}

    def read(table: dict[str, Any]) -> dict[Slot, str]:
        found = {slot: table["{} {}".format(*slot)] for slot in allowed}
        for slot, format in found.items():
            if format not in allowed[slot]:
                raise ValueError(f"{slot}: expected one of {allowed[slot]}, found {format!r}")
        return found

    key = shape_of(step.workload(dict.fromkeys(allowed, "")), context.config, "wires", *sorted(allowed.items()))
    return decide_together(key, make, read)


class _Step:
    """The workload of the joint graph for any choice of formats."""

    def __init__(
        self,
        graph: fx.Graph,
        prices: Prices,
        slots: Mapping[Slot, Sequence[fx.Node]],
        allowed: Mapping[Slot, Sequence[str]],
    ) -> None:
        self.allowed = allowed
        self.units: dict[str, int] = {}  # numbers in tags by name
        self.by_format: dict[str, Workload] = {}
        for format in dict.fromkeys(each for formats in allowed.values() for each in formats):
            for slot, starts in slots.items():
                _set_format(starts, format if format in allowed[slot] else "")
            info = prices.read(graph, "joint")
            self.by_format[format] = info.workload
            for name, gather in info.gathers.items():
                self.units[name] = tag_of(gather.start[-1]).unit
            for name, reduce in info.reduces.items():
                self.units.setdefault(name, tag_of(reduce.start[-1]).unit)

    def workload(self, chosen: Formats) -> Workload:
        """With the seconds of the chosen formats."""
        units = []
        for at, unit in enumerate(self.by_format[""].units):
            number = self.units.get(unit.name, -1)
            gather = self.by_format[chosen.get(("gather", number), "")].units[at]
            reduce = self.by_format[chosen.get(("reduce", number), "")].units[at]
            units.append(replace(unit, gather=gather.gather, reduce=reduce.reduce, replicate=reduce.replicate))
        return replace(self.by_format[""], units=tuple(units))

    def quickest_first(self) -> dict[Slot, Sequence[str]]:
        """What is allowed, in the order of seconds in full."""
        seconds: dict[Slot, float] = dict.fromkeys(self.allowed, 0.0)
        for unit in self.by_format[""].units:
            number = self.units.get(unit.name, -1)
            for slot, took in {("gather", number): unit.gather, ("reduce", number): unit.reduce}.items():
                if slot in seconds:
                    seconds[slot] += took
        return {slot: self.allowed[slot] for slot in sorted(self.allowed, key=lambda slot: (seconds[slot], slot))}


class Predicted(Protocol):
    """What steps take."""

    def planned(self, chosen: Formats) -> float:
        """Seconds of the step by a plan made for these formats, which is known from then on."""

    def by_known_plans(self, chosen: Formats) -> float:
        """Seconds of the step by the best of the plans that are known."""


class _Prediction:
    def __init__(self, step: _Step, budget: int | None) -> None:
        self.step, self.budget, self.plans = step, budget, list[Plan]()

    def planned(self, chosen: Formats) -> float:
        """As in `Predicted`."""
        workload = self.step.workload(chosen)
        try:
            found = safe_plan(workload, self.budget)
        except PlanError:  # the bound of memory is too high here, or the graph's own plan will say it
            found = safe_plan(workload)
        self.plans.append(found.plan)
        return self.by_known_plans(chosen)

    def by_known_plans(self, chosen: Formats) -> float:
        """As in `Predicted`."""
        workload = self.step.workload(chosen)
        return min(simulate(workload, plan).makespan for plan in self.plans)


def widest(allowed: Mapping[Slot, Sequence[str]], predicted: Predicted) -> dict[Slot, str]:
    """For each slot one of its formats, of which the widest comes first: see this file's first lines."""
    full = {slot: formats[0] for slot, formats in allowed.items()}
    chosen = {slot: formats[-1] for slot, formats in allowed.items()}
    limit, in_full = predicted.planned(chosen) * (1 + WORTH), predicted.planned(full)
    if in_full <= limit:
        return full
    before: dict[Slot, str] = {}
    while chosen != before:
        before = dict(chosen)
        _widen(chosen, allowed, lambda trial: predicted.by_known_plans(trial) <= limit)
        seconds = predicted.planned(chosen)
    return full if in_full <= seconds * (1 + WORTH) else chosen


def _widen(chosen: dict[Slot, str], allowed: Mapping[Slot, Sequence[str]], is_short: Callable[[Formats], bool]) -> None:
    """Give as many slots as can have it a wider format, the widest first."""

    def widen(slots: Sequence[Slot], level: int) -> None:
        """Give `slots` the format `level` places behind their widest, or as many as can have it."""
        trial = {slot: allowed[slot][level] for slot in slots}
        if not slots or is_short({**chosen, **trial}):
            chosen.update(trial)
        elif len(slots) > 1:
            half = len(slots) // 2
            widen(slots[:half], level)
            widen(slots[half:], level)

    for level in range(max(map(len, allowed.values())) - 1):
        widen([slot for slot, formats in allowed.items() if level < formats.index(chosen[slot])], level)


def _log_formats(graph: fx.Graph) -> None:
    """Log which formats the graph has, and how many bytes they leave."""
    counted: Counter[tuple[str, str]] = Counter()
    full: Counter[tuple[str, str]] = Counter()
    for start in tagged(graph, "gather", "reduce"):
        what = tag_of(start).kind, tag_of(start).wire
        counted[what] += 1
        full[what] += max(size_of(start), size_of(start.all_input_nodes[0]))
    if not any(format for _, format in counted):
        return
    for (kind, format), count in sorted(counted.items()):
        name = "all-gathers" if kind == "gather" else "reduces"
        dtype = next(each.meta["val"].dtype for each in tagged(graph, "gather", "reduce")
                     if (tag_of(each).kind, tag_of(each).wire) == (kind, format))  # fmt: skip
        size = full[kind, format] / 1e6
        sent = f"full: {size:.1f} MB"
        if format:
            sent = f"{format}: {size * ratio(format, dtype):.1f} MB in place of {size:.1f}"
        log.info("wire: %d %s in %s", count, name, sent)
