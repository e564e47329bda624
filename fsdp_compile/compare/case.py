"""What is trained: a model, its batches, its loss, its optimizer, and what shards it."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile import fully_shard
from fsdp_compile.compare.pool import one_line
from fsdp_compile.compare.values import tensors_in
from fsdp_compile.core._torch import tree_map
from fsdp_compile.explain.batch import batch_of
from fsdp_compile.tools.files import load_factory, names_beside

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
        """The same on a device: tensors, and what else can be moved."""
        parts = (self.args, dict(self.kwargs), self.target)
        return Batch(*tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, parts))


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
class Case:
    """What is trained.

    Attributes:
        make: makes the model, unsharded, on the CPU.
        batches: batch number n, of all that all ranks see one after the other.
        loss: called with the output, and the batch's target if it has one; returns shape `()`.
        optimizer: called with the parameters that train.
        shard: shards the model and returns it.
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


Load = Callable[[], Case]  # pickled for other processes, where it loads a case


def given_case(model: nn.Module | Callable[[], nn.Module], batches: Any, **parts: Any) -> Case:
    """Of a model, of which copies train, or a function that makes it; of batches in turn, or a function of a number."""
    make = partial(deepcopy, model) if isinstance(model, nn.Module) else model
    return Case(make, batches if callable(batches) else partial(_batch_in_turn, batches), **parts)


def _batch_in_turn(batches: Sequence[Any], number: int) -> Any:
    return batches[number % len(batches)]


def case_in_file(factory: str, batch: int, sequence: int) -> Case:
    """Of `FILE.py:FUNCTION`, which makes the model, and of `loss(output)`, `optimizer(params)` and `shard(model)`
    beside it, if the file has them. ValueError if it fails, or one of these is no function."""
    make, inputs = load_factory(factory)
    model = make() if inputs is None else nn.Module()  # its forward says what it takes

    def batches(number: int) -> Any:
        return batch_of(model, None, batch, sequence, draws=True) if inputs is None else inputs(batch, sequence)

    return Case(make, batches, **names_beside(factory, ("loss", "optimizer", "shard")))


def check_pickles(model: Any, batches: Any, **parts: Any) -> None:
    """Raise ValueError with the name of what cannot be pickled for other processes."""
    for name, value in {"model": model, "batches": batches, **parts}.items():
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:  # of many kinds, also the user's own
            raise ValueError(
                f"{name}: expected something that can be pickled for other processes, found {one_line(error)}; "
                f"define functions and classes at the top of a module, pass a function that makes the model, or call "
                f"check on all ranks of torchrun"
            ) from error
