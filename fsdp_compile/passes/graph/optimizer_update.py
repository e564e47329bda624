"""What the plan of a whole step knows beside its joint graph: the optimizer's update, and when its gathers arrive."""

from dataclasses import replace

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.graph.analyze import GraphInfo, stored_shard
from fsdp_compile.passes.graph.nodes import set_tag, tag_of
from fsdp_compile.passes.graph.prices import Prices
from fsdp_compile.passes.graph.work import size_of
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.whole_step import UpdateCost, arrivals_in_forward
from fsdp_compile.passes.plan.workload import Workload


def note_arrivals(info: GraphInfo, step: Workload, plan: Plan) -> None:
    """Tag the gathers that `plan` launches behind updates with the time at which each ends."""
    for name, seconds in arrivals_in_forward(step, plan).items():
        for node in info.gathers[name].start:
            set_tag(node, replace(tag_of(node), arrives=seconds))


def update_cost(info: GraphInfo, prices: Prices | None, config: CompileConfig) -> UpdateCost | None:
    """Return the cost of the optimizer's update after the backward of a joint graph; None if it is unknown.

    A graph that reduces nothing is that of a micro-batch whose gradients are accumulated; in the first of a step the
    update comes right before it.
    """
    update, step = config.update, info.workload
    if prices is None or update is None or step.backward == len(step.tasks):
        return None
    sizes = [_shard_bytes(info, unit.name) for unit in step.units]
    return UpdateCost(
        tuple(prices.update(update.moves * size) if size else 0.0 for size in sizes),
        tuple(sizes),
        prices.update(sum(sizes)) if update.clips else 0.0,
        prices.device.step_seconds,
        norm=prices.norm if update.clips else None,
        prefetch=None if update.prefetch == "auto" else update.prefetch,
        in_backward=units_updated_in_backward(info),
        compare=prices.norm if update.prefetch != 0 and prices.device.name == "cpu" else 0.0,  # else not over the link
    )


def units_updated_in_backward(info: GraphInfo) -> tuple[int, ...]:
    """Indices of the units whose update is part of the backward graph."""
    names = [unit.name for unit in info.workload.units]
    return tuple(at for at, name in enumerate(names) if name in info.reduces and info.reduces[name].updates)


def _shard_bytes(info: GraphInfo, name: str) -> int:
    """Bytes of the unit's shard that the optimizer updates: those that get gradients."""
    reduce = info.reduces.get(name)
    updated = stored_shard(info.gathers[name]) if not info.reduces else reduce.result if reduce is not None else None
    return size_of(updated) if updated is not None else 0
