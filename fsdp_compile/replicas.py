"""Hybrid sharding with replicas that come and go: training goes on when one is lost, and takes in new ones.

    replicas = Replicas(store, name="a", shard=rank, shards=2)      # this replica's ranks find each other
    model = fully_shard(Net(), mesh=replicas.mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    optimizer = torch.optim.AdamW(model.parameters())
    replicas.join({"model": model, "optimizer": optimizer})         # copies their state from a replica that trains
    while replicas.step < steps:
        loss = replicas.run(lambda: backward(model, batch(replicas.step, replicas.index, replicas.count)))
        optimizer.step()
        optimizer.zero_grad()

`run` returns when all ranks of all replicas have their gradients. If a rank fails before that, the others give up the
step, form new process groups without its replica, and run the step again.
"""

# Note [A step is taken by all ranks or by none]
# Until the optimizer runs, a step can be undone: it has changed gradients, buffers and random generators alone. So
# ranks agree between backward and `optimizer.step()`, through a store that lives in no rank (comm/membership.py). A
# rank that fails before it has voted makes all others give the step up; once all have voted, all of them update, and a
# rank that dies then is missed in the next step. All replicas that are left have therefore taken the same steps, and
# hold the same values. torchft and the elastic agent of torch.distributed do the same: a store decides who takes part,
# and process groups are made anew.
#
# Process groups are made anew as a whole: which collectives of the old ones have completed, and on which ranks, cannot
# be known. Nothing that they wrote is read again. A rank that waits in one of them is woken when the rank at the other
# end of a connection leaves, or by the timeout.

import gc
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.optim import Optimizer

from fsdp_compile.comm.collectives import broadcast, broadcast_object, is_first
from fsdp_compile.comm.groups import Groups, check_ranks_of_tree, divide, place, separate_group
from fsdp_compile.comm.hops import NamedGroup
from fsdp_compile.comm.membership import (
    Generation,
    Membership,
    ReplicaLostError,
    mark_replica_lost,
    store_of_generation,
)
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.state_dict._torch import tree_flatten_with_path, tree_unflatten
from fsdp_compile.state_dict.sharded_value import ShardedValue

__all__ = ["ReplicaLostError", "Replicas", "mark_replica_lost"]

T = TypeVar("T")


class Replicas:
    """This rank's place among replicas that train one model together.

    Args:
        store: reached by all ranks of all replicas, and in a process that outlives them, such as the launcher's
            `torch.distributed.TCPStore(..., is_master=True)`.
        name: of this rank's replica; all of its ranks pass the same. A replica that is started again takes a new one.
        shard: which rank of the replica this is, from 0.
        shards: number of ranks of a replica; equal for all replicas.
        device_type: of the mesh, such as "cuda".
        backend: of the process groups; default: that of the devices.
        timeout: seconds after which a collective fails, and a rank that has not answered counts as lost. Choose it
            longer than the first step needs to compile.

    Attributes:
        mesh: 2-D, (replicate, shard): until `join` of this replica alone, then of all that train.
        step: number of steps taken, by all replicas that train.

    Raises:
        RuntimeError: a default process group is initialised already: it could not be replaced.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        name: str,
        shard: int,
        shards: int,
        device_type: str = "cpu",
        backend: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not 0 <= shard < shards:
            raise ValueError(f"shard: expected a number from 0 to {shards - 1}, found {shard}")
        if dist.is_initialized():
            raise RuntimeError(
                "replicas: a default process group exists already; drop init_process_group(...), as groups are made "
                "anew whenever a replica comes or goes"
            )
        self._store, self._membership = store, Membership(store, name, shard, shards, timeout)
        self._name, self._shard, self._shards = name, shard, shards
        self._device_type, self._backend, self._timeout = device_type, backend, timedelta(seconds=timeout)
        self._generation: Generation | None = None
        self._joining: tuple[str, ...] = ()
        self._optimizers: list[Optimizer] = []
        self._others: list[Any] = []
        self._model: nn.Module = nn.Module()
        self._has_state = False
        self.step = 0
        self.mesh = self._init_groups(dist.PrefixStore(f"fsdp_flat/replicas/alone/{name}", store), 0, 1)

    @property
    def count(self) -> int:
        """Number of replicas that train; 1 before `join`. Changes only in `run`."""
        return 1 if self._generation is None else len(self._generation.members)

    @property
    def index(self) -> int:
        """Index of this rank's replica among them. Changes only in `run`."""
        return 0 if self._generation is None else self._generation.names.index(self._name)

    def join(self, state: dict[str, Any], *, step: int = 0, at_least: int = 1, join_timeout: float = 1800.0) -> None:
        """Train together with the other replicas; blocks until they take this one in, between two of their steps.

        Parameters, buffers, the optimizers' state and all other state are then equal to theirs.

        Args:
            state: one model that is sharded over `mesh`, its optimizers, and other objects with `state_dict()` and
                `load_state_dict()`, such as a learning rate scheduler.
            step: number of steps taken already, if `state` comes from a checkpoint.
            at_least: number of replicas with which training begins. Once it has begun, replicas join one by one.
            join_timeout: seconds to wait at most.

        Raises:
            RuntimeError: no replica is left to copy the state from.
            TimeoutError: the time is up.
            ValueError: the model is not sharded over `mesh` alone, or is not the only one; or something in `state` has
                no `state_dict()`.
        """
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        if len(models) != 1:
            raise ValueError(f"state: expected one model, found {len(models)}")
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        _check_model(models[0], self.mesh, optimizers)
        others = {key: value for key, value in state.items() if not isinstance(value, nn.Module | Optimizer)}
        for key, value in others.items():
            if not isinstance(value, Stateful):
                raise ValueError(
                    f"state[{key!r}]: expected an object with state_dict() and load_state_dict(), found a "
                    f"{type(value).__name__}"
                )
        self._model, self._optimizers, self._others, self.step = models[0], optimizers, list(others.values()), step
        self._enter_or_regroup(self._membership.join(at_least, join_timeout))

    def run(self, backward: Callable[[], T]) -> T:
        """Run a step's forward and backward until all ranks of all replicas have done it; then take the step.

        Args:
            backward: computes gradients, which are None before, clips them if wanted, and changes no other state than
                buffers of the model and random generators. It is called again, perhaps with another `count` and
                `index`, if a replica was lost.

        Returns:
            The result of the last call of `backward`.

        Raises:
            ReplicaLostError: a rank of this replica is lost.
            RuntimeError: the step has failed twice, although no replica was lost in between.
            ValueError: a parameter has a gradient already.
        """
        generation = self._generation
        if generation is None:
            raise RuntimeError("run: this replica has not joined the others; call join(...) first")
        if any(param.grad is not None for param in self._model.parameters()):
            raise ValueError(
                "run: a parameter has a gradient already; call optimizer.zero_grad() after optimizer.step(), and "
                "accumulate within one call of run"
            )
        if self._joining:
            generation = self._regroup(generation, self._joining)
        failed_with: tuple[str, ...] = ()
        while True:
            before = _Undo(self._model)
            try:
                result = backward()
            except RuntimeError as error:  # what collectives raise when another rank has gone
                cause: RuntimeError | None = error.with_traceback(None)  # which holds process groups
                decision = self._membership.fail(generation, self.step, f"{type(error).__name__}: {error}")
            except BaseException as error:
                self._membership.fail(generation, self.step, f"{type(error).__name__}: {error}")
                raise
            else:
                cause, decision = None, self._membership.vote(generation, self.step)
            if decision.is_taken:
                self.step += 1
                self._joining = decision.joining
                return result
            if generation.names == failed_with:
                raise RuntimeError(
                    f"step {self.step} has failed twice with replicas {', '.join(failed_with)}: {decision.reason}; "
                    f"look at what that rank printed"
                ) from cause
            failed_with = generation.names
            generation = self._regroup(generation)
            before.undo()

    # --- generations --------------------------------------------------------------------------------------------------

    def _regroup(self, last: Generation, joining: tuple[str, ...] = ()) -> Generation:
        """Continue in the generation after `last`."""
        self._joining = ()
        self._membership.announce(last.generation_id + 1, self.step if self._has_state else None)
        self._leave_groups()
        return self._enter_or_regroup(self._membership.next_generation(last, joining))

    def _enter_or_regroup(self, generation: Generation) -> Generation:
        """Enter `generation`, or the first one after it that all of its ranks can enter."""
        try:
            self._enter_generation(generation)
        except RuntimeError as error:
            if isinstance(error, ReplicaLostError):
                raise
            self._membership.fail(generation, self.step, f"{type(error).__name__}: {error}")
            return self._regroup(generation)
        self._generation, self._has_state = generation, True
        return generation

    def _enter_generation(self, generation: Generation) -> None:
        """Find the other ranks, and give the state to replicas that have none."""
        self._leave_groups()
        index = generation.names.index(self._name)
        self.mesh = self._init_groups(store_of_generation(self._store, generation), index, len(generation.members))
        replicate = self.mesh.get_group(0)
        groups = Groups(self.mesh.get_group(1), replicate)
        for unit in units_gathered_below(self._model):
            _set_groups(unit, groups)
        if any(member.step is None for member in generation.members) and replicate.size() > 1:
            self._copy_state(replicate)

    def _init_groups(self, store: dist.Store, index: int, replicas: int) -> DeviceMesh:
        dist.init_process_group(
            self._backend,
            store=store,
            rank=index * self._shards + self._shard,
            world_size=replicas * self._shards,
            timeout=self._timeout,
        )
        ranks = torch.arange(replicas * self._shards).view(replicas, self._shards)
        mine = ranks[:, self._shard].tolist(), ranks[index].tolist()
        shard, replicate = (
            dist.new_group(each, self._timeout, self._backend, use_local_synchronization=True) for each in mine[::-1]
        )  # init_device_mesh would let collectives in them wait for half an hour
        return DeviceMesh.from_group(
            [replicate, shard], self._device_type, ranks, mesh_dim_names=("replicate", "shard")
        )

    def _leave_groups(self) -> None:
        """Give up all process groups, and what a step in them has left."""
        for runtime in {module._fsdp_runtime for module in self._model.modules() if isinstance(module, FSDPModule)}:
            runtime.abandon(self._model)
        for param in self._model.parameters():
            param.grad = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a connection ends with the last reference to its group, which wakes the rank at the other end

    # --- copying state ------------------------------------------------------------------------------------------------

    # Replicas store the same shards on the ranks of one replica group, so each rank sends what it stores to the ranks
    # that store the same, and nothing is gathered.

    @torch.no_grad()
    def _copy_state(self, group: dist.ProcessGroup) -> None:
        """Make all state equal to that of the first rank of `group`; all of its ranks must call it."""
        model, first = self._model, is_first(group)
        tensors = [flat.shard for unit in units_gathered_below(model) for flat in unit.flats]
        tensors += [param for param in model.parameters() if unit_of(param) is None]
        for tensor in (*tensors, *model.buffers()):
            broadcast(tensor.detach(), group)
        for optimizer in self._optimizers:
            if broadcast_object(bool(optimizer.state), group):
                _copy_optimizer(model, optimizer, group)
        for other in self._others:
            state = broadcast_object(other.state_dict() if first else None, group)
            if not first:
                other.load_state_dict(state)
        self.step = broadcast_object(self.step, group)


def _copy_optimizer(model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    state = get_optimizer_state_dict(model, optimizer)  # of an optimizer that has none it makes some, to be overwritten
    leaves, structure = tree_flatten_with_path(state)
    outline = [
        (str(path), f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in leaves
    ]
    values = [leaf for _, leaf in leaves if not isinstance(leaf, Tensor)]
    their_outline, their_values = broadcast_object((outline, values), group)
    if their_outline != outline:
        here, there = next((a, b) for a, b in zip_longest(outline, their_outline, fillvalue="nothing") if a != b)
        raise RuntimeError(
            f"optimizer: its state differs between replicas: {here} here, {there} on the replica that it is copied "
            f"from; make the model and the optimizer alike on all replicas"
        )
    for _, leaf in leaves:
        if isinstance(leaf, Tensor):
            broadcast(leaf.local if isinstance(leaf, ShardedValue) else leaf, group)
    if not is_first(group):
        remaining = iter(their_values)
        copied = [leaf if isinstance(leaf, Tensor) else next(remaining) for _, leaf in leaves]
        set_optimizer_state_dict(model, optimizer, tree_unflatten(copied, structure))


class _Undo:
    """What a forward changes beside gradients: buffers and random generators."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self.devices = sorted({param.device for param in model.parameters()} - {torch.device("cpu")}, key=str)
        self.random = torch.get_rng_state()
        self.random_of_devices = [torch.get_device_module(device).get_rng_state(device) for device in self.devices]

    def undo(self) -> None:
        """Restore the state that was there before the forward."""
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        torch.set_rng_state(self.random)
        for device, state in zip(self.devices, self.random_of_devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


def _check_model(model: nn.Module, mesh: DeviceMesh, optimizers: Iterable[Optimizer]) -> None:
    """ValueError unless all units are sharded over the second dimension of `mesh`, in a way that can change groups."""
    units = units_gathered_below(model)
    if not units:
        raise ValueError(
            "state: the model is not sharded; call "
            "fully_shard(model, mesh=replicas.mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD) first"
        )
    for unit in units:
        name = unit.names[0]
        if unit.group is not mesh.get_group(1):
            raise ValueError(
                f"parameter {name} is not sharded over dimension 1 of replicas.mesh; pass mesh=replicas.mesh to every "
                f"call of fully_shard"
            )
        if unit.comm_hook is not None or unit.tensor_parallel:
            raise ValueError(
                f"parameter {name}: its unit has a communication hook or tensor parallelism, whose process groups are "
                f"not made anew; train it without replicas that change"
            )
    params = set(model.parameters())
    for optimizer in optimizers:
        if any(param not in params for group in optimizer.param_groups for param in group["params"]):
            raise ValueError("state: an optimizer has parameters that are not the model's; leave these out")


def _set_groups(unit: Unit, groups: Groups) -> None:
    """Let `unit` communicate in `groups`, as it did in the process groups before."""
    if unit.settings.same_bits:
        check_ranks_of_tree(groups)
    keeps = unit.reshard_after_forward is False
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
    if len(unit.stages) == 2:
        groups = divide(groups, unit.stages[1].size)
    placement = place(strategy, groups, unit.settings.same_bits)
    unit.set_groups(placement.group, placement.replicate, placement.stages)
    if unit.options.reduce_groups is not None:
        unit.set_options(reduce_groups=tuple(NamedGroup.of(separate_group(stage.name)) for stage in unit.stages))
