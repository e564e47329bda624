"""One rank of one system, in a process of its own, which does what it is asked to (rounds.py asks it).

A process for each system keeps compile caches, memory and Inductor's settings apart: SimpleFSDP replaces a hook that
ours uses. It waits while the others have their turns.
"""

import json
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import link, systems
from bench.copies import GeneratedCode, copied
from bench.link import FREE, LINK
from bench.memory import thinned
from bench.models import WORKLOADS
from fsdp_compile.compare.memory import curve, resident, states_of
from fsdp_compile.compare.pool import device_here


@dataclass(frozen=True)
class Spec:
    """What a worker is."""

    system: str  # of `systems.SYSTEMS`, maybe with an option
    model: str  # of `models.WORKLOADS`
    mode: str  # gloo or nccl: real ranks; link: the emulated one
    device: str  # cpu or cuda
    bf16: bool  # what it computes in
    world: int  # how many ranks there are, or are played
    cpu_time: bool = False  # emulated link: CPU seconds count, and those of transfers that are waited for


class Worker:
    """A system that trains a model."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.number = spec, 0
        self.device = device_here(spec.device)
        torch.set_flush_denormal(True)  # what is never really received must not slow kernels
        if spec.mode == "link":
            link.start(spec.world, 0.0, FREE)
            if spec.cpu_time:
                LINK.count_cpu_time()
        self.generated = GeneratedCode()
        self.workload = WORKLOADS[spec.model]()
        torch.manual_seed(0)
        with self.device:
            model = self.workload.build()
        self.prepared = systems.prepare(spec.system, model, self.workload.blocks(model), self._setup(model))
        trained = [p for p in self.prepared.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), foreach=True)
        self.whole_step = self.prepared.whole_step(self.optimizer)

    def _setup(self, model: torch.nn.Module) -> systems.Setup:
        names = {module: name for name, module in model.named_modules()}
        mesh = init_device_mesh(self.device.type, (self.spec.world,))
        blocking = self.spec.mode == "link" and self.device.type == "cpu"
        blocks, option = [names[block] for block in self.workload.blocks(model)], self.spec.system.partition(":")[2]
        return systems.Setup(self.device, mesh, self.spec.bf16, blocking, self.workload.ends, blocks, option)

    def clock(self) -> float:
        """Seconds; after all that the device was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return LINK.clock()

    def accumulate(self) -> dict[str, float]:
        """Forward and backward: the loss, seconds of forward, of both, and calls issued before backward."""
        batch = self._batch()
        begin = self.clock()
        loss = self.prepared.forward(*batch)
        forward, calls = self.clock() - begin, len(LINK.calls)
        (loss * self.prepared.scale if self.prepared.scale != 1 else loss).backward()
        self.prepared.after_backward()
        return {"forward": forward, "backward": self.clock() - begin, "calls": calls, "loss": loss.item()}

    def _batch(self) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in self.workload.batch(self.number, dist.get_rank())]

    def step(self) -> dict[str, float]:
        if self.whole_step is None:
            LINK.reset()
        else:
            LINK.forget()  # what it has started for this step in the one before is a part of it
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record()
        begin = self.clock()
        if self.whole_step is not None:
            loss = self.whole_step(*self._batch())
            done = {"forward": 0.0, "backward": self.clock() - begin, "calls": 0, "loss": loss.item()}
        else:
            done = self.accumulate()
            self.optimizer.step()
            self.optimizer.zero_grad()
        done["step"] = self.clock() - begin
        if on_cuda and LINK.marks:
            from bench.link_cuda import settle

            settle(LINK, origin)
        self.number += 1
        return {**done, "begin": begin, "exposed": LINK.summary()["exposed"]}

    def first(self) -> dict[str, float]:
        """The step that compiles: seconds and CPU seconds, of the compilers that it starts too."""
        begin, before = time.perf_counter(), _cpu_seconds()
        done = self.step()
        return {**done, "seconds": time.perf_counter() - begin, "cpu": _cpu_seconds() - before}

    def train(self, steps: int) -> list[dict[str, float]]:
        """`steps` steps, each timed, after the other ranks have come."""
        if self.spec.mode in ("gloo", "nccl"):
            dist.barrier()
        if self.whole_step is not None or self.device.type == "cuda":
            self.step()  # what was started for it has ended while others had their turns; and memory was given back
        return [self.step() for _ in range(steps)]

    def configure(self, latency: float, bandwidth: float) -> None:
        """Set the emulated link, and let the system plan for it."""
        LINK.configure(0.0, FREE)
        if bandwidth < FREE:
            self.prepared.configured(f"custom:{latency},{bandwidth}", self._batch())
        LINK.configure(latency, bandwidth)

    def calls(self) -> dict[str, Any]:
        """One step's calls, as the link saw them, with totals."""
        done = self.step()
        origin = done["begin"] if self.device.type == "cpu" else 0.0
        kept = [{**asdict(call), "origin": origin} for call in LINK.calls]
        return {**done, "summary": LINK.summary(), "list": kept}

    def copies(self) -> int:
        """Bytes of parameters and gradients that a forward and backward copy outside of collectives."""
        if systems.find(self.spec.system).graphs == "whole":
            return self.generated.moved()
        plain = self.workload.build().to(self.device, torch.bfloat16 if self.spec.bf16 else None)
        found = copied(self.accumulate) - copied(lambda: plain(*self._batch()).backward())
        self.prepared.model.zero_grad()
        return found

    def memory(self) -> dict[str, Any]:
        """Bytes resident between steps, the most beside them in a forward and backward, its curve, the RSS.

        Of a system that has one call for a whole step: in that, once it has taken over the optimizer's state.
        """
        if self.whole_step is not None:
            self.step()
        states, model = states_of(self.optimizer), self.prepared.model
        there = resident([*model.parameters(), *model.buffers(), *states])
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        points = curve(self.accumulate if self.whole_step is None else self.step, self.device)
        model.zero_grad()
        return {
            "resident": there,
            "optimizer": resident(states),
            "above": max((total for _, total in points), default=0),
            "curve": thinned(points),
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "allocator": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
        }


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_WORKER: list[Worker] = []  # of this process


def do(spec: Spec, what: str, arguments: dict[str, Any]) -> Any:
    """Call a method of this process's worker, which is made first; the answer as JSON has it."""
    if not _WORKER:
        _WORKER.append(Worker(spec))
    found = getattr(_WORKER[0], what)(**arguments)
    if spec.device == "cuda":  # what no tensor has goes back to the systems whose turn is next
        torch.cuda.empty_cache()
    return json.loads(json.dumps(found))
