"""A unit: parameters that are gathered together, in one flat parameter for each kind of them.

           handle (of each flat parameter)
                |
        unshard (once per forward)          backward: pack the gradients and reduce them
           /        \\
      full view   full view ...             what module code finds under `self.weight`

Parameters of one dtype, device and `requires_grad` form a flat parameter: frozen parts are gathered and never reduced.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, StateDictSettings

from fsdp_compile.core._torch import current_backward
from fsdp_compile.core.environment import Switches
from fsdp_compile.core.flat_param import FlatParam, NamedParams, by_kind
from fsdp_compile.core.layout import ShardRecord
from fsdp_compile.core.locations import ParameterLocations
from fsdp_compile.core.ops import UNSHARD, VIEWS
from fsdp_compile.core.unshard_spec import NamedGroup, UnshardSpec, shard_index

T = TypeVar("T")
GradientDelivery = Literal["reduce", "reduce with kept", "hand over"]


class VersionCounters(NamedTuple):
    """When the values of a unit's parameters were last changed: equal stamps, equal values.

    All ranks' stamps change together, also those of ranks that store nothing of what was changed.
    """

    params: list[int]  # version counters of the parameters
    shards: list[int]  # for each flat parameter, that of its shard and how often it was tied to its parameters


class Unit:
    """Parameters that are gathered together, reduced together and freed together.

    Args:
        params: `(name, parameter)` pairs in full shape. Each parameter keeps its identity.
        group: the process group that the unit is sharded over; for NO_SHARD, that it averages gradients over.
        shards: into how many parts flat parameters are split: the size of `group`, or 1 for NO_SHARD.
        reshard_after_forward: whether gathered buffers are freed between forward and backward.
        replicas: hybrid sharding: the ranks that store the same shard; gradients are averaged over them too.
        halves: peers and neighbours in `group`, through which gathers go (unshard_spec.py): backward uses the second.
        may_stay: whether a compiled graph may keep gathered buffers although `reshard_after_forward`.
        precision: dtypes of computation and of reduction; None: that of the parameters.
        offload: whether shards and gradients are stored on the CPU.
        device: where the unit computes; None: where its parameters are.

    Attributes:
        stages: what gathers go through.
        flats: the flat parameters; parameters are numbered through all of them, in this order.
        unsharded_params: the full views while a forward or backward of this unit runs, else None.
        unsharded_flats: instead, the unsharded flat parameters, while a forward that was compiled by itself runs.
        views_backward: the number of the backward pass that set `views` or `fulls`; -1: a forward did.
        awaiting_backward: the eager forwards of this unit whose backward is still to come.
        unsharded: the forward that `FSDPModule.unshard` gathered for, until a forward takes it, or None.
        summoned: the full parameters while they stand in the place of the sharded ones (eager/summon.py), or None.
        locations: which modules hold the parameters.
        may_keep: whether a backward pass of what was gathered last may leave it filled; equal on all ranks.
        kept_unsharded: what backward left filled for the next forward (eager/unsharded.py), or None.
        accumulates: whether no_sync was ever in force.
        delivery: what a graph traced now does in backward with packed gradients: reduce them; reduce them with what is
            kept under no_sync; or hand them to the eager runtime. One plain attribute, which Dynamo guards on.
        switches: what the environment asked for when the unit was made.
        state_settings: the kind of state dicts (state_dict/kinds.py), or None.
        shard_specs: what state dicts (state_dict/sharded_value.py) have computed of each parameter's sharding. Like
            `mesh` it goes by the kind of device: a model may move, and a copy of it may move elsewhere.
    """

    def __init__(
        self,
        params: NamedParams,
        group: dist.ProcessGroup,
        shards: int,
        reshard_after_forward: bool,
        *,
        replicas: dist.ProcessGroup | None = None,
        halves: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        may_stay: bool = False,
        precision: MixedPrecision | None = None,
        offload: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.group, self.replicas = group, replicas
        self.group_size, self.group_name = group.size(), group.group_name
        self.precision = precision or MixedPrecision()
        self.rank = dist.get_rank(group) if shards > 1 else 0
        self.stages = tuple(map(NamedGroup.of, halves or (group,)))
        self.device = device or params[0][1].device
        self.offload = offload
        self.reshard_after_forward = reshard_after_forward and shards > 1
        self.may_stay = may_stay
        stored = torch.device("cpu") if offload else self.device
        pin = offload and self.device.type != "cpu"  # copies from and to other devices run beside the host (E-OFF-3)
        index = shard_index((each.rank(), each.size()) for each in halves or (group,)) if shards > 1 else 0
        self.flats = tuple(FlatParam(kind, shards, index, stored, pin) for kind in by_kind(params))
        self.params = [param for flat in self.flats for param in flat.params]
        self.names = [name for flat in self.flats for name in flat.layout.names]
        self.unsharded_params: list[Tensor] | None = None
        self.unsharded_flats: list[Tensor] | None = None
        self.views_backward = -1
        self.awaiting_backward: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook_compresses = False
        self.may_keep = False
        self.kept_unsharded: Any = None  # eager.full_buffer.KeptUnsharded
        self._comm_hook: tuple[Any, Callable[..., Any]] | None = None
        self.accumulates, self.syncs = False, True
        self.switches = Switches.from_environment()
        self.unsharded: Any = None  # eager.gathered.UnshardedUnit
        self.summoned: Any = None  # eager.summon.Summoned
        self.state_settings: StateDictSettings | None = None
        self.shard_specs: dict[tuple[int, bool, str], object] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        self.locations = ParameterLocations(len(self.params))
        self.note_dtypes()
        self.mark()

    def _spec(self, flat: FlatParam, compute: torch.dtype, reduce: torch.dtype) -> tuple[str, str]:
        """The constants of a traced forward, one for `unshard` and one for `views`."""
        spec = UnshardSpec(
            flat.layout,
            self.stages,
            reshard_after_forward=None if self.may_stay and self.reshard_after_forward else self.reshard_after_forward,
            replicas=None if self.replicas is None else NamedGroup.of(self.replicas),
            compute_dtype=compute if compute != flat.shard.dtype else None,
            reduce_dtype=reduce if reduce != compute else None,
        )
        return spec.text, flat.layout.text

    @property
    def syncs(self) -> bool:
        """Whether backward reduces gradients."""
        return self._syncs

    @syncs.setter
    def syncs(self, syncs: bool) -> None:
        self._syncs = syncs
        self.accumulates |= not syncs
        self._choose_delivery()

    @property
    def comm_hook(self) -> tuple[Any, Callable[..., Any]] | None:
        """The state and the function that reduce gradients instead of the default, or None."""
        return self._comm_hook

    def set_comm_hook(self, state: Any, hook: Callable[..., Any], compresses: bool) -> None:
        """Let `hook` reduce gradients; `compresses`: it gets them in the dtype of the computation."""
        self._comm_hook, self._hook_compresses = (state, hook), compresses
        self.note_dtypes()
        self._choose_delivery()

    def _choose_delivery(self) -> None:
        if not self._syncs or self._comm_hook is not None:
            self.delivery: GradientDelivery = "hand over"
        else:
            self.delivery = "reduce with kept" if self.accumulates else "reduce"

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return self.group_size * (1 if self.replicas is None else self.replicas.size())

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different parts of the parameters; False under NO_SHARD."""
        return self.flats[0].layout.world_size > 1

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of `group`, as a 1-D mesh of the devices that the unit computes on now."""
        kind = self.device.type
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.group, kind)
        return self._meshes[kind]

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters train and some do not."""
        return any(not flat.trains or flat.frozen for flat in self.flats) and self.trains

    @property
    def trains(self) -> bool:
        """Whether any parameter trains."""
        return any(flat.trains for flat in self.flats)

    @property
    def stays_unsharded(self) -> bool:
        """Whether a backward pass that ends now leaves the full parameters gathered (E-STRAT-5)."""
        return self.is_sharded and not self.reshard_after_forward and not self.syncs

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """For each parameter its full shape."""
        return [shape for flat in self.flats for shape in flat.layout.shapes]

    @property
    def records(self) -> list[ShardRecord | None]:
        """For each parameter the part that this rank stores."""
        return [record for flat in self.flats for record in flat.records]

    def compute_dtype(self, flat: FlatParam) -> torch.dtype:
        """The dtype of full views in forward and backward (E-MP-2)."""
        return self.precision.param_dtype or flat.shard.dtype

    def reduce_dtype(self, flat: FlatParam) -> torch.dtype:
        """The dtype in which gradients are reduced (E-MP-2)."""
        return self.precision.reduce_dtype or self.compute_dtype(flat)

    def sent_dtype(self, flat: FlatParam) -> torch.dtype:
        """The dtype in which gradients are packed: that of the reduce, but a compressing hook gets them as they are."""
        return self.compute_dtype(flat) if self._hook_compresses else self.reduce_dtype(flat)

    def flat_of(self, index: int) -> FlatParam:
        """The flat parameter that the unit's parameter `index` lies in."""
        return self.in_flat(index)[0]

    def in_flat(self, index: int) -> tuple[FlatParam, int]:
        """The flat parameter that the unit's parameter `index` lies in, and its index there."""
        at = index
        for flat in self.flats:
            if at < len(flat.params):
                return flat, at
            at -= len(flat.params)
        raise IndexError(f"{self}: expected the index of one of {len(self.params)} parameters, found {index}")

    def by_flat(self, values: Sequence[T]) -> Iterator[tuple[FlatParam, Sequence[T]]]:
        """Cut a sequence of one value per parameter into one sequence per flat parameter."""
        start = 0
        for flat in self.flats:
            yield flat, values[start : start + len(flat.params)]
            start += len(flat.params)

    def traced_views(self, full_precision: bool = False) -> list[Tensor]:
        """Record the gather of all flat parameters; one differentiable full view per parameter."""
        views: list[Tensor] = []
        constants = self._traced_in_full if full_precision else self._traced
        for flat, (spec, layout) in zip(self.flats, constants, strict=True):
            if flat.autograd_shard is None:
                raise AssertionError("forward: expected sharded parameters, found full ones; leave summon_full_params")
            flat_param_id = flat.flat_param_id if self.delivery != "reduce" else None
            deferred = flat.deferred if self.delivery == "hand over" else None
            found: list[Tensor] = VIEWS(UNSHARD(flat.autograd_shard, flat_param_id, deferred, spec), layout)
            views += [view.detach() if index in flat.frozen else view for index, view in enumerate(found)]
        return views

    def views_of(self, fulls: Sequence[Tensor]) -> list[Tensor]:
        """The views cut from flat parameters in full; traced, a marker lets the passes pack their gradients."""
        views: list[Tensor] = []
        for flat, full, (spec, layout) in zip(self.flats, fulls, self._gathered, strict=True):
            marked = UNSHARD(full, None, None, spec) if torch.compiler.is_compiling() else full
            found: list[Tensor] = VIEWS(marked, layout)
            views += [view.detach() if index in flat.frozen else view for index, view in enumerate(found)]
        return views

    def version_counters(self) -> VersionCounters:
        """To compare with a later one: whether the parameters have changed in between."""
        shards = [count for flat in self.flats for count in (flat.shard._version, flat.bindings)]
        return VersionCounters([param._version for param in self.params], shards)

    def is_current(self) -> bool:
        """Whether modules hold the parameters that the unit knows, and these lie where it put them."""
        return self.locations.hold_what_is_known() and all(flat.is_current() for flat in self.flats)

    def replace(self, params: dict[int, nn.Parameter]) -> None:
        """Let other parameter objects, by index, take the places of those that the unit knows."""
        for index, param in params.items():
            del vars(self.params[index])["_fsdp_unit"]
            self.params[index] = param
        for flat, known in self.by_flat(self.params):
            flat.params = list(known)
        self.locations.note()
        self.mark()

    def note_dtypes(self) -> None:
        """Make anew what follows from the dtype of the shards."""
        self._traced = [self._spec(flat, self.compute_dtype(flat), self.sent_dtype(flat)) for flat in self.flats]
        unsharded = [replace(flat.layout, world_size=1) for flat in self.flats]  # nothing is left to gather
        specs = [UnshardSpec(layout, (), self.reshard_after_forward) for layout in unsharded]
        self._gathered = [(spec.text, spec.layout.text) for spec in specs]
        self._traced_in_full = [self._spec(flat, flat.shard.dtype, flat.shard.dtype) for flat in self.flats]
        if self.precision.keep_low_precision_grads:
            for flat in self.flats:
                flat.reduction.grad_dtype = self.reduce_dtype(flat)

    def mark(self) -> None:
        """Let every parameter know its unit."""
        for index, param in enumerate(self.params):
            vars(param)["_fsdp_unit"] = (weakref.ref(self), index)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        """A unit with parameters (copied already with their modules), shards and joins of its own; same groups.

        It synchronises gradients, whatever this one does now.
        """
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.params = [copy.deepcopy(param, memo) for param in self.params]
        twin.unsharded_flats = None
        twin.unsharded_params, twin.kept_unsharded, twin.awaiting_backward = None, None, weakref.WeakSet()
        twin.unsharded, twin.summoned = None, None
        twin.flats = tuple(flat.copy_with(list(params)) for flat, params in self.by_flat(twin.params))
        twin.syncs = True  # nothing would ever end, for the twin, the no_sync that it was made in
        twin.locations = copy.deepcopy(self.locations, memo)
        twin.locations.note()
        twin.mark()
        return twin

    def __repr__(self) -> str:
        sizes = " + ".join(f"{flat.layout.numel} elements of {flat.shard.dtype}" for flat in self.flats)
        padding = sum(flat.layout.padding_numel for flat in self.flats)  # E-FLAT-20
        sizes += f" ({padding} of them padding)" if padding else ""
        return f"Unit({len(self.params)} parameters, {sizes}, rank {self.rank} of {self.flats[0].layout.world_size})"


def unit_of(param: nn.Parameter) -> tuple[Unit, int] | None:
    """The unit that manages `param` and the parameter's index there, or None."""
    mark = getattr(param, "_fsdp_unit", None)
    unit = mark[0]() if mark else None
    return (unit, mark[1]) if mark and unit else None


def is_open(unit: Unit) -> bool:
    """Whether the unit's views are good to use: set by a forward under way, or by the backward pass now running.

    Views left behind by a backward pass that failed belong to none of these, and are gathered anew.
    """
    found = unit.unsharded_params is not None or unit.unsharded_flats is not None
    return found and unit.views_backward in (-1, current_backward())


def doing(unit: Unit) -> str:
    """What the unit is doing, for messages."""
    if unit.summoned is not None:
        return f"inside {unit.summoned.by}"
    return "in its forward or backward" if is_open(unit) else "idle"


def check_idle(units: Iterable[Unit], what: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` if a unit is open or summoned, or a backward pass is running (E-STATE-3, E-STATE-4)."""
    for unit in units:
        if unit.summoned is not None or is_open(unit):
            raise error(f"{what}: expected idle units, found {unit} {doing(unit)}; call {what} between steps")
    if current_backward() != -1:
        raise error(f"{what}: expected to be called between steps, found a backward pass under way")


def check_no_forward_runs(unit: Unit) -> None:
    """Raise ValueError if a forward of the unit is under way, whose views a backward would close (E-BWD-3)."""
    if is_open(unit) and unit.views_backward == -1:
        raise ValueError(
            f"backward: expected {unit} to be idle, found it in a forward, within which an earlier forward of it was "
            f"run backward; end the forward first"
        )


def check_not_summoned(unit: Unit, what: str) -> None:
    """Raise AssertionError if the unit's parameters are summoned: `what` cannot run then (E-FWD-12)."""
    if unit.summoned is not None:
        raise AssertionError(f"{what}: expected sharded parameters, found {unit} {doing(unit)}; leave that first")
