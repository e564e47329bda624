"""The join: what ties the parameters of a flat parameter to the handle that forward gathers from.

nn.Parameter a   nn.Parameter b ...     what the optimizer holds: 1-D views into the shard (autograd leaves)
      \\             /
       join (applied once)              backward: hands each parameter its slice of the reduced gradient
            |
         handle                         the whole shard; the one input that a traced graph has for it
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import (
    call_after_backward,
    carries_optimizers,
    current_backward,
    set_grad,
    step_carried_optimizers,
)
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import alias


class ShardSplitter:
    """Cuts a tensor laid out like this rank's shard into the parameters' parts, by a single split."""

    def __init__(self, layout: FlatParamLayout, rank: int) -> None:
        self.sizes: list[int] = []  # of the runs that cover the shard, padding included
        self.places: list[int | None] = []  # for each parameter the run that is its part; None: not on this rank
        self.shapes = layout.shapes if layout.world_size == 1 else None  # whole parameters keep their shape
        end = 0
        for record in layout.records(rank):
            if record:
                self.sizes += [record.offset - end] * (record.offset > end) + [record.numel]
                end = record.offset + record.numel
            self.places.append(len(self.sizes) - 1 if record else None)
        self.sizes += [layout.shard_numel - end] * (layout.shard_numel > end)

    def of(self, flat: Tensor) -> list[Tensor | None]:
        """The parts of `flat`, 1-D `[shard_numel]`: views, 1-D or, unsharded, in full shape; None: not on this rank."""
        runs = flat.split_with_sizes(self.sizes)
        parts = [None if place is None else runs[place] for place in self.places]
        if self.shapes is None:
            return parts
        return [None if part is None else part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class GradientReduction:
    """What stands between the reduce of a flat parameter's gradients and the join that hands them out.

    With shards in host memory the engine runs joins in another thread than what starts reduces.

    Attributes:
        finish: waits for the gradient that is on its way, and completes it; None: there is none.
        settle: lets the host wait for a completed gradient's copy into host memory; None: there is nothing to wait for.
        backward: the backward pass that has last reduced gradients, with all that was kept under no_sync.
        full_precision: whether that one computed in the parameters' own dtype, mixed precision left aside.
        grad_dtype: the dtype in which `.grad` stays after backward, if not the parameters' (keep_low_precision_grads).
        reduce_accumulated: reduces the gradients that were accumulated under no_sync, zeros if there are none, and
            returns this rank's slice; None until no_sync has been in force for the first time.
        results: with the number of its backward pass, what was reduced of gradients that a graph has handed over.
    """

    def __init__(self) -> None:
        self.finish: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None
        self.backward = -1
        self.full_precision = False
        self.grad_dtype: torch.dtype | None = None
        self.reduce_accumulated: Callable[[], Tensor] | None = None
        self.results: list[tuple[int, Tensor]] = []
        self._lock = threading.RLock()

    def wait(self) -> None:
        """Order the current stream after the gradient that was handed to autograd."""
        with self._lock:
            if self.finish is not None:
                finish, self.finish = self.finish, None
                finish()

    def wait_on_host(self) -> None:
        """As `wait`; a gradient in host memory may be read by the host as well (E-OFF-5)."""
        with self._lock:
            self.wait()
            if self.settle is not None:
                settle, self.settle = self.settle, None
                settle()

    def take_results(self) -> Tensor | None:
        """The sum of `results` of the running backward pass, `[shard_numel]`, complete; None: all was kept."""
        found = [grad for backward, grad in self.results if backward == current_backward()]
        self.results.clear()
        self.wait_on_host()  # autograd may add to it at once: the gradient of another forward
        return sum(found[1:], found[0]) if found else None

    def twin(self) -> "GradientReduction":
        """One with these settings, and nothing on its way."""
        twin = GradientReduction()
        twin.grad_dtype = self.grad_dtype
        return twin


def check_first_order(name: str, grad: Tensor) -> None:
    """Raise RuntimeError if `grad`, of parameter `name`, is to be differentiated again."""
    if grad.requires_grad:
        raise RuntimeError(
            f"parameter {name}: expected a gradient without a graph, found one to differentiate again: derivatives of "
            f"second order do not pass through a reduce; call backward without create_graph"
        )


class ScatterGradients(torch.autograd.Function):
    """Ties the sharded parameters to the handle: forward passes the shard on, backward hands out its parts.

    It lives outside every traced graph and keeps rank-dependent offsets there, so the graph is the same on all ranks.
    The engine runs what was recorded last first, so of all that a backward pass can run this runs last: reduces are
    waited for here.
    Note on lifetime: handle -> this node -> parameters is a chain of C++ references that Python's garbage collector
    does not see, so nothing here, nor any parameter, may refer strongly to the flat parameter or its unit.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, binding: "ShardBinding", *params: nn.Parameter) -> Tensor:
        """The handle: the shard, 1-D `[shard_numel]`, as a tensor that `params` require the gradient of."""
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        return alias(shard)  # own version counter: in-place optimizer updates do not invalidate the graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # grad: [shard_numel]
        """The reduced gradient's part of each parameter; None where there is none."""
        binding: ShardBinding = ctx.binding
        if grad is None:  # nothing was reduced: no_sync
            return (None, None, *[None] * len(binding.params))
        check_first_order(binding.names[0], grad)
        reduction = binding.reduction
        reduction.wait_on_host()
        if reduction.reduce_accumulated is not None and reduction.backward != current_backward():
            grad = grad + reduction.reduce_accumulated()  # the graph was traced before the first no_sync: on all ranks
        binding.check_bound()
        if [param for param in binding.params if param.grad is not None]:
            binding.check_gradients()
            _set_grad_dtype(binding.params, None)  # accumulation is never in low precision (E-MP-12)
        if any(map(carries_optimizers, binding.params)):
            call_after_backward(partial(step_carried_optimizers, binding.params))
        if reduction.grad_dtype is not None and not reduction.full_precision:
            call_after_backward(partial(_set_grad_dtype, binding.params, reduction.grad_dtype))
        pairs = zip(binding.views.of(grad), binding.params, strict=True)
        return (None, None, *[part if param.requires_grad else None for part, param in pairs])


class DeferredGradient(torch.autograd.Function):
    """Where a traced graph leaves the gradients that it does not reduce itself.

    To the graph it is a scalar, an input like the handle, that nothing is computed from. The gradient that arrives here
    says only that gradients were handed over; what came of them is in `reduction`.
    """

    @staticmethod
    def forward(ctx: Any, handle: Tensor, binding: "ShardBinding") -> Tensor:
        """The entry, shape `()`."""
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        return torch.zeros((), dtype=torch.float32, device=handle.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """The reduced gradient of the handle, or None."""
        if grad is None:
            return None, None
        check_first_order(ctx.binding.names[0], grad)
        return ctx.binding.reduction.take_results(), None


def _set_grad_dtype(params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Cast the gradients to `dtype`; None: to the parameters' own."""
    for param in params:
        wanted = dtype or param.dtype
        if param.grad is not None and param.grad.dtype != wanted:
            set_grad(param, param.grad.to(wanted))


class ShardBinding:
    """What the join knows: the parameters, their places in the shard, and where the shard's memory is."""

    def __init__(self, views: ShardSplitter, reduction: GradientReduction, names: Sequence[str], shard: Tensor) -> None:
        self.views, self.reduction, self.names = views, reduction, names
        self.addresses = [0 if part is None else part.data_ptr() for part in views.of(shard)]
        self.absent = [index for index, address in enumerate(self.addresses) if not address]
        self.end = shard.storage_offset() + shard.numel()  # where absent parameters lie, as views without elements
        self.params: tuple[nn.Parameter, ...] = ()

    def is_bound(self) -> bool:
        """Whether all parameters lie in the shard. At every forward: no more than a comparison for each parameter."""
        if [param.data_ptr() for param in self.params] != self.addresses:
            return False
        return all(self.params[index].storage_offset() == self.end for index in self.absent)

    def unbound(self) -> list[int]:
        """Indices of the parameters that no longer lie in the shard."""
        return [index for index in range(len(self.params)) if not self._lies_in_shard(index)]

    def _lies_in_shard(self, index: int) -> bool:
        param, address = self.params[index], self.addresses[index]
        return param.data_ptr() == address and (address != 0 or param.storage_offset() == self.end)

    def check_bound(self) -> None:
        """Raise RuntimeError if a parameter no longer lies in the shard: training it would change nothing."""
        if self.is_bound():
            return
        for index in self.unbound():
            raise RuntimeError(
                f"parameter {self.names[index]}: expected it to lie in its unit's shard, found other memory; its data "
                f"was replaced between forward and backward: do that before forward, or copy into it"
            )

    def check_gradients(self) -> None:
        """Raise RuntimeError if what a parameter has as `.grad` cannot be added to: autograd would broadcast it."""
        for name, param in zip(self.names, self.params, strict=True):
            grad = param.grad
            if grad is not None and (grad.shape != param.shape or grad.device != param.device):
                raise RuntimeError(
                    f"parameter {name}: expected a .grad of shape {tuple(param.shape)} on {param.device}, this rank's "
                    f"part, to add to, found {tuple(grad.shape)} on {grad.device}; clear it, or assign this rank's "
                    f"part (in full shape inside summon_full_params(with_grads=True))"
                )
