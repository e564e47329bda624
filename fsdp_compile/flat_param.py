"""A flat parameter: parameters of one dtype laid out in one buffer, this rank's shard of it, and the tie between them.

nn.Parameter a   nn.Parameter b ...     what the optimizer holds: 1-D views into the shard (autograd leaves)
      \\             /
       join (applied once)              backward: hands each parameter its slice of the reduced gradient
            |
         handle                         the whole shard; the one input that a traced graph has for it
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.engine import call_after_backward, current_backward, set_grad
from fsdp_compile.layout import FlatParamLayout, ShardRecord
from fsdp_compile.ops import alias

NamedParams = Sequence[tuple[str, nn.Parameter]]


class ShardViews:
    """Cuts a tensor laid out like this rank's shard into the parameters' parts, by a single split."""

    def __init__(self, layout: FlatParamLayout, rank: int) -> None:
        self.sizes: list[int] = []  # of the runs that cover the shard, padding included
        self.places: list[int | None] = []  # for each parameter the run that is its part; None: not on this rank
        self.shapes = layout.shapes if layout.world_size == 1 else None  # whole parameters keep their shape
        end = 0
        for record in layout.records(rank):
            if record:
                self.sizes += [record.offset - end, record.numel]
                end = record.offset + record.numel
            self.places.append(len(self.sizes) - 1 if record else None)
        self.sizes.append(layout.shard_numel - end)

    def of(self, flat: Tensor) -> list[Tensor | None]:
        """The parts of `flat`, 1-D `[shard_numel]`: views, 1-D or, unsharded, in full shape; None: not on this rank."""
        runs = flat.split_with_sizes(self.sizes)
        parts = [None if place is None else runs[place] for place in self.places]
        if self.shapes is None:
            return parts
        return [None if part is None else part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Arrival:
    """What stands between the reduce of a flat parameter's gradients and the join that hands them out.

    Attributes:
        finish: waits for the gradient that is on its way, and completes it; None: there is none.
        backward: the backward pass in which the eager runtime has last reduced gradients.
        full_precision: whether that one computed in the parameters' own dtype, mixed precision left aside.
        kept_dtype: the dtype in which `.grad` stays after backward, if not the parameters' (keep_low_precision_grads).
        eager_only: the name of a setting in force that compiled graphs do not know of, or None.
    """

    def __init__(self) -> None:
        self.finish: Callable[[], None] | None = None
        self.backward = -1
        self.full_precision = False
        self.kept_dtype: torch.dtype | None = None
        self.eager_only: str | None = None

    def wait(self) -> None:
        """Make the gradient that was handed to autograd complete."""
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()

    def check_eager(self, name: str) -> None:
        """Raise NotImplementedError if a compiled graph has reduced this gradient although it should not have.

        Args:
            name: of a parameter, for the message.
        """
        if self.eager_only is not None and self.backward != current_backward():
            raise NotImplementedError(
                f"parameter {name}: expected a gradient from the eager runtime under {self.eager_only}, found one that "
                f"a compiled graph has reduced already: {self.eager_only} is not supported in compiled models yet; "
                f"run these steps with the model that was passed to torch.compile"
            )

    def twin(self) -> "Arrival":
        """One with these settings, and nothing on its way."""
        twin = Arrival()
        twin.kept_dtype, twin.eager_only = self.kept_dtype, self.eager_only
        return twin


class _Join(torch.autograd.Function):
    """Ties the sharded parameters to the handle: forward passes the shard on, backward hands out its parts.

    It lives outside every traced graph and keeps rank-dependent offsets there, so the graph is the same on all ranks.
    The engine runs what was recorded last first, so of all that a backward pass can run this runs last: reduces are
    waited for here.
    Note on lifetime: handle -> this node -> parameters is a chain of C++ references that Python's garbage collector
    does not see, so nothing here, nor any parameter, may refer strongly to the flat parameter or its unit.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, tie: "_Tie", *params: nn.Parameter) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tie = tie
        return alias(shard)  # own version counter: in-place optimizer updates do not invalidate the graph

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # grad: [shard_numel]
        tie: _Tie = ctx.tie
        if grad is None:  # nothing was reduced: no_sync
            return (None, None, *[None] * len(tie.params))
        arrival = tie.arrival
        arrival.check_eager(tie.names[0])
        arrival.wait()
        tie.check_attached()
        _set_grad_dtype(tie.params, None)  # accumulation is never in low precision (E-MP-12)
        if arrival.kept_dtype is not None and not arrival.full_precision:
            call_after_backward(partial(_set_grad_dtype, tie.params, arrival.kept_dtype))
        pairs = zip(tie.views.of(grad), tie.params, strict=True)
        return (None, None, *[part if param.requires_grad else None for part, param in pairs])


def _set_grad_dtype(params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Cast the gradients to `dtype`; None: to the parameters' own."""
    for param in params:
        wanted = dtype or param.dtype
        if param.grad is not None and param.grad.dtype != wanted:
            set_grad(param, param.grad.to(wanted))


class _Tie:
    """What the join knows: the parameters, their places in the shard, and where the shard's memory is."""

    def __init__(self, views: ShardViews, arrival: Arrival, names: Sequence[str], shard: Tensor) -> None:
        self.views, self.arrival, self.names = views, arrival, names
        self.storage = shard.untyped_storage().data_ptr()
        self.addresses = [None if part is None else part.data_ptr() for part in views.of(shard)]
        self.params: tuple[nn.Parameter, ...] = ()

    def detached(self) -> list[int]:
        """Indices of the parameters that no longer lie in the shard; an empty one is a view of the shard as well."""
        return [
            index
            for index, (address, param) in enumerate(zip(self.addresses, self.params, strict=True))
            if param.data_ptr() != address and (address or param.untyped_storage().data_ptr() != self.storage)
        ]

    def check_attached(self) -> None:
        """Raise RuntimeError if a parameter no longer lies in the shard: training it would change nothing."""
        for index in self.detached():
            raise RuntimeError(
                f"parameter {self.names[index]}: expected it to lie in its unit's shard, found other memory; its data "
                f"was replaced between forward and backward: do that before forward, or copy into it"
            )


class FlatParam:
    """Parameters of one dtype and device, all trainable or all frozen when made, in one flat buffer.

    Args:
        params: `(name, parameter)` pairs, full shape, in layout order. Each parameter keeps its identity; its data
            becomes a 1-D view into the local shard (full shape when `shards == 1`).
        shards: into how many parts the flat buffer is split.
        rank: which part is this rank's.
        device: where the shard is stored.

    Attributes:
        shard: this rank's slice, 1-D `[layout.shard_numel]`.
        handle: `shard` as a differentiable tensor.
        frozen: indices of the parameters that do not require grad, if others do.
        unsynced: local gradients that no reduce has seen yet (eager/accumulate.py), or None.
        arrival: what stands between a reduce and the join.
    """

    def __init__(self, params: NamedParams, shards: int, rank: int, device: torch.device) -> None:
        self.layout = FlatParamLayout.build([(n, tuple(p.shape)) for n, p in params], shards, shard_alignment=16)
        self.params = [param for _, param in params]
        self.rank = rank
        self.unsynced: Any = None  # eager.accumulate.Unsynced
        self.arrival = Arrival()
        self._views = ShardViews(self.layout, rank)
        self.adopt(self._copy_to_shard(device))

    @property
    def records(self) -> tuple[ShardRecord | None, ...]:
        """For each parameter the part that this rank stores."""
        return self.layout.records(self.rank)

    @property
    def trains(self) -> bool:
        """Whether any parameter had `requires_grad` when the join was made."""
        return self.handle.requires_grad

    def parts(self, flat: Tensor) -> list[Tensor | None]:
        """The parameters' parts of `flat`, a tensor laid out like the shard; None: not on this rank."""
        return self._views.of(flat)

    def _copy_to_shard(self, device: torch.device) -> Tensor:
        """Copy what this rank stores of each parameter; the full flat parameter never exists."""
        shard = torch.zeros(self.layout.shard_numel, dtype=self.params[0].dtype, device=device)
        with torch.no_grad():
            for param, record in zip(self.params, self.records, strict=True):
                if record:
                    part = param.detach().reshape(-1)[record.first : record.last + 1]
                    shard.narrow(0, record.offset, record.numel).copy_(part)
        return shard

    def adopt(self, shard: Tensor) -> None:
        """Make `shard` the storage of all parameters and tie it to a new handle."""
        self.shard = shard
        for index, (param, part) in enumerate(zip(self.params, self.parts(shard), strict=True)):
            param.data = shard[:0].view(self._absent_shape(index)) if part is None else part
        self._tie = _Tie(self._views, self.arrival, self.layout.names, shard)
        self._tie.params = tuple(self.params)
        with torch.enable_grad():
            self.handle: Tensor = _Join.apply(shard, self._tie, *self.params)
        self.note_frozen()
        self._joined_without = [param for param in self.params if not param.requires_grad]

    def note_frozen(self) -> None:
        """See which parameters train now."""
        # With no trainable parameter the handle itself carries no gradient and nothing needs detaching.
        self.frozen = tuple(i for i, p in enumerate(self.params) if self.trains and not p.requires_grad)

    def refresh(self) -> None:
        """Notice, before an eager forward, what was done to the parameters since.

        Replaced data of the right size is copied into the shard (E-WB-3); a thawed parameter joins.

        Raises:
            RuntimeError: replaced data has another size than this rank's part (E-WB-4).
        """
        replaced = self._tie.detached()
        if replaced:
            self._write_back(replaced)
        if replaced or any(param.requires_grad for param in self._joined_without):
            self.adopt(self.shard)
        self.note_frozen()

    def _write_back(self, replaced: list[int]) -> None:
        parts = self.parts(self.shard)
        for index in replaced:
            expected, found = parts[index], self.params[index]
            numel = 0 if expected is None else expected.numel()
            if found.numel() != numel or found.dtype != self.shard.dtype:
                raise RuntimeError(
                    f"parameter {self.layout.names[index]}: expected data of {numel} elements of {self.shard.dtype}, "
                    f"this rank's part, found shape {tuple(found.shape)} of {found.dtype}; copy into the parameter, "
                    f"or replace it inside summon_full_params"
                )
        with torch.no_grad():
            for index in replaced:
                part = parts[index]
                if part is not None:
                    part.copy_(self.params[index].detach().view(part.shape))

    def _absent_shape(self, index: int) -> tuple[int, ...]:
        return (0,) if self.layout.world_size > 1 else self.layout.shapes[index]

    def copy_with(self, params: list[nn.Parameter]) -> "FlatParam":
        """A flat parameter like this one, with a shard and a join of its own for `params`."""
        twin = object.__new__(FlatParam)
        twin.__dict__.update(self.__dict__)
        twin.params, twin.arrival, twin.unsynced = params, self.arrival.twin(), None
        twin.adopt(self.shard.clone())
        return twin
