"""Marker operators `fsdp_flat::*`: one node each in a traced graph, with real bodies for eager execution.

    operator                   result                                      where
    unshard(shard)             the full flat parameter                     traced forwards
    views(full)                one full view per parameter                 traced forwards; decomposes into aten views
    reduce_grads(packed)       this rank's slice of the mean               backward, the derivative of `unshard`
    add_accumulated(packed)    its sum with the gradients that were        backward, before the reduce of a unit that
                               accumulated under no_sync                   was ever under no_sync
    defer_reduce(packed)       a scalar without a meaning                  backward, instead of a reduce: the eager
                                                                           runtime accumulates, or a hook reduces
    leave_out(grad)            the gradient of a shard, and a note of      backward of what has not used all
                               what has none of the parameters
    update_shard(grad)         a scalar without a meaning                  backward, behind a reduce: the optimizer
                                                                           updates the unit (compile_step)
    pack_grads(grads)          one buffer laid out like the parameters     graphs: a pass replaces autograd's `cat`
    wait_collective(full,      `full` once its collective has ended;       Inductor's graphs
      sent)                    `sent` is alive until then
    await_gather(full)         `full` once what gathers it outside of      Inductor's graphs of a block
                               the graph has ended
    start_reduce_(packed,      nothing                                     Inductor's backward graphs of a block: the
      full)                                                                eager runtime reduces `packed` from here on
    check_ranks(...)           an empty tensor                             Inductor, where ranks compare their graphs
    reduce_rows(rows)          their mean or sum; overwrites the rows      graphs, behind an all-to-all
    send_buffer(payload)       the payload, in one buffer; with a dtype    Inductor's graphs
                               cast where its all-gather starts

This file has the signatures, the derivatives and the shapes, and `UnshardSpec`, the string that says how a unit is
gathered and reduced. The bodies of `unshard`, `reduce_grads` and `check_ranks` are in agree/rank_order.py, those of
`add_accumulated`, `defer_reduce` and `update_shard` in eager/reduce.py, those of `await_gather` and `start_reduce_` in
eager/block_reader.py, that of `leave_out` in agree/unused_parameters.py. `flat_param_id` is a flat parameter's id in a
tensor on the CPU (flat_param.py, Note [Flat parameters are looked up by id]).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fsdp_compile.comm.collectives import REDUCTIONS
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.hops import parse_hops, print_hops
from fsdp_compile.core._torch import inductor_settings, outside_of_transforms, plain_within, without_dispatch_modes
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.traced_writes import note_gathered
from fsdp_compile.tensors.unused import mark_unused, unused_in

# Note [Why markers are operators]
# An `autograd.Function` would be traced through: its collectives would end up in the graph as Dynamo met them, and
# AOTAutograd does not cache graphs that contain one. A library operator with a registered derivative stays one node
# through Dynamo and AOTAutograd, which passes can find and expand. It is opaque to both of them, so all that decides
# its shape must be in its arguments: the layout and the groups travel as text (Note [One string describes an unshard]).
# Where backward does not reduce, the graph may not return a gradient of the shard, which has another shape and is not
# known yet. `defer_reduce` returns a scalar instead, the gradient of `deferred`, an input of the graph that nothing
# reads. It makes autograd call the node behind `deferred` (autograd.ScatterGradients) when the graph has run. So does
# `update_shard`, as what a unit was updated by shall not live until the graph has run.


def define(name: str, signature: str, *tags: torch.Tag) -> Any:
    """Define the operator `fsdp_flat::name`; return it."""
    torch.library.define(f"fsdp_flat::{name}", signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    return getattr(torch.ops.fsdp_flat, name).default


_OPAQUE = torch.Tag.cudagraph_unsafe  # a replay would not call it

UNSHARD = define("unshard", "(Tensor shard, Tensor? flat_param_id, Tensor? deferred, str spec) -> Tensor")
VIEWS = define("views", "(Tensor(a) full, str layout, int[] frozen=[]) -> Tensor(a)[]")
REDUCE_GRADS = define("reduce_grads", "(Tensor packed, str spec) -> Tensor")
PACK_GRADS = define("pack_grads", "(Tensor?[] grads, str layout) -> Tensor")
ADD_ACCUMULATED = define(
    "add_accumulated", "(Tensor packed, Tensor flat_param_id, bool in_place=False) -> Tensor", _OPAQUE
)
ADD_ACCUMULATED_ = define("add_accumulated_", "(Tensor(a!) packed, Tensor flat_param_id) -> ()", _OPAQUE)
DEFER_REDUCE = define(
    "defer_reduce",
    "(Tensor packed, Tensor flat_param_id, str layout, bool owned=False, *, int[] unused=[]) -> Tensor",
    _OPAQUE,
)
UPDATE_SHARD = has_side_effect(
    define("update_shard", "(Tensor grad, Tensor flat_param_id, bool at_once=False) -> Tensor", _OPAQUE)
)
AWAIT_GATHER = define("await_gather", "(Tensor(a) full) -> Tensor(a)", _OPAQUE)
LEAVE_OUT = define("leave_out", "(Tensor grad, Tensor? shard, int[] params) -> Tensor", _OPAQUE)
START_REDUCE_ = define("start_reduce_", "(Tensor(a!) packed, Tensor full) -> ()", _OPAQUE)
WAIT_COLLECTIVE = define("wait_collective", "(Tensor full, Tensor sent) -> Tensor")
CHECK_RANKS = has_side_effect(
    define("check_ranks", "(Tensor[] shards, str sequence, str[] groups, float timeout, Device device) -> Tensor")
)
REDUCE_ROWS = define("reduce_rows", "(Tensor(a!) rows, str op) -> Tensor")
SEND_BUFFER = define("send_buffer", "(Tensor payload, ScalarType? dtype=None) -> Tensor")
MARKERS = (UNSHARD, REDUCE_GRADS, PACK_GRADS, DEFER_REDUCE, UPDATE_SHARD)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no autograd history, no shared version counter."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype are equal bit by bit; `torch.equal` takes no float8."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a wrapper subclass; a plain tensor itself (E-SYNC-5)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # a DTensor names its mesh too
            yield from inner_tensors(inner)


def views_of(full: Tensor, layout: FlatParamLayout) -> list[Tensor]:
    """Views of `full`, 1-D `[layout.numel]`, in the parameters' shapes, cut by a single split: at every forward."""
    sizes, windows, empty = layout.windows
    cut = full.split_with_sizes(sizes)
    views = [cut[at] if shape is None else cut[at].view(shape) for at, shape in windows]
    for index in empty:
        views.insert(index, full.new_empty(layout.shapes[index]))
    return views


def view_parameters(full: Tensor, layout: str, frozen: Sequence[int] = ()) -> list[Tensor]:
    """`views_of` a layout that is given as text."""
    return views_of(full, FlatParamLayout.parse(layout))


class _Views(torch.autograd.Function):
    """`view_parameters`, whose derivative packs the gradients, and says which parameters have none."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, layout: str, frozen: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.frozen = layout, frozen
        return tuple(view_parameters(full, layout))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        if (some := next((grad for grad in grads if grad is not None), None)) is None:
            return None, None, None
        segments = FlatParamLayout.parse(ctx.layout).segments
        given = [None if each.parameter is None else grads[each.parameter] for each in segments]
        packed = torch.cat([
            some.new_zeros(each.numel) if grad is None else grad if grad.dim() == 1 else grad.reshape(each.numel)
            for grad, each in zip(given, segments, strict=True)
        ], out=some.new_empty(sum(each.numel for each in segments)))  # fmt: skip  # any dtype, also under autocast
        return mark_unused(packed, grads, ctx.frozen), None, None


torch.library.impl("fsdp_flat::views", "CompositeImplicitAutograd", view_parameters)
for _key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):  # a key of all devices would come behind the other one

    @torch.library.impl("fsdp_flat::views", _key)
    def _differentiable_views(full: Tensor, layout: str, frozen: Sequence[int] = ()) -> list[Tensor]:
        with outside_of_transforms():  # of torch.func, for which parameters are constants
            return list(_Views.apply(plain_within(full), layout, frozen))


@torch.library.impl("fsdp_flat::reduce_rows", "default")
def _reduce_rows(rows: Tensor, op: str) -> Tensor:  # [n, part] -> [part]
    reduced = rows.new_empty(rows.shape[1:])
    REDUCTIONS[op](rows, 0, out=reduced)
    return reduced


_before_tracing: dict[Callable[[], None], None] = {}


def call_before_tracing(function: Callable[[], None]) -> None:
    """Call `function` once, when an unshard is traced next: before any graph that holds it is compiled.
    So the passes and Inductor are loaded only when `torch.compile` is used.
    """
    _before_tracing[function] = None


def set_inductor_settings(settings: Callable[[torch.fx.Graph], dict[str, Any]]) -> None:
    """Have plain `torch.compile` compile each graph that holds an unshard with what `settings` returns for it."""
    inductor_settings[:] = [settings]


@torch.library.register_fake("fsdp_flat::unshard")
def _unshard_fake(shard: Tensor, flat_param_id: Tensor | None, deferred: Tensor | None, spec: str) -> Tensor:
    while _before_tracing:
        function, _ = _before_tracing.popitem()
        with without_dispatch_modes():  # modules that are imported now may create tensors
            function()
    parsed = UnshardSpec.parse(spec)
    note_gathered(shard, holds_plain=parsed.layout.world_size == 1)
    return shard.new_empty(parsed.layout.numel, dtype=parsed.compute_dtype or shard.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, flat_param_id, deferred, spec = inputs
    ctx.save_for_backward(*([] if flat_param_id is None else [flat_param_id]))
    ctx.defers, ctx.spec, ctx.dtype, ctx.shard = deferred is not None, spec, shard.dtype, shard


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: [layout.numel]
    spec = UnshardSpec.parse(ctx.spec)
    packed, unused = grad if spec.reduce_dtype is None else grad.to(spec.reduce_dtype), unused_in(grad)
    if ctx.defers and not spec.updates:
        return None, None, DEFER_REDUCE(packed, *ctx.saved_tensors, spec.layout.text, unused=unused), None
    if ctx.saved_tensors and not spec.updates:
        packed = ADD_ACCUMULATED(packed, *ctx.saved_tensors)
    mean = REDUCE_GRADS(packed, ctx.spec)
    mean = mean if mean.dtype == ctx.dtype else mean.to(ctx.dtype)
    if unused:
        return LEAVE_OUT(mean, ctx.shard if spec.groups else None, unused), None, None, None
    return (None, None, UPDATE_SHARD(mean, *ctx.saved_tensors), None) if spec.updates else (mean, None, None, None)


torch.library.register_autograd("fsdp_flat::unshard", _unshard_backward, setup_context=_save_for_backward)


@torch.library.register_fake("fsdp_flat::reduce_grads")
def _reduce_grads_fake(packed: Tensor, spec: str) -> Tensor:
    return packed.new_empty(UnshardSpec.parse(spec).layout.shard_numel)


@torch.library.register_fake("fsdp_flat::pack_grads")
def _pack_grads_fake(grads: list[Tensor | None], layout: str) -> Tensor:
    some = next(grad for grad in grads if grad is not None)
    return some.new_empty(FlatParamLayout.parse(layout).numel)


for _name in ("add_accumulated_", "start_reduce_"):
    torch.library.register_fake(f"fsdp_flat::{_name}", lambda packed, _: None)
for _name in ("add_accumulated", "leave_out", "wait_collective"):
    torch.library.register_fake(f"fsdp_flat::{_name}", lambda tensor, *_, **__: torch.empty_like(tensor))
for _name in ("defer_reduce", "update_shard"):
    torch.library.register_fake(f"fsdp_flat::{_name}", lambda grad, *_, **__: grad.new_empty((), dtype=torch.float32))
torch.library.register_fake("fsdp_flat::check_ranks", lambda *given: torch.empty(0, device=given[-1]))
torch.library.register_fake("fsdp_flat::send_buffer", lambda sent, dtype=None: torch.empty_like(sent, dtype=dtype))
torch.library.register_fake("fsdp_flat::reduce_rows", lambda rows, _: rows.new_empty(rows.shape[1:]))


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


# Note [One string describes an unshard]
# A traced graph must be the same program on every rank, Dynamo must guard on as little as possible at every call, and
# AOTAutograd must be able to cache the graph. A string constant meets all three: it is compared once per flat
# parameter, it is hashed by its text, and it holds nothing that depends on the rank. An object as an operator's
# argument would have to be registered with the compiler, and a list of separate arguments is guarded one by one.
# Passes and the operators' bodies read the string back with `UnshardSpec.parse`, which is cached.


@dataclass(frozen=True)
class UnshardSpec:
    """How one flat parameter is gathered and its gradient reduced; equal on all ranks."""

    layout: FlatParamLayout  # with a `world_size` of 1 nothing is gathered, unless one rank has `same_bits`
    groups: tuple[NamedGroup, ...]  # of all-gathers, in order: one or two. Unsharded: of the average; maybe none
    reshard_after_forward: bool | None  # whether the full buffer is freed after forward; None: a pass decides
    replicas: NamedGroup | None = None  # hybrid sharding: ranks that store the same shard; averaged over as well
    compute_dtype: torch.dtype | None = None  # of the full buffer; None: that of the shard
    reduce_dtype: torch.dtype | None = None  # in which gradients are reduced; None: that of the full buffer
    of_root: bool = False  # whether the unit is that of a root, which an eager forward does not free
    same_bits: bool = False  # whether gradients are added up in an order that any number of ranks has
    updates: bool = False  # whether the unit may be updated in backward as soon as its gradient is reduced
    is_searched: bool = False  # whether a search decides if it is freed after forward
    is_part: bool = False  # gathered outside of the graph: whether the unit has several flat parameters
    divisor: float | None = None  # of the sum of gradients over all ranks; None: their mean, as the backend computes it
    reduce_groups: tuple[NamedGroup, ...] = ()  # of reduce-scatters, if not those of all-gathers

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different slices of the buffer."""
        return self.layout.world_size > 1 or (self.same_bits and all(group.size == 1 for group in self.groups))

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return prod(group.size for group in self.groups) * (1 if self.replicas is None else self.replicas.size)

    @cached_property
    def text(self) -> str:
        """The specification as a constant for compilers; `parse` reads it back.

        Grammar: the layout's text, `groups=` and one or two hops (comm/hops.py), `reshard=True|False|None`, and what is
        not the default as `_OPTIONS` says; separated by blanks.
        """
        fields = [self.layout.text, f"groups={print_hops(self.groups)}", f"reshard={self.reshard_after_forward}"]
        given = ((word, write, getattr(self, name)) for word, (name, write, _) in _OPTIONS.items())
        return " ".join([*fields, *(f"{word}={write(value)}" for word, write, value in given if value)])

    @staticmethod
    @lru_cache(maxsize=1024)  # read at every run of an operator; specifications are immutable
    def parse(text: str) -> "UnshardSpec":
        """The specification that wrote `text`, without parameter names. ValueError quotes a malformed text."""
        layout, *pairs = text.split(" ")
        fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if len(fields) != len(pairs) or not {"groups", "reshard"} <= fields.keys() <= {"groups", "reshard", *_OPTIONS}:
            raise ValueError(f"{text!r} is not an unshard specification; expected LAYOUT groups=NAME:SIZE,... "
                             f"reshard=True|False|None, and some of {', '.join(_OPTIONS)}")  # fmt: skip
        reshard = {"True": True, "False": False, "None": None}[fields["reshard"]]
        given = {name: read(fields[word]) for word, (name, _, read) in _OPTIONS.items() if word in fields}
        return UnshardSpec(FlatParamLayout.parse(layout), parse_hops(fields["groups"]), reshard, **given)


_DTYPE: Any = lambda dtype: str(dtype).removeprefix("torch."), lambda text: getattr(torch, text)
_FLAG: Any = str, "True".__eq__
_OPTIONS: dict[str, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {  # word: field, how to write and read it
    "replicas": ("replicas", lambda hop: print_hops([hop]), lambda text: parse_hops(text)[0]),
    "reduces": ("reduce_groups", print_hops, parse_hops),
    "compute": ("compute_dtype", *_DTYPE),
    "reduce": ("reduce_dtype", *_DTYPE),
    "order": ("same_bits", lambda _: "tree", "tree".__eq__),
    "search": ("is_searched", *_FLAG),
    "divisor": ("divisor", repr, float),
    "root": ("of_root", *_FLAG),
    "update": ("updates", *_FLAG),
    "part": ("is_part", *_FLAG),
}
OF_ROOT, UPDATES = " root=True", " update=True"  # the end of a specification with `of_root`, `updates`


def shard_order(groups: Sequence[NamedGroup]) -> tuple[int, ...]:
    """For each rank of the group that is sharded over, the slice it stores; empty if rank r stores slice r."""
    if len(groups) == 1:
        return ()
    peers, neighbors = (group.size for group in groups)
    return tuple(rank // neighbors + peers * (rank % neighbors) for rank in range(peers * neighbors))


torch.library.register_fake("fsdp_flat::await_gather", lambda full: full)
