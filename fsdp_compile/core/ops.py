"""Marker operators `fsdp_flat::*`: one node each in a traced graph, with real bodies for eager execution.

    operator                   result                                      where
    unshard(shard)             the full flat parameter                     traced forwards
    views(full)                one full view per parameter                 traced forwards; decomposes into aten views
    reduce_grads(packed)       this rank's slice of the mean               backward, the derivative of `unshard`
    add_accumulated(packed)    its sum with the gradients that were        backward, before the reduce of a unit that
                               accumulated under no_sync                   was ever under no_sync
    defer_reduce(packed)       a scalar without a meaning                  backward, instead of a reduce: the eager
                                                                           runtime accumulates, or a hook reduces
    update_shard(grad)         a scalar without a meaning                  backward, behind a reduce: the optimizer
                                                                           updates the unit (compile_step)
    pack_grads(grads)          one buffer laid out like the parameters     graphs: a pass replaces autograd's `cat`;
                                                                           Inductor may put it `into` a given buffer
    wait_collective(full,      `full` once its collective has ended;       Inductor's graphs
      sent)                    `sent` is alive until then
    check_ranks(...)           an empty tensor                             Inductor, where ranks compare their graphs
    record_time(...)           an empty tensor                             Inductor, where a profile is recorded
    prefetch_next(shards)      an empty tensor                             Inductor's forwards, planned with an update

This file has the signatures, the derivatives and the shapes, and `UnshardSpec`, the string that says how a unit is
gathered and reduced. Bodies that communicate are in flat_collectives.py, those of `add_accumulated`, `defer_reduce`
and `update_shard` in eager/reduce.py, that of `prefetch_next` in eager/next_forward.py, those of `check_ranks` and
`record_time` beside the passes that insert them. `flat_param_id` is a flat parameter's id in a tensor on the CPU
(flat_param.py, Note [Flat parameters are looked up by id]).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect

from fsdp_compile.comm.groups import shared_name
from fsdp_compile.core._torch import without_dispatch_modes
from fsdp_compile.core.layout import FlatParamLayout

# Note [Why markers are operators]
# An `autograd.Function` would be traced through: its collectives would end up in the graph as Dynamo met them, and
# AOTAutograd does not cache graphs that contain one. A library operator with a registered derivative stays one node
# through Dynamo and AOTAutograd, which passes can find and expand. It is opaque to both of them, so all that decides
# its shape must be in its arguments: the layout and the groups travel as text (Note [One string describes an unshard]).
# Where backward does not reduce, the graph may not return a gradient of the shard, which has another shape and is not
# known yet. `defer_reduce` returns a scalar instead, the gradient of `deferred`, an input of the graph that nothing
# reads. It makes autograd call the node behind `deferred` (autograd.DeferredGradient) when the graph has run. So does
# `update_shard`, as what a unit was updated by shall not live until the graph has run.

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
torch.library.define(
    "fsdp_flat::update_shard", "(Tensor grad, Tensor flat_param_id, bool at_once=False) -> Tensor", tags=_OPAQUE
)
torch.library.define("fsdp_flat::wait_collective", "(Tensor full, Tensor sent) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::check_ranks", "(str sequence, str[] groups, float timeout, Device device) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fsdp_flat::record_time", "(str graph, int stretch, int index, Device device) -> Tensor", tags=_OPAQUE
)
torch.library.define("fsdp_flat::prefetch_next", "(Tensor[] shards, Device device) -> Tensor", tags=_OPAQUE)

UNSHARD = torch.ops.fsdp_flat.unshard.default
VIEWS = torch.ops.fsdp_flat.views.default
REDUCE_GRADS = torch.ops.fsdp_flat.reduce_grads.default
PACK_GRADS = torch.ops.fsdp_flat.pack_grads.default
ADD_ACCUMULATED = torch.ops.fsdp_flat.add_accumulated.default
ADD_ACCUMULATED_ = torch.ops.fsdp_flat.add_accumulated_.default
DEFER_REDUCE = torch.ops.fsdp_flat.defer_reduce.default
UPDATE_SHARD = has_side_effect(torch.ops.fsdp_flat.update_shard.default)
WAIT_COLLECTIVE = torch.ops.fsdp_flat.wait_collective.default
CHECK_RANKS = has_side_effect(torch.ops.fsdp_flat.check_ranks.default)
RECORD_TIME = has_side_effect(torch.ops.fsdp_flat.record_time.default)
PREFETCH_NEXT = has_side_effect(torch.ops.fsdp_flat.prefetch_next.default)
MARKERS = (UNSHARD, REDUCE_GRADS, PACK_GRADS, DEFER_REDUCE, UPDATE_SHARD)


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
    if ctx.defers and not spec.updates:
        return None, None, DEFER_REDUCE(packed, *ctx.saved_tensors, spec.layout.text), None
    if ctx.saved_tensors and not spec.updates:
        packed = ADD_ACCUMULATED(packed, *ctx.saved_tensors)
    mean = REDUCE_GRADS(packed, ctx.spec)
    mean = mean if mean.dtype == ctx.dtype else mean.to(ctx.dtype)
    return (None, None, UPDATE_SHARD(mean, *ctx.saved_tensors), None) if spec.updates else (mean, None, None, None)


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


@torch.library.register_fake("fsdp_flat::update_shard")
def _update_shard_fake(grad: Tensor, flat_param_id: Tensor, at_once: bool = False) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


@torch.library.register_fake("fsdp_flat::wait_collective")
def _wait_collective_fake(full: Tensor, sent: Tensor) -> Tensor:
    return torch.empty_like(full)


@torch.library.register_fake("fsdp_flat::check_ranks")
def _check_ranks_fake(sequence: str, groups: list[str], timeout: float, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


@torch.library.register_fake("fsdp_flat::record_time")
def _record_time_fake(graph: str, stretch: int, index: int, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


@torch.library.register_fake("fsdp_flat::prefetch_next")
def _prefetch_next_fake(shards: list[Tensor], device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _first(grads: list[Tensor | None]) -> Tensor:
    return next(grad for grad in grads if grad is not None)


# --- how a flat parameter is gathered and its gradients reduced, as one string that a graph carries -------------------

# An all-gather goes through one process group, or through two of them, one after the other; a reduce-scatter goes
# through the same groups in reverse:
#
#     one stage      every rank's shard is gathered from the whole group; rank r stores shard r
#     two stages     peers, then neighbors: 4 ranks, 2 neighbors
#
#         rank              0    1    2    3
#         stores shard      0    2    1    3       its rank among its peers + peers * its rank among its neighbors
#         with peers        0 1  2 3  0 1  2 3     one half of the buffer, contiguous: what is retained for backward
#         with neighbors    0 1 2 3   ...          gathered again in backward
#
# With shards in this order each stage concatenates what it gathers: nothing is moved, and no rank appears in a graph.


class NamedGroup(NamedTuple):
    """A process group as a graph refers to it, equal on all ranks (comm/groups.py, Note [Names of groups])."""

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "NamedGroup":
        """The name and the size of `group`."""
        return cls(shared_name(group), group.size())


# Note [One string describes an unshard]
# A traced graph must be the same program on every rank, Dynamo must guard on as little as possible at every call, and
# AOTAutograd must be able to cache the graph. A string constant meets all three: it is compared once per flat
# parameter, it is hashed by its text, and it holds nothing that depends on the rank. An object as an operator's
# argument would have to be registered with the compiler, and a list of separate arguments is guarded one by one.
# Passes and the operators' bodies read the string back with `UnshardSpec.parse`, which is cached.


@dataclass(frozen=True)
class UnshardSpec:
    """How one flat parameter is gathered and its gradient reduced; equal on all ranks.

    Attributes:
        layout: where parameters lie in the full buffer. With a `world_size` of 1 nothing is gathered.
        groups: what all-gathers go through, in order: one group or two. For an unsharded layout the group that
            gradients are averaged over; empty if there is none.
        reshard_after_forward: whether the full buffer is freed between forward and backward; None: a pass decides.
        replicas: hybrid sharding: the group whose ranks store the same shard; gradients are averaged over it too.
        compute_dtype: the dtype of the full buffer; None: that of the shard.
        reduce_dtype: the dtype in which gradients are reduced; None: that of the full buffer.
        updates: whether the unit may be updated in backward as soon as its gradient is reduced.
    """

    layout: FlatParamLayout
    groups: tuple[NamedGroup, ...]
    reshard_after_forward: bool | None
    replicas: NamedGroup | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    updates: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different slices of the buffer."""
        return self.layout.world_size > 1

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return prod(group.size for group in self.groups) * (1 if self.replicas is None else self.replicas.size)

    @cached_property
    def text(self) -> str:
        """The specification as a constant for compilers; `parse` reads it back.

        Grammar: the layout's text, `groups=name:size[,name:size]`, `reshard=True|False|None`, and where they are not
        the default `replicas=name:size`, `compute=dtype`, `reduce=dtype` and `update=True`; separated by blanks.
        """
        fields = [self.layout.text, f"groups={_print(self.groups)}", f"reshard={self.reshard_after_forward}"]
        if self.replicas is not None:
            fields.append(f"replicas={_print([self.replicas])}")
        for name, dtype in (("compute", self.compute_dtype), ("reduce", self.reduce_dtype)):
            if dtype is not None:
                fields.append(f"{name}={str(dtype).removeprefix('torch.')}")
        return " ".join(fields) + UPDATES * self.updates

    @staticmethod
    @lru_cache(maxsize=1024)  # read at every run of an operator; specifications are immutable
    def parse(text: str) -> "UnshardSpec":
        """The specification that wrote `text`, except for parameter names. ValueError quotes a malformed text."""
        layout, *pairs = text.split(" ")
        fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if len(fields) != len(pairs) or not {"groups", "reshard"} <= fields.keys() <= _FIELDS:
            raise ValueError(
                f"{text!r} is not an unshard specification; expected LAYOUT groups=NAME:SIZE,... "
                f"reshard=True|False|None [replicas=NAME:SIZE] [compute=DTYPE] [reduce=DTYPE] [update=True]"
            )
        replicas = _parse(fields.get("replicas", ""))
        return UnshardSpec(
            FlatParamLayout.parse(layout),
            _parse(fields["groups"]),
            {"True": True, "False": False, "None": None}[fields["reshard"]],
            replicas[0] if replicas else None,
            getattr(torch, fields["compute"]) if "compute" in fields else None,
            getattr(torch, fields["reduce"]) if "reduce" in fields else None,
            fields.get("update") == "True",
        )


_FIELDS = {"groups", "reshard", "replicas", "compute", "reduce", "update"}
UPDATES = " update=True"  # the end of a specification with `updates`


def _print(groups: Sequence[NamedGroup]) -> str:
    return ",".join(f"{quote(group.name, safe='')}:{group.size}" for group in groups)


def _parse(text: str) -> tuple[NamedGroup, ...]:
    pairs = (group.split(":") for group in text.split(",") if group)
    return tuple(NamedGroup(unquote(name), int(size)) for name, size in pairs)


def shard_order(groups: Sequence[NamedGroup]) -> tuple[int, ...]:
    """For each rank of the group that is sharded over, which slice it stores; empty if rank r stores slice r."""
    if len(groups) == 1:
        return ()
    peers, neighbors = (group.size for group in groups)
    return tuple(rank // neighbors + peers * (rank % neighbors) for rank in range(peers * neighbors))
