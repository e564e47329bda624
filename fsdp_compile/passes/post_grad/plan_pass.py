"""Which plan a graph gets: it is read with its costs, a plan is chosen, and the plan is verified.

    read_graph      the graph as tasks and units, with seconds and bytes, for a planner that knows nothing of graphs
    choose_plan     the plan in a file, the best one that a search finds for these costs, or the one of a fixed rule
    verify_plan     refuses a plan that breaks a rule or exceeds the budget
    record_times    seconds of tasks, measured while graphs run

Costs are estimates by the files of a named device and link (passes/cost/hardware.py). A recorded profile replaces the
seconds of tasks.
"""

import json
import logging
import pathlib
import re
import reprlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.core.text_files import read_text
from fsdp_compile.passes.cost.hardware import Hardware, device, link, reported_device, update_seconds
from fsdp_compile.passes.cost.roofline import (
    all_reduce_seconds,
    graph_name,
    launch_seconds,
    measured_update,
    transfer_seconds,
    with_profile,
)
from fsdp_compile.passes.graph.node_costs import node_seconds, node_work, size_of
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.graph.reading import Costs, Reading, read, stored_shard, stretches_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Plan, PlanError, verify
from fsdp_compile.passes.plan.search import alternating, prefetch, search_plan
from fsdp_compile.passes.plan.update import UpdateCost
from fsdp_compile.passes.plan.workload import Workload

plan_log = logging.getLogger("fsdp_compile.plans")


def read_graph(context: GraphContext) -> None:
    """Set `context.reading`, and `context.workload`: what the planner sees of it, with measured seconds if there are.

    Raises:
        PlanError: the profile that the configuration names has no graph of this direction and as many products.
        ValueError: the configuration names a link or device that is unknown.
    """
    graph, config = context.graph, context.config
    context.reading = read(graph, costs_of(graph, config) or relative_costs(graph))
    context.workload = context.reading.workload
    if config.profile is not None:
        stretches = stretches_of(context.reading.tasks)
        context.workload = with_profile(context.workload, stretches, context.direction, config.profile)
    if context.direction == "forward" and config.update is not None:
        context.workload = _with_arrivals(context.reading, context.workload)


def _with_arrivals(reading: Reading, workload: Workload) -> Workload:
    """`workload`, of a forward, whose first gathers the step before has launched, as their tags say."""
    arrivals = {name: tag_of(gather.start[-1]).arrives for name, gather in reading.gathers.items()}
    units = tuple(replace(unit, arrives=arrivals.get(unit.name)) for unit in workload.units)
    return replace(workload, units=units)


def choose_plan(context: GraphContext) -> None:
    """Set `context.plan`.

    Raises:
        PlanError: the file has no plan for this direction, or no plan fits into the budget.
    """
    workload, config = context.workload, context.config
    if config.plan is not None:
        plan = plan_in_file(config.plan, context.direction)
    elif config.link is not None:
        try:
            plan = search_plan(workload, config.budget).plan
        except PlanError as error:
            if config.activations == "keep":
                raise
            raise PlanError(f"activations={config.activations!r}: {context.direction} needs more than was planned for "
                            f"the step as a whole, so that it takes a larger budget; {error}") from None  # fmt: skip
    elif config.reduces_in_flight == 1:
        plan = alternating(workload)
    else:
        in_flight = config.reduces_in_flight or len(workload.units)
        plan = prefetch(workload, forward=1, backward=1, before_wait=True, in_flight=in_flight)
    context.plan = plan
    plan_log.debug("%s:\n%s", context.direction, plan, extra={"workload": workload})  # for who wants to time it


def plan_in_file(path: str, heading: str) -> Plan:
    """The plan under `heading:` in a file. PlanError if there is none, or if it cannot be read."""
    try:
        text = read_text(pathlib.Path(path))
    except ValueError as error:
        raise PlanError(f"plan: expected {path} to be text with plans, found {error}") from None
    headings = list(re.finditer(r"^(\w+):[ \t]*$", text, flags=re.MULTILINE))
    names = [each[1] for each in headings]
    if names.count(heading) != 1:
        listed = ", ".join(map(reprlib.repr, names)) or "no heading"
        raise PlanError(f"plan: expected {path} to have one plan under '{heading}:', found {listed}")
    place = names.index(heading)
    begin = headings[place].end()
    end = headings[place + 1].start() if place + 1 < len(headings) else len(text)
    try:
        return Plan.parse("\n" * text.count("\n", 0, begin) + text[begin:end])  # errors have the line of the file
    except PlanError as error:
        raise PlanError(f"plan: {path}, {heading}, {error}") from None


def verify_plan(context: GraphContext) -> None:
    """Raise PlanError if the plan breaks a rule of plans, or needs more bytes than the budget."""
    verify(context.workload, context.plan, context.config.budget)


# --- costs of one graph -----------------------------------------------------------------------------------------------

_FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 240.0}
"""How much a device computes while it moves a byte (passes/cost): the CPU in float32, an H100 in bfloat16."""


def costs_of(graph: fx.Graph, config: CompileConfig) -> Costs | None:
    """Costs of nodes and collectives by `config.link` and `config.device`; None without a link.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    wire = link(config.link)
    computer = device(config.device) if config.device else _device_of(starts[0].meta["val"].device)

    def of_node(node: fx.Node) -> float:
        return node_seconds(node, computer)

    def of_collective(start: fx.Node) -> float:
        if start.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            return all_reduce_seconds(size_of(start), _world_size(start), wire) - wire.latency
        full = max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        return transfer_seconds(full, _world_size(start), wire)

    def moving(moved: float) -> float:
        return max(update_seconds(moved, computer), computer.kernel_seconds)

    world = max(map(_world_size, starts))
    norm = all_reduce_seconds(4, world, wire)
    # Ranks compare what they know by a message on the host, where a GPU's link is another one.
    on_cpu = starts[0].meta["val"].device.type == "cpu" and config.device in (None, "cpu")
    return Costs(
        of_node,
        of_collective,
        launch_seconds(world, wire),
        moving=moving,
        norm=norm,
        step=computer.step_seconds,
        compare=norm if on_cpu else 0.0,
        host_bandwidth=computer.host_bandwidth,
    )


def update_cost(reading: Reading, costs: Costs | None, config: CompileConfig) -> UpdateCost | None:
    """What `config.update` says follows the backward of `reading`, a joint graph; None if nothing is known of it.

    A graph that reduces nothing is that of a micro-batch whose gradients are accumulated: the first of its step has the
    update right before it.

    Raises:
        PlanError: `config.profile` is no profile.
    """
    update, step = config.update, reading.workload
    if costs is None or update is None or step.backward == len(step.tasks):
        return None
    sizes = [_shard_bytes(reading, unit.name) for unit in step.units]
    estimated = [costs.moving(sum(sizes)) if update.clips else 0.0, *(costs.moving(update.moves * n) for n in sizes)]
    measured = measured_update(config.profile, sizes) if config.profile is not None else None
    before, *seconds, after = measured or [*estimated, costs.step]
    return UpdateCost(
        tuple(each if size else 0.0 for each, size in zip(seconds, sizes, strict=True)),
        tuple(sizes),
        before,
        after,
        norm=costs.norm if update.clips else None,
        prefetch=None if update.prefetch == "auto" else update.prefetch,
        compare=costs.compare if update.prefetch != 0 else 0.0,
    )


def _shard_bytes(reading: Reading, name: str) -> int:
    """Bytes of a unit's shard that are updated: as many as it has gradients."""
    if reading.reduces:
        reduce = reading.reduces.get(name)
        return size_of((reduce.wait + reduce.end)[-1]) if reduce is not None else 0
    shard = stored_shard(reading.gathers[name])
    return size_of(shard) if shard is not None else 0


def relative_costs(graph: fx.Graph) -> Costs:
    """Costs where no link is named: how long a task takes relative to others, in no unit, on this kind of device."""
    starts = tagged(graph, "gather", "reduce")
    kind = starts[0].meta["val"].device.type if starts else "cpu"
    flops_per_byte = _FLOPS_PER_BYTE.get(kind, _FLOPS_PER_BYTE["cuda"])

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        return work.flops + flops_per_byte * (work.read_bytes + work.written_bytes)

    return Costs(of_node, lambda start: 0.0, memory=False)


def _world_size(start: fx.Node) -> int:
    return group_named(start.args[GROUP_ARGUMENT[start.target]]).size()  # type: ignore[arg-type,index]  # fx arguments are untyped


def _device_of(where: torch.device) -> Hardware:
    if where.type == "cpu":
        return device("cpu")
    return reported_device(torch.cuda.get_device_name(where), torch.cuda.get_device_properties(where).total_memory)


# --- measured seconds -------------------------------------------------------------------------------------------------

# What `CompileConfig.profile` names is a file that `TaskProfile` has saved:
#
#     compiled = torch.compile(model, backend="fsdp_compile", options={"record_profile": True})
#     step(compiled)                                   compiles
#     with TaskProfile() as profile:
#         for _ in range(5):
#             step(compiled)
#     profile.save("profile.json")                     then options={"link": ..., "profile": "profile.json"}, where all
#                                                      ranks read the same file
#
# The pass puts an operator before and one after the nodes of each task, outside of the collectives that are started and
# waited for before it. On CUDA the operators record events, so that the stream is timed and not the host.

Moment = float | torch.cuda.Event


def record_times(context: GraphContext) -> None:
    """Put a `fsdp_flat::record_time` before and after each task, if the configuration asks for a profile."""
    starts = tagged(context.graph, "gather", "reduce")
    if not context.config.record_profile or not starts:
        return
    graph, tasks, value = context.graph, context.reading.tasks, starts[0].meta["val"]
    stretches = stretches_of(tasks)
    name = graph_name(context.direction, stretches)

    def record(stretch: int, moment: int) -> None:
        arguments = (name, stretch, moment, value.device)
        node = graph.create_node("call_function", RECORD_TIME, arguments, name=f"record_time_{moment}")
        with value.fake_mode:
            node.meta["val"] = RECORD_TIME(*node.args)

    for index, (nodes, stretch) in enumerate(zip(tasks, stretches, strict=True)):
        with graph.inserting_before(nodes[0]):
            record(stretch, 2 * index)
        with graph.inserting_after(nodes[-1]):
            record(stretch, 2 * index + 1)


class TaskProfile:
    """Records when tasks of compiled graphs, and updates of `compile_step`, begin and end, in a `with` statement.

    There is one for all threads at a time, as backward may run in a thread of its own.

    Args:
        clock: seconds, as time passes on the CPU.
    """

    _active: ClassVar["TaskProfile | None"] = None

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._moments: defaultdict[tuple[str, int, int], list[Moment]] = defaultdict(list)  # by graph, stretch, moment

    def __enter__(self) -> "TaskProfile":
        TaskProfile._active = self
        return self

    def __exit__(self, *_: object) -> None:
        TaskProfile._active = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """By name of a graph, the seconds of each of its stretches: the sum of the medians of its tasks."""
        table: dict[str, list[float]] = {}
        for (graph, stretch, moment), begins in self._moments.items():
            stretches = table.setdefault(graph, [])
            stretches += [0.0] * (stretch + 1 - len(stretches))
            if moment % 2 == 0:
                ends = self._moments[graph, stretch, moment + 1]
                stretches[stretch] += statistics.median(map(_seconds_between, begins, ends))
        return table

    def save(self, path: str | pathlib.Path) -> None:
        """Write what was measured to `path`, as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.seconds, indent=1) + "\n")


@torch.library.impl("fsdp_flat::record_time", "default")
def _record_time(graph: str, stretch: int, moment: int, device: torch.device) -> torch.Tensor:
    profile = TaskProfile._active
    if profile is not None and (moment % 2 == 0 or (graph, stretch, moment - 1) in profile._moments):
        now: Moment = profile.clock()
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        profile._moments[graph, stretch, moment].append(now)
    return torch.empty(0, device=device)


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are floats
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
