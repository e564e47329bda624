"""Private names of torch about optimizers. Checked on torch 2.11, 2.13 and 2.14.

When torch moves:
- `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks` and their global counterparts hold what was registered by
  `register_optimizer_step_pre_hook` and the like; `torch.profiler` counts steps by a global one;
- `step` of each class is wrapped by what calls the hooks; `__wrapped__` is the original;
- schedulers set `_opt_called` when `optimizer.step` is called, and warn if it was not called before them;
- `_zeropower_via_newtonschulz` and `_adjust_lr` of Muon are what `step` calls between the momentum and the update.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, _muon, optimizer


def has_step_hooks(of: Optimizer) -> bool:
    """Whether users have hooks before or after each step of the optimizer."""
    around = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    has_own = of._optimizer_step_pre_hooks or of._optimizer_step_post_hooks
    return bool(has_own) or any(hook.__module__.partition(".")[0] not in ("torch", "fsdp_compile") for hook in around)


def announce_step(of: Optimizer) -> None:
    """Call the hooks before a step of any optimizer: checks of this package, which may raise."""
    for hook in optimizer._global_optimizer_pre_hooks.values():
        hook(of, (), {})


def step_without_hooks(of: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Step the optimizer as its class does, without what torch calls around it."""
    step = getattr(type(of).step, "__wrapped__", type(of).step)
    step(*((of,) if closure is None else (of, closure)))  # a step of users may take no closure


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What Muon makes of a matrix in bfloat16, which is overwritten, by its Newton-Schulz iterations."""
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)


def adjusted_lr(lr: Any, how: str | None, shape: tuple[int, ...]) -> Any:
    """Muon's learning rate for a matrix of this shape; `lr`: a number, or a tensor of shape `()`."""
    return _muon._adjust_lr(lr, how, torch.Size(shape))


def note_step(of: Optimizer) -> None:
    """Let learning rate schedulers and the profiler know that the optimizer has stepped."""
    of._opt_called = True  # type: ignore[attr-defined]  # which schedulers set
    for hook in optimizer._global_optimizer_post_hooks.values():
        hook(of, (), {})
