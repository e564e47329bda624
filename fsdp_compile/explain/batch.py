"""What a model is given in a step where nobody says it, and the loss of what it returns."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[..., Sequence[Any]]
Batch = tuple[list[Any], dict[str, Any]]


def batch_of(model: nn.Module, example_inputs: Inputs | None, batch: int, sequence: int, draws: bool = False) -> Batch:
    """Positional arguments and arguments by name of a forward.

    Args:
        model: unsharded or not.
        example_inputs: given (batch, sequence), returns positional arguments; None: tokens, and targets if forward
            takes them.
        batch: number of sequences.
        sequence: tokens of each.
        draws: whether tokens are drawn at random from those that the model's embedding knows; otherwise they are zeros.
    """
    if example_inputs is not None:
        return list(example_inputs(batch, sequence)), {}
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    if draws:
        ids.random_(_vocabulary(model))
    names = list(inspect.signature(model.forward).parameters)
    without = {"use_cache": False} if "use_cache" in names else {}  # keys and values for generation
    if "labels" in names:
        return [ids], {"labels": ids.clone(), **without}  # such models shift them
    second = names[1] if len(names) > 1 else ""
    wants_targets = "target" in second or "label" in second or second == "y"
    return ([ids, ids.roll(-1, 1)] if wants_targets else [ids]), without


def _vocabulary(model: nn.Module) -> int:
    """How many tokens the first embedding knows, or the one that a Hugging Face model calls that of its inputs."""
    named = getattr(model, "get_input_embeddings", lambda: None)()
    embeddings = [named, *model.modules()]
    return next((each.num_embeddings for each in embeddings if isinstance(each, nn.Embedding)), 1)


def loss_of(output: Any) -> Tensor:
    """The scalar of which backward computes gradients."""
    for name in ("loss", "logits"):
        output = output[name] if isinstance(output, dict) and name in output else getattr(output, name, output)
    if isinstance(output, (tuple, list)):
        losses = [each for each in output if isinstance(each, Tensor) and each.dim() == 0]
        output = losses[0] if losses else output[0]
    if output.dim() == 0:
        return output
    if output.dim() < 3:
        return output.float().sum()
    logits = output.flatten(0, -2)
    targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.float(), targets)
