"""A flat parameter: parameters of one dtype laid out in one buffer, and this rank's shard of it."""

import copy
import itertools
import operator
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm.hops import wire_of
from fsdp_compile.core._torch import concatenate_flattened, keep_size_static, without_torch_function
from fsdp_compile.core.autograd import GradientReduction, ScatterGradients, ShardBinding, ShardSplitter
from fsdp_compile.core.inner_params import is_inner
from fsdp_compile.core.layout import MORE, ShardRecord, lay_out
from fsdp_compile.core.ops import views_of
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardRanks, ShardSpec, name_specs
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_local
from fsdp_compile.tensors.tensor_parallel import tensor_parallel_of
from fsdp_compile.tensors.unsharded_tensor import UnshardedTensor

_REQUIRES_GRAD, _DTYPE, _LAYOUT = map(operator.attrgetter, ("requires_grad", "dtype", "layout"))
NamedParams = Sequence[tuple[str, nn.Parameter]]


class FlatParam:
    """Parameters of one dtype and device, all trainable or all frozen when made, in one flat buffer.

    Args:
        params: `(name, parameter)` pairs, full shape, in layout order. Each stays the same object and becomes a
            `ShardedTensor` over a view into the local shard.
        ranks: the ranks that the flat buffer is split over, which may be one, and their replicas.
        shard_order: for each of these ranks the slice that it stores; empty: rank r stores slice r.
        device: where the shard is stored.
        pin_memory: whether it is pinned there, for copies to another device.
    """

    shard: Tensor  # 1-D `[layout.shard_numel]`

    def __init__(
        self,
        params: NamedParams,
        ranks: ShardRanks,
        shard_order: tuple[int, ...],
        device: torch.device,
        pin_memory: bool = False,
    ) -> None:
        shapes = [(name, tuple(param.shape)) for name, param in params]
        self.layout = layout = lay_out(shapes, ranks.size, ranks.same_bits, ranks.rows / MORE)
        self.params = [param for _, param in params]
        self.is_inner = is_inner(self.params[0])  # inner tensors of subclasses, which nothing casts
        self.wire = wire_of(self.params[0])
        self.residual: Tensor | None = None  # what its format has lost of gradients (eager.error_feedback)
        self.rank = rank = shard_order[ranks.rank] if shard_order else ranks.rank  # which slice is this rank's
        offsets = zip(layout.shapes, layout.offsets, strict=True)
        shardings = [FlatSharding(shape, offset, layout.shard_numel, shard_order) for shape, offset in offsets]
        # For each parameter how it is sharded.
        self.specs = tuple(map(ShardSpec, shardings, itertools.repeat(ranks), map(tensor_parallel_of, self.params)))
        self.accumulated: Any = None  # local gradients that no reduce has seen yet (eager.accumulate)
        # Hybrid sharding: the sum of reduced gradients, 1-D, that are still to be averaged over replicas.
        self.deferred_all_reduce: Tensor | None = None
        self.reduction = GradientReduction()  # between the reduce of the gradient and autograd
        self._splitter = ShardSplitter(self.layout, rank)
        self.bindings = 0  # how often the parameters were bound to a shard: again when their data was replaced
        self._paddings: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.names = list(layout.names)  # in the root, once there is one; those in the unit's module until then
        name_specs(self.specs, self.names)
        self.path = self.names[0]  # of its unit, once ranks have compared the model
        self.flat_param_id = new_flat_param_id(self)  # names it in graphs: an integer in a tensor on the CPU
        shard = torch.zeros(layout.shard_numel, dtype=self.params[0].dtype, device=device, pin_memory=pin_memory)
        with torch.no_grad():  # copy what this rank stores of each parameter; the full flat parameter never exists
            for param, part, record in zip(self.params, self.split(shard), self.records, strict=True):
                if record is not None:
                    part.copy_(param.detach().reshape(-1)[record.first : record.last + 1])
        self.shard = shard
        self.bind(shard)

    @property
    def records(self) -> tuple[ShardRecord | None, ...]:
        """For each parameter the slice that this rank stores."""
        return self.layout.records(self.rank)

    @cached_property
    def full_shapes(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter its shape; for a DTensor that of the full tensor."""
        return tuple(tuple(spec.shape) for spec in self.specs)

    def full_views(self, full: Tensor) -> list[Tensor]:
        """Views of `full`, 1-D `[layout.numel]`, in `full_shapes`.
        What was a DTensor is gathered from its ranks, all of which take part, and is no view.
        """
        views = self.views(full)
        for index, spec in enumerate(self.specs):
            if spec.tensor_parallel is not None:
                views[index] = spec.tensor_parallel.gather(views[index])
        return views

    def views(self, full: Tensor) -> list[Tensor]:
        """Views of `full`, 1-D `[layout.numel]`, in the shapes that the parameters have unsharded."""
        return views_of(full, self.layout)

    def pack(self, grads: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Concatenate gradients in the parameters' unsharded shapes to a new `[layout.numel]`; zeros where is none."""
        parts: list[Any] = [*grads]
        if set(map(type, grads)) != {Tensor} or set(map(_LAYOUT, parts)) != {torch.strided}:
            sizes, zeros = self.layout.numels, partial(torch.zeros, dtype=dtype, device=device)
            parts = [zeros(n) if part is None else part for n, part in zip(sizes, parts, strict=True)]
            parts = [part.to_dense() if part.is_sparse else part for part in parts]
        segments = self.layout.segments
        if not len(segments) == len(self.layout.windows[1]) == len(parts):
            if (dtype, device) not in self._paddings:  # made once: their only reader is the stream that first packs
                numels = [each.numel for each in segments if each.parameter is None]
                self._paddings[dtype, device] = [torch.zeros(n, dtype=dtype, device=device) for n in numels]
            padding = iter(self._paddings[dtype, device])
            parts = [parts[at] if (at := each.parameter) is not None else next(padding) for each in segments]
        if len(parts) > 1 and set(map(_DTYPE, parts)) == {dtype} and not torch.is_autocast_enabled(device.type):
            return concatenate_flattened(parts)  # in C: it runs for each parameter; under autocast it takes few dtypes
        out = torch.empty(self.layout.numel, dtype=dtype, device=device)
        return torch.cat([part.reshape(-1) for part in parts], out=out) if parts else out

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parameters' slices of `flat`, a tensor laid out like the shard; without elements if not on this rank."""
        return self._splitter.split_all(flat)

    def bind(self, shard: Tensor) -> None:
        """Make `shard`, 1-D `[layout.shard_numel]`, the storage of all parameters, with an autograd node of its own."""
        self.shard = shard
        self.bindings += 1
        vars(shard.untyped_storage())["flat_param"] = weakref.ref(self)
        self.release()
        self._bind_params()
        self.binding = ShardBinding(self.params, self.names, self._splitter, self.reduction)
        with torch.enable_grad():
            # A class of its own, so that what autograd says of the shard names its parameters.
            scatter: Any = type("", (ScatterGradients,), {})
            # `deferred`: of reduces outside of graphs.
            self._bound_shard, self.deferred = scatter.apply(shard, self.binding, self.binding.sentinel, *self.params)
            # Where one piece of code runs units of several sizes, Dynamo would take the size for a variable.
            keep_size_static(self._bound_shard)
        # `shard`, differentiable; None while parameters are shown in full.
        self.autograd_shard: Tensor | None = self._bound_shard
        self.trains = self._bound_shard.requires_grad  # whether any parameter trained when it was bound
        self.frozen_when_bound = [param for param in self.params if not param.requires_grad]
        self.note_trained()
        self._name_shard()

    def rename(self, names: Mapping[nn.Parameter, str]) -> None:
        """Call parameters in errors as `names` does; those that it lacks keep theirs."""
        self.names[:] = [names.get(param, name) for param, name in zip(self.params, self.names, strict=True)]
        self.path = self.names[0]
        self._name_shard()

    def _name_shard(self) -> None:
        node = None if self._bound_shard is None else self._bound_shard.grad_fn
        if node is not None:
            rest = ", ..." if len(self.names) > 3 else ""
            type(node).__name__ = f"the shard of parameters {', '.join(self.names[:3])}{rest}"

    def _bind_params(self) -> None:
        for param, part, spec in zip(self.params, self.split(self.shard), self.specs, strict=True):
            set_local(param, part, spec, ShardedTensor)

    def note_trained(self) -> None:
        """Record which parameters train now."""
        self._trained = [param.requires_grad for param in self.params]
        # Indices to detach. With no trainable parameter the flat shard itself carries no gradient.
        self.frozen = tuple(i for i, trained in enumerate(self._trained) if self.trains and not trained)

    def is_current(self) -> bool:
        """Whether the parameters lie where `bind` put them and the same ones train."""
        with without_torch_function():
            return self.binding.is_bound() and list(map(_REQUIRES_GRAD, self.params)) == self._trained

    def only_trains(self) -> bool:
        """Whether all parameters train, and nothing but the optimizer would see their next gradients."""
        return self.accumulated is None and not self.reduction.awaits_reduce and self.binding.only_trains()

    def use_unsharded(self, full: Sequence[Tensor]) -> None:
        """Let the parameters be `full`, one tensor in full shape for each, until `use_sharded` or `bind`.
        Meanwhile `autograd_shard` is None, so that a forward, eager or compiled, raises.
        """
        self.hide()
        for param, tensor, spec in zip(self.params, full, self.specs, strict=True):
            set_local(param, tensor.view(-1), spec, UnshardedTensor)

    def hide(self) -> None:
        """Let forwards raise until `use_sharded` or `bind`: another rank shows full parameters."""
        self.autograd_shard = None

    def use_sharded(self) -> None:
        """Let the parameters lie in the shard again; graphs recorded before `use_unsharded` stay valid."""
        same = all(param is bound for param, bound in zip(self.params, self.binding.params, strict=True))
        stored = self.shard.device, self.shard.dtype
        if same and all((param.device, param.dtype) == stored for param in self.params):
            self._bind_params()
            self.binding.record()
            self.autograd_shard = self._bound_shard
        else:  # other objects, or autograd's accumulators of these are gone: it drops them with the device
            self.bind(self.shard)

    def release(self) -> None:
        """Drop autograd's nodes for the parameters, as these are about to leave the shard for good."""
        self._bound_shard = self.deferred = self.autograd_shard = None

    def copy_with(self, params: list[nn.Parameter]) -> "FlatParam":
        """A flat parameter like this one, with a shard and autograd nodes of its own for `params`."""
        new = copy.copy(self)
        new.params, new.accumulated, new.deferred_all_reduce = params, None, None
        new.names = list(self.names)
        new.reduction = GradientReduction(self.reduction.grad_dtype)
        new.flat_param_id = new_flat_param_id(new)
        new.bind(torch.empty_like(self.shard, pin_memory=self.shard.is_pinned()).copy_(self.shard))
        return new


def group_by_dtype(params: NamedParams) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype, `requires_grad` and wire together, in order of first appearance; inner tensors apart."""
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        kinds.setdefault((param.dtype, param.requires_grad, is_inner(param), wire_of(param)), []).append((name, param))
    return list(kinds.values())


# Note [Flat parameters are looked up by id]
# Under no_sync or with a communication hook, a graph calls back into the eager runtime, which needs the flat parameter
# that a gradient belongs to. The graph is shared by all blocks of equal layout, so the flat parameter must be an input,
# and inputs are tensors: an integer on the CPU. An attribute of that tensor would not survive hooks on saved tensors,
# which may copy it. So an operator's body, which has nothing else to start from, needs one table per process. It holds
# weak references: a graph may outlive its model.


_ids = itertools.count()  # never used again
_living: weakref.WeakValueDictionary[int, FlatParam] = weakref.WeakValueDictionary()


def new_flat_param_id(flat: FlatParam) -> Tensor:
    """Give `flat` an id: a 0-d integer tensor on the CPU."""
    flat_param_id = next(_ids)
    _living[flat_param_id] = flat
    return torch.tensor(flat_param_id, device="cpu")


def find_flat_param(flat_param_id: Tensor) -> FlatParam | None:
    """The flat parameter with that id; None if its model is gone."""
    return _living.get(int(flat_param_id))


def flat_param_at(shard: Tensor) -> FlatParam | None:
    """The flat parameter whose shard lies in the memory of `shard`; None if no living one does."""
    memory = shard.untyped_storage()
    found = vars(memory).get("flat_param", lambda: None)()
    return found if found is not None and found.shard.untyped_storage() is memory else None  # not its former one
