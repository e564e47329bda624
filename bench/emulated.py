"""What benches on the emulated link share: the plans of graphs, and the seconds of one thread."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench import link
from bench.link import FREE, LINK
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log

WORLD = 8
Graphs = dict[str, tuple[Workload, Plan]]


@contextmanager
def noted() -> Iterator[Graphs]:
    """The plans of the graphs that are compiled meanwhile."""
    graphs: Graphs = {}

    def note(record: Any) -> bool:
        graphs[record.args[0]] = (record.workload, record.args[1])
        return True

    plan_log.addFilter(note)
    plan_log.setLevel(logging.DEBUG)
    try:
        yield graphs
    finally:
        plan_log.setLevel(logging.NOTSET)
        plan_log.removeFilter(note)


def count_one_thread() -> None:
    """Play rank 0 of `WORLD` on a link that takes no time, and count the CPU seconds of this one thread."""
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(WORLD, 0.0, FREE)
    LINK.count_cpu_time()
