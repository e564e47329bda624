"""A flat parameter: parameters of one dtype laid out in one buffer, and this rank's shard of it."""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import replace_data
from fsdp_compile.core.autograd import Arrival, Entry, Join, ShardViews, Tie
from fsdp_compile.core.layout import DEFAULT_ALIGNMENT, FlatParamLayout, ShardRecord
from fsdp_compile.core.rows import end_between_rows

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
        self.arrival = Arrival()
        self.handle: Tensor | None = None
        self._views = ShardViews(self.layout, rank)
        self.ties = 0
        self._take_number()
        self.adopt(self._copy_to_shard(device, pin_memory))

    def _take_number(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        _by_number[number] = self

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
        self._tie = Tie(self._views, self.arrival, self.layout.names, shard)
        self._tie.params = tuple(self.params)
        with torch.enable_grad():
            self.handle = Join.apply(shard, self._tie, *self.params)
            self.entry = Entry.apply(self.handle, self._tie)
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
        twin.params, twin.arrival, twin.accumulated = params, self.arrival.twin(), None
        twin._take_number()
        twin.adopt(torch.empty_like(self.shard, pin_memory=self.shard.is_pinned()).copy_(self.shard))
        return twin


def by_kind(params: NamedParams) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype, device and `requires_grad` together, in order of first appearance."""
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
    return list(kinds.values())


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, FlatParam] = weakref.WeakValueDictionary()


def flat_numbered(number: Tensor) -> FlatParam | None:
    """The flat parameter with this `number`; None if its model is gone."""
    return _by_number.get(int(number))
