"""What is checked, and training it: unsharded on all ranks' data, and sharded by each way of running it."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import FSDPModule, compile_step, fully_shard
from fsdp_compile.explain.batch import batch_of
from fsdp_compile.tools.check_ranks import one_line
from fsdp_compile.tools.check_values import Key, Values, kept, tensors_in
from fsdp_compile.tools.files import run_file

BACKENDS = {"blocks": "aot_eager", "step": "aot_eager"}  # of ways that name none
FIRST_SEED = 1000


@dataclass(frozen=True)
class Batch:
    """What one rank trains on in one forward.

    Attributes:
        args: of the model.
        kwargs: of the model.
        target: what the loss is given beside the output, unless it is None.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    @classmethod
    def of(cls, given: Any) -> "Batch":
        """A batch as it is; a tensor, a tuple or list of arguments, a dict of arguments by name, or a pair of both."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Tensor):
            return cls((given,))
        if isinstance(given, Mapping):
            return cls(kwargs=given)
        if isinstance(given, (tuple, list)):
            is_pair = len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], Mapping)
            return cls(tuple(given[0]), given[1]) if is_pair else cls(tuple(given))
        raise TypeError(f"batches: expected a Batch, tensor, tuple, list or dict, found {type(given).__name__}")

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return replace(
            self,
            args=_moved_to(self.args, device),
            kwargs=_moved_to(self.kwargs, device),
            target=_moved_to(self.target, device),
        )


def _moved_to(value: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dicts, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved_to(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_moved_to(each, device) for each in value)
    return value


def default_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an `eps` far above the rounding errors of gradients that ought to be zero."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def default_loss(output: Any) -> Tensor:
    """The loss that the output has; else the mean over its floating tensors, with fixed weights of both signs.

    Without weights a last normalization would get gradients of zero.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [each for _, each in tensors_in(output) if each.requires_grad and each.numel()]
    scalars = [each for each in tensors if each.dim() == 0]
    if scalars:
        return scalars[0]
    if not tensors:
        raise ValueError("loss: expected an output that has a loss, or a tensor that depends on parameters; pass loss")
    means = []
    for each in tensors:
        weights = torch.arange(each.numel(), device=each.device).mul(0.7).cos().add(0.1).view(each.shape)
        means.append((each.abs() if each.is_complex() else each).float().mul(weights).mean())
    return torch.stack(means).sum()


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        make: makes the model, unsharded, on the CPU.
        batches: batch number n, of all that all ranks see one after the other.
        loss: called with the output, and the batch's target if it has one; returns shape `()`.
        optimizer: called with the parameters that train.
        shard: shards the model.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int], Any]
    loss: Callable[..., Tensor] = default_loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = default_optimizer
    shard: Callable[[nn.Module], nn.Module] = fully_shard

    def model(self) -> nn.Module:
        """The model, which is the same each time."""
        torch.manual_seed(0)
        made = self.make()
        if not isinstance(made, nn.Module):
            raise ValueError(f"FUNCTION: expected a function that makes a module, found one that makes "
                             f"{type(made).__name__}")  # fmt: skip
        return made.train()

    def batch(self, number: int) -> Batch:
        """Batch `number`, which is the same each time."""
        torch.manual_seed(FIRST_SEED + number)
        return Batch.of(self.batches(number))


@dataclass(frozen=True)
class InFile:
    """A subject that a file defines: a function that makes the model, and beside it, if they are not the usual ones,
    `example_inputs(batch, sequence)`, `loss(output)`, `optimizer(params)` and `shard(model)`.
    """

    path: str
    name: str
    batch: int
    sequence: int

    def subject(self) -> Subject:
        """Run the file. ValueError if it lacks the function, or fails."""
        names = run_file(Path(self.path))
        for name in (self.name, "example_inputs", "loss", "optimizer", "shard"):
            if name in names and not callable(names[name]):
                raise ValueError(f"{self.path}: expected {name} to be a function, found {type(names[name]).__name__}")
        if self.name not in names:
            raise ValueError(f"{self.path}: expected a function {self.name}() without arguments, found none")
        make, inputs = names[self.name], names.get("example_inputs")
        model = make() if inputs is None else nn.Module()  # its forward says what it takes

        def batches(number: int) -> Any:
            if inputs is not None:
                return inputs(self.batch, self.sequence)
            args, kwargs = batch_of(model, None, self.batch, self.sequence, draws=True)
            return Batch(tuple(args), kwargs)

        own = {name: names[name] for name in ("loss", "optimizer", "shard") if name in names}
        return Subject(make, batches, **own)


class Pickled:
    """A subject for other processes, as bytes, so that they share no memory.

    Raises:
        ValueError: a part of it cannot be pickled.
    """

    def __init__(self, model: Any, batches: Any, parts: Mapping[str, Any]) -> None:
        texts = {"model": model, "batches": batches, **parts}
        self._bytes = {name: _pickle_argument(name, value) for name, value in texts.items()}

    def subject(self) -> Subject:
        """What was pickled. A model that was given is a new one each time it is made."""
        parts = {name: _unpickled(each) for name, each in self._bytes.items()}
        model, batches = parts.pop("model"), parts.pop("batches")
        return subject_of(model, batches, parts, again=lambda: _unpickled(self._bytes["model"]))


def subject_of(model: Any, batches: Any, parts: Mapping[str, Any], again: Callable[[], Any]) -> Subject:
    """A subject of what `check` was given; `again` makes a copy of the model, where it is no function."""
    numbered = batches if callable(batches) else lambda number: batches[number % len(batches)]
    return Subject(again if isinstance(model, nn.Module) else model, numbered, **parts)


def _pickle_argument(name: str, value: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:  # of many kinds, also the user's own
        raise ValueError(
            f"{name}: expected something that can be pickled for other processes, found {one_line(error)}; "
            f"define functions and classes at the top of a module, pass a function that makes the model, or call check "
            f"on all ranks of torchrun"
        ) from error
    return file.getvalue()


def _unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a model is run: "eager", "blocks", "whole" or "step", by which backend of torch.compile."""

    name: str
    how: str
    backend: str | None

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


def compiled(model: nn.Module, backend: str) -> Any:
    """`torch.compile(model)`; Inductor draws the random numbers that eager mode draws."""
    return torch.compile(model, backend=backend, options=options_of(backend))


def options_of(backend: str) -> dict[str, Any] | None:
    """Options of torch.compile with which random operators draw the same numbers as in eager mode."""
    return {"fallback_random": True} if backend == "inductor" else None


class Training:
    """One rank that trains a model in the default process group, and shows all values of each step.

    Args:
        subject: what is trained.
        device: where.
        hook: called with the model before it is sharded and compiled.
    """

    micro_batches = 0  # how many forwards there were

    def __init__(self, subject: Subject, device: torch.device, hook: Callable[[nn.Module], None] | None = None) -> None:
        self.subject, self.device = subject, device
        self.model = self.prepared(subject.model(), hook or (lambda model: None))
        self.optimizer = subject.optimizer([each for each in self.model.parameters() if each.requires_grad])
        self.run: Any = self.model

    def prepared(self, model: nn.Module, hook: Callable[[nn.Module], None]) -> nn.Module:
        """The model as it is trained."""
        raise NotImplementedError

    def next_batches(self, count: int) -> list[Batch]:
        """This rank's next micro-batches."""
        first, ranks = self.micro_batches, dist.get_world_size()
        self.micro_batches += count
        numbers = (number * ranks + dist.get_rank() for number in range(first, first + count))
        return [self.subject.batch(number).to(self.device) for number in numbers]

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """The loss of a micro-batch, shape `()`."""
        target = () if batch.target is None else (batch.target,)
        return self.subject.loss(output, *target)

    def step(self, count: int) -> Values:
        """Train by one step of `count` micro-batches; its values, of which some are gathered."""
        values: Values = {}
        batches = self.next_batches(count)
        torch.manual_seed(self.micro_batches)
        losses = []
        for number, batch in enumerate(batches):
            with self.accumulating() if number < count - 1 else nullcontext():
                output = self.run(*batch.args, **batch.kwargs)
                loss = self.loss_of(output, batch)
                (loss if count == 1 else loss / count).backward()
            of = f", micro-batch {number}" if count > 1 else ""
            values |= {Key("output", path + of): kept(each) for path, each in tensors_in(output)}
            losses.append(loss.detach())
        self.average()
        values[Key("loss", "")] = kept(losses[0] if count == 1 else torch.stack(losses).mean())
        params = self.model.named_parameters()
        values |= {Key("gradient", name): kept(p.grad) for name, p in params if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values | self.state()

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

    def accumulating(self) -> Any:
        """A context for all micro-batches of a step but the last."""
        return nullcontext()

    def average(self) -> None:
        """Let each gradient be the mean over ranks."""


class Unsharded(Training):
    """The model as it is, on each rank with its own data; gradients are added up in the order of ranks.

    Args:
        subject: what is trained.
        device: where.
        backend: that compiles it; None: none does.
        moved: whether each parameter begins one unit in the last place away from its value.
        hook: called with the model before it is compiled.
    """

    def __init__(
        self,
        subject: Subject,
        device: torch.device,
        backend: str | None = None,
        moved: bool = False,
        hook: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__(subject, device, hook)
        self._reversed = moved or backend is not None  # another order of ranks, whose rounding is another one
        if moved:
            self.move()
        if backend is not None:
            self.run = compiled(self.model, backend)

    def prepared(self, model: nn.Module, hook: Callable[[nn.Module], None]) -> nn.Module:
        """On the device, with its hooks."""
        hook(model)
        return model.to(self.device)

    @torch.no_grad()
    def move(self) -> None:
        """Change each floating parameter by one unit in the last place."""
        generator = torch.Generator().manual_seed(1)
        for param in self.model.parameters():
            if param.is_floating_point():
                signs = torch.randint(2, param.shape, generator=generator).mul(2).sub(1).to(param.device)
                param.add_((param.double() * signs * torch.finfo(param.dtype).eps).to(param.dtype))

    def average(self) -> None:
        """The mean over ranks; None if no rank has a gradient."""
        ranks = dist.get_world_size()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        has: list[Any] = [None] * ranks
        dist.all_gather_object(has, [each.grad is not None for each in trained])
        for param, given in zip(trained, zip(*has, strict=True), strict=True):
            if any(given):
                mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
                of_ranks = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ranks)]
                dist.all_gather(of_ranks, mine)
                ordered = of_ranks[::-1] if self._reversed else of_ranks
                total: Any = ordered[0]
                for other in ordered[1:]:
                    total = total + other
                param.grad = total / ranks


class Sharded(Training):
    """The model after `subject.shard`, run by a way."""

    def __init__(
        self, subject: Subject, device: torch.device, way: Way, hook: Callable[[nn.Module], None] | None = None
    ) -> None:
        super().__init__(subject, device, hook)
        self.way = way
        self._steps: dict[int, Any] = {}  # what compile_step returned, by the number of micro-batches
        if way.how == "whole" and way.backend is not None:
            self.run = compiled(self.model, way.backend)
        if way.how == "blocks":
            for block in self.blocks():
                block.compile(backend=way.backend, options=options_of(way.backend or ""))

    def prepared(self, model: nn.Module, hook: Callable[[nn.Module], None]) -> nn.Module:
        """Sharded, on the device."""
        hook(model)
        sharded = self.subject.shard(model.to(self.device))
        if not any(isinstance(each, FSDPModule) for each in sharded.modules()):
            raise ValueError("shard: expected a function that returns a sharded model, found one without FSDPModule")
        return sharded

    def blocks(self) -> Sequence[nn.Module]:
        """The units below the model. ValueError if it has none."""
        found = [each for each in self.model.modules() if isinstance(each, FSDPModule) and each is not self.model]
        if not found:
            raise Absent("the model has no units below it to compile one by one")
        return found

    def accumulating(self) -> Any:
        """`no_sync`."""
        model: Any = self.model
        return model.no_sync()

    def step(self, count: int) -> Values:
        """Also by `compile_step`, which shows neither outputs nor gradients."""
        if self.way.how != "step":
            return super().step(count)
        batches = self.next_batches(count)
        torch.manual_seed(self.micro_batches)
        args, kwargs, target = _join_micro_batches([(each.args, each.kwargs, each.target) for each in batches])
        if count not in self._steps:
            backend = self.way.backend or ""
            self._steps[count] = compile_step(self.model, self.optimizer, self.subject.loss, accumulate=count,
                                              backend=backend, options=options_of(backend))  # fmt: skip
        loss = self._steps[count](*args, target=target, **kwargs)
        return {Key("loss", ""): kept(loss)} | self.state()


class Absent(Exception):
    """A way that does not exist for this model; why."""


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


def trained(training: Training, counts: Iterable[int]) -> Iterator[Values]:
    """The values of each step."""
    for count in counts:
        yield training.step(count)
