"""What compiled graphs of this package do otherwise than FSDP2, by which steps are priced first.

Note [What graphs of this package do]
Where collectives are part of a compiled graph, they follow the rule for graphs without a link (`alternating`), by which
collectives begin between any two products, not just between blocks. Backward gathers the last block again. Gradients
are written into the buffer that is reduced, which takes the memory of the gathered one: nothing is packed. Parameters
outside of blocks are read until the end of backward. Shards of gradients come to exist one by one. The first product
of a checkpointed block's backward may run before its forward is computed again. `compile_step` updates the parameters
that the next forward reads first, and gathers them beside the rest of the update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_compile.explain.work import Product, UnitWork
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.search import alternating
from fsdp_compile.passes.plan.workload import Task, Workload

UPDATE = "update"  # the task of `compile_step` that comes first
PREFETCHED = 2  # units that `compile_step` gathers beside it by default
TASKS = 8  # of a block's forward or backward, between which collectives may begin


@dataclass(frozen=True)
class GraphStep:
    """A pass as one graph of each direction.

    Attributes:
        workload: the pass as tasks; of one block, some in each direction.
        plan: the rule's.
        gradients: bytes of shards of gradients that exist while each task runs, and at the end.
    """

    workload: Workload
    plan: Plan
    gradients: tuple[int, ...]


def as_graph(
    workload: Workload,
    blocks: Sequence[UnitWork],
    gradient_bytes: Sequence[int],
    width: int,
    reshards_last: bool,
    accumulates: bool,
    update: float | None = None,
) -> GraphStep:
    """The pass `workload`, as FSDP2 does it, as compiled graphs do it.

    Args:
        workload: unit 0 is all that is outside of blocks; its first, middle two and last tasks are not of blocks.
        blocks: in order; unit i + 1 is block i.
        gradient_bytes: of each unit's shard of gradients, all of which `workload` counts in each task.
        width: bytes of an element of a gradient; `workload` counts a block's gradients beside the packed ones.
        reshards_last: whether the last block is freed after forward.
        accumulates: whether shards of gradients of an earlier pass exist.
        update: seconds of the optimizer's update before the pass, beside which the first all-gathers run; None: they
            begin after it.
    """
    tasks: list[Task] = []
    gradients: list[int] = []
    split, made, everything = 0, 0, sum(gradient_bytes)
    for at, task in enumerate(workload.tasks):
        if at == workload.backward:
            split = len(tasks)
        backward, unit = at >= workload.backward, task.reads[0] if task.reads else 0
        exist = everything if accumulates else made
        memory = task.memory - everything + exist
        if not unit:
            last = at == len(workload.tasks) - 1
            new = [replace(task, memory=memory, reads=(0,) if last else task.reads)]
        else:
            if backward:
                memory += _first_product(blocks[unit - 1]) - blocks[unit - 1].parameters * width
                made += gradient_bytes[unit]
            new = [*_divided(replace(task, memory=memory), unit, backward)]
        tasks += new
        gradients += [exist] * len(new)
    if update is not None:
        states = min(task.memory for task in workload.tasks)
        tasks, gradients, split = [Task(UPDATE, update, states), *tasks], [everything, *gradients], split + 1
    units = list(workload.units)
    if reshards_last:
        units[-1] = replace(units[-1], keep_unsharded=False)
    graph = replace(workload, tasks=tuple(tasks), backward=split, units=tuple(units))
    plan = alternating(graph)
    return GraphStep(graph, plan if update is None else _prefetched(plan), (*gradients, everything))


def _prefetched(plan: Plan) -> Plan:
    """`plan`, whose first gathers begin before all tasks."""
    first = plan.of("gather")[:PREFETCHED]
    return Plan((*(replace(step, at=0) for step in first), *(step for step in plan.steps if step not in first)))


def _divided(task: Task, unit: int, backward: bool) -> Iterator[Task]:
    """`task` in equal tasks; those of backward only read the block's parameters, and the last one only writes."""
    for at in range(TASKS):
        ends = backward and at == TASKS - 1
        yield replace(task, seconds=task.seconds / TASKS, reads=() if ends else (unit,), writes=(unit,) if ends else ())


def _first_product(block: UnitWork) -> int:
    """Bytes of what the first product of a checkpointed block's backward makes; 0 of another block."""
    if block.saved_bytes:
        return 0
    products = [each for each in block.backward[len(block.forward) :] if isinstance(each, Product)]
    width = {"float32": 4, "float64": 8}.get(products[0].dtype, 2) if products else 0
    return products[0].batch * products[0].rows * products[0].columns * width if products else 0
