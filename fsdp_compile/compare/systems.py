"""The systems that are compared, each as its users write it, and one rank of one of them that trains a model.

All have the same weights at first, the same batches, AdamW and, if they shard, the same units: each repeated block, and
the rest.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile.api import shard_module
from fsdp_compile.comm.hops import Wire
from fsdp_compile.compare.memory import alive, resident, states_of, waited
from fsdp_compile.construct.blocks import repeated_blocks
from fsdp_compile.core._torch import tree_map
from fsdp_compile.explain.batch import Batch, Inputs, batch_of, loss_of
from fsdp_compile.step import compile_step

WARM = 3  # steps before the first that counts: the first compiles the model, the second may compile the update
RATE = 1e-4  # of learning
LOOKS = 5  # steps whose waits are timed


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


@dataclass(frozen=True)
class Spec:
    """One rank of a system in a process of its own: what it trains, and where its ranks meet, by which name."""

    system: str
    factory: str
    task: Task
    rank: int
    world: int
    host: str
    port: int
    meeting: str


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
        waits: seconds of a step in which the host waits for collectives, the mean over ranks; None: that is not seen.
    """

    seconds: list[float]
    losses: list[float]
    first: float | None
    peak: int | None
    unit: str
    number: int
    waits: float | None = None


Run = Callable[..., Any]


class Training:
    """One rank of a system, in the default process group.

    Args:
        system: one of `SYSTEMS`.
        make: makes the model, unsharded, on the CPU.
        example_inputs: as in `explain`.
        task: what to do.
    """

    def __init__(self, system: str, make: Callable[[], Any], example_inputs: Inputs | None, task: Task) -> None:
        self.task, self.device, self.example_inputs = task, torch.device(task.device), example_inputs
        torch.manual_seed(0)
        model = make()
        if not isinstance(model, nn.Module):
            raise ValueError(f"FUNCTION: expected a function that makes a module, found one that makes "
                             f"{type(model).__name__}")  # fmt: skip
        self.name = type(model).__name__
        self.given = model.train()  # its forward says what it takes
        self.model, self._run = SYSTEMS[system].prepare(self, model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, foreach=True)
        self._step: Run = compile_step(self.model, self.optimizer, loss_of) if system == "step" else self._usual_step
        self._kept = resident(trained) if system == "ddp" else 0  # its buckets of gradients, which it never frees
        self._done = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """What bf16 is where nothing is sharded."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.bf16)

    def _usual_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self._run(*args, **kwargs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, batch: Batch) -> Tensor:
        """One step; the loss on this rank, shape `()`."""
        args, kwargs = batch
        loss: Tensor = self._step(*args, **kwargs)
        return loss

    def batch(self) -> Batch:
        """The next batch, which is another one on each rank and in each step, and the same for all systems."""
        torch.manual_seed(1 + dist.get_rank() + 1000 * self._done)
        self._done += 1
        given = batch_of(self.given, self.example_inputs, self.task.batch, self.task.sequence, draws=True)
        return tree_map(lambda each: each.to(self.device) if isinstance(each, Tensor) else each, given)

    def _synchronized_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def turn(self, steps: int, looks: bool) -> Turn:
        """Train for `steps` steps that count, and some before; `looks`: see how many bytes are alive."""
        is_first, warm = self._done == 0, 1 if self._done else WARM
        batches = [self.batch() for _ in range(warm + steps)]
        seconds, losses = list[float](), list[Tensor]()
        dist.barrier()
        for number, batch in enumerate(batches):
            if number == warm and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = self._synchronized_time()
            losses.append(self.step(batch))
            seconds.append(self._synchronized_time() - begin)
        mean = torch.stack(losses).float()
        dist.all_reduce(mean)
        first = next((each for each in (*batches[0][0], *batches[0][1].values()) if isinstance(each, Tensor)), None)
        unit, number = "samples", self.task.batch
        if first is not None and first.dim() > 1 and not first.is_floating_point():
            unit, number = "tokens", first.numel()
        return Turn(
            seconds=seconds[warm:],
            losses=(mean / dist.get_world_size()).tolist(),
            first=seconds[0] if is_first else None,
            peak=self._peak_bytes() if looks else None,
            unit=unit,
            number=number * dist.get_world_size(),
            waits=self._seconds_waited() if looks else None,
        )

    def _seconds_waited(self) -> float | None:
        """Of a step, the median of some."""
        if self.device.type != "cpu" or dist.get_world_size() == 1:  # on a GPU streams wait, and not the host
            return None
        seen = [waited(partial(self.step, self.batch())) for _ in range(LOOKS)]
        seconds = [each for each in seen if each is not None]
        if len(seconds) < LOOKS:
            return None
        mean = torch.tensor(statistics.median(seconds))
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def _peak_bytes(self) -> int:
        """Bytes alive at most in a step: by the allocator; on the CPU what stays, and what more steps allocate."""
        if self.device.type == "cuda":
            bytes_alive = torch.cuda.max_memory_allocated()
        else:
            batch = self.batch()
            states = [*self.model.parameters(), *self.model.buffers(), *states_of(self.optimizer)]
            bytes_alive = alive(lambda: self.step(batch), self.device, resident(states) + self._kept).peak
        most = torch.tensor(bytes_alive, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)


# --- systems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A row.

    Attributes:
        label: what it is, as code.
        prepare: given the rank and the model, returns the model that trains, and a function from a batch to the loss.
        setting: how a prediction's `Setting` differs.
        shares: whether all ranks train one model on all batches; otherwise each its own.
    """

    label: str
    prepare: Callable[[Training, nn.Module], tuple[nn.Module, Run]]
    setting: dict[str, Any] = field(default_factory=dict)
    shares: bool = True


def _with_loss(run: Run) -> Run:
    return lambda *args, **kwargs: loss_of(run(*args, **kwargs))


def _make_eager(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    task = training.task
    precision = MixedPrecision(torch.bfloat16, torch.float32) if task.bf16 else None
    wire = Wire(task.wire_gather, task.wire_reduce) if task.wire_gather or task.wire_reduce else None
    device = training.device if training.device.type == "cuda" else None
    shard_module(model, mixed_precision=precision, device_id=device, wire=wire)
    return model, _with_loss(model)


def _make_compiled(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    _make_eager(training, model)
    return model, _with_loss(torch.compile(model))


def _fsdp2(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if training.task.bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(training.device.type, (dist.get_world_size(),))
    for unit in (*repeated_blocks(model), model):
        fsdp2(unit, mesh=mesh, mp_policy=policy)
    return model, _with_loss(model)


def _fsdp2_compiled(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    """Each block is compiled before it is sharded, which is torchtitan's recipe."""
    blocks = set(repeated_blocks(model))
    names = [name for name, each in model.named_modules() if each in blocks]
    if not names:
        raise ValueError("expected repeated blocks to compile one by one, found none")
    for name in names:
        compiled: Any = torch.compile(model.get_submodule(name))
        model.set_submodule(name, compiled)
    return _fsdp2(training, model)


def _make_ddp(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    replicated = DistributedDataParallel(model.to(training.device), gradient_as_bucket_view=True)
    return replicated, _in_autocast(training, torch.compile(replicated))


def _make_unsharded(training: Training, model: nn.Module) -> tuple[nn.Module, Run]:
    return model.to(training.device), _in_autocast(training, torch.compile(model))


def _in_autocast(training: Training, run: Run) -> Run:
    def in_autocast(*args: Any, **kwargs: Any) -> Tensor:
        with training.autocast():
            return loss_of(run(*args, **kwargs))

    return in_autocast


FSDP2 = {"runtime": "fsdp2"}
SYSTEMS = {
    "eager": System("fully_shard(model)", _make_eager, {"compiled": False}),
    "compiled": System("torch.compile(fully_shard(model))", _make_compiled),
    "step": System("compile_step(fully_shard(model), optimizer)", _make_eager, {"compile_step": True}),
    "fsdp2": System("torch's fully_shard of each block, and of the model", _fsdp2, {**FSDP2, "compiled": False}),
    "fsdp2-compiled": System("the same, each block compiled", _fsdp2_compiled, FSDP2),
    "ddp": System("torch.compile(DistributedDataParallel(model))", _make_ddp, {**FSDP2, "strategy": "NO_SHARD"}),
    "unsharded": System("torch.compile(model): each rank for itself", _make_unsharded, {"world_size": 1}, shares=False),
}
OURS = ("eager", "compiled", "step")
"""Those of this package."""
