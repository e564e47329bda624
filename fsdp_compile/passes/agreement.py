"""What the first rank to come finds counts for all ranks, and for later runs: figures of links, and plans.

Note [Why ranks agree on plans]
A plan depends on seconds, and those on sizes of batches, which may differ between ranks. Ranks that follow different
plans would wait for each other for ever (Note [Why ranks compare before the first collective]). So ranks whose graphs
have the same units, tasks and figures of links follow the plan of the first of them. Nobody waits: who comes first
writes to the store. A later run may find the graph of one rank in the compiler's caches and compile that of another,
so plans are kept beside these caches.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp_compile.comm.comparison import exists
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.config import MEASURED, CompileConfig, read_text
from fsdp_compile.passes._torch import cache_folder
from fsdp_compile.passes.pipeline import hash_of_sources
from fsdp_compile.passes.plan.plan import Plan, PlanError, simulate, verify
from fsdp_compile.passes.plan.safe import safe_plan
from fsdp_compile.passes.plan.workload import Workload, lower_bound

log = logging.getLogger("fsdp_compile")

Table = dict[str, Any]  # of what JSON has
Decision = TypeVar("Decision")


def board() -> MessageBoard | None:
    """Where all ranks read and write; None if there are no others."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return MessageBoard.of_group(world, "fsdp_flat/agreed") if world is not None and exists(world) else None


def agree(key: str, text: str) -> str:
    """`text`, or what another rank has written under `key` before."""
    shared = board()
    return text if shared is None else shared.decide(key, text)


def kept(key: str) -> str | None:
    """What an earlier run, or this one, has kept under `key`."""
    try:
        return read_text(_path(key))
    except (OSError, ValueError):
        return None


def keep(key: str, text: str) -> None:
    """Keep `text` under `key` for later runs, if the folder of the compiler's caches can be written."""
    path = _path(key)
    with suppress(OSError):  # a later run decides anew
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file of text, whole or not at all. OSError if it cannot be written."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.partial")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def _path(key: str) -> Path:
    return cache_folder() / "fsdp_compile" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.kept"


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_together(workload: Workload, config: CompileConfig, what: str) -> tuple[Plan, tuple[str, ...]]:
    """A plan that ranks with the same units, tasks and link follow together, and the units that it keeps unsharded.

    Without a budget, a plan for a measured link needs no more memory than the rule: what is free is not known when a
    model is compiled.

    Args:
        workload: with seconds and bytes, which may differ between ranks.
        config: with a link.
        what: is planned, for the log.

    Raises:
        PlanError: no plan fits into the budget.
    """
    needs_little = is_lean(config)

    def make() -> Table:
        found = safe_plan(workload, config.budget, is_lean=needs_little)
        return {"keep": found.keep_unsharded, "plan": str(found.plan)}

    key = shape_of(workload, config, needs_little)
    plan, kept_units = decide_together(key, make, lambda table: read_plan(table, workload, config.budget))
    if log.isEnabledFor(logging.INFO):
        timeline, bound = simulate(workload, plan), lower_bound(workload)
        log.info(
            "%s: planned for %s, %.1f ms expected, %.1f of them waiting for collectives; no plan takes less than %.1f "
            "ms", what, config.link, timeline.makespan * 1e3, timeline.exposed * 1e3, bound * 1e3,
        )  # fmt: skip
    return plan, kept_units


def is_lean(config: CompileConfig) -> bool:
    """Whether a plan needs no more memory than the rule: nobody has named a link or a budget."""
    return config.budget is None and (config.link or "").startswith(MEASURED)


def log_worth(step: Workload, config: CompileConfig) -> None:
    """Log what the plan of a step is worth, and what `reshard_after_forward="auto"` would give beside it."""
    units = (replace(unit, keep_unsharded=unit.keep_unsharded or None) for unit in step.units)
    try:
        steps = step, replace(step, units=tuple(units))
        found, free = (safe_plan(each, config.budget, is_lean=is_lean(config)) for each in steps)
    except PlanError:  # the bound of memory is too high, or the graphs' own plans will say it
        return
    exposed = simulate(step, found.plan).exposed
    least = lower_bound(step) - sum(task.seconds for task in step.tasks)
    more, saves = max(0, free.peak - found.peak) / 1e9, max(0.0, found.seconds - free.seconds) * 1e3
    log.info(
        "planned: %.1f ms a step expected, %.1f ms exposed (bound %.1f); reshard_after_forward='auto' would need %.2f "
        "GB more and save %.1f ms", found.seconds * 1e3, exposed * 1e3, least * 1e3, more, saves,
    )  # fmt: skip


def decide_together(key: str, make: Callable[[], Table], read: Callable[[Table], Decision]) -> Decision:
    """`read` what `make` returns, on the rank that comes first, in this run or in an earlier one.

    What was kept and raises when it is read is made again: anybody may have written it.
    """
    together = board() is not None
    text = kept(key) if together else None
    try:
        read(json.loads(text or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = json.dumps(make())
    if together:
        keep(key, text := agree(key, text or ""))
    return read(json.loads(text or ""))


def read_plan(table: Table, workload: Workload, budget: int | None) -> tuple[Plan, tuple[str, ...]]:
    """A plan for `workload`, and the units that it keeps unsharded. ValueError or TypeError if `table` has none."""
    plan = Plan.parse(table["plan"])
    verify(workload, plan, budget)
    if not all(isinstance(name, str) for name in table["keep"]):
        raise TypeError("keep: expected names of units")
    return plan, tuple(table["keep"])


def shape_of(workload: Workload, config: CompileConfig, *others: object) -> str:
    """All that plans depend on beside seconds of tasks, and bytes that batches, or what a rank pads, decide."""
    tasks = [(task.reads, task.writes, task.reduced, task.updates) for task in workload.tasks]
    names = "name", "gather", "reduce", "replicate", "keep_unsharded", "module"
    prefetched = [(unit.may_prefetch, unit.arrives is None) for unit in workload.units if config.update is not None]
    units = list(map(attrgetter(*names), workload.units)), prefetched
    step = workload.backward, workload.forward, workload.can_coalesce
    chosen = config.link, config.device, config.budget, config.file_contents, config.update
    text = repr((tasks, units, step, chosen, others, hash_of_sources()))
    return f"plan/{hashlib.sha256(text.encode()).hexdigest()}"
