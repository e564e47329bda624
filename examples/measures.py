"""What train_gpt.py finds out about a run: losses, times, memory, and how far it has come."""

import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP = 3  # steps left out of the median


@dataclass
class Run:
    """What one run of training left behind on this rank."""

    losses: list[float]  # (steps,) mean over ranks
    seconds: list[float]  # (steps,)
    tokens: int  # per step, all ranks
    peak: float  # MB

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first few where there are enough."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds)

    @property
    def speed(self) -> float:
        """Tokens per second of the median step, all ranks together."""
        return self.tokens / self.step


def timed(step: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Run a step; return its loss and the wall time it took."""
    begin = time.perf_counter()
    loss = step(x, y)
    return loss, time.perf_counter() - begin


class Progress:
    """Says on rank 0's stderr how far a run has come: on a terminal in one line, else in a line every 5 seconds.

    A thread says it, for the first step of a compiled run takes longer than that.
    """

    def __init__(self, label: str, run: Run, steps: int) -> None:
        self.label, self.run, self.steps = label, run, steps
        self.terminal, self.begin, self.over = sys.stderr.isatty(), time.monotonic(), threading.Event()
        self.thread = threading.Thread(target=self._repeat, daemon=True)
        if dist.get_rank() == 0:
            self._say()
            self.thread.start()

    def end(self) -> None:
        """Say that all steps are done."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
            self._say(end="\n")

    def _repeat(self) -> None:
        while not self.over.wait(0.2 if self.terminal else 5.0):
            self._say()

    def _say(self, end: str = "") -> None:
        done, bar = len(self.run.losses), "#" * (30 * len(self.run.losses) // self.steps)
        if done:
            said = f"loss {self.run.losses[-1]:.3f}  {self.run.tokens / self.run.seconds[-1]:8,.0f} tokens/s"
        else:
            doing = "compiling, then the first step" if self.label == "compiled" else "first step"
            said = f"{doing}: {time.monotonic() - self.begin:.0f} s"
        line = f"{self.label:>8} [{bar:<30}] {done}/{self.steps}  {said:<40}"
        print(
            f"\r{line}" if self.terminal else line.rstrip(),
            end=end if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


class PeakMemory:
    """Peak memory of this process since `forget`: CUDA's allocator knows it, on a CPU a thread samples /proc."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.done, self.peak = device.type == "cuda", threading.Event(), 0
        give_back_memory()
        self.before = 0 if self.cuda else resident_bytes()
        self.sampler = threading.Thread(target=self._sample, daemon=True)
        if not self.cuda:
            self.sampler.start()

    def _sample(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, resident_bytes())

    def forget(self) -> None:
        """Start again after the first step: what compiling took is not counted, what it left behind is."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.peak = 0

    def stop(self) -> float:
        """The peak in MB; on a CPU less what the process held before."""
        self.done.set()
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 1e6
        self.sampler.join()
        return (max(self.peak, resident_bytes()) - self.before) / 1e6


def resident_bytes() -> int:
    """Resident set of this process, read from /proc; 0 where there is none."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def give_back_memory() -> None:
    """Return an earlier run's freed memory to the system, so that the next run's growth is its own."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # glibc
        ctypes.CDLL(None).malloc_trim(0)
