"""What becomes of each block's activations between forward and backward: the fastest mix within a budget.

A block's activations stay alive until backward reads them, or are computed again there. Together with which units stay
unsharded, which `search_plan` chooses, that decides how much is alive and how long the step is.

    Choices          a step, and for each of its blocks the ways in which its activations may be treated
      workload_of    the step that a mix of ways makes, as the planner sees it
    choose           of all mixes that are tried the one with the shortest plan within the budget

Note [Which mixes are tried]
Three kinds: all activations stay; the first blocks by some order are treated in one and the same way, for every number
of blocks and every way; and the mixes on the way from the first to the last of these, in which each step takes the
block and the way that saves the most bytes for each second that it costs; that again for the blocks that remain where
a quarter, half or three quarters of them are copied to the host. Every mix is searched with the units' choice
open, and, where the search is not exact, also with every unit resharded. So the result is never slower than units that
stay unsharded with all activations, nor than one way for so many blocks with every unit resharded: all of these are
among the candidates. A mix is left out only if a lower bound shows that it cannot be faster than one that is known, by
more than the tolerance of the search.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fsdp_compile.passes.plan.bound import lower_bound, smallest_budget
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.search import EXACT_UNITS, TOLERANCE, PlannedStep, search_plan
from fsdp_compile.passes.plan.update import UpdateCost, with_update
from fsdp_compile.passes.plan.workload import Task, Workload

KEEP = "keep"


@dataclass(frozen=True)
class Repeat:
    """A task of forward that backward computes again.

    Attributes:
        task: its index.
        part: the part of its seconds that is computed again.
        memory: bytes of what is computed again that are alive meanwhile.
    """

    task: int
    part: float
    memory: int


@dataclass(frozen=True)
class Copy:
    """Activations that are copied to the host in forward, and back in backward.

    Attributes:
        made: the task of forward that computes them.
        left: the task of forward at whose end the copy has been made, and they are freed.
        back: the task of backward at whose beginning they begin to be copied back.
        read: the task of backward that reads them first.
        size: their bytes.
        seconds: of each of the two copies.
    """

    made: int
    left: int
    back: int
    read: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Way:
    """What may be done with the activations of a block, other than keeping them.

    Attributes:
        name: for people.
        at: the task of backward that is the first to read them.
        changes: `(position, bytes)`: so many more, or fewer, are alive from there on.
        repeats: what is computed again before task `at`, in order.
        returns: bytes that are alive from task `at` on because they have been computed again.
        copies: what is copied to the host and back.
    """

    name: str
    at: int
    changes: tuple[tuple[int, int], ...]
    repeats: tuple[Repeat, ...]
    returns: int
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Block:
    """A block whose activations may be treated in one of some ways, or plain."""

    name: str
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Choices:
    """A step, and what may be chosen in it.

    Attributes:
        plain: the step in which all activations stay.
        stored: the same step, where the inputs of all blocks are stored: all other mixes begin there.
        live: bytes that are alive at each position in `stored`, beside gathered and packed buffers.
        fresh: bytes of these, at the first position of each task, that are alive since there.
        starts: the first position of each task.
        blocks: the blocks, in the order of forward.
        update: what follows backward, whatever is chosen; None: it is not planned.
    """

    plain: Workload
    stored: Workload
    live: tuple[int, ...]
    fresh: tuple[int, ...]
    starts: tuple[int, ...]
    blocks: tuple[Block, ...]
    update: UpdateCost | None = None


Mix = tuple[Way | None, ...]  # for each block; None: its activations stay


@dataclass(frozen=True)
class Chosen:
    """A mix, the step that it makes, and the plan for that."""

    mix: Mix
    workload: Workload
    planned: PlannedStep

    @property
    def seconds(self) -> float:
        """Of the step, by the simulator."""
        return self.planned.seconds


def workload_of(choices: Choices, mix: Mix) -> Workload:
    """The step in which each block's activations are treated as `mix` says."""
    step = _computed(choices, mix)
    return step if choices.update is None else with_update(step, choices.update)


def _computed(choices: Choices, mix: Mix) -> Workload:
    """The forward and the backward of that."""
    ways = [way for way in mix if way is not None]
    if not ways:
        return choices.plain
    live = live_of(choices, mix)
    again: dict[int, list[Task]] = {}
    for way in ways:
        beside = live[choices.starts[way.at]] - choices.fresh[way.at] - way.returns
        again.setdefault(way.at, []).extend(_repeated(choices.stored, repeat, beside) for repeat in way.repeats)
    tasks: list[Task] = []
    waits = _waits(choices.stored, [copy for way in ways for copy in way.copies])
    ends = [*choices.starts[1:], len(live)]
    for index, (task, begin, end) in enumerate(zip(choices.stored.tasks, choices.starts, ends, strict=True)):
        seconds = task.seconds + waits.get(index, 0.0)
        tasks += [*again.get(index, ()), replace(task, seconds=seconds, memory=max(live[begin:end]))]
    return replace(choices.stored, tasks=tuple(tasks))


def live_of(choices: Choices, mix: Mix) -> list[int]:
    """Bytes that are alive at each position beside gathered and packed buffers, and what is computed again."""
    changes = [0] * (len(choices.live) + 1)
    for way in mix:
        for position, size in way.changes if way is not None else ():
            changes[position] += size
    return [size + change for size, change in zip(choices.live, accumulate(changes), strict=False)]


def _waits(step: Workload, copies: Sequence[Copy]) -> dict[int, float]:
    """Seconds that tasks wait for copies, one after the other on the host's link, if nothing else delays them."""
    waits: dict[int, float] = {}
    ready: dict[Copy, float] = {}
    at = {name: defaultdict[int, list[Copy]](list) for name in ("made", "left", "back", "read")}
    for copy in copies:
        for name, of_task in at.items():
            of_task[getattr(copy, name)].append(copy)
    now = link = 0.0
    for index, task in enumerate(step.tasks if copies else ()):
        for copy in at["back"].get(index, ()):
            ready[copy] = link = max(link, now) + copy.seconds
        end = max([now, *(ready[copy] for copy in at["read"].get(index, ()))]) + task.seconds
        for copy in at["made"].get(index, ()):
            ready[copy] = link = max(link, end) + copy.seconds
        end = max([end, *(ready[copy] for copy in at["left"].get(index, ()))])
        waits[index] = end - now - task.seconds
        now = end
    return waits


def _repeated(step: Workload, repeat: Repeat, beside: int) -> Task:
    task = step.tasks[repeat.task]
    return Task(f"{task.name} again", task.seconds * repeat.part, max(0, beside) + repeat.memory, task.reads)


# --- the search -------------------------------------------------------------------------------------------------------


def planned(choices: Choices, mix: Mix, budget: int | None) -> Chosen:
    """`mix`, and the plan that the search finds for it. PlanError if none fits into the budget."""
    workload = workload_of(choices, mix)
    return Chosen(mix, workload, search_plan(workload, budget))


def choose(choices: Choices, budget: int | None) -> Chosen:
    """The mix with the shortest plan within the budget. See Note [Which mixes are tried].

    Args:
        choices: the step.
        budget: bytes that may live at most; None: no limit.

    Raises:
        PlanError: no mix has a plan within the budget; the message says which budget has one.
    """
    best: Chosen | None = None
    fitting = [mix for mix in mixes(choices) if budget is None or _may_fit(choices, mix, budget)]
    computing = {mix: _computing(choices, mix) for mix in fitting}
    for mix in sorted(fitting, key=computing.__getitem__):
        if best is not None and computing[mix] >= best.seconds * (1 - TOLERANCE):
            break  # neither this mix nor one that follows can take fewer seconds
        workload = workload_of(choices, mix)
        if budget is not None and smallest_budget(workload) > budget:
            continue
        for variant in _variants(workload):
            if best is None or lower_bound(variant, None, budget) < best.seconds * (1 - TOLERANCE):
                result = Chosen(mix, workload, search_plan(variant, budget))
                best = result if best is None or result.seconds < best.seconds else best
    if best is None:
        least = min(smallest_budget(workload_of(choices, mix)) for mix in mixes(choices))
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        "when it is read and reduced when it is ready, and activations are treated so that the least "
                        f"of them is alive, found {budget}")  # fmt: skip
    return best


def _may_fit(choices: Choices, mix: Mix, budget: int) -> bool:
    """Whether `mix` may have a plan within the budget: beside what is alive there are gathered and packed buffers."""
    return max(live_of(choices, mix) if any(mix) else [task.memory for task in choices.plain.tasks]) <= budget


def _variants(workload: Workload) -> Iterator[Workload]:
    """`workload`, and where its search is not exact also the one in which every unit that may be is resharded."""
    yield workload
    if workload.may_keep and len(workload.units) > EXACT_UNITS:
        units = (replace(unit, keep_unsharded=bool(unit.keep_unsharded)) for unit in workload.units)
        yield replace(workload, units=tuple(units))


def mixes(choices: Choices) -> list[Mix]:
    """The mixes that are tried. See Note [Which mixes are tried]."""
    blocks = choices.blocks
    keep: Mix = (None,) * len(blocks)
    result: dict[Mix, None] = {keep: None}
    for name in dict.fromkeys(way.name for block in blocks for way in block.ways):
        mix = list(keep)
        named = [(at, way) for at, block in enumerate(blocks) for way in block.ways if way.name == name]
        for at, way in sorted(named, key=lambda each: (-_worth(choices, each[1]), each[0])):
            mix[at] = way
            result[tuple(mix)] = None
    copied = [mix for mix in result if any(way is not None and way.copies for way in mix)]
    for begin in (keep, *(copied[len(copied) * part // 4] for part in (1, 2, 3) if copied)):
        mix = list(begin)
        while steps := [
            (at, way) for at, block in enumerate(blocks) for way in block.ways if _saves_more(way, mix[at])
        ]:
            at, way = max(steps, key=lambda each: (_worth(choices, each[1], mix[each[0]]), -each[0]))
            mix[at] = way
            result[tuple(mix)] = None
    return list(result)


def _saved(way: Way | None) -> int:
    """Bytes that are not alive between forward and backward."""
    return way.returns + sum(copy.size for copy in way.copies) if way is not None else 0


def _saves_more(way: Way, than: Way | None) -> bool:
    """Whether a way that computes again saves more than another one; what is copied stays so."""
    return not way.copies and not (than is not None and than.copies) and _saved(way) > _saved(than)


def _worth(choices: Choices, way: Way, than: Way | None = None) -> float:
    """Bytes that a way saves for each second that it costs, both beside another one."""
    seconds = _seconds(choices, way) - (_seconds(choices, than) if than is not None else 0.0)
    return (_saved(way) - _saved(than)) / max(seconds, 1e-12)


def _seconds(choices: Choices, way: Way) -> float:
    return sum(choices.stored.tasks[repeat.task].seconds * repeat.part for repeat in way.repeats)


def _computing(choices: Choices, mix: Mix) -> float:
    """Seconds that the step computes, and waits for copies: no plan takes fewer."""
    waits = _waits(choices.stored, [copy for way in mix if way is not None for copy in way.copies])
    again = sum(_seconds(choices, way) for way in mix if way is not None)
    return sum(task.seconds for task in choices.plain.tasks) + again + sum(waits.values())
