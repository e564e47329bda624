"""What becomes of each block's activations between forward and backward: the fastest choice within a budget.

A block's activations stay alive until backward reads them, or are computed again there, or are copied to the host and
back. `search_plan` chooses which units stay unsharded at the same time.

    Options        a step, and for each of its blocks the policies that its activations may have
    workload_of    the step as the planner sees it, if each block has a certain policy
    choose         of the choices that are tried the one with the shortest plan within the budget

The choices have one knob: the first blocks, in the order of bytes saved for each second, have one policy, and the
others have another one or keep their activations. So the result is never slower than keeping all activations, nor than
one policy for some of the blocks.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.schedule import TOLERANCE, PlannedStep, search_plan
from fsdp_compile.passes.plan.whole_step import UpdateCost, with_update
from fsdp_compile.passes.plan.workload import Task, Workload, least_memory, lower_bound, smallest_budget

KEEP = "keep"


@dataclass(frozen=True)
class Repeat:
    """A task of forward, or a part of it, that backward computes again.

    Attributes:
        task: its index.
        part: fraction of its seconds.
        memory: bytes that are alive for it meanwhile.
    """

    task: int
    part: float
    memory: int


@dataclass(frozen=True)
class Copy:
    """Activations that are copied to the host in forward, and back in backward.

    Attributes:
        made: the task of forward that computes them.
        left: the task of forward at whose end the copy to the host is done and they are freed.
        back: the task of backward at whose beginning the copy back starts.
        read: the task of backward that reads them first.
        size: bytes.
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
    """Something other than keeping the activations of a block.

    Attributes:
        name: for people.
        at: the first task of backward that reads the activations.
        changes: `(position, bytes)`: how many more, or fewer, bytes are alive from there on.
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
    """A block, and the policies that its activations may have instead of being kept."""

    name: str
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class Options:
    """A step, and what may be chosen in it.

    Attributes:
        plain: the step in which all activations stay.
        stored: the same step with the inputs of all blocks stored: policies change this one.
        live: bytes that are alive at each position in `stored`, beside gathered and packed buffers.
        fresh: how many of these bytes are new at the first position of each task.
        starts: the first position of each task.
        blocks: the blocks, in the order of forward.
        update: cost of the optimizer's update, whatever is chosen; None: it is not planned.
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
    """The workload if each block's activations follow the given policy; blocks without one keep them."""
    active = [each for each in policies if each is not None]
    step = _with_policies(options, active) if active else options.plain
    return step if options.update is None else with_update(step, options.update)


def _with_policies(options: Options, active: Sequence[Policy]) -> Workload:
    stored, live = options.stored, _live(options, active)
    again: dict[int, list[Task]] = {}
    for policy in active:
        beside = max(0, live[options.starts[policy.at]] - options.fresh[policy.at] - policy.returns)
        for repeat in policy.repeats:
            task = stored.tasks[repeat.task]
            repeated = Task(f"{task.name} again", task.seconds * repeat.part, beside + repeat.memory, task.reads)
            again.setdefault(policy.at, []).append(repeated)
    tasks: list[Task] = []
    waits = _waits_for_copies(stored, active)
    ends = [*options.starts[1:], len(live)]
    for index, (task, begin, end) in enumerate(zip(stored.tasks, options.starts, ends, strict=True)):
        seconds = task.seconds + waits.get(index, 0.0)
        tasks += [*again.get(index, ()), replace(task, seconds=seconds, memory=max(live[begin:end]))]
    return replace(stored, tasks=tuple(tasks))


def _live(options: Options, active: Sequence[Policy]) -> list[int]:
    """Bytes that are alive at each position beside gathered and packed buffers, and what is computed again."""
    changes = Counter[int]()
    for position, size in (change for policy in active for change in policy.changes):
        changes[position] += size
    moved = accumulate(changes[position] for position in range(len(options.live)))
    return [size + change for size, change in zip(options.live, moved, strict=True)]


def _waits_for_copies(step: Workload, active: Sequence[Policy]) -> dict[int, float]:
    """Seconds that tasks wait for copies, one after the other on the host's link, if nothing else delays them."""
    copies = [copy for policy in active for copy in policy.copies]
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


# --- the choice -------------------------------------------------------------------------------------------------------


def planned(options: Options, policies: PolicyPerBlock, budget: int | None) -> Result:
    """Plan the step with these policies. PlanError if no plan fits into the budget."""
    workload = workload_of(options, policies)
    return Result(policies, workload, search_plan(workload, budget))


def choose(options: Options, budget: int | None) -> Result:
    """Of all choices that are tried the one with the shortest plan within the budget.

    A choice is skipped only if no plan for it can be shorter, by more than the search's tolerance, than a known one.

    Args:
        options: the step.
        budget: bytes that may live at most; None: no limit.

    Raises:
        PlanError: no choice has a plan within the budget; the message says which budget has one.
    """
    best: Result | None = None
    tried = choices(options)
    computing: dict[PolicyPerBlock, float] = {}
    for policies in tried:
        active = [policy for policy in policies if policy is not None]
        if budget is None or not active or max(_live(options, active)) <= budget:  # what is computed again comes on top
            again = sum(_repeated_seconds(options, policy) for policy in active)
            waits = sum(_waits_for_copies(options.stored, active).values())
            computing[policies] = sum(task.seconds for task in options.plain.tasks) + again + waits
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


def least_of(options: Options) -> PolicyPerBlock:
    """Of all choices that are tried the one that needs the least memory, at its peak and then in all."""

    def needs(policies: PolicyPerBlock) -> tuple[int, int]:
        workload = workload_of(options, policies)
        memory = least_memory(workload, workload.must_keep)
        return max(memory), sum(memory)

    return min(choices(options), key=needs)


def choices(options: Options) -> list[PolicyPerBlock]:
    """What is tried: all blocks keep their activations; or the first ones have one policy, the others another or none.

    The first ones are those that save the most bytes for each second that is computed again.
    """
    names = list(dict.fromkeys(policy.name for block in options.blocks for policy in block.policies))
    of_blocks = [{policy.name: policy for policy in block.policies} for block in options.blocks]
    by_name = {name: tuple(policies.get(name) for policies in of_blocks) for name in names}
    kept: PolicyPerBlock = (None,) * len(options.blocks)
    result = {kept: None}
    for name, policies in by_name.items():
        worth = {}
        for at, policy in enumerate(policies):
            if policy is not None:
                saved = policy.returns + sum(copy.size for copy in policy.copies)
                worth[at] = saved / max(_repeated_seconds(options, policy), 1e-12)
        for others in (kept, *(each for other, each in by_name.items() if other != name)):
            chosen = list(others)
            for at in sorted(worth, key=lambda at: (-worth[at], at)):
                chosen[at] = policies[at]
                result[tuple(chosen)] = None
    return list(result)


def _repeated_seconds(options: Options, policy: Policy) -> float:
    return sum(options.stored.tasks[repeat.task].seconds * repeat.part for repeat in policy.repeats)
