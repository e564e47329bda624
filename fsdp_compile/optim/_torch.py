"""Private names of torch about optimizers. Checked on torch 2.11, 2.13 and 2.14.

When torch moves:
- `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks` and their global counterparts hold what was registered by
  `register_optimizer_step_pre_hook` and the like; `torch.profiler` counts steps by a global one;
- `step` of each class is wrapped by what calls the hooks; `__wrapped__` is the original;
- schedulers set `_opt_called` when `optimizer.step` is called, and warn if it was not called before them;
- `TorchDispatchMode` sees each operator, with Python numbers where the caller passed some;
- `torch._foreach_*` call an operator for each tensor of lists; on the CPU by its own kernel;
- `_cdata` of a storage tells storages apart, also those without memory;
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def has_step_hooks(of: Optimizer) -> bool:
    """Whether users have hooks before or after each step of the optimizer."""
    around = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    if of._optimizer_step_pre_hooks or of._optimizer_step_post_hooks:
        return True
    return any(hook.__module__.partition(".")[0] not in ("torch", "fsdp_compile") for hook in around)


def announce_step(of: Optimizer) -> None:
    """Call the hooks before a step of any optimizer: checks of this package, which may raise."""
    for hook in optimizer._global_optimizer_pre_hooks.values():
        hook(of, (), {})


def step_without_hooks(of: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Step the optimizer as its class does, without what torch calls around it."""
    step = getattr(type(of).step, "__wrapped__", type(of).step)
    step(*((of,) if closure is None else (of, closure)))  # a step of users may take no closure


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share whose memory is the same, also without memory, as on the meta device."""
    return tensor.untyped_storage()._cdata


def of_lists(name: str) -> Callable[..., Any]:
    """The operator `name` for lists of tensors; one that works in place ends with `_`, and returns nothing."""
    operator: Callable[..., Any] = getattr(torch, f"_foreach_{name}")
    return operator


def note_step(of: Optimizer) -> None:
    """Let learning rate schedulers and the profiler know that the optimizer has stepped."""
    of._opt_called = True  # type: ignore[attr-defined]  # which schedulers set
    for hook in optimizer._global_optimizer_post_hooks.values():
        hook(of, (), {})
