"""Gradients that wait for a later reduce: `no_sync`.

They add up whole and local, one buffer per flat parameter. Meanwhile each parameter's `.grad` is a full-shape view of
that buffer, so `zero_grad`, inspection and scaling work on it; what an earlier backward had reduced into `.grad` is put
aside and returns with the next reduce (E-ACC-3, E-GRAD-6).
"""

import torch
from torch import Tensor, nn

from fsdp_compile.flat_param import FlatParam
from fsdp_compile.ops import view_parameters


class Unsynced:
    """The local gradients of one flat parameter, and the reduced ones that they hide.

    Attributes:
        total: sum of the local gradients, 1-D `[layout.numel]`.
    """

    def __init__(self, flat: FlatParam, total: Tensor) -> None:
        self.total = total
        self.views = view_parameters(total, flat.layout.text)
        self.hidden = [param.grad for param in flat.params]
        self.shown: list[Tensor | None] = []
        for param, view in zip(flat.params, self.views, strict=True):
            if param.requires_grad:
                set_grad(param, view)
            self.shown.append(param.grad)

    def collect(self, flat: FlatParam) -> None:
        """Take over what the user did to the shown gradients since.

        A gradient set to None counts as zero, and what it hid is dropped as well. RuntimeError if a gradient was
        replaced by one of another size.
        """
        for index, (param, view) in enumerate(zip(flat.params, self.views, strict=True)):
            if not param.requires_grad or param.grad is self.shown[index]:
                continue
            self.hidden[index] = None
            if param.grad is None:
                view.zero_()
            elif param.grad.shape == view.shape:
                view.copy_(param.grad)
            else:
                raise RuntimeError(
                    f"parameter {flat.layout.names[index]}: expected a gradient of its full shape {tuple(view.shape)} "
                    f"inside no_sync, found {tuple(param.grad.shape)}; clear it or reduce it first"
                )

    def restore(self, flat: FlatParam) -> None:
        """Put back the reduced gradients."""
        for param, hidden in zip(flat.params, self.hidden, strict=True):
            if param.requires_grad:
                param.grad = hidden


def keep_unsynced(flat: FlatParam, packed: Tensor) -> None:
    """Add `packed`, 1-D `[layout.numel]`, to the flat parameter's local gradients and show them."""
    if flat.unsynced is None:
        flat.unsynced = Unsynced(flat, packed)
        return
    flat.unsynced.collect(flat)
    flat.unsynced.total.add_(packed)


def add_unsynced(flat: FlatParam, packed: Tensor) -> Tensor:
    """Add what was kept to `packed`, in place, before it is reduced; `.grad` is the reduced gradient again."""
    if flat.unsynced is not None:
        flat.unsynced.collect(flat)
        flat.unsynced.restore(flat)
        packed.add_(flat.unsynced.total)
        flat.unsynced = None
    return packed


def set_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Let `param.grad` be `grad`, whatever its shape, dtype and device; autograd itself would refuse (E-GRAD-2)."""
    placeholder = torch.empty_like(param)
    param.grad = placeholder
    placeholder.data = grad
