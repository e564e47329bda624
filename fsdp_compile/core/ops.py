"""Marker operators `fsdp_flat::*`: one node each in a traced graph, with real bodies for eager execution.

    operator                   result                                      where
    unshard(shard)             the full flat parameter                     traced forwards
    views(full)                one full view per parameter                 traced forwards; decomposes into aten views
    reduce_grads(packed)       this rank's slice of the mean               backward, the derivative of `unshard`
    add_accumulated(packed)    its sum with the gradients that were        backward, before the reduce of a unit that
                               accumulated under no_sync                   was ever under no_sync
    defer_reduce(packed)       a scalar without a meaning                  backward, instead of a reduce: the eager
                                                                           runtime accumulates, or a hook reduces
    pack_grads(grads)          one buffer laid out like the parameters     graphs: a pass replaces autograd's `cat`;
                                                                           Inductor may put it `into` a given buffer
    cast_shard(shard)          it in another dtype, in one buffer          Inductor's graphs
    wait_collective(full,      `full` once its collective has ended;       Inductor's graphs
      sent)                    `sent` is alive until then
    check_ranks(...)           an empty tensor                             Inductor, where ranks compare their graphs
    record_time(...)           an empty tensor                             Inductor, where a profile is recorded

This file has the signatures, the derivatives and the shapes. Bodies that communicate are in comm/flat.py, those of
`add_accumulated` and `defer_reduce` in eager/reduce.py, those of `check_ranks` and `record_time` beside the passes that
insert them. `flat_param_id` is a flat parameter's id in a tensor on the CPU (flat_param.py, Note [Flat parameters are
looked up by id]).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fsdp_compile.core._torch import without_dispatch_modes
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.unshard_spec import UnshardSpec

# Note [Why markers are operators]
# An `autograd.Function` would be traced through: its collectives would end up in the graph as Dynamo met them, and
# AOTAutograd does not cache graphs that contain one. A library operator with a registered derivative stays one node
# through Dynamo and AOTAutograd, which passes can find and expand. It is opaque to both of them, so all that decides
# its shape must be in its arguments: the layout and the groups travel as text (Note [One string describes an unshard]).
# Where backward does not reduce, the graph may not return a gradient of the shard, which has another shape and is not
# known yet. `defer_reduce` returns a scalar instead, the gradient of `deferred`, an input of the graph that nothing
# reads. It makes autograd call the node behind `deferred` (autograd.DeferredGradient) when the graph has run.

_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPAQUE = (*_TAGS, torch.Tag.cudagraph_unsafe)  # a replay would not call them

torch.library.define(
    "fsdp_flat::unshard",
    "(Tensor shard, Tensor? flat_param_id, Tensor? deferred, str spec) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::views", "(Tensor(a) full, str layout) -> Tensor(a)[]", tags=_TAGS)
torch.library.define("fsdp_flat::reduce_grads", "(Tensor packed, str spec) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::pack_grads", "(Tensor?[] grads, str layout, Tensor? into=None) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::add_accumulated", "(Tensor packed, Tensor flat_param_id, bool in_place=False) -> Tensor", tags=_OPAQUE
)
torch.library.define("fsdp_flat::add_accumulated_", "(Tensor(a!) packed, Tensor flat_param_id) -> ()", tags=_OPAQUE)
torch.library.define(
    "fsdp_flat::defer_reduce",
    "(Tensor packed, Tensor flat_param_id, str layout, bool owned=False) -> Tensor",
    tags=_OPAQUE,
)
torch.library.define("fsdp_flat::cast_shard", "(Tensor shard, ScalarType dtype) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::wait_collective", "(Tensor full, Tensor sent) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::check_ranks", "(str sequence, str[] groups, float timeout, Device device) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fsdp_flat::record_time", "(str graph, int stretch, int index, Device device) -> Tensor", tags=_OPAQUE
)

UNSHARD = torch.ops.fsdp_flat.unshard.default
VIEWS = torch.ops.fsdp_flat.views.default
REDUCE_GRADS = torch.ops.fsdp_flat.reduce_grads.default
PACK_GRADS = torch.ops.fsdp_flat.pack_grads.default
ADD_ACCUMULATED = torch.ops.fsdp_flat.add_accumulated.default
ADD_ACCUMULATED_ = torch.ops.fsdp_flat.add_accumulated_.default
DEFER_REDUCE = torch.ops.fsdp_flat.defer_reduce.default
CAST_SHARD = torch.ops.fsdp_flat.cast_shard.default
WAIT_COLLECTIVE = torch.ops.fsdp_flat.wait_collective.default
CHECK_RANKS = has_side_effect(torch.ops.fsdp_flat.check_ranks.default)
RECORD_TIME = has_side_effect(torch.ops.fsdp_flat.record_time.default)
MARKERS = (UNSHARD, REDUCE_GRADS, PACK_GRADS, DEFER_REDUCE)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no autograd history, no shared version counter."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a wrapper subclass consists of; of a plain one itself (E-SYNC-5)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # a DTensor names its mesh too
            yield from inner_tensors(inner)


def view_parameters(full: Tensor, layout: str) -> list[Tensor]:
    """Views of `full`, 1-D `[layout.numel]`, in the parameters' shapes, cut by a single split.

    The split's derivative concatenates the gradients, zeros for padding and for unused parameters: it packs them.
    """
    parsed = FlatParamLayout.parse(layout)
    windows = full.split_with_sizes([segment.numel for segment in parsed.segments])
    views = [full.new_empty(shape) for shape in parsed.shapes] if 0 in parsed.numels else [full] * len(parsed.shapes)
    for window, segment in zip(windows, parsed.segments, strict=True):
        if segment.parameter is not None:
            views[segment.parameter] = window.view(parsed.shapes[segment.parameter])
    return views


torch.library.impl("fsdp_flat::views", "CompositeImplicitAutograd", view_parameters)


_before_tracing: dict[Callable[[], None], None] = {}


def call_before_tracing(function: Callable[[], None]) -> None:
    """Have `function` called once, when an unshard is traced next: before any graph that holds it is compiled.

    What only compilation needs, such as the passes and Inductor, is thus loaded when `torch.compile` is used.
    """
    _before_tracing[function] = None


@torch.library.register_fake("fsdp_flat::unshard")
def _unshard_fake(shard: Tensor, flat_param_id: Tensor | None, deferred: Tensor | None, spec: str) -> Tensor:
    while _before_tracing:
        function, _ = _before_tracing.popitem()
        with without_dispatch_modes():  # modules that are imported now may create tensors
            function()
    parsed = UnshardSpec.parse(spec)
    return shard.new_empty(parsed.layout.numel, dtype=parsed.compute_dtype or shard.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, flat_param_id, deferred, spec = inputs
    ctx.save_for_backward(*([] if flat_param_id is None else [flat_param_id]))
    ctx.defers, ctx.spec, ctx.dtype = deferred is not None, spec, shard.dtype


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: [layout.numel]
    spec = UnshardSpec.parse(ctx.spec)
    packed = grad if spec.reduce_dtype is None else grad.to(spec.reduce_dtype)
    if ctx.defers:
        return None, None, DEFER_REDUCE(packed, *ctx.saved_tensors, spec.layout.text), None
    if ctx.saved_tensors:
        packed = ADD_ACCUMULATED(packed, *ctx.saved_tensors)
    mean = REDUCE_GRADS(packed, ctx.spec)
    return mean if mean.dtype == ctx.dtype else mean.to(ctx.dtype), None, None, None


torch.library.register_autograd("fsdp_flat::unshard", _unshard_backward, setup_context=_save_for_backward)


@torch.library.register_fake("fsdp_flat::reduce_grads")
def _reduce_grads_fake(packed: Tensor, spec: str) -> Tensor:
    return packed.new_empty(UnshardSpec.parse(spec).layout.shard_numel)


@torch.library.impl("fsdp_flat::pack_grads", "default")
def _pack_grads(grads: list[Tensor | None], layout: str, into: Tensor | None = None) -> Tensor:
    parsed = FlatParamLayout.parse(layout)
    packed = _first(grads).new_empty(parsed.numel)
    for segment in parsed.segments:
        window = packed.narrow(0, segment.offset, segment.numel)
        grad = None if segment.parameter is None else grads[segment.parameter]
        if grad is None:
            window.zero_()  # padding and unused parameters: what is sent must be finite
        else:
            window.view(grad.shape).copy_(grad)
    return packed


@torch.library.register_fake("fsdp_flat::pack_grads")
def _pack_grads_fake(grads: list[Tensor | None], layout: str, into: Tensor | None = None) -> Tensor:
    return _first(grads).new_empty(FlatParamLayout.parse(layout).numel)


@torch.library.register_fake("fsdp_flat::add_accumulated")
def _add_accumulated_fake(packed: Tensor, flat_param_id: Tensor, in_place: bool = False) -> Tensor:
    return torch.empty_like(packed)


@torch.library.register_fake("fsdp_flat::add_accumulated_")
def _add_accumulated_in_place_fake(packed: Tensor, flat_param_id: Tensor) -> None:
    return None


@torch.library.register_fake("fsdp_flat::defer_reduce")
def _defer_reduce_fake(packed: Tensor, flat_param_id: Tensor, layout: str, owned: bool = False) -> Tensor:
    return packed.new_empty((), dtype=torch.float32)


@torch.library.register_fake("fsdp_flat::cast_shard")
def _cast_shard_fake(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(shard, dtype=dtype)


@torch.library.register_fake("fsdp_flat::wait_collective")
def _wait_collective_fake(full: Tensor, sent: Tensor) -> Tensor:
    return torch.empty_like(full)


@torch.library.register_fake("fsdp_flat::check_ranks")
def _check_ranks_fake(sequence: str, groups: list[str], timeout: float, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


@torch.library.register_fake("fsdp_flat::record_time")
def _record_time_fake(graph: str, stretch: int, index: int, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _first(grads: list[Tensor | None]) -> Tensor:
    return next(grad for grad in grads if grad is not None)
