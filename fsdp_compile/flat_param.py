"""A flat parameter: parameters of one dtype laid out in one buffer, this rank's shard of it, and the tie between them.

nn.Parameter a   nn.Parameter b ...     what the optimizer holds: 1-D views into the shard (autograd leaves)
      \\             /
       join (applied once)              backward: hands each parameter its slice of the reduced gradient
            |
         handle                         the whole shard; the one input that a traced graph has for it
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.engine import (
    call_after_backward,
    carries_optimizers,
    current_backward,
    replace_data,
    set_grad,
    step_carried_optimizers,
)
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

    With shards in host memory the engine runs joins in another thread than what starts reduces.

    Attributes:
        finish: waits for the gradient that is on its way, and completes it; None: there is none.
        settle: lets the host wait for a completed gradient's copy into host memory; None: there is nothing to wait for.
        backward: the backward pass in which the eager runtime has last reduced gradients.
        full_precision: whether that one computed in the parameters' own dtype, mixed precision left aside.
        kept_dtype: the dtype in which `.grad` stays after backward, if not the parameters' (keep_low_precision_grads).
        kept: reduces what eager backward passes have kept under no_sync, and returns this rank's slice; None: nothing
            was kept.
        eager_only: the name of a setting in force that compiled graphs do not know of, or None.
    """

    def __init__(self) -> None:
        self.finish: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None
        self.backward = -1
        self.full_precision = False
        self.kept_dtype: torch.dtype | None = None
        self.kept: Callable[[], Tensor | None] | None = None
        self.eager_only: str | None = None
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

    def check_eager(self, name: str) -> None:
        """Raise NotImplementedError if a compiled graph has reduced this gradient although it should not have.

        A graph is traced with a reduce in it; without one it would be a second graph, which is not made yet.

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
        arrival.wait_on_host()
        kept = arrival.kept() if arrival.kept is not None else None  # compiled graphs reduce their own gradients alone
        grad = grad if kept is None else grad + kept
        tie.check_attached()
        _set_grad_dtype(tie.params, None)  # accumulation is never in low precision (E-MP-12)
        if any(map(carries_optimizers, tie.params)):
            call_after_backward(partial(step_carried_optimizers, tie.params))
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
        self.addresses = [0 if part is None else part.data_ptr() for part in views.of(shard)]
        self.absent = [index for index, address in enumerate(self.addresses) if not address]
        self.end = shard.storage_offset() + shard.numel()  # where absent parameters lie, as views without elements
        self.params: tuple[nn.Parameter, ...] = ()

    def is_attached(self) -> bool:
        """Whether all parameters lie in the shard. At every forward: no more than a comparison for each parameter."""
        if [param.data_ptr() for param in self.params] != self.addresses:
            return False
        return all(self.params[index].storage_offset() == self.end for index in self.absent)

    def detached(self) -> list[int]:
        """Indices of the parameters that no longer lie in the shard."""
        return [index for index in range(len(self.params)) if not self._lies_in_shard(index)]

    def _lies_in_shard(self, index: int) -> bool:
        param, address = self.params[index], self.addresses[index]
        return param.data_ptr() == address and (address != 0 or param.storage_offset() == self.end)

    def check_attached(self) -> None:
        """Raise RuntimeError if a parameter no longer lies in the shard: training it would change nothing."""
        if self.is_attached():
            return
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
        pin_memory: whether it is pinned there, for copies to another device.

    Attributes:
        shard: this rank's slice, 1-D `[layout.shard_numel]`.
        handle: `shard` as a differentiable tensor; None while the parameters are lent in full shape.
        trains: whether any parameter had `requires_grad` when the join was made.
        frozen: indices of the parameters that do not require grad, if others do.
        unsynced: local gradients that no reduce has seen yet (eager/accumulate.py), or None.
        arrival: what stands between a reduce and the join.
        ties: how often the parameters were tied to the shard: again when their data was replaced.
    """

    def __init__(
        self, params: NamedParams, shards: int, rank: int, device: torch.device, pin_memory: bool = False
    ) -> None:
        self.layout = FlatParamLayout.build([(n, tuple(p.shape)) for n, p in params], shards, shard_alignment=16)
        self.params = [param for _, param in params]
        self.rank = rank
        self.unsynced: Any = None  # eager.accumulate.Unsynced
        self.arrival = Arrival()
        self.handle: Tensor | None = None
        self._views = ShardViews(self.layout, rank)
        self.ties = 0
        self.adopt(self._copy_to_shard(device, pin_memory))

    @property
    def records(self) -> tuple[ShardRecord | None, ...]:
        """For each parameter the part that this rank stores."""
        return self.layout.records(self.rank)

    def parts(self, flat: Tensor) -> list[Tensor | None]:
        """The parameters' parts of `flat`, a tensor laid out like the shard; None: not on this rank."""
        return self._views.of(flat)

    def _copy_to_shard(self, device: torch.device, pin_memory: bool) -> Tensor:
        """Copy what this rank stores of each parameter; the full flat parameter never exists."""
        dtype = self.params[0].dtype
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device, pin_memory=pin_memory)
        with torch.no_grad():
            for param, record in zip(self.params, self.records, strict=True):
                if record:
                    part = param.detach().reshape(-1)[record.first : record.last + 1]
                    shard.narrow(0, record.offset, record.numel).copy_(part)
        return shard

    def adopt(self, shard: Tensor) -> None:
        """Make `shard` the storage of all parameters and tie it to a new handle."""
        self.shard, self.ties = shard, self.ties + 1
        for param, part in self._parts_of_params():
            replace_data(param, part)
        self._tie = _Tie(self._views, self.arrival, self.layout.names, shard)
        self._tie.params = tuple(self.params)
        with torch.enable_grad():
            self.handle = _Join.apply(shard, self._tie, *self.params)
        self._joined = self.handle
        self.trains = self._joined.requires_grad
        self.joined_without = [param for param in self.params if not param.requires_grad]
        self.note_frozen()

    def _parts_of_params(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of the shard, without elements where it is absent."""
        for index, (param, part) in enumerate(zip(self.params, self.parts(self.shard), strict=True)):
            absent = self.shard[self.shard.numel() :].view(self._absent_shape(index)) if part is None else part
            yield param, absent

    def note_frozen(self) -> None:
        """See which parameters train now."""
        self._trained = [param.requires_grad for param in self.params]
        # With no trainable parameter the handle itself carries no gradient and nothing needs detaching.
        self.frozen = tuple(i for i, trained in enumerate(self._trained) if self.trains and not trained)

    def is_current(self) -> bool:
        """Whether the parameters lie where `adopt` put them and the same ones train."""
        return self._tie.is_attached() and [param.requires_grad for param in self.params] == self._trained

    def detached(self) -> list[int]:
        """Indices of the parameters whose data was replaced: it no longer lies in the shard."""
        return self._tie.detached()

    def lend(self, full: Sequence[Tensor]) -> None:
        """Let the parameters' data be `full`, one tensor in full shape for each, until `take_back` or `adopt`.

        Meanwhile there is no handle: what would compute with it, eager or compiled, finds out.
        """
        self.handle = None
        for param, tensor in zip(self.params, full, strict=True):
            param.data = tensor

    def take_back(self) -> None:
        """Let the parameters lie in the shard again; graphs that were recorded before `lend` stay good."""
        same = all(param is tied for param, tied in zip(self.params, self._tie.params, strict=True))
        if same and all(param.device == self.shard.device for param in self.params):
            for param, part in self._parts_of_params():
                param.data = part
            self.handle = self._joined
        else:  # other objects, or autograd's accumulators of these are gone: it drops them with the device
            self.adopt(self.shard)

    def _absent_shape(self, index: int) -> tuple[int, ...]:
        return (0,) if self.layout.world_size > 1 else self.layout.shapes[index]

    def copy_with(self, params: list[nn.Parameter]) -> "FlatParam":
        """A flat parameter like this one, with a shard and a join of its own for `params`."""
        twin = object.__new__(FlatParam)
        twin.__dict__.update(self.__dict__)
        twin.params, twin.arrival, twin.unsynced = params, self.arrival.twin(), None
        twin.adopt(torch.empty_like(self.shard, pin_memory=self.shard.is_pinned()).copy_(self.shard))
        return twin
