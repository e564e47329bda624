"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.

A module inside a sharded one that was compiled by itself goes both ways: `compiled_forward` gathers and frees in eager,
as for its neighbours, and the graph in between reads whole flat parameters and packs their gradients.

Note on graph breaks: where the code of a module breaks the graph, that module's unit is gathered eagerly, and Dynamo
compiles what it would compile without sharding. For Dynamo cannot leave a frame in the middle of a `try`, so it traces
`sharded_forward` as a whole or not at all; and it keeps out of functions that are disabled. A gather that was traced
alone would be kept until backward, as its views would be outputs of one graph and inputs of another.

What a compiled step needs that is no part of its graph: one look at the parameters before it, outside of Dynamo.

    torch.compile(model), model.compile()   the call of the module itself is not traced: the look happens here
    a function that calls the model         the call is traced with it: nothing is looked at, nor guarded on

Measured on one CPU core, 13 units of 10 parameters: 6 us per unit and step by itself, 8 to 11 us between other work.

What becomes of a sharded module's inputs, and of its buffers under mixed precision.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils._pytree import tree_map_only

from fsdp_compile.core.sharding import ModuleSharding
from fsdp_compile.core.unit import Unit, is_open
from fsdp_compile.eager._torch import allowed_in_regions, current_backward, dynamo_runs, never_trace
from fsdp_compile.eager.runtime import Runtime
from fsdp_compile.eager.unshard import discard_unsharded, drop_kept_unsharded
from fsdp_compile.eager.unsharded import UnshardedUnit, open_for_recomputation
from fsdp_compile.eager.writeback import refresh


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp.units` gathered.

    A unit that is gathered already, by an enclosing module or by the backward pass that recomputes this forward, is
    used as it is. If forward raises, the units are closed and the module stays usable.
    """
    try:  # for Dynamo: see the note
        args, kwargs = prepare_inputs(module, args, kwargs)
        if torch.compiler.is_compiling():
            return _traced(module, forward, args, kwargs)
        if _holds_whole(module):
            return _uncompiled(module, forward, args, kwargs)
        return _gathered(module, partial(forward, module), args, kwargs)
    finally:
        pass


def compiled_forward(module: Any, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `compiled`, which traces the call of `module`, with its units gathered around it; a root gathers inside.

    Where a module around it is traced, its own compilation is left aside.
    """
    if torch.compiler.is_compiling():
        return module._call_impl(*args, **kwargs)
    if module._fsdp.is_root:
        return compiled(*args, **kwargs)
    return _gathered(module, compiled, args, kwargs, whole=True)


def _gathered(module: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any], whole: bool = False) -> Any:
    """`run(*args, **kwargs)` with views of the units' parameters; if `whole`, of their flat parameters instead."""
    try:  # for Dynamo
        if _backward_runs():
            return _recomputed(module, run, args, kwargs, whole)
        return _run(module, run, args, kwargs, whole)
    finally:
        pass


def _run(module: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any], whole: bool) -> Any:
    opened: list[UnshardedUnit] = []
    try:
        _open(module, opened, whole)
        output = run(*args, **kwargs)
    except BaseException:
        _close(module, opened)
        raise
    _end(module, opened, (args, kwargs), output)
    return output


@torch.compiler.disable
def _backward_runs() -> bool:
    return current_backward() != -1


@torch.compiler.disable
def _holds_whole(module: Any) -> bool:
    return any(unit.unsharded_params is None and is_open(unit) for unit in module._fsdp.units)


@torch.compiler.disable
def _open(module: Any, opened: list[UnshardedUnit], whole: bool) -> None:
    root: Runtime = module._fsdp_runtime
    closed = [unit for unit in module._fsdp.units if not is_open(unit)]
    if module._fsdp.is_root:
        root.begin_iteration(module)
    for unit in closed:
        gathered = root.gather(unit, computes_in_full_precision(module))
        gathered.open(whole)  # one by one: if one fails, those before it are closed
        opened.append(gathered)
        root.prefetch_forward(gathered)


@torch.compiler.disable
def _close(module: Any, opened: list[UnshardedUnit], completed: bool = False) -> None:
    try:
        if completed and module._fsdp.is_root:
            module._fsdp_runtime.complete_iteration()
    finally:
        for gathered in opened:
            gathered.drop_views()
        if module._fsdp.is_root:
            module._fsdp_runtime.end_iteration()


@torch.compiler.disable
def _end(module: Any, opened: list[UnshardedUnit], inputs: Any, output: Any) -> None:
    _close(module, opened, completed=True)
    for gathered in opened:
        gathered.end_forward(inputs, output, keep=module._fsdp.is_root)
        module._fsdp_runtime.ended_forward(gathered)


def _recomputed(module: Any, run: Callable[..., Any], args: tuple, kwargs: Any, whole: bool) -> Any:
    """Run the forward again within backward, with the units that have no views to use gathered."""
    closed = [unit for unit in module._fsdp.units if not is_open(unit)]
    full_precision = computes_in_full_precision(module)
    streams_for = module._fsdp_runtime.streams_for
    found = [open_for_recomputation(unit, full_precision, streams_for(unit.device), whole) for unit in closed]
    fresh = [gathered for gathered in found if gathered is not None]
    output = run(*args, **kwargs)
    for gathered in fresh:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
        gathered.end_forward((args, kwargs), output, keep=True)
    return output


def _uncompiled(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What was compiled runs eagerly after all: torch was told so, or gave up."""
    opened = [unit for unit in module._fsdp.units if unit.unsharded_params is None]
    try:
        for unit in opened:
            unit.unsharded_params = unit.views_of(unit.unsharded_flats)
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            unit.unsharded_params = None


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp.units:
        if unit.unsharded_flats is not None:
            allowed_in_regions(_set_views, unit, unit.views_of(unit.unsharded_flats))
            opened.append(unit)
        elif (
            unit.unsharded_params is None or unit.views_backward != -1
        ):  # the latter: left behind by a failed backward pass
            allowed_in_regions(_set_views, unit, unit.traced_views(computes_in_full_precision(module)))
            opened.append(unit)
    try:
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            allowed_in_regions(_set_views, unit, None)


def _set_views(unit: Unit, views: list[Tensor] | None) -> None:
    """In a function of its own: Dynamo refuses side effects in a checkpointed region, but for calls that it is told of.

    This one is undone before the region ends. Around a whole forward the permission would be the user's code's too.
    """
    unit.unsharded_params = views


class Prologue:
    """A module whose compiled forward is preceded by a look at the parameters of all units that it gathers."""

    _fsdp: ModuleSharding  # of a wrapper: that of the module inside
    _compiled_call_impl: Any

    @never_trace
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.__call__`."""
        if not torch.compiler.is_compiling():
            # Written out, not a method: this function is not traced, but Dynamo would compile what it calls.
            gathers_itself = self._compiled_call_impl is not None and (self._fsdp.is_root or "_fsdp" not in vars(self))
            if gathers_itself or dynamo_runs():  # else the eager runtime gathers, which looks too
                _prepare(self._fsdp.units_below)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # a mixin of modules


@torch.compiler.disable
def _prepare(units: tuple[Any, ...]) -> None:
    """Take over replaced data, replaced and thawed parameters; free what was gathered for an eager forward.

    Raises as `refresh` does.
    """
    if current_backward() != -1:  # a forward that is recomputed: what the first one found is in force
        return
    for unit in units:
        if not is_open(unit):
            refresh(unit)
            discard_unsharded(unit)
            drop_kept_unsharded(unit)


def exempt_classes(policy: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    """Classes that auto-wrapping leaves out of mixed precision (E-INIT-6); none if the settings change no dtype."""
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) if policy else ()
    return tuple(policy._module_classes_to_ignore) if policy and any(dtypes) else ()


def computes_in_full_precision(module: Any) -> bool:
    """Whether mixed precision is left aside: in eval mode, with the switch on at `fully_shard` (E-MP-7)."""
    return module._fsdp.full_precision_in_eval and not module.training


def prepare_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Cast and move the tensors among the arguments.

    Floating ones are cast to `param_dtype`, where the settings ask for it (E-MP-13, E-MP-14). At the root, all go to
    the accelerator that it computes on, if it does (E-FWD-2).
    """
    dtype = _input_dtype(module)
    device = module._fsdp.device if module._fsdp.is_root and module._fsdp.device.type != "cpu" else None
    if dtype is None and device is None:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return tree_map_only(Tensor, prepare, (args, kwargs))


def _input_dtype(module: Any) -> torch.dtype | None:
    policy = module._fsdp.precision
    if policy is None or computes_in_full_precision(module):
        return None
    own = policy.cast_forward_inputs and module._fsdp.units
    return policy.param_dtype if own or (policy.cast_root_forward_inputs and module._fsdp.is_root) else None


def buffer_dtypes(module: nn.Module, own: Collection[nn.Module]) -> dict[str, torch.dtype]:
    """The dtypes of the floating buffers that the modules `own`, at or below `module`, have; by name in `module`."""
    return {
        f"{path}.{name}" if path else name: buffer.dtype
        for path, owner in module.named_modules()
        if owner in own
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }


def cast_buffers(module: Any) -> None:
    """Give the module's buffers the dtype that it computes in now: `buffer_dtype`, or their own (E-MP-16, E-MP-17).

    Buffers are found by name, whatever was put in their place since (E-MP-18); one that has two names stays one.
    """
    policy = module._fsdp.precision
    if policy is None or policy.buffer_dtype is None:
        return
    full_precision = computes_in_full_precision(module)
    cast: dict[Tensor, Tensor] = {}
    for name, dtype in module._fsdp.buffer_dtypes.items():
        path, _, attribute = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        buffer = buffers.get(attribute)
        if buffer is not None:
            buffers[attribute] = cast.setdefault(buffer, buffer.to(dtype if full_precision else policy.buffer_dtype))
