"""One rank that trains a case by a way: sharded by this package in one of several ways, by torch's, or unsharded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import FSDPModule, compile_step
from fsdp_compile.compare.case import Batch, Case
from fsdp_compile.compare.values import Key, Values, kept, tensors_in
from fsdp_compile.construct.blocks import repeated_blocks

BACKENDS = {"blocks": "aot_eager", "step": "aot_eager"}  # of ways that name none


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        name: of the way.
        how: "eager", "blocks", "whole" or "step", by this package; "fsdp2", "fsdp2-blocks" or "ddp", by torch; or
            "unsharded".
        backend: of torch.compile; None: nothing is compiled.
    """

    name: str
    how: str
    backend: str | None = None

    @classmethod
    def of(cls, text: str) -> "Way":
        """Of "eager", "blocks", "step", the latter with ":BACKEND", or a backend that compiles the whole model."""
        how, colon, backend = text.partition(":")
        if how in BACKENDS:
            return cls(text, how, backend or BACKENDS[how])
        known = torch.compiler.list_backends(exclude_tags=())
        if colon or (how != "eager" and how not in known):
            raise ValueError(f"ways: expected eager, blocks, step, blocks:BACKEND, step:BACKEND or one of "
                             f"{', '.join(known)}, found {text!r}")  # fmt: skip
        return cls(text, "eager" if how == "eager" else "whole", None if how == "eager" else how)


Hook = Callable[[nn.Module], None]


class Absent(Exception):
    """A way that does not exist for this model; why."""


class Training:
    """One rank, in the default process group.

    Args:
        case: what is trained.
        way: how.
        device: where.
        options: of torch.compile.
        averages: whether ranks of an unsharded model average their gradients; otherwise each trains for itself.
        turned: whether gradients are added up in the opposite order of ranks, whose rounding is another one.
        bf16: whether what is not sharded by the case computes in it.
        hook: called with the model before it is sharded and compiled.
    """

    forwards = 0  # how many there were

    def __init__(
        self, case: Case, way: Way, device: torch.device, *, options: dict[str, Any] | None = None,
        averages: bool = False, turned: bool = False, bf16: bool = False, hook: Hook = lambda model: None,
    ) -> None:  # fmt: skip
        self.case, self.way, self.device, self.bf16 = case, way, device, bf16
        self._options, self._averages, self._turned = options, averages, turned
        given = case.model()
        hook(given)
        self.name = type(given).__name__
        self.model: nn.Module = self._sharded(given)
        self.run: Any = self.model
        if way.backend is not None and way.how in ("whole", "ddp", "unsharded"):
            self.run = torch.compile(self.model, backend=way.backend, options=self._options)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = case.optimizer(self.trained)
        self._steps: dict[int, Any] = {}  # what compile_step returned, by the number of micro-batches

    def _sharded(self, model: nn.Module) -> nn.Module:
        """The model as it trains, with blocks that are compiled one by one."""
        how = self.way.how
        if how == "unsharded":
            return model.to(self.device)
        if how == "ddp":
            return DistributedDataParallel(model.to(self.device), gradient_as_bucket_view=True)
        if how.startswith("fsdp2"):
            return self._by_fsdp2(model)
        model = self.case.shard(model)
        units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        if not units:
            raise ValueError("shard: expected a function that returns a sharded model, found one without FSDPModule")
        if how == "blocks":
            blocks = [each for each in units if each is not model]
            if not blocks:
                raise Absent("the model has no units below it to compile one by one")
            for block in blocks:
                block.compile(backend=self.way.backend, options=self._options)
        return model

    def _by_fsdp2(self, model: nn.Module) -> nn.Module:
        """The units are each repeated block, perhaps compiled before, which is torchtitan's recipe, and the rest."""
        blocks = set(repeated_blocks(model))
        if self.way.backend is not None:
            names = [name for name, each in model.named_modules() if each in blocks]
            if not names:
                raise ValueError("expected repeated blocks to compile one by one, found none")
            for name in names:
                compiled: Any = torch.compile(model.get_submodule(name), backend=self.way.backend)
                model.set_submodule(name, compiled)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for unit in (*repeated_blocks(model), model):
            fsdp2(unit, mesh=mesh, mp_policy=policy)
        return model

    # --- a step ------------------------------------------------------------------------------------------------------

    def next_batches(self, count: int = 1) -> list[Batch]:
        """This rank's next micro-batches."""
        first, ranks = self.forwards, dist.get_world_size()
        self.forwards += count
        numbers = (number * ranks + dist.get_rank() for number in range(first, first + count))
        return [self.case.batch(number).to(self.device) for number in numbers]

    def loss_of(self, output: Any, target: Any = None) -> Tensor:
        """The loss of a micro-batch, shape `()`."""
        return self.case.loss(output, *([] if target is None else [target]))

    def step(self, batches: Sequence[Batch], seen: Values | None = None) -> Tensor:
        """Train by one step of some micro-batches, and return the mean loss, shape `()`.

        `seen` gets outputs and gradients, some of which are gathered; `compile_step` shows neither.
        """
        count = len(batches)
        if self.way.how == "step":
            return self._whole_step(batches)
        losses = []
        cast = self.bf16 and self.way.how in ("ddp", "unsharded")
        for number, batch in enumerate(batches):
            with self._accumulating(number < count - 1):
                with torch.autocast(self.device.type, torch.bfloat16) if cast else nullcontext():
                    output = self.run(*batch.args, **batch.kwargs)
                    loss = self.loss_of(output, batch.target)
                (loss if count == 1 else loss / count).backward()
            losses.append(loss.detach())
            if seen is not None:
                of = f", micro-batch {number}" if count > 1 else ""
                seen |= {Key("output", path + of): kept(each) for path, each in tensors_in(output)}
        if self._averages:
            self._average()
        if seen is not None:
            named = self.model.named_parameters()
            seen |= {Key("gradient", name): kept(param.grad) for name, param in named if param.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses[0] if count == 1 else torch.stack(losses).mean()

    def _accumulating(self, more: bool) -> Any:
        """`no_sync` for all micro-batches of a step but the last."""
        return self.model.no_sync() if more and isinstance(self.model, FSDPModule) else nullcontext()

    def _whole_step(self, batches: Sequence[Batch]) -> Tensor:
        args, kwargs, target = _join_micro_batches([(each.args, dict(each.kwargs), each.target) for each in batches])
        count = len(batches)
        if count not in self._steps:
            self._steps[count] = compile_step(self.model, self.optimizer, self.case.loss, accumulate=count,
                                              backend=self.way.backend or "", options=self._options)  # fmt: skip
        loss: Tensor = self._steps[count](*args, target=target, **kwargs)
        return loss

    def _average(self) -> None:
        """Let each gradient be the mean over ranks; None if no rank has one."""
        ranks = dist.get_world_size()
        has: list[Any] = [None] * ranks
        dist.all_gather_object(has, [each.grad is not None for each in self.trained])
        for param, given in zip(self.trained, zip(*has, strict=True), strict=True):
            if any(given):
                mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
                of_ranks = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ranks)]
                dist.all_gather(of_ranks, mine)
                total, *others = of_ranks[::-1] if self._turned else of_ranks
                for other in others:
                    total = total + other
                param.grad = total / ranks

    def state(self) -> Values:
        """Buffers, parameters and the optimizer's state."""
        values: Values = {Key("buffer", name): kept(each) for name, each in self.model.named_buffers()}
        for name, param in self.model.named_parameters():
            values[Key("parameter", name)] = kept(param)
        for name, param in self.model.named_parameters():
            for entry, value in sorted(self.optimizer.state.get(param, {}).items()):
                number = torch.tensor(float(value)) if isinstance(value, (int, float)) else value
                for path, each in tensors_in(number, entry):
                    values[Key("state", f"{path} of {name}")] = kept(each)
        return values

    @torch.no_grad()
    def move(self) -> None:
        """Change each floating parameter by one unit in the last place."""
        generator = torch.Generator().manual_seed(1)
        for param in self.model.parameters():
            if param.is_floating_point():
                signs = torch.randint(2, param.shape, generator=generator).mul(2).sub(1).to(param.device)
                param.add_((param.double() * signs * torch.finfo(param.dtype).eps).to(param.dtype))


def _join_micro_batches(values: Sequence[Any]) -> Any:
    """Micro-batches as one batch, which `compile_step` divides again. Absent if that is not possible."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor) and first.dim():
        if any(each.shape != first.shape for each in values):
            raise Absent("compile_step cannot accumulate micro-batches of different shapes")
        return torch.cat(list(values))
    if isinstance(first, Mapping):
        return {key: _join_micro_batches([each[key] for each in values]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_join_micro_batches(each) for each in zip(*values, strict=True))
    if isinstance(first, Tensor):
        raise Absent("compile_step cannot accumulate with a tensor without dimensions")
    return first
