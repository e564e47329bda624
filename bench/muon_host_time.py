"""Host time of the optimizer's part of `compile_step`: `python -m bench muon --host-time`.

The GPT of host_overhead.py with 16 blocks of width 16, whose tensors are tiny, as rank 0 of 8 on an emulated link that
takes no time. What is timed is what the step does between backward and `zero_grad`: CPU time of the process, medians
over steps, systems in turns. A schedule changes the learning rate at every step.

    adamw            AdamW for all parameters
    adamw of rest    AdamW for what Muon leaves; matrices have no optimizer
    muon, adamw      Muon for the matrices of the blocks, AdamW for the rest

Two parts of that are measured in the same steps and taken off. Newton-Schulz is what this rank computes of complete
matrices: the time within `Stage.update`. And the emulation of the link: the time within the methods of its group and
its works.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from bench import link
from bench.host_overhead import TOKENS, build
from bench.link import FREE, EmulatedGroup, LinkWork
from fsdp_compile import compile_step
from fsdp_compile.optim.matrix_step import Stage
from fsdp_compile.step import CompiledStep

BLOCKS, RANKS, ROUNDS = 16, 8, 40
TIMED = {
    "all": [(CompiledStep, "_update_parameters")],
    "Newton-Schulz": [(Stage, "update")],
    "link": [
        (LinkWork, "wait"), (LinkWork, "is_completed"),
        *((EmulatedGroup, name) for name in ("alltoall_base", "_allgather_base", "allreduce", "broadcast")),
    ],
}  # fmt: skip


class Clock:
    """CPU seconds within `_update_parameters`, by the functions of `TIMED`; "all" has what is in none of them too."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(TIMED, 0.0)
        self.of_step = self.spent

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Time calls in this block."""
        with ExitStack() as stack:
            for what, methods in TIMED.items():
                for owner, name in methods:
                    stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), what)))
            yield

    def _timed(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if what == "all":
                self.spent = dict.fromkeys(TIMED, 0.0)  # of forward and backward too
            begin = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[what] += time.process_time() - begin
                if what == "all":
                    self.of_step = self.spent.copy()

        return timed


def systems(model: Callable[[], nn.Module], halves: Callable[[nn.Module], Any]) -> dict[str, CompiledStep]:
    """Steps of equal models."""

    def step(choose: Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], list[Optimizer]]) -> CompiledStep:
        made = model()
        return compile_step(made, choose(*halves(made)), regional=True)

    return {
        "adamw": step(lambda matrices, rest: [AdamW([*matrices, *rest], lr=1e-3)]),
        "adamw of rest": step(lambda matrices, rest: [AdamW(rest, lr=1e-3)]),
        "muon, adamw": step(lambda matrices, rest: [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]),
    }


def measure(halves: Callable[[nn.Module], Any], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Medians of milliseconds for each system."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(RANKS, 0.0, FREE)
    steps, clock = systems(lambda: build(BLOCKS, True), halves), Clock()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    with clock.runs():
        for index in range(rounds + 5):
            for name, step in steps.items():
                for group in (group for each in step._update.optimizers for group in each.param_groups):
                    group["lr"] *= 0.99  # as a schedule does
                step(TOKENS, TOKENS)
                found[name] += [clock.of_step] if index >= 5 else []
    dist.destroy_process_group()
    return {name: {what: 1000 * median(each[what] for each in of) for what in TIMED} for name, of in found.items()}


def report(halves: Callable[[nn.Module], Any]) -> None:
    """Print what `measure` finds."""
    found = measure(halves)
    print(
        f"{BLOCKS} blocks, {RANKS} ranks: ms of CPU time of the optimizer's part, of which Newton-Schulz and the link"
    )
    print("take, and without these:")
    rest = {name: 2 * of["all"] - sum(of.values()) for name, of in found.items()}
    for name, of in found.items():
        row = "  ".join(f"{value:6.2f}" for value in (*of.values(), rest[name]))
        print(f"  {name:14} {row}  {rest[name] / rest['adamw']:5.2f} x adamw")
