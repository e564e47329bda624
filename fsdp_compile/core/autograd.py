"""Between the parameters of a user and the flat shard that graphs take: the autograd function of a flat parameter.

nn.Parameter a   nn.Parameter b ...      what the optimizer has: views into the shard, leaves of autograd
            |     |
     ScatterGradients (applied once)     backward: gives each parameter its slice of the reduced gradient
         |          |
autograd_shard    deferred               the flat shard, differentiable: the input of gathers and of graphs; and a
                                         scalar, the input of eager forwards and of graphs that do not reduce
"""

import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fsdp_compile.core._torch import (
    carry_optimizers,
    executes_node,
    never_compile,
    runs_compiled_autograd,
    step_carried_optimizers,
    without_torch_function,
)
from fsdp_compile.core.backward_pass import running_backward
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, has_hooks, set_grad
from fsdp_compile.tensors.unused import Indices, UnusedParameters

# Note [Why reduces are waited for behind the flat shard]
# The engine runs what was recorded last first. The function is applied when a model is sharded, before any forward, so
# in every backward pass its backward runs after the backward of all layers: reduces that were started meanwhile have
# had all of that time, and nobody can read `.grad` before. Applied once and outside of every traced graph, it is also
# where numbers that depend on the rank can stay: a graph takes and returns the shard as a whole.
#
# What reduces outside of graphs, eager forwards and graphs that leave it to their runtime, takes the scalar. The
# gradient that arrives there only says that there is one: it is in the reduction, perhaps in flight, and autograd would
# add to it at once where the shard has another gradient in that pass, as from a graph that reduces.

# Note [Nothing behind the flat shard refers to its unit]
# autograd_shard -> its autograd node -> the parameters' gradient accumulators is a chain of C++ references, which
# Python's garbage collector does not follow. If anything that hangs on it (the binding, the reduction, a parameter)
# referred strongly to the flat parameter or to its unit, the cycle would never be freed.

# Note [Gradients that pass autograd by]
# Autograd's node for a parameter detaches a new gradient before it stores it: for a wrapper subclass an operator in
# Python and a second wrapper, for each parameter. So where nobody could see a difference, `ScatterGradients` stores the
# gradients itself and returns None: the pass computes all gradients, the parameters have none yet, and no hooks. The
# nodes run nevertheless, and so do hooks on them.
# The hook by which `average_gradients` sees to plain gradients is no reason: it lets sharded ones pass.

# Note [Values that a graph reads again]
# A compiled graph that gathers again in backward saves the flat shard, as autograd saves any tensor: with its version
# counter, which must be the same when backward reads it. So the differentiable shard shares the counter of the shard
# and of all that lies in it.

# Note [Backward passes within a compiled function]
# A function that calls `backward` may be compiled (`torch.compile(train_step)`). Its graph breaks there, and the engine
# calls functions in Python from outside of any graph. Dynamo would compile each of them, and all that they call, by
# themselves: it has nothing to win there, and fails on attributes of parameters. So whatever of this package the engine
# or an operator calls is marked by `never_compile`: autograd functions, hooks, what runs after a backward pass, and
# `__torch_dispatch__`.


_LOCAL = operator.attrgetter("local")
_REQUIRES_GRAD, _GRAD = operator.attrgetter("requires_grad"), operator.attrgetter("grad")
_HOOKS = tuple(map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks")))


class ShardSplitter:
    """Splits a tensor that is laid out like this rank's shard into the parameters' slices, by a single split."""

    def __init__(self, layout: FlatParamLayout, rank: int) -> None:
        records = layout.records(rank)
        self._sizes: list[int] = []  # of consecutive windows of the shard, padding included
        self._windows: list[int] = []  # for each parameter its window, without elements if it is not on this rank
        end = 0
        for record in records:
            if record and record.offset > end:
                self._sizes.append(record.offset - end)
            self._windows.append(len(self._sizes))
            self._sizes.append(record.numel if record else 0)
            end = record.offset + record.numel if record else end
        self._sizes += [layout.shard_numel - end] * (layout.shard_numel > end)
        filled = [window for window, size in enumerate(self._sizes) if size]
        self._filled_sizes = [self._sizes[window] for window in filled]
        self._filled = [filled.index(window) for window in self._windows if self._sizes[window]]

    def split_all(self, flat: Tensor) -> list[Tensor]:
        """1-D views of `flat`, 1-D `[shard_numel]`: one for each parameter, without elements if it is not here.

        No two parameters get the same tensor object: a compiler would take them for one input.
        """
        windows = flat.split_with_sizes(self._sizes)
        return [windows[window] for window in self._windows]

    def split_stored(self, flat: Tensor) -> list[Tensor]:
        """As `split_all`, for parameters that have elements here: most have none where there are many ranks."""
        windows = flat.split_with_sizes(self._filled_sizes)
        return [windows[window] for window in self._filled]


@dataclass(eq=False)
class GradientReduction:
    """The reduce of a flat parameter's gradient: started by the eager runtime, waited for by autograd.

    With shards in host memory the engine runs `ScatterGradients` in another thread than what starts reduces.
    """

    grad_dtype: torch.dtype | None = None  # of `.grad` after backward, if not the parameters'
    running: Any = None  # the reduce in flight (eager.reduce.RunningReduce)
    wait_for_copy: Callable[[], None] | None = None  # lets the host wait for the result's copy into host memory
    full_precision: bool = False  # whether the last one computed in the parameters' own dtype
    # Reduces the gradients that were accumulated under no_sync, zeros if there are none, and returns this rank's slice;
    # None until no_sync has been in force for the first time.
    reduce_accumulated: Callable[[], Tensor] | None = None
    awaits_reduce: bool = False  # no_sync was in force since the last reduce, on all ranks: some may have accumulated
    # Whether `flat_gradient`, 1-D, takes what would become gradients of the parameters, which stay None: who sets this
    # updates them next (step.py).
    keeps_flat: bool = False
    flat_gradient: Tensor | None = None
    # Updates the parameters by their reduced gradient, 1-D, which does not reach autograd then. Who sets it resets it
    # after the pass.
    update: Callable[[Tensor], None] | None = None
    unused: UnusedParameters = field(default_factory=partial(UnusedParameters, running_backward))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def begin_in_backward(self) -> bool:
        """Record that the running backward pass reduces; return whether this was known. False outside of backward."""
        backward = running_backward()
        if backward is None or self in backward.begun:  # outside of backward nothing is noted
            return backward is not None
        backward.begun.add(self)
        return False

    def abandon(self) -> None:
        """Drop the reduce in flight, after a backward that failed."""
        with self._lock:
            self.running = self.wait_for_copy = None
            self.unused.forget()

    def wait(self) -> None:
        """Complete the reduce in flight, and order the current stream after it."""
        with self._lock:
            if self.running is None:
                return
            running, self.running = self.running, None
            self.wait_for_copy = running.finish() or self.wait_for_copy
            if (update := self.update) is not None and running.update is update:  # else a backward that has failed
                self.wait_on_host()
                update(running.gradient)
                self.unused.forget()

    def wait_on_host(self) -> None:
        """As `wait`; a gradient in host memory may be read by the host as well (E-OFF-5)."""
        self.wait()
        with self._lock:
            if self.wait_for_copy is not None:
                wait_for_copy, self.wait_for_copy = self.wait_for_copy, None
                wait_for_copy()

    def defer(self, grad: Tensor | None) -> bool:
        """Leave `grad`, `[shard_numel]`, perhaps in flight, to `ScatterGradients`; return whether there is one."""
        backward = running_backward()
        if grad is not None and backward is not None:
            backward.results.setdefault(self, []).append(grad)
        return grad is not None

    def take_results(self) -> Tensor | None:
        """The sum of `results` of the running backward pass, `[shard_numel]`, complete; None if all was accumulated."""
        backward = running_backward()
        grads = [] if backward is None else backward.results.pop(self, [])
        self.wait_on_host()
        return sum(grads[1:], grads[0]) if grads else None


class ReduceQueue(deque[dict[GradientReduction, None]]):
    """Reduces that a root's backward passes have started and not yet waited for, oldest first, by unit.

    Attributes:
        awaiting_reduce: units of the root that were under no_sync since their last reduce, in one order on all ranks:
            what they accumulated is reduced even if they take part in no further backward pass.
        order: in which units communicate in backward (agree/rank_order.py); None before there is a root.
        microbatches: which microbatch of a step a backward pass is (eager/partial_sums.py), where sums need it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.awaiting_reduce: dict[weakref.ref[Any], None] = {}
        self.order: Any = None
        self.microbatches: Any = None
        self._newest = ""  # the path of the unit whose reduces were started last

    def add(self, reduction: GradientReduction, path: str, most: int) -> None:
        """Note the reduce of a flat parameter of unit `path`; wait where more than `most` units have one under way."""
        if not self or path != self._newest:
            self._newest = path
            self.append({})
        self[-1][reduction] = None
        while len(self) > most:
            self.wait_for_oldest()

    def wait_for_oldest(self) -> None:
        """Wait for the reduces of one unit."""
        for reduction in self.popleft():
            reduction.wait()


class ShardBinding:
    """The parameters that are views into one shard, and where they lie in it.

    Args:
        params: in layout order; their data is already in `shard`.
        names: of the parameters, for errors.
        splitter: splits the shard, and gradients that are laid out like it.
        reduction: where their gradient comes from.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        splitter: ShardSplitter,
        reduction: GradientReduction,
    ) -> None:
        self.params, self.names, self.splitter, self.reduction = tuple(params), names, splitter, reduction
        self._specs = [param.spec for param in params]  # type: ignore[attr-defined]  # sharded tensors
        trains = any(param.requires_grad for param in params)
        self.sentinel = torch.empty(0, requires_grad=trains)  # a leaf beside the parameters that nobody asks for
        self._sentinel_node = get_gradient_edge(self.sentinel).node if trains else None
        self.record()

    def record(self) -> None:
        """Record where the parameters lie now."""
        self._where = self._local_tensors()

    def _local_tensors(self) -> list[Any]:  # at every forward: no more than one attribute for each parameter
        return list(map(_LOCAL, self.params))

    def is_bound(self) -> bool:
        """Whether all parameters lie in the shard."""
        return all(map(operator.is_, map(_LOCAL, self.params), self._where))

    def unbound(self) -> list[int]:
        """Indices of the parameters that no longer lie in the shard."""
        pairs = enumerate(zip(self._local_tensors(), self._where, strict=True))
        return [index for index, (now, before) in pairs if now is not before]

    def check_gradients(self) -> None:
        """Raise RuntimeError if autograd could not add to the `.grad` of a parameter: it would broadcast."""
        for name, param in zip(self.names, self.params, strict=True):
            grad = param.grad
            if grad is not None and (grad.shape != param.shape or grad.device != param.device):
                raise RuntimeError(
                    f"parameter {name} has shape {tuple(param.shape)} on {param.device}, and the .grad to add to has "
                    f"shape {tuple(grad.shape)} on {grad.device}: clear it, or assign one that fits"
                )

    def check_order(self) -> None:
        """Raise RuntimeError if sums have an order, in which nothing is added to reduced gradients other than zeros."""
        if not self._specs[0].ranks.same_bits:
            return
        stored = [getattr(param.grad, "local", param.grad) for param in self.params if param.grad is not None]
        nonzero = [any(bool(each.any()) for each in stored)]
        if self._specs[0].all_reduce(torch.tensor(nonzero, dtype=torch.uint8, device=stored[0].device), "max"):
            raise RuntimeError(
                f"parameter {self.names[0]} or one beside it has the gradient of an earlier backward, which "
                f"reduction_order='tree' cannot add to: accumulate under no_sync, or call zero_grad() before"
            )

    def all_are_asked(self) -> bool:
        """Whether the running backward pass gives gradients to all parameters that train: no `inputs` were named."""
        return executes_node(self._sentinel_node)

    def scatter(self, grad: Tensor, wanted: Sequence[bool], adds: bool, left_out: Indices) -> list[Tensor | None]:
        """Split `grad`, 1-D `[shard_numel]`, into gradients of the parameters, for autograd to accumulate.

        None for parameters that do not train or are `left_out`, and for all if this sets `.grad` itself, see Note
        [Gradients that pass autograd by]. A parameter that is absent here gets a gradient without elements.

        Args:
            wanted: for each parameter whether it trained when it was bound.
            adds: whether some of the parameters have a gradient to add to.
        """
        with without_torch_function():
            trains = list(map(_REQUIRES_GRAD, self.params))
        for index in left_out:
            trains[index] = False
        with without_torch_function():
            passes_by = not adds and not self._have_hooks() and self.all_are_asked()
            if passes_by and self.reduction.keeps_flat and all(trains):
                earlier = self.reduction.flat_gradient  # of a backward pass within this one
                self.reduction.flat_gradient = grad if earlier is None else earlier.add_(grad)
                return [None] * len(self.params)
            grads = self._split_gradient(grad)
            if not passes_by:
                chosen = map(operator.and_, wanted, trains)
                return [each if own else None for each, own in zip(grads, chosen, strict=True)]
            for param, each, own in zip(self.params, grads, trains, strict=True):
                if own:
                    param.grad = each
        return [None] * len(grads)

    def show_gradient(self) -> None:
        """Turn the flat gradient that the reduction has kept into gradients of the parameters."""
        grad, self.reduction.flat_gradient = self.reduction.flat_gradient, None
        if grad is not None:
            for param, each in zip(self.params, self._split_gradient(grad), strict=True):
                param.grad = each

    def _split_gradient(self, grad: Tensor) -> list[ShardedTensor]:
        return ShardedTensor.of_each(FlatGradient(grad, self._specs, self.splitter.split_stored))

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient to add to."""
        with without_torch_function():
            return any(map(operator.is_not, map(_GRAD, self.params), repeat(None)))

    def only_trains(self) -> bool:
        """Whether all parameters train, and nothing but the optimizer would see their next gradients."""
        with without_torch_function():
            trains = all(map(_REQUIRES_GRAD, self.params))
            sees = self.has_gradients() or self._have_hooks() or carry_optimizers(self.params)
        return trains and not sees and self.reduction.grad_dtype is None

    def _have_hooks(self) -> bool:
        some = any(map(operator.is_not, chain(*[map(get, self.params) for get in _HOOKS]), repeat(None)))
        return some and any(map(has_hooks, self.params))

    def set_grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Cast the parameters' gradients to `dtype`; None: to the parameters' own."""
        for param in self.params:
            wanted = dtype or param.dtype
            if param.grad is not None and param.grad.dtype != wanted:
                set_grad(param, param.grad.to(wanted))


class ScatterGradients(torch.autograd.Function):
    """Makes the shard differentiable: its gradient becomes the gradients of the parameters that lie in it."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, binding: ShardBinding, sentinel: Tensor, *params: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        """The shard, 1-D `[shard_numel]`, and a scalar (Note [Why reduces are waited for behind the flat shard])."""
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        deferred = torch.zeros((), dtype=torch.float32, device=shard.device)
        return shard.detach(), deferred  # Note [Values that a graph reads again]

    @staticmethod
    @never_compile  # Note [Backward passes within a compiled function]
    def backward(ctx: Any, grad: Tensor | None, deferred: Tensor | None) -> tuple[Tensor | None, ...]:
        """The reduced gradient's slice for each parameter; None where there is none. `grad`: 1-D `[shard_numel]`."""
        binding: ShardBinding = ctx.binding
        check_engine(binding.names[0])
        for each in (grad, deferred):
            if each is not None:
                check_first_order(binding.names[0], each)
        reduction, of_graphs = binding.reduction, grad
        if deferred is not None:
            reduced = reduction.take_results()
            if reduced is not None and reduction.update is not None and not reduction.unused.so_far:
                reduction.update(reduced)
                reduction.unused.forget()
            elif reduced is not None:
                grad = reduced if grad is None else grad + reduced
        if grad is None:  # nothing was reduced, as under no_sync, or `update` has used it
            return (None, None, None, *[None] * len(binding.params))
        backward = running_backward()
        assert backward is not None  # the engine runs this
        unused = reduction.unused.take(of_graphs, grad, binding.splitter.split_all)
        if reduction.reduce_accumulated is not None and reduction not in backward.begun:
            grad = grad + reduction.reduce_accumulated()  # the graph was traced before the first no_sync: on all ranks
        if not binding.is_bound() and (moved := binding.unbound()):  # training would not change it
            raise RuntimeError(
                f"the data of parameter {binding.names[moved[0]]} was replaced between forward and backward, so that "
                f"its gradient has no place: replace it before forward, or copy into it"
            )
        adds = binding.has_gradients()
        if adds:
            binding.check_gradients()
            binding.check_order()
            binding.set_grad_dtype(None)  # accumulation is never in low precision (E-MP-12)
        left_out = reduction.unused.left_out(grad, unused)
        if carry_optimizers(binding.params):
            backward.at_end(partial(step_carried_optimizers, binding.params))
        if reduction.grad_dtype is not None and not reduction.full_precision:
            backward.at_end(partial(binding.set_grad_dtype, reduction.grad_dtype))
        return (None, None, None, *binding.scatter(grad, ctx.needs_input_grad[3:], adds, left_out))


def check_engine(name: str) -> None:
    """Raise RuntimeError if compiled autograd runs the backward pass of parameter `name`.

    It calls no callbacks at the end of a backward pass, and its graph would hold neither reduces nor their results.
    """
    if runs_compiled_autograd():
        raise RuntimeError(
            f"parameter {name}: compiled autograd cannot run the backward of sharded modules; leave "
            f"torch._dynamo.config.compiled_autograd off: torch.compile compiles their backward without it"
        )


def check_first_order(name: str, grad: Tensor) -> None:
    """Raise RuntimeError if `grad`, of parameter `name`, would be differentiated again."""
    if grad.requires_grad:
        raise RuntimeError(
            f"parameter {name}: derivatives of second order do not pass through a reduce; call backward without "
            f"create_graph, or use torch.autograd.grad(..., inputs, create_graph=True), which does not reduce"
        )
