"""Elementwise optimizers on flat shards: their own `step` updates each segment (segments.py) as one parameter.

`optimizer.step()`        of users: a hook shows it the segments; `flat_step` turns that off
`step_segments(...)`      the same on chosen segments, as `compile_step` and its updates in backward call it
"""

# Note [Which kernels run]
# `optimizer.step()` runs the kernels that torch chooses, so that a loop has the bits that it has without sharding. With
# Inductor, whose forward and backward round otherwise anyway, torch's fused kernels run where a group leaves the choice
# open: one pass over parameter, gradient and state, which also scales the gradient by a clip factor (`grad_scale`).
# For these Adam keeps its step counts on the device, where other kernels would have to wait for them. So that state
# does not depend on who steps, Adam and Adagrad are fused on an accelerator only by `fused=True`.

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.optim._torch import has_step_hooks, step_without_hooks
from fsdp_compile.optim.matrix_optimizers import takes_matrices
from fsdp_compile.optim.matrix_step import MatrixUpdates
from fsdp_compile.optim.segments import Ready, Segments

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, Rprop)
"""Optimizers that update each element by its own gradient and state alone, and keep zeros where all of these are."""
ELEMENTWISE_NAMES = ", ".join(kind.__name__ for kind in ELEMENTWISE)
_FUSED = (SGD, Adam, AdamW, Adagrad)


def flat_step(optimizer: Optimizer, enabled: bool = True) -> Optimizer:
    """Choose whether `optimizer.step()` updates flat shards where it can, as it does by default; return `optimizer`.

    Steps on flat shards save host time: nearly all of a step is Python code that runs per parameter. On a CPU, results
    of the two ways differ in the last bit of some elements, as kernels compute the last few elements of a tensor with
    other instructions than the rest.

    Args:
        optimizer: of one of the classes in `ELEMENTWISE` exactly, or Muon; others always step as they are.
        enabled: if False, `optimizer` updates each parameter by itself. Then every rank gathers and computes each
            matrix of Muon.

    Raises:
        TypeError: `optimizer` is of another class.
    """
    if type(optimizer) not in ELEMENTWISE and not takes_matrices(optimizer):
        raise TypeError(
            f"optimizer: flat_step takes optimizers that update elementwise ({ELEMENTWISE_NAMES}) and Muon, not "
            f"{type(optimizer).__name__}; call its own step"
        )
    Segments.of(optimizer).is_off = not enabled
    return optimizer


@functools.cache
def step_on_flat_shards() -> None:
    """From now on let elementwise optimizers update flat shards; registered once per process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have `_give_closure` called behind the hooks of users. Without `args`, `compile_step` steps by itself."""
    if torch.compiler.is_compiling() or not args or not (type(optimizer) in ELEMENTWISE or takes_matrices(optimizer)):
        return
    segments = Segments.of(optimizer, known=True)
    if segments.hook is not None:  # is registered still where another hook has raised
        segments.hook.remove()
    if (segments.all or takes_matrices(optimizer)) and not segments.is_off:
        segments.hook = optimizer.register_step_pre_hook(functools.partial(_give_closure, segments))


def _give_closure(segments: Segments, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the step a closure that calls the user's, then shows it segments (Note [One loop over other groups])."""
    if len(args) > 2 or not kwargs.keys() <= {"closure"}:
        return None  # the step raises
    closure = args[1] if len(args) == 2 else kwargs.get("closure")
    given: dict[str, Any] = {}

    def begin() -> Any:
        given.clear()  # hooks behind the step see what the user gave
        given.update({} if closure is None else {"closure": closure})
        segments.hook.remove()
        loss = None if closure is None else closure()
        present = Segments.of(optimizer)  # hooks and closures may replace parameters
        if takes_matrices(optimizer):
            _update_matrices(optimizer)
        elif ready := present.ready(optimizer):
            present.show(optimizer, ready, present.others(ready))
        return loss

    given["closure"] = begin
    return args[:1], given


def _update_matrices(optimizer: Optimizer) -> None:
    """Update what is computed from complete matrices, and let the step that runs find the other parameters."""
    updates = MatrixUpdates.of(optimizer)
    try:
        covered = updates.begin(optimizer)
        updates.finish()
    finally:
        updates.drop()
    if covered:
        show_others(optimizer, covered)


def show_others(optimizer: Optimizer, covered: Collection[int]) -> None:
    """Let the step that runs find the parameters whose ids are not `covered`."""
    others = [[param for param in group["params"] if id(param) not in covered] for group in optimizer.param_groups]
    Segments.of(optimizer).show(optimizer, (), others)


def steps_segments(optimizer: Optimizer) -> bool:
    """Whether `step_segments` does all that a step of `optimizer` does: it is elementwise, and users have no hooks."""
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in ELEMENTWISE and not differentiable and not has_step_hooks(optimizer)


@torch.no_grad()
def step_segments(
    optimizer: Optimizer,
    ready: Ready,
    others: Sequence[Sequence[nn.Parameter]] = (),
    factor: Tensor | None = None,
    fuses: bool = False,
) -> None:
    """The optimizer's own step, without step hooks, on segments, and on `others`, for each group, one by one.

    Args:
        ready: each segment with its gradient, 1-D.
        factor: the gradients of segments count times this, shape `()`; they are changed.
        fuses: whether torch's fused kernels run where a group leaves it open (Note [Which kernels run]).
    """
    on_cpu = all(each.shard.is_cpu for each, _ in ready) and all(each.is_cpu for some in others for each in some)
    has_fused = fuses and type(optimizer) in (_FUSED if on_cpu else (SGD,))
    chosen = [_fuses(group, has_fused) for group in optimizer.param_groups]
    if factor is not None and all(chosen[segment.group] and grad.dtype != torch.float64 for segment, grad in ready):
        optimizer.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]  # which `step` reads
    elif factor is not None:
        for _, grad in ready:
            grad.mul_(factor.to(grad.device))
    try:
        step_without_hooks(optimizer, lambda: Segments.of(optimizer, known=True).show(optimizer, ready, others, chosen))
    finally:
        vars(optimizer).pop("grad_scale", None)


def _fuses(group: dict[str, Any], has_fused: bool) -> bool:
    """Whether a fused kernel updates `group`: as its user says, or else if torch `has_fused` ones for it."""
    if group.get("fused") is not None or group.get("foreach") is not None:
        return bool(group.get("fused"))
    return has_fused and not isinstance(group["lr"], Tensor)
