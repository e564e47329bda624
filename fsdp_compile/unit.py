"""A unit: parameters that are gathered together, their layout, this rank's shard, and the tie between them.

    nn.Parameter a   nn.Parameter b ...     what the optimizer holds: 1-D views into the shard (autograd leaves)
          \\             /
           join (applied once)              backward: hands each parameter its slice of the reduced gradient
                |
             handle                         the whole shard; the one input that a traced graph has for this unit
                |
        unshard (once per forward)          backward: pack the gradients and reduce them
           /        \\
      full view   full view ...             what module code finds under `self.weight`
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.layout import FlatParamLayout, ShardRecord
from fsdp_compile.ops import UNSHARD, VIEWS, ReduceInBackward, alias, view_parameters


class ShardViews:
    """Cuts a tensor laid out like this rank's shard into the parameters' parts, by a single split."""

    def __init__(self, layout: FlatParamLayout, rank: int) -> None:
        self.sizes: list[int] = []  # of the runs that cover the shard, padding included
        self.places: list[int | None] = []  # for each parameter the run that is its part; None: not on this rank
        self.names, self.addresses = layout.names, list[int | None]()
        self.shapes = layout.shapes if layout.world_size == 1 else None  # whole parameters keep their shape
        end = 0
        for record in layout.records(rank):
            if record:
                self.sizes += [record.offset - end, record.numel]
                end = record.offset + record.numel
            self.places.append(len(self.sizes) - 1 if record else None)
        self.sizes.append(layout.shard_numel - end)

    def remember_memory(self, shard: Tensor) -> None:
        """Note where `shard` and its parts lie, for `check_attached`."""
        self.storage = shard.untyped_storage().data_ptr()
        self.addresses = [None if part is None else part.data_ptr() for part in self.of(shard)]

    def check_attached(self, params: Sequence[nn.Parameter]) -> None:
        """Raise RuntimeError if a parameter no longer lies in the shard: training it would change nothing.

        All ranks raise: an empty parameter is a view of the shard as well.
        """
        for name, address, param in zip(self.names, self.addresses, params, strict=True):
            if param.data_ptr() != address and (address or param.untyped_storage().data_ptr() != self.storage):
                raise RuntimeError(
                    f"parameter {name}: expected it to lie in its unit's shard, found other memory; its data was "
                    f"replaced after fully_shard (.to(), .half(), .data = ...): do that before, or copy into it"
                )

    def of(self, flat: Tensor) -> list[Tensor | None]:
        """The parts of `flat`, 1-D `[shard_numel]`: views, 1-D or, unsharded, in full shape; None: not on this rank."""
        runs = flat.split_with_sizes(self.sizes)
        parts = [None if place is None else runs[place] for place in self.places]
        if self.shapes is None:
            return parts
        return [None if part is None else part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class _Join(torch.autograd.Function):
    """Ties the sharded parameters to the handle: forward passes the shard on, backward hands out its parts.

    It lives outside every traced graph and keeps rank-dependent offsets there, so the graph is the same on all ranks.
    Note on lifetime: handle -> this node -> parameters is a chain of C++ references that Python's garbage collector
    does not see, so nothing here, nor any parameter, may refer strongly to the unit.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, views: ShardViews, *params: nn.Parameter) -> Tensor:
        ctx.views, ctx.params = views, params
        views.remember_memory(shard)
        return alias(shard)  # own version counter: in-place optimizer updates do not invalidate the graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: [shard_numel]
        ctx.views.check_attached(ctx.params)
        pairs = zip(ctx.views.of(grad), ctx.params, strict=True)
        return (None, None, *[part if param.requires_grad else None for part, param in pairs])


class Unit:
    """Parameters that are gathered together, reduced together and freed together.

    Args:
        params: `(name, parameter)` pairs of one dtype and one device, full shape, in layout order. Each parameter keeps
            its identity; its data becomes a 1-D view into the local shard (full shape when `shards == 1`).
        group: the process group that the unit communicates over.
        shards: into how many parts the flat parameter is split: the size of `group`, or 1 for NO_SHARD.
        reshard_after_forward: whether the gathered buffer is freed between forward and backward.

    Attributes:
        shard: this rank's slice of the flat parameter, 1-D `[layout.shard_numel]`.
        handle: `shard` as a differentiable tensor.
        views: the full views while a forward or backward of this unit runs, else None.
        views_backward: the number of the backward pass that set `views`; -1: a forward did.
        awaiting_backward: the eager forwards of this unit whose backward is still to come.
        is_root: whether no other unit encloses this one; the eager runtime keeps such a unit after forward.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        shards: int,
        reshard_after_forward: bool,
    ) -> None:
        self.layout = FlatParamLayout.build([(n, tuple(p.shape)) for n, p in params], shards, shard_alignment=16)
        self.params = [param for _, param in params]
        self.group = group
        self.rank = dist.get_rank(group) if shards > 1 else 0
        self.reshard_after_forward = reshard_after_forward and shards > 1
        self.unshard_args = (self.layout.text, group.group_name, group.size(), self.reshard_after_forward)
        self.views: list[Tensor] | None = None
        self.views_backward = -1
        self.awaiting_backward: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_root = True
        self._adopt(self._copy_to_shard())

    @property
    def records(self) -> tuple[ShardRecord | None, ...]:
        """For each parameter the part that this rank stores."""
        return self.layout.records(self.rank)

    def unshard(self) -> list[Tensor]:
        """Gather the flat parameter; return one differentiable full view per parameter. One all-gather."""
        if torch.compiler.is_compiling():
            views: list[Tensor] = VIEWS(UNSHARD(self.handle, *self.unshard_args), self.unshard_args[0])
        else:
            views = view_parameters(self._gather(), self.unshard_args[0])
        if self.frozen:
            views = [view.detach() if index in self.frozen else view for index, view in enumerate(views)]
        return views

    def _gather(self) -> Tensor:
        if self.layout.world_size == 1:
            return ReduceInBackward.apply(self.handle, self.unshard_args[:3])
        return UNSHARD(self.handle, *self.unshard_args)

    def _copy_to_shard(self) -> Tensor:
        """Copy what this rank stores of each parameter; the full flat parameter never exists."""
        first = self.params[0]
        shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for param, record in zip(self.params, self.records, strict=True):
                if record:
                    part = param.detach().reshape(-1)[record.first : record.last + 1]
                    shard.narrow(0, record.offset, record.numel).copy_(part)
        return shard

    def _adopt(self, shard: Tensor) -> None:
        """Make `shard` the storage of all parameters and tie it to a new handle."""
        self.shard, self._shard_views = shard, ShardViews(self.layout, self.rank)
        parts = self._shard_views.of(shard)
        for index, (param, part) in enumerate(zip(self.params, parts, strict=True)):
            param.data = shard[:0].view(self._absent_shape(index)) if part is None else part
            param._fsdp_unit = (weakref.ref(self), index)  # type: ignore[attr-defined]
        with torch.enable_grad():
            self.handle: Tensor = _Join.apply(shard, self._shard_views, *self.params)
        # With no trainable parameter the handle itself carries no gradient and nothing needs detaching.
        trains = self.handle.requires_grad
        self._joined_without = [param for param in self.params if not param.requires_grad]
        self.frozen = tuple(i for i, p in enumerate(self.params) if trains and not p.requires_grad)

    def refresh(self) -> None:
        """Notice, before an eager forward, what was done to the parameters since.

        Raises:
            RuntimeError: a parameter's data was replaced.
        """
        self._shard_views.check_attached(self.params)
        if any(param.requires_grad for param in self._joined_without):
            self._adopt(self.shard)  # thawed: the join has no edge to it yet

    def _absent_shape(self, index: int) -> tuple[int, ...]:
        return (0,) if self.layout.world_size > 1 else self.layout.shapes[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        """A unit with parameters (copied already with their modules), shard and join of its own; same group."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.params = [copy.deepcopy(param, memo) for param in self.params]
        twin.views, twin.awaiting_backward = None, weakref.WeakSet()
        twin._adopt(self.shard.clone())
        return twin

    def __repr__(self) -> str:
        size, where = self.layout.numel, f"rank {self.rank} of {self.layout.world_size}"
        return f"Unit({len(self.params)} parameters, {size} elements of {self.shard.dtype}, {where})"


def unit_of(param: nn.Parameter) -> tuple[Unit, int] | None:
    """The unit that manages `param` and the parameter's index there, or None."""
    mark = getattr(param, "_fsdp_unit", None)
    unit = mark[0]() if mark else None
    return (unit, mark[1]) if mark and unit else None
