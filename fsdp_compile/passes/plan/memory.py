"""What becomes of each block's activations between forward and backward: the fastest choice within a budget.

A block's activations stay alive until backward reads them, are computed again there, or are copied to the host and
back. Together with which units stay unsharded, which `search_plan` chooses, that decides how much is alive and how long
the step is.

    Options        a step, and for each of its blocks the policies that its activations may have
    workload_of    the step that a policy for each block makes, as the planner sees it
    choose         of the choices that are tried the one with the shortest plan within the budget

One knob is turned: the first blocks, by what a policy saves for its seconds, have that policy, and all others have
another one or keep their activations. So the result is never slower than units that stay unsharded with all
activations, nor than one policy for so many blocks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.schedule import TOLERANCE, PlannedStep, search_plan
from fsdp_compile.passes.plan.workload import Task, UpdateCost, Workload, lower_bound, smallest_budget, with_update

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
class Policy:
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
    """A block, and the policies that its activations may have beside being kept."""

    name: str
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class Options:
    """A step, and what may be chosen in it.

    Attributes:
        plain: the step in which all activations stay.
        stored: the same step, where the inputs of all blocks are stored: policies change this one.
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


PolicyPerBlock = tuple[Policy | None, ...]  # for each block; None: its activations stay


@dataclass(frozen=True)
class Result:
    """A policy for each block, the step that this makes, and the plan for it."""

    policies: PolicyPerBlock
    workload: Workload
    planned: PlannedStep

    @property
    def seconds(self) -> float:
        """Of the step, by the simulator."""
        return self.planned.seconds


def workload_of(options: Options, policies: PolicyPerBlock) -> Workload:
    """The step in which each block's activations have a policy, or are kept."""
    step = _computed(options, policies)
    return step if options.update is None else with_update(step, options.update)


def _computed(options: Options, policies: PolicyPerBlock) -> Workload:
    """The forward and the backward of that."""
    active = [each for each in policies if each is not None]
    if not active:
        return options.plain
    live = live_of(options, policies)
    again: dict[int, list[Task]] = {}
    for policy in active:
        beside = live[options.starts[policy.at]] - options.fresh[policy.at] - policy.returns
        again.setdefault(policy.at, []).extend(_repeated(options.stored, repeat, beside) for repeat in policy.repeats)
    tasks: list[Task] = []
    waits = _waits(options.stored, [copy for policy in active for copy in policy.copies])
    ends = [*options.starts[1:], len(live)]
    for index, (task, begin, end) in enumerate(zip(options.stored.tasks, options.starts, ends, strict=True)):
        seconds = task.seconds + waits.get(index, 0.0)
        tasks += [*again.get(index, ()), replace(task, seconds=seconds, memory=max(live[begin:end]))]
    return replace(options.stored, tasks=tuple(tasks))


def live_of(options: Options, policies: PolicyPerBlock) -> list[int]:
    """Bytes that are alive at each position beside gathered and packed buffers, and what is computed again."""
    changes = [0] * (len(options.live) + 1)
    for policy in policies:
        for position, size in policy.changes if policy is not None else ():
            changes[position] += size
    return [size + change for size, change in zip(options.live, accumulate(changes), strict=False)]


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


# --- the choice -------------------------------------------------------------------------------------------------------


def planned(options: Options, policies: PolicyPerBlock, budget: int | None) -> Result:
    """A choice, and the plan that is found for it. PlanError if none fits into the budget."""
    workload = workload_of(options, policies)
    return Result(policies, workload, search_plan(workload, budget))


def choose(options: Options, budget: int | None) -> Result:
    """Of all that is tried the choice with the shortest plan within the budget.

    A choice is left out only if no plan for it can be shorter, by more than the search's tolerance, than a known one.

    Args:
        options: the step.
        budget: bytes that may live at most; None: no limit.

    Raises:
        PlanError: no choice has a plan within the budget; the message says which budget has one.
    """
    best: Result | None = None
    tried = choices(options)
    computing = {policies: _computing(options, policies) for policies in tried if _may_fit(options, policies, budget)}
    for policies in sorted(computing, key=computing.__getitem__):
        most = best.seconds * (1 - TOLERANCE) if best is not None else inf
        if computing[policies] >= most:
            break  # neither this choice nor one that follows can take fewer seconds
        workload = workload_of(options, policies)
        fits = budget is None or smallest_budget(workload) <= budget
        if fits and lower_bound(workload) < most:
            closed = replace(
                workload,
                units=tuple(replace(each, keep_unsharded=bool(each.keep_unsharded)) for each in workload.units),
            )
            found = min((search_plan(each, budget) for each in (workload, closed)), key=lambda each: each.seconds)
            best = Result(policies, workload, found) if found.seconds < most else best
    if best is None:
        least = min(smallest_budget(workload_of(options, policies)) for policies in tried)
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        "when it is read and reduced when it is ready, and activations are treated so that the least "
                        f"of them is alive, found {budget}")  # fmt: skip
    return best


def choices(options: Options) -> list[PolicyPerBlock]:
    """What is tried: all activations stay; or so many blocks have one policy, and the others another one, or none."""
    names = list(dict.fromkeys(policy.name for block in options.blocks for policy in block.policies))
    by_name = {name: tuple(_named(block, name) for block in options.blocks) for name in names}
    kept: PolicyPerBlock = (None,) * len(options.blocks)
    result = {kept: None}
    for name, policies in by_name.items():
        worth = {at: _worth(options, policy) for at, policy in enumerate(policies) if policy is not None}
        order = sorted(worth, key=lambda at: (-worth[at], at))
        for others in (kept, *(each for other, each in by_name.items() if other != name)):
            chosen = list(others)
            for at in order:
                chosen[at] = policies[at]
                result[tuple(chosen)] = None
    return list(result)


def _named(block: Block, name: str) -> Policy | None:
    return next((policy for policy in block.policies if policy.name == name), None)


def _worth(options: Options, policy: Policy) -> float:
    """Bytes that a policy saves for each second that it computes."""
    saved = policy.returns + sum(copy.size for copy in policy.copies)
    return saved / max(_seconds(options, policy), 1e-12)


def _may_fit(options: Options, policies: PolicyPerBlock, budget: int | None) -> bool:
    """Whether there may be a plan within the budget: beside what is alive there are gathered and packed buffers."""
    live = live_of(options, policies) if any(policies) else [task.memory for task in options.plain.tasks]
    return budget is None or max(live) <= budget


def _seconds(options: Options, policy: Policy) -> float:
    return sum(options.stored.tasks[repeat.task].seconds * repeat.part for repeat in policy.repeats)


def _computing(options: Options, policies: PolicyPerBlock) -> float:
    """Seconds that the step computes, and waits for copies: no plan takes fewer."""
    active = [policy for policy in policies if policy is not None]
    waits = _waits(options.stored, [copy for policy in active for copy in policy.copies])
    again = sum(_seconds(options, policy) for policy in active)
    return sum(task.seconds for task in options.plain.tasks) + again + sum(waits.values())
