"""A unit: parameters that are gathered, reduced and freed together.

           flat shard (of each flat parameter)
                |
        unshard (once per forward)          backward: pack the gradients and reduce them
           /        \\
    parameter   parameter ...               unsharded: what module code finds under `self.weight`

Parameters of one dtype, device and `requires_grad` form a flat parameter: frozen ones are gathered and never reduced.
If a unit is given in sections, each has flat parameters for itself.
"""

import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictSettings

from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.hops import hops_of
from fsdp_compile.core._torch import while_tracing, without_torch_function
from fsdp_compile.core.autograd import ReduceQueue
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.core.flat_collectives import all_gather_flat
from fsdp_compile.core.flat_param import FlatParam, NamedParams
from fsdp_compile.core.layout import ShardRecord
from fsdp_compile.core.ops import OF_ROOT, UNSHARD, UPDATES, VIEWS, UnshardSpec, shard_order
from fsdp_compile.core.settings import Settings
from fsdp_compile.core.traced_writes import check_finished_graph
from fsdp_compile.tensors.shard_spec import ShardRanks, ShardSpec
from fsdp_compile.tensors.tensor_parallel import in_forward

_VERSION = operator.attrgetter("_version")
T = TypeVar("T")


class Phase(Enum):
    """Who reads unsharded parameters of a unit (E-STATE-1). `TRANSITIONS` has the changes that are allowed.

    In SHARDED nothing reads them, though buffers may hold them: prefetched for the next forward, not freed between
    forward and backward (SHARD_GRAD_OP), or left by a backward pass under no_sync.
    """

    SHARDED = "sharded"
    FORWARD = "forward"
    BACKWARD = "backward"
    SUMMONED = "summoned"
    __hash__ = object.__hash__  # that of Enum is a Python function, called several times per unit and step


TRANSITIONS = {
    Phase.SHARDED: {Phase.SHARDED, Phase.FORWARD, Phase.BACKWARD, Phase.SUMMONED},
    Phase.FORWARD: {Phase.SHARDED},
    Phase.BACKWARD: {Phase.SHARDED, Phase.BACKWARD},  # again for an earlier forward of the unit
    Phase.SUMMONED: {Phase.SHARDED},
}


class GradientDelivery(Enum):
    """What a graph that is traced now does in backward with packed gradients."""

    REDUCE = "reduce"
    REDUCE_AND_UPDATE = "reduce and update"  # the optimizer may update the unit at once (compile_step)
    REDUCE_WITH_ACCUMULATED = "reduce with accumulated"  # their sum with gradients accumulated under no_sync
    DEFER = "defer"  # the eager runtime accumulates them, or reduces them as hooks and `UnitOptions` say


@dataclass
class UnitOptions:
    """What the `set_*` methods of a sharded module chose for its units."""

    all_reduces: bool = True  # hybrid sharding: average reduced shards over replicas; False: sum them up until then
    has_deferred: bool = False  # whether `all_reduces` was ever False: sums may wait
    divide_factor: float | None = None  # of the sum of gradients over all ranks; None: the number of ranks
    only_sums: bool = False  # collectives add, and a kernel divides, where the backend could average
    reduce_groups: tuple[NamedGroup, ...] | None = None  # of reduce-scatters, if not those of all-gathers
    reduces_in_flight: int = 2  # of how many units reduces may be under way before the oldest one is waited for
    all_reduce_hook: Callable[[Tensor], Any] | None = None  # gets each reduced gradient, 1-D; may change it in place
    all_reduce_hook_stream: Any = None  # the stream that it is called in, or None
    reshard_after_backward: bool = True  # whether a backward pass frees unsharded parameters
    prefetch_in_forward: "tuple[Unit, ...] | None" = None  # whose all-gathers a forward starts; None: as it is chosen
    prefetch_in_backward: "tuple[Unit, ...] | None" = None  # the same of backward

    @property
    def only_eager(self) -> set[str]:
        """The methods that chose what a graph does not follow."""
        chosen = {
            "set_modules_to_forward_prefetch": self.prefetch_in_forward is not None,
            "set_modules_to_backward_prefetch": self.prefetch_in_backward is not None,
            "set_reduce_scatter_max_input_buffers": self.reduces_in_flight != UnitOptions.reduces_in_flight,
            "set_reshard_after_backward": not self.reshard_after_backward,
        }
        return {method for method, is_chosen in chosen.items() if is_chosen}

    @property
    def changes_reduce(self) -> bool:
        """Whether gradients are reduced in another way than a graph's reduces do it."""
        return self.has_deferred or self.all_reduce_hook is not None


class VersionCounters(NamedTuple):
    """Version counters of a unit's parameters: equal counters, equal values.
    The counters of all ranks change together, also on ranks that store nothing of what was changed.
    """

    params: list[int]  # version counters of the parameters
    shards: list[int]  # for each flat parameter, that of its shard and how often it was bound to its parameters


Location = tuple[dict[str, nn.Parameter | None], str]
"""A module's `_parameters`, and a name there."""


class ParameterLocations:
    """The locations `of` each parameter of a unit, by index; tied parameters have several."""

    def __init__(self, params: int) -> None:
        self.of: list[list[Location]] = [[] for _ in range(params)]
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that hold them; weak: they refer to the unit
        self.record()

    def add(self, index: int, module: nn.Module, parameters: dict[str, nn.Parameter | None], name: str) -> None:
        """Record that `parameters`, as `module` stores them, hold parameter `index` under `name`."""
        self.of[index].append((parameters, name))
        self.modules.add(module)
        self.record()

    def record(self) -> None:
        """Record what modules hold now, to compare with later."""
        flattened = [location for locations in self.of for location in locations]
        self._registries = [parameters for parameters, _ in flattened]
        self._names = [name for _, name in flattened]
        self._recorded = [parameters.get(name) for parameters, name in flattened]

    def are_unchanged(self) -> bool:
        """Whether modules hold what they held at the last `record`.
        Asked at every eager forward: the work for each parameter runs in C (edits/writeback.py has what it costs).
        """
        held = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, held, self._recorded))


class Unit:
    """Parameters that are gathered, reduced and freed together.

    Args:
        sections: for each flat parameter `(name, parameter)` pairs in full shape, of one kind (`group_by_dtype`). Each
            parameter stays the same object.
        settings: the options of `fully_shard`.
        on_meta: whether the shard has no memory until `to_empty` gives it some.
        device: where the unit computes.
    """

    def __init__(
        self,
        sections: Sequence[NamedParams],
        settings: Settings,
        *,
        device: torch.device,
        on_meta: bool = False,
    ) -> None:
        self.settings = settings
        group, shards, self.is_sharded, reshard_after_forward, self.replicas, stages = settings.placement
        self.group, self.stages = group, stages or (group,)  # the groups that all-gathers go through, in order
        self.rank = group.find().rank() if self.is_sharded else 0
        self.device = device
        # Whether unsharded parameters are freed between forward and backward; None: but for the last unit's, and a
        # compiled step keeps more if "auto" or a budget asks for a search.
        is_open = reshard_after_forward and settings.reshard_after_forward in ("auto", "last")
        self.reshard_after_forward: bool | None = None if is_open else reshard_after_forward
        stored = torch.device("meta" if on_meta else "cpu") if settings.offload or on_meta else self.device
        # Pinned, copies from and to other devices run beside the host (E-OFF-3).
        pin = settings.offload and settings.pin_memory and not on_meta and self.device.type != "cpu"
        # That parameters are sharded over; under NO_SHARD this rank alone, of which all others are replicas.
        copies = self.replicas if self.is_sharded else group if group.size > 1 else None
        kind = settings.same_bits, settings.groups.mesh, settings.rows
        self.ranks = ranks = ShardRanks(group.name, shards, self.rank, copies and copies.name, *kind)
        order = shard_order(self.stages) if self.is_sharded else ()
        self.flats = tuple(FlatParam(part, ranks, order, stored, pin) for part in sections)
        self.params = [param for flat in self.flats for param in flat.params]  # indexed in this order everywhere
        self.path = self.flats[0].path  # for errors; from the first forward on the path of the unit's module
        self.tensor_parallel = found if any(found := tuple(map(in_forward, self.params))) else ()  # if unsharded
        self.state_settings: StateDictSettings | None = None  # the kind of state dicts (state_dict/model.py)
        self.locations = ParameterLocations(len(self.params))  # which modules hold the parameters
        # A state and the user's function that reduces gradients, and what calls it: see `set_comm_hook`.
        self.comm_hook: tuple[Any, Callable[..., Any]] | None = None
        self.reduce_by: Callable[..., Tensor] | None = None
        self._hook_compresses = False
        self.reduces_in_flight = ReduceQueue()  # shared by all units of a root
        self.of_root = False  # whether it is gathered around the forward of a root
        self.accumulates = False  # whether no_sync was ever in force
        self.written: str | None = None  # a parameter that its own forward changes, as was seen
        self.may_update = False  # whether graphs let the optimizer update the unit in backward, if nothing is deferred
        self.options = self.options_when_compiled = UnitOptions()  # the latter of the last compiled forward
        self.become_idle()
        self.syncs = True
        self.update_dtypes()
        self.link_params()

    def _spec(self, flat: FlatParam, full_precision: bool) -> tuple[str, str]:
        """As constants for compilers; read outside of the unit's forward it is in full precision, and the mean."""
        stages, replicas = hops_of(flat.wire, self.stages, self.replicas, full_precision)
        compute, reduce = self.compute_dtype(flat, full_precision), self.sent_dtype(flat, full_precision)
        spec = UnshardSpec(
            flat.layout,
            stages,
            reshard_after_forward=self.reshard_after_forward,
            replicas=replicas,
            compute_dtype=compute if compute != flat.shard.dtype else None,
            reduce_dtype=reduce if reduce != compute else None,
            same_bits=self.settings.same_bits,
            is_searched=self.reshard_after_forward is None and self.settings.reshard_after_forward == "auto",
            divisor=None if full_precision else self.divisor,
            reduce_groups=hops_of(flat.wire, self.options.reduce_groups or (), None, full_precision)[0],
        )
        return spec.text, flat.layout.text

    # --- who reads unsharded parameters -------------------------------------------------------------------------------

    def become_idle(self) -> None:
        """Begin in SHARDED, with nothing gathered. Plain attributes, as Dynamo guards on some of them."""
        self._phase = Phase.SHARDED
        # What a forward or backward reads: the parameters, or flat ones in a forward that was compiled by itself.
        self.unsharded_params: list[Tensor] | None = None
        self.unsharded_flats: list[Tensor] | None = None
        self.backward: BackwardPass | None = None  # that set one of these two; None: a forward did
        # Eager forwards whose backward is to come (eager.unsharded), as they ended: in the same order on all ranks.
        self.awaiting_backward: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.prefetched: Any = None  # what `FSDPModule.unshard` gathered, until a forward takes it (eager.unsharded)
        self.summoned: Any = None  # the full parameters in the place of the sharded ones (edits.summon)
        self.casts_closed = False  # whether a forward goes on that ran its own backward: it reads what that has closed
        self.keep_unsharded = False  # whether what was gathered last may outlive its backward; equal on all ranks
        self.awaited_by: Any = None  # the compiled forward whose graphs wait for flat parameters (eager.unsharded)
        self.kept: Any = None  # what a backward pass left unsharded for the next forward (eager.unsharded)

    @property
    def phase(self) -> Phase:
        """Who reads the parameters now. A phase left by a backward pass that failed ends with that pass."""
        if self._phase is Phase.BACKWARD and self.backward is not running_backward():
            return Phase.SHARDED
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Change the phase, as `TRANSITIONS` allows."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self} cannot change from {self.phase.value} to {phase.value}")
        self._phase = phase

    @property
    def is_unsharded(self) -> bool:
        """Whether module code may read unsharded parameters: in a forward, or in the running backward pass."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)

    @property
    def is_shown(self) -> bool:
        """Whether module code finds unsharded parameters: also in a pass within the backward pass that reads them."""
        in_backward = self._phase is Phase.BACKWARD and self.backward is not None and not self.backward.is_over
        return in_backward or self._phase is Phase.FORWARD

    def show_unsharded(self, tensors: list[Tensor], as_flats: bool) -> None:
        """Let a forward or the running backward pass read `tensors`, one per parameter, or per flat parameter."""
        backward = running_backward()
        self.enter(Phase.FORWARD if backward is None else Phase.BACKWARD)
        self.backward = backward
        if as_flats:
            self.unsharded_flats = tensors
        else:
            self.unsharded_params = tensors

    def hide_unsharded(self, tensors: list[Tensor] | None = None) -> None:
        """End the reading of `tensors`, or of any. They own an autograd node that owns this unit: drop them."""
        self.casts_closed = False
        if tensors is None or self.unsharded_params is tensors:
            self.unsharded_params = None
        if tensors is None or self.unsharded_flats is tensors:
            self.unsharded_flats = None
        if self.unsharded_params is None and self.unsharded_flats is None and self._phase is not Phase.SUMMONED:
            self._phase = Phase.SHARDED

    def describe_phase(self) -> str:
        """What the unit is doing, for messages."""
        if self.summoned is not None:
            return f"inside {self.summoned.by}"
        return "in its forward or backward" if self.is_unsharded else "idle"

    def check_not_summoned(self, what: str) -> None:
        """Raise AssertionError if the parameters are summoned: `what` cannot run then (E-FWD-12)."""
        if self.summoned is not None:
            raise AssertionError(f"{what} needs sharded parameters, and {self} is {self.describe_phase()}: leave that")

    # --- what the user changes ----------------------------------------------------------------------------------------

    @property
    def syncs(self) -> bool:
        """Whether backward reduces gradients."""
        return self._syncs

    @syncs.setter
    def syncs(self, syncs: bool) -> None:
        self._syncs = syncs
        self.accumulates |= not syncs
        self._choose_delivery()

    def set_comm_hook(
        self, comm_hook: tuple[Any, Callable[..., Any]], reduce_by: Callable[..., Tensor], compresses: bool
    ) -> None:
        """Let a hook, with its state, reduce gradients in the place of our collectives.

        `reduce_by(unit, flat, state, hook, packed)` returns what it reduces `packed`, 1-D `[layout.numel]`, to.
        `compresses`: the hook gets gradients in the dtype of the computation.
        """
        self.comm_hook, self.reduce_by, self._hook_compresses = comm_hook, reduce_by, compresses
        self.update_dtypes()
        self._choose_delivery()

    def set_may_update(self, may_update: bool) -> None:
        """Choose whether graphs traced from now on let the optimizer update the unit in backward."""
        self.may_update = may_update and self.is_sharded
        self._choose_delivery()

    def set_options(self, **changed: Any) -> None:
        """Change some of `options`."""
        before, self.options = (self.divisor, self.options.reduce_groups), replace(self.options, **changed)
        self._choose_delivery()
        if (self.divisor, self.options.reduce_groups) != before:
            self.update_dtypes()  # of graphs, which divide and reduce too

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Choose whether unsharded parameters are freed between forward and backward."""
        self.reshard_after_forward = reshard_after_forward and self.is_sharded
        self.update_dtypes()

    def _choose_delivery(self) -> None:
        same_bits = self.settings.same_bits
        changes = self.options.changes_reduce or (same_bits and self.ranks.replicas is not None)
        if not self._syncs or self.comm_hook is not None or changes:
            self.delivery = GradientDelivery.DEFER
        elif self.accumulates or same_bits:
            self.delivery = GradientDelivery.REDUCE_WITH_ACCUMULATED
        else:
            self.delivery = GradientDelivery.REDUCE_AND_UPDATE if self.may_update else GradientDelivery.REDUCE

    # --- description --------------------------------------------------------------------------------------------------

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return self.group.size * (1 if self.replicas is None else self.replicas.size)

    @property
    def divisor(self) -> float | None:
        """What the sum of gradients over all ranks is divided by; None: their mean, as the backend computes it."""
        is_given = self.options.only_sums or self.options.divide_factor is not None
        return float(self.options.divide_factor or self.data_parallel_size) if is_given else None

    @property
    def only_trains(self) -> bool:
        """Whether all parameters train."""
        return all(flat.trains and not flat.frozen for flat in self.flats)

    @property
    def trains(self) -> bool:
        """Whether any parameter trains."""
        return any(flat.trains for flat in self.flats)

    @property
    def reshard_after_backward(self) -> bool:
        """Whether a backward pass that ends now frees the unsharded parameters (E-STRAT-5)."""
        stays_under_no_sync = self.reshard_after_forward is False and not self.syncs
        return not self.is_sharded or (self.options.reshard_after_backward and not stays_under_no_sync)

    @property
    def names(self) -> list[str]:
        """For each parameter its name, for errors: see `rename`."""
        return [name for flat in self.flats for name in flat.names]

    @property
    def specs(self) -> list[ShardSpec]:
        """For each parameter how it is sharded."""
        return [spec for flat in self.flats for spec in flat.specs]

    @property
    def records(self) -> list[ShardRecord | None]:
        """For each parameter the part that this rank stores."""
        return [record for flat in self.flats for record in flat.records]

    def gather(self, local: Tensor) -> Tensor:
        """Gather `local`, 1-D `[shard_numel]`, to 1-D `[layout.numel]`; itself if each rank stores all of it."""
        return all_gather_flat(local.to(self.device), self.stages) if self.is_sharded else local

    def compute_dtype(self, flat: FlatParam, full_precision: bool = False, given: Any = None) -> torch.dtype:
        """The dtype of unsharded parameters, or one that is given; with `full_precision`, that of the shard (E-MP-2).
        Quantized ones (integers and one-byte dtypes) and inner tensors of subclasses are never cast: their values mean
        something only together with what the module stores beside them.
        """
        stored = flat.shard.dtype
        is_quantized = not stored.is_floating_point or stored.itemsize == 1
        never_cast = full_precision or is_quantized or flat.is_inner
        return stored if never_cast else given or self.settings.precision.param_dtype or stored

    def reduce_dtype(self, flat: FlatParam) -> torch.dtype:
        """The dtype in which gradients are reduced (E-MP-2)."""
        return self.settings.precision.reduce_dtype or self.compute_dtype(flat)

    def sent_dtype(self, flat: FlatParam, full_precision: bool = False) -> torch.dtype:
        """The dtype in which gradients are packed: that of the reduce, unless a hook compresses them itself."""
        if full_precision:
            return flat.shard.dtype
        return self.compute_dtype(flat) if self._hook_compresses else self.reduce_dtype(flat)

    def in_flat(self, index: int) -> tuple[FlatParam, int]:
        """The flat parameter that holds parameter `index` of the unit, and its index there."""
        return next((flat, some.index(index)) for flat, some in self.by_flat(range(len(self.params))) if index in some)

    def by_flat(self, values: Sequence[T]) -> Iterator[tuple[FlatParam, Sequence[T]]]:
        """Cut a sequence of one value per parameter into one sequence per flat parameter."""
        start = 0
        for flat in self.flats:
            yield flat, values[start : start + len(flat.params)]
            start += len(flat.params)

    @property
    def traced_constants(self) -> list[str]:
        """The constants in a graph of the unit's forward: units with equal ones can share a graph."""
        distributions = [f"{p.mesh} {p.placements} {p.shape}" for p in self.tensor_parallel if p is not None]
        return [spec for spec, _ in self._traced] + distributions

    # --- parameters ---------------------------------------------------------------------------------------------------

    def traced_unshard(self, full_precision: bool = False) -> list[Tensor]:
        """Record the all-gather of all flat parameters; return the unsharded parameters, differentiable."""
        params: list[Tensor] = []
        constants = self._traced_in_full_precision if full_precision else self._traced
        for flat, (spec, layout) in zip(self.flats, constants, strict=True):
            if flat.autograd_shard is None:
                raise AssertionError(f"forward needs sharded parameters, and {self} shows full ones: leave that")
            flat_param_id = flat.flat_param_id if self.delivery is not GradientDelivery.REDUCE else None
            updates = self.delivery is GradientDelivery.REDUCE_AND_UPDATE
            deferred = flat.deferred if self.delivery is GradientDelivery.DEFER or updates else None
            spec = spec + OF_ROOT if self.of_root else spec
            spec = spec + UPDATES if updates else spec
            full = UNSHARD(flat.autograd_shard, flat_param_id, deferred, spec)
            views: list[Tensor] = list(VIEWS(full, layout, flat.frozen))  # Dynamo assigns none in the operator's
            for index in flat.frozen:
                views[index] = views[index].detach()
            params += views
        while_tracing(check_finished_graph)
        return self.distributed(params, full_precision)

    def split_flats(self, unsharded_flats: Sequence[Tensor]) -> list[Tensor]:
        """Split unsharded flat parameters; traced, a marker lets the passes pack their gradients."""
        params: list[Tensor] = []
        for flat, full, (spec, layout) in zip(self.flats, unsharded_flats, self._gathered, strict=True):
            marked = UNSHARD(full, None, None, spec) if torch.compiler.is_compiling() else full
            views: list[Tensor] = list(VIEWS(marked, layout, flat.frozen))
            for index in flat.frozen:
                views[index] = views[index].detach()
            params += views
        while_tracing(check_finished_graph)
        return self.distributed(params)

    def distributed(self, params: list[Tensor], full_precision: bool = False) -> list[Tensor]:
        """Unsharded parameters as module code finds them: those that were DTensors are DTensors."""
        if not self.tensor_parallel:  # at every forward, and Dynamo guards on what is read
            return params
        each = zip(params, self.tensor_parallel, self._reduce_dtypes, strict=True)
        return [p if to is None else to.distribute(p, p.dtype if full_precision else dtype) for p, to, dtype in each]

    def version_counters(self) -> VersionCounters:
        """The current version counters of the parameters."""
        shards = [count for flat in self.flats for count in (flat.shard._version, flat.bindings)]
        with without_torch_function():  # which each of them would be asked for
            return VersionCounters(list(map(_VERSION, self.params)), shards)

    def is_current(self) -> bool:
        """Whether modules hold the unit's parameters and these lie in its shards."""
        return self.locations.are_unchanged() and all(flat.is_current() for flat in self.flats)

    def replace(self, params: dict[int, nn.Parameter]) -> None:
        """Replace parameter objects, by index."""
        for index, param in params.items():
            del vars(self.params[index])["_fsdp_unit"]
            self.params[index] = param
        for flat, of_flat in self.by_flat(self.params):
            flat.params = list(of_flat)
        self.locations.record()
        self.link_params()

    def rename(self, names: Mapping[nn.Parameter, str]) -> None:
        """Call the parameters in errors as `names` does, which has those of a module around the unit."""
        for flat in self.flats:
            flat.rename(names)
        self.path = self.flats[0].path

    def update_dtypes(self) -> None:
        """Update what follows from the dtypes of shards and gradients, `reshard_after_forward` and `divisor`."""
        self._traced = [self._spec(flat, full_precision=False) for flat in self.flats]
        unsharded = [replace(flat.layout, world_size=1) for flat in self.flats]  # nothing is left to gather
        reshards, is_part = self.reshard_after_forward is not False, len(unsharded) > 1
        specs = [UnshardSpec(layout, (), reshards, is_part=is_part) for layout in unsharded]
        self._gathered = [(spec.text, spec.layout.text) for spec in specs]
        self._traced_in_full_precision = [self._spec(flat, full_precision=True) for flat in self.flats]
        self._reduce_dtypes = [self.reduce_dtype(flat) for flat in self.flats for _ in flat.params]
        if self.settings.precision.keep_low_precision_grads:
            for flat in self.flats:
                flat.reduction.grad_dtype = self.reduce_dtype(flat)

    def link_params(self) -> None:
        """Give every parameter the number of its unit, and its index there."""
        number = next(_numbers)
        _units[number] = self
        for index, param in enumerate(self.params):
            vars(param)["_fsdp_unit"] = (number, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        """A unit with parameters (copied already with their modules) and shards of its own, in the same groups.
        It is idle and synchronizes gradients: nothing would ever end a no_sync for it.
        """
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.params = [copy.deepcopy(param, memo) for param in self.params]
        copied.flats = tuple(flat.copy_with(list(params)) for flat, params in self.by_flat(copied.params))
        copied.options = replace(self.options, prefetch_in_forward=None, prefetch_in_backward=None)
        copied.reduces_in_flight = memo.setdefault(id(self.reduces_in_flight), ReduceQueue())
        copied.become_idle()
        copied.syncs = True
        copied.locations = copy.deepcopy(self.locations, memo)
        copied.locations.record()
        copied.link_params()
        return copied

    def __repr__(self) -> str:
        sizes = " + ".join(f"{flat.layout.numel} elements of {flat.shard.dtype}" for flat in self.flats)
        padding = sum(flat.layout.padding_numel for flat in self.flats)  # E-FLAT-20
        sizes += f" ({padding} of them padding)" if padding else ""
        return f"Unit({len(self.params)} parameters, {sizes}, rank {self.rank} of {self.flats[0].layout.world_size})"


# Numbers, not references: a parameter may be pickled and copied with its attributes.
_numbers = itertools.count()  # never used again
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


IGNORED = "_fsdp_ignored"
"""An attribute of parameters that the user named in `ignored_params`."""


def unit_of(param: nn.Parameter) -> tuple[Unit, int] | None:
    """The unit that manages `param` and the parameter's index there, or None."""
    number, index = getattr(param, "_fsdp_unit", (-1, 0))
    unit = _units.get(number)
    if unit is None or index >= len(unit.params) or unit.params[index] is not param:  # a copy, maybe another process's
        return None
    return unit, index


def check_idle(units: Iterable[Unit], what: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` if a unit is not idle or a backward pass is running (E-STATE-3, E-STATE-4)."""
    for unit in units:
        if unit.phase is not Phase.SHARDED:
            raise error(f"{what} needs idle units, and {unit} is {unit.describe_phase()}: call it between steps")
    if running_backward() is not None:
        raise error(f"{what} cannot run within a backward pass: call it between steps")
