"""A flat parameter: parameters of one dtype laid out in one buffer, and this rank's shard of it."""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import replace_data
from fsdp_compile.core.autograd import (
    DeferredGradient,
    GradientReduction,
    ScatterGradients,
    ShardBinding,
    ShardSplitter,
)
from fsdp_compile.core.layout import DEFAULT_ALIGNMENT, FlatParamLayout, ShardRecord, end_between_rows

NamedParams = Sequence[tuple[str, nn.Parameter]]


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
        entry: where traced graphs leave gradients that they do not reduce, a scalar that depends on `handle`.
        number: names this flat parameter in traced graphs: an integer in a tensor on the CPU.
        trains: whether any parameter had `requires_grad` when the join was made.
        frozen: indices of the parameters that do not require grad, if others do.
        accumulated: local gradients that no reduce has seen yet (eager/accumulate.py), or None.
        arrival: what stands between a reduce and the join.
        ties: how often the parameters were tied to the shard: again when their data was replaced.
    """

    def __init__(
        self, params: NamedParams, shards: int, rank: int, device: torch.device, pin_memory: bool = False
    ) -> None:
        shapes = [(name, tuple(param.shape)) for name, param in params]
        layout = FlatParamLayout.build(shapes, shards, shard_alignment=DEFAULT_ALIGNMENT)
        self.layout = end_between_rows(layout, DEFAULT_ALIGNMENT)
        self.params = [param for _, param in params]
        self.rank = rank
        self.accumulated: Any = None  # eager.accumulate.AccumulatedGradient
        self.reduction = GradientReduction()
        self.autograd_shard: Tensor | None = None
        self._views = ShardSplitter(self.layout, rank)
        self.bindings = 0
        self._take_id()
        self.bind(self._copy_to_shard(device, pin_memory))

    def _take_id(self) -> None:
        number = next(_ids)
        self.flat_param_id = torch.tensor(number, device="cpu")
        _by_id[number] = self

    @property
    def records(self) -> tuple[ShardRecord | None, ...]:
        """For each parameter the part that this rank stores."""
        return self.layout.records(self.rank)

    def split(self, flat: Tensor) -> list[Tensor | None]:
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

    def bind(self, shard: Tensor) -> None:
        """Make `shard` the storage of all parameters and tie it to a new handle."""
        self.shard, self.bindings = shard, self.bindings + 1
        for param, part in self._parts_of_params():
            replace_data(param, part)
        self._binding = ShardBinding(self._views, self.reduction, self.layout.names, shard)
        self._binding.params = tuple(self.params)
        with torch.enable_grad():
            self.autograd_shard = ScatterGradients.apply(shard, self._binding, *self.params)
            self.deferred = DeferredGradient.apply(self.autograd_shard, self._binding)
        self._bound_shard = self.autograd_shard
        self.trains = self._bound_shard.requires_grad
        self.frozen_when_bound = [param for param in self.params if not param.requires_grad]
        self.note_trained()

    def _parts_of_params(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of the shard, without elements where it is absent."""
        for index, (param, part) in enumerate(zip(self.params, self.split(self.shard), strict=True)):
            absent = self.shard[self.shard.numel() :].view(self._absent_shape(index)) if part is None else part
            yield param, absent

    def note_trained(self) -> None:
        """See which parameters train now."""
        self._trained = [param.requires_grad for param in self.params]
        # With no trainable parameter the handle itself carries no gradient and nothing needs detaching.
        self.frozen = tuple(i for i, trained in enumerate(self._trained) if self.trains and not trained)

    def is_current(self) -> bool:
        """Whether the parameters lie where `bind` put them and the same ones train."""
        return self._binding.is_bound() and [param.requires_grad for param in self.params] == self._trained

    def unbound(self) -> list[int]:
        """Indices of the parameters whose data was replaced: it no longer lies in the shard."""
        return self._binding.unbound()

    def use_unsharded(self, full: Sequence[Tensor]) -> None:
        """Let the parameters' data be `full`, one tensor in full shape for each, until `use_sharded` or `bind`.

        Meanwhile there is no handle: what would compute with it, eager or compiled, finds out.
        """
        self.autograd_shard = None
        for param, tensor in zip(self.params, full, strict=True):
            param.data = tensor

    def use_sharded(self) -> None:
        """Let the parameters lie in the shard again; graphs that were recorded before `use_unsharded` stay good."""
        same = all(param is tied for param, tied in zip(self.params, self._binding.params, strict=True))
        if same and all(param.device == self.shard.device for param in self.params):
            for param, part in self._parts_of_params():
                param.data = part
            self.autograd_shard = self._bound_shard
        else:  # other objects, or autograd's accumulators of these are gone: it drops them with the device
            self.bind(self.shard)

    def _absent_shape(self, index: int) -> tuple[int, ...]:
        return (0,) if self.layout.world_size > 1 else self.layout.shapes[index]

    def copy_with(self, params: list[nn.Parameter]) -> "FlatParam":
        """A flat parameter like this one, with a shard and a join of its own for `params`."""
        twin = object.__new__(FlatParam)
        twin.__dict__.update(self.__dict__)
        twin.params, twin.reduction, twin.accumulated = params, self.reduction.twin(), None
        twin._take_id()
        twin.bind(torch.empty_like(self.shard, pin_memory=self.shard.is_pinned()).copy_(self.shard))
        return twin


def by_kind(params: NamedParams) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype, device and `requires_grad` together, in order of first appearance."""
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
    return list(kinds.values())


_ids = itertools.count()
_by_id: weakref.WeakValueDictionary[int, FlatParam] = weakref.WeakValueDictionary()


def flat_param_by_id(number: Tensor) -> FlatParam | None:
    """The flat parameter with this `number`; None if its model is gone."""
    return _by_id.get(int(number))
