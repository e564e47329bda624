"""The systems that are compared, as their users write them, and a turn of one of them on one rank.

All have the same weights at first, the same batches, AdamW and, if they shard, the same units: each repeated block, and
the rest.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile.api import shard_module
from fsdp_compile.comm.hops import Wire
from fsdp_compile.compare.case import Case, Load
from fsdp_compile.compare.memory import curve, resident, states_of
from fsdp_compile.compare.pool import device_here
from fsdp_compile.compare.training import Training, Way
from fsdp_compile.explain.batch import loss_of

WARM = 3  # steps before the first that counts: the first compiles the model, the second may compile the update
RATE = 1e-4  # of learning
TRIES = 4  # steps whose bytes are counted with gloo


@dataclass(frozen=True)
class System:
    """A row.

    Attributes:
        label: what it is, as code.
        way: how it trains.
        setting: how a prediction's `Setting` differs.
        shares: whether all ranks train one model on all batches; otherwise each its own.
    """

    label: str
    way: Way
    setting: dict[str, Any] = field(default_factory=dict)
    shares: bool = True


def _system(label: str, name: str, how: str, backend: str | None = None, shares: bool = True, **setting: Any) -> System:
    return System(label, Way(name, how, backend), setting, shares)


SYSTEMS = {
    each.way.name: each
    for each in (
        _system("fully_shard(model)", "eager", "eager", compiled=False),
        _system("torch.compile(fully_shard(model))", "compiled", "whole", "inductor"),
        _system("compile_step(fully_shard(model), optimizer)", "step", "step", "fsdp_compile"),
        _system("torch's fully_shard of each block, and of the model", "fsdp2", "fsdp2",
                runtime="fsdp2", compiled=False),
        _system("the same, each block compiled", "fsdp2-compiled", "fsdp2", "inductor", runtime="fsdp2"),
        _system("torch.compile(DistributedDataParallel(model))", "ddp", "ddp", "inductor",
                runtime="fsdp2", strategy="NO_SHARD"),
        _system("torch.compile(model): each rank for itself", "unsharded", "unsharded", "inductor", shares=False,
                world_size=1),
    )
}  # fmt: skip
OURS = ("eager", "compiled", "step")
"""Those of this package."""


@dataclass(frozen=True)
class Task:
    """What all systems do alike: on each rank `batch` sequences a step, of `sequence` tokens.

    Those of this package send parameters and gradients in the formats `wire_gather` and `wire_reduce`; None: in full.
    """

    batch: int
    sequence: int
    bf16: bool
    device: str
    wire_gather: str | None = None
    wire_reduce: str | None = None

    def training(self, case: Case, system: str, device: torch.device) -> Training:
        """A rank of a system, whatever loss, optimizer and sharding the case itself has."""
        own = replace(case, loss=_loss, optimizer=_adamw, shard=partial(self._shard, device))
        return Training(own, SYSTEMS[system].way, device, bf16=self.bf16)

    def _shard(self, device: torch.device, model: nn.Module) -> nn.Module:
        precision = MixedPrecision(torch.bfloat16, torch.float32) if self.bf16 else None
        wire = Wire(self.wire_gather, self.wire_reduce) if self.wire_gather or self.wire_reduce else None
        on = device if device.type == "cuda" else None
        shard_module(model, mixed_precision=precision, device_id=on, wire=wire)
        return model


def _loss(output: Any, target: Any = None) -> Tensor:
    return loss_of(output)


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, foreach=True)


# --- a turn -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What a turn has shown.

    Attributes:
        seconds: of each step that counts.
        losses: of all steps of the turn, the mean over ranks.
        first: seconds of the first step, which compiles; None: it was in an earlier turn.
        peak: bytes alive at most, of the rank with the most; None: not looked at.
        unit: what a step trains on: "tokens" or "samples".
        number: how many of them, on all ranks.
    """

    seconds: list[float]
    losses: list[float]
    first: float | None
    peak: int | None
    unit: str
    number: int


def take_turn(training: Training, samples: int, steps: int, looks: bool) -> Turn:
    """Train for `steps` steps that count, of `samples` on each rank, and some before.

    `looks`: see how many bytes are alive.
    """
    is_first, warm, device = training.forwards == 0, 1 if training.forwards else WARM, training.device
    batches = [training.next_batches() for _ in range(warm + steps)]
    seconds, losses = list[float](), list[Tensor]()
    dist.barrier()
    for number, batch in enumerate(batches):
        if number == warm and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = _synchronized_time(device)
        losses.append(training.step(batch))
        seconds.append(_synchronized_time(device) - begin)
    given = [*batches[0][0].args, *batches[0][0].kwargs.values()]
    first = next((each for each in given if isinstance(each, Tensor)), None)
    unit, number = "samples", samples
    if first is not None and first.dim() > 1 and not first.is_floating_point():
        unit, number = "tokens", first.numel()
    ranks = dist.get_world_size()
    return Turn(
        seconds=seconds[warm:],
        losses=(_reduced(torch.stack(losses).float()) / ranks).tolist(),
        first=seconds[0] if is_first else None,
        peak=_peak_bytes(training) if looks else None,
        unit=unit,
        number=number * ranks,
    )


def _synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _reduced(value: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(value, by)
    return value


def _peak_bytes(training: Training) -> int:
    """Bytes alive at most in a step: by the allocator; on the CPU what stays, and what more steps allocate."""
    model, device = training.model, training.device
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated()
    else:
        stays = resident([*model.parameters(), *model.buffers(), *states_of(training.optimizer)])
        if training.way.how == "ddp":
            stays += resident(training.trained)  # its buckets of gradients, which it never frees
        # The profiler does not see what threads of gloo free, which now and then are the last to use a buffer.
        tries = TRIES if dist.get_world_size() > 1 else 1
        seen = [curve(partial(training.step, training.next_batches()), device) for _ in range(tries)]
        most = stays + min(max((total for _, total in each), default=0) for each in seen)
    return int(_reduced(torch.tensor(most, device=device), dist.ReduceOp.MAX))


# --- in a process of a `Pool`, which is one rank of one system --------------------------------------------------------

_TRAINING: list[Training] = []


def begin(load: Load, task: Task, system: str) -> dict[str, Any]:
    """Make the model; what is said of it, and of the device."""
    device, on_gpu = device_here(task.device), task.device == "cuda"
    _TRAINING.append(task.training(load(), system, device))
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    return {"device": name, "memory": memory, "model": _TRAINING[0].name}


def train(samples: int, steps: int, looks: bool) -> Turn:
    """A turn of what `begin` has made."""
    return take_turn(_TRAINING[0], samples, steps, looks)
