"""The `set_*` methods of a sharded module: FSDP2's names and meanings, for eager and compiled steps.

Most choose something of the module's own units; those with `recurse` also of the units of sharded modules below. What
changes how gradients are reduced holds in compiled steps too: there the eager runtime reduces what the graph packs.
What is about the order of all-gathers holds for eager steps; a compiled step follows its plan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm.groups import separate_group
from fsdp_compile.core.ops import NamedGroup
from fsdp_compile.core.sharding import ModuleSharding, units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager import Runtime
from fsdp_compile.eager.reduce import set_sync


class ModuleOptions(nn.Module):
    """What can be chosen for a sharded module between steps."""

    _fsdp: ModuleSharding
    _fsdp_runtime: Runtime

    # --- gradients ----------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward passes from now on reduce the gradients of this module's units.

        Without synchronization each rank accumulates its own unsharded gradients; the next reduce takes their sum.
        In a compiled model this holds for the backward passes of forwards that run from now on. Under hybrid sharding
        it chooses the same for the all-reduce over replicas.

        Args:
            requires_gradient_sync: whether to reduce.
            recurse: whether this is for the units of sharded modules below as well.
        """
        for unit in _units(self, recurse):
            set_sync(unit, requires_gradient_sync)
            if not unit.options.all_reduces and requires_gradient_sync:
                unit.set_options(all_reduces=True)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether reduced gradients are averaged over replicas under hybrid sharding.

        Without, each replica sums up its own reduced gradients, sharded, and leaves `.grad` as it is; the next backward
        pass with all-reduces averages the sum. Units that are not sharded, and only averaged over replicas, accumulate
        as under `set_requires_gradient_sync(False)`; it changes nothing for those without replicas.
        """
        for unit in _units(self, recurse):
            if unit.replicas is not None:
                deferred = unit.options.has_deferred or not requires_all_reduce
                unit.set_options(all_reduces=requires_all_reduce, has_deferred=deferred)
            elif not unit.is_sharded:
                set_sync(unit, requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by `factor`, above 0, instead of by the number of ranks."""
        if not isinstance(factor, int | float) or not factor > 0:
            raise ValueError(f"factor: expected a number above 0, found {factor!r}")
        for unit in self._fsdp.units:
            unit.set_options(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only add, and a kernel divides, where the backend could compute the mean."""
        for unit in self._fsdp.units:
            unit.set_options(only_sums=enable)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: Any = None) -> None:
        """Call `hook(gradient)` with each reduced gradient of this module, 1-D, which it may change in place.

        Under hybrid sharding it gets the mean over replicas. It is called in the stream of reduces.

        Args:
            hook: may run collectives of its own.
            stream: a stream to call it in instead; not under hybrid sharding.

        Raises:
            ValueError: a stream was given for a unit that has replicas, or `hook` is not callable.
        """
        if not callable(hook):
            raise ValueError(f"hook: expected a callable, found {type(hook).__name__}")
        if stream is not None and any(unit.replicas is not None for unit in self._fsdp.units):
            raise ValueError("stream: expected None under hybrid sharding, whose all-reduce has a stream, found one")
        for unit in self._fsdp.units:
            unit.set_options(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether gradients are reduced in a process group of their own, beside all-gathers.

        All ranks of the mesh must call this. Models that shard over the same ranks share that group.
        """
        for unit in _units(self, recurse):
            groups = None
            if enable and unit.is_sharded:
                groups = tuple(NamedGroup.of(separate_group(stage.name)) for stage in unit.stages)
            unit.set_options(reduce_groups=groups)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Choose how many reduces of an eager backward, and so their inputs in memory, may be under way; 2 at first.

        Raises:
            TypeError: not an integer.
            ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, found {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, found {max_input_buffers}")
        for unit in _units(self, recurse):
            unit.set_options(reduces_in_flight=max_input_buffers)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted for FSDP2's sake: zeros are reduced for parameters without a gradient, whatever is chosen."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for FSDP2's sake: every backward pass waits for its own reduces, and keeps nothing for the next."""

    # --- unsharded parameters -----------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether unsharded parameters are freed between forward and backward. ValueError if not a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}")
        for unit in _units(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether a backward pass in eager mode frees unsharded parameters.

        If not, the next forward reads them, unless a parameter was changed on some rank; ranks ask each other.
        """
        for unit in _units(self, recurse):
            unit.set_options(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted for FSDP2's sake: what backward does not read is not gathered again in a compiled step anyway."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Let an eager forward of this module start the all-gathers of `modules`, sharded, once its own is waited for.

        Raises:
            ValueError: one of `modules` is not sharded.
        """
        chosen = _units_of(modules)
        for unit in self._fsdp.units:
            unit.set_options(prefetch_in_forward=chosen)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Let an eager backward of this module start the all-gathers of `modules`, instead of those of the module whose
        forward ended before.

        Raises:
            ValueError: one of `modules` is not sharded.
        """
        chosen = _units_of(modules)
        for unit in self._fsdp.units:
            unit.set_options(prefetch_in_backward=chosen)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the all-gathers of the next eager forward of the root wait for `event`, recorded behind the optimizer's
        step, and not for what the current stream was given after it. It holds once."""
        self._fsdp_runtime.post_optim_event = event

    # --- what other mechanisms do here --------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises NotImplementedError: compiled and eager steps share one set of collectives."""
        raise NotImplementedError(
            "set_custom_all_gather: expected the package's own all-gathers, which are operators of compiled graphs, "
            "found others; pass a process group with another backend to fully_shard instead"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises NotImplementedError: `register_comm_hook` is the way to reduce gradients by other means."""
        raise NotImplementedError(
            "set_custom_reduce_scatter: expected a function that reduces gradients, found an object that allocates "
            "their memory as well; use register_comm_hook(state, hook) on the root, which works eager and compiled"
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Raises NotImplementedError if `enable`: memory comes from the caching allocator, and Inductor plans it."""
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: expected False, found True: collectives read and "
                "write flat parameters where they lie, so that there is no staging buffer to allocate"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raises NotImplementedError, for the same reason."""
        raise NotImplementedError(
            "set_symm_mem_for_comm: expected memory of the caching allocator, found symmetric memory: collectives read "
            "and write flat parameters where they lie, so that there is no staging buffer to allocate"
        )


def _units(module: Any, recurse: bool) -> Sequence[Unit]:
    return units_gathered_below(module) if recurse else module._fsdp.units


def _units_of(modules: Sequence[Any]) -> tuple[Unit, ...]:
    for module in modules:
        if "_fsdp" not in vars(module):
            raise ValueError(
                f"modules: expected sharded modules, found {type(module).__name__}; call fully_shard on it"
            )
    return tuple(unit for module in modules for unit in module._fsdp.units)
