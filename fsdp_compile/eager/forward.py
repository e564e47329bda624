"""The forward of a sharded module: unshard, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of parameters are traced; graph passes decide what is freed and
gathered again. `torch.compiler.is_compiling()` in `sharded_forward` is the one place where the two ways part.

A module inside a sharded one that was compiled by itself goes both ways: `compiled_forward` gathers and frees eagerly,
as for its neighbors, and the graph in between reads unsharded flat parameters and packs their gradients.
"""

import functools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm.collectives import profiled
from fsdp_compile.core._torch import (
    allowed_in_regions,
    call_after_backward,
    call_before_runs,
    current_backward,
    current_transform,
    dynamo_is_active,
    has_global_hooks,
    is_exporting,
    never_trace,
    outside_of_transforms,
    records_operators,
    renew_attributes,
    while_tracing,
)
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import ModuleSharding, original_class
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.casting import cast_outputs, computes_in_full_precision, prepare_inputs
from fsdp_compile.eager.checks import kept_by_modules
from fsdp_compile.eager.runtime import Runtime
from fsdp_compile.eager.unsharded import Reader, UnshardedUnit, free_for_next_forward, wait_for_flats
from fsdp_compile.eager.writeback import refresh

# Note [Graph breaks in the forward of a sharded module]
# Where a module's code breaks the graph, its unit is gathered eagerly, and Dynamo compiles what it would without
# sharding. Dynamo cannot leave a frame in the middle of a `try`, so it traces `sharded_forward` as a whole or not at
# all: hence the `try` with an empty `finally`. Functions that gather and free are disabled, so it does not trace them.
# An all-gather that was traced alone would be worse than an eager one: its results would be outputs of one graph and
# inputs of another, and so stay in memory until backward.


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp.units` unsharded.

    Units that are unsharded already, by an enclosing module or by the backward pass that recomputes this forward, are
    used as they are. If forward raises, the units are resharded and the module stays usable.
    """
    if module._fsdp.in_hooked_call:
        return cast_outputs(module, forward(module, *args, **kwargs))
    try:  # Note [Graph breaks in the forward of a sharded module]
        args, kwargs = prepare_inputs(module, args, kwargs)
        if torch.compiler.is_compiling():
            return cast_outputs(module, _traced(module, forward, args, kwargs))
        run: Callable[..., Any] = partial(forward, module)
        if module._fsdp.settings.output_dtype is not None:  # before outputs get hooks, which see what users see
            run = lambda *args, **kwargs: cast_outputs(module, forward(module, *args, **kwargs))  # noqa: E731
        if _has_unsharded_flats(module):
            return _run_with_flats(module, run, args, kwargs)
        return _unsharded(module, run, args, kwargs)
    finally:
        pass


def compiled_forward(module: Any, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `compiled`, which traces the call of `module`, with its units gathered around it; a root does so inside."""
    if torch.compiler.is_compiling():
        return module._call_impl(*args, **kwargs)
    if module._fsdp.is_root:
        return compiled(*args, **kwargs)
    return _unsharded(module, compiled, args, kwargs, reader=compiled)


def hooked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, the `_call_impl` of a sharded module's class, with the units gathered around hooks and forward alike."""

    def call_inside(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        sharding = module._fsdp
        allowed_in_regions(_set_in_hooked_call, sharding, True)
        try:
            return call(module, *args, **kwargs)
        finally:
            if torch.compiler.is_compiling():
                while_tracing(_renew_sharding)
            allowed_in_regions(_set_in_hooked_call, sharding, False)

    return gathering(call_inside)


def _renew_sharding(tracing: Any) -> None:
    renew_attributes(tracing, "sharding")


def _set_in_hooked_call(sharding: ModuleSharding, in_hooked_call: bool) -> None:
    sharding.in_hooked_call = in_hooked_call


class CheckParams:
    """Mixin: before a compiled forward, checks the parameters of all units below the module, outside of Dynamo.

        torch.compile(model), model.compile()   the call of the module is not traced: the check happens here
        a compiled function or module that      the call is traced: the check is one of the graph's guards, which Dynamo
        calls the model                         calls before each run, and it happens once while Dynamo traces

    Measured on one CPU core, 13 units of 10 parameters: 6 us per unit and step alone, 8 to 11 us between other work.
    """

    _fsdp: ModuleSharding
    _fsdp_runtime: Runtime
    _fsdp_hooked_call: Callable[..., Any]
    _compiled_call_impl: Any
    _forward_hooks: Any
    _forward_pre_hooks: Any
    _backward_hooks: Any
    _backward_pre_hooks: Any

    @never_trace
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.__call__`."""
        if is_exporting() or (not torch.compiler.is_compiling() and records_operators()):
            self._fsdp_runtime.check_again()
            kind = original_class(self)  # type: ignore[arg-type]  # a mixin of modules
            raise RuntimeError(
                f"{kind.__name__} is sharded: torch.export, torch.jit.trace and make_fx cannot record "
                f"it, as its parameters are gathered while it runs; use torch.compile, or record an unsharded model "
                f"that has loaded its full state dict"
            )
        if not torch.compiler.is_compiling():
            # Written out, not a method: this function is not traced, but Dynamo would compile what it calls.
            gathers_itself = self._compiled_call_impl is not None and self._fsdp.is_root
            if gathers_itself or dynamo_is_active():  # else the eager runtime gathers, which checks too
                _prepare(self)
            own = vars(self).get("forward")
            if own is not None and not hasattr(own, "gathers"):
                gather_around_own_forward(self)
        else:
            while_tracing(_check_before_runs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # a mixin of modules

    @never_trace
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module._call_impl`, with unsharded parameters around forward and hooks alike.

        Dynamo does not trace backward hooks: if the module it compiles has any, all its hooks run outside of the graph.
        """
        backward = self._backward_hooks or self._backward_pre_hooks
        hooks = backward or self._forward_pre_hooks or self._forward_hooks or has_global_hooks()
        if hooks and (torch.compiler.is_compiling() or not (backward and dynamo_is_active())):
            return self._fsdp_hooked_call(*args, **kwargs)
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]  # a mixin of modules


def gathering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, a function of a sharded module, with the module's units gathered around it."""

    def gathered_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return sharded_forward(self, forward, args, kwargs)

    # A code object for each function: Dynamo counts recompilations per code object, and these are different programs.
    gathered_forward.__code__ = gathered_forward.__code__.replace(co_name="gathered_forward")
    gathered_forward = functools.wraps(forward)(gathered_forward)
    vars(gathered_forward)["gathers"] = True  # and so have functions that wrap it with functools.wraps
    return gathered_forward


@torch.compiler.disable
def gather_around_own_forward(module: nn.Module) -> None:
    """Gather the module's units around a `forward` that was set on `module` itself instead of its class."""
    own: Any = vars(module)["forward"]
    is_method = isinstance(own, MethodType) and own.__self__ is module
    function = own.__func__ if is_method else lambda self, *args, **kwargs: own(*args, **kwargs)
    vars(module)["forward"] = MethodType(gathering(function), module)


@torch.compiler.disable
def _prepare(module: Any) -> None:
    """Apply what users did to parameters; free what was gathered for an eager forward. Raises as `refresh` does."""
    if current_backward() != -1:  # a forward that is recomputed: what the first one found is in force
        return
    runtime: Runtime = module._fsdp_runtime
    if module._fsdp.is_root:
        runtime.check(module)
        runtime.compare(module, compiled=True)
        if runtime.post_optim_event is not None:
            runtime.warn_compiled({"set_post_optim_event"})
    for unit in module._fsdp.units_below:
        if unit.options is not unit.options_when_compiled:
            unit.options_when_compiled = unit.options
            runtime.warn_compiled(unit.options.only_eager)
        if not unit.is_unsharded:
            if unit.prefetched is not None:
                runtime.warn_compiled({"unshard"})
            refresh(unit)
            free_for_next_forward(unit)


def _check_before_runs(tracing: Any) -> None:
    """Dynamo traces a call of a sharded module: have its parameters checked before each run of the graph."""
    call_before_runs(tracing, _is_prepared, inside=sharded_forward.__code__)


def _is_prepared(module: Any) -> bool:
    """Prepare `module` for a compiled forward; whether graphs from before still hold: the same parameters train."""
    trained = _trained(module)
    _prepare(module)
    return trained == _trained(module)


def _trained(module: Any) -> list[bool]:
    return [flat.trains for unit in module._fsdp.units_below for flat in unit.flats]


# --- eager ------------------------------------------------------------------------------------------------------------


def _unsharded(
    module: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any], reader: Callable[..., Any] | None = None
) -> Any:
    """`run(*args, **kwargs)` with the units' parameters unsharded; for `reader`, compiled, their flat parameters."""
    try:  # Note [Graph breaks in the forward of a sharded module]
        if _in_backward():
            return _recomputed(module, run, args, kwargs, reader)
        if module._fsdp.is_root and _is_inside_itself(module):
            return run(*args, **kwargs)
        opened: list[UnshardedUnit] = []
        try:
            _pre_forward(module, opened, reader)
            output = run(*args, **kwargs)
            _post_forward(module, opened, (args, kwargs), output)
            return output
        except BaseException as error:
            _hide_after(error, module, opened)
            raise
        finally:
            if module._fsdp.is_root:  # no call, which could be interrupted: the next forward would not gather
                module._fsdp_runtime.iteration = None
    finally:
        pass


@torch.compiler.disable
def _in_backward() -> bool:
    return current_backward() != -1


@torch.compiler.disable
def _is_inside_itself(module: Any) -> bool:
    """Whether a forward that was set on the root `module` calls the one of its class."""
    return bool(module._fsdp_runtime.iteration)


@torch.compiler.disable
def _pre_forward(module: Any, opened: list[UnshardedUnit], reader: Callable[..., Any] | None) -> None:
    """Gather the module's units, show them to module code, and begin to gather what comes next."""
    if current_transform() is not None:
        with outside_of_transforms():
            return _pre_forward(module, opened, reader)
    runtime: Runtime = module._fsdp_runtime
    full_precision = computes_in_full_precision(module)
    if module._fsdp.is_root:
        runtime.begin_iteration(module)
    sharded = [u for u in module._fsdp.units if not u.is_unsharded and not _computes_summoned(u, full_precision)]
    for unit in sharded:
        with profiled("pre", unit.path):
            gathered = runtime.gather(unit, full_precision)
            gathered.of_several = unit in module._fsdp.shared_units
            gathered.open(reader)  # one by one: if one fails, those before it are closed
            shared = gathered.of_several and runtime.iteration is not None
            (runtime.shared_in_forward if shared else opened).append(gathered)
            runtime.prefetch_forward(gathered)


def _computes_summoned(unit: Unit, full_precision: bool) -> bool:
    """Whether a forward may compute with the full parameters that `summon_full_params` shows (E-FWD-12)."""
    if unit.summoned is None or torch.is_grad_enabled() or not unit.summoned.may_compute:
        return False
    return all(unit.compute_dtype(flat, full_precision) == flat.shard.dtype for flat in unit.flats)


def _hide(
    module: Any, opened: list[UnshardedUnit], completed: bool = False, error: BaseException | None = None
) -> None:
    """Hide the units from module code: the forward has ended or failed."""
    runtime: Runtime = module._fsdp_runtime
    try:
        if completed:
            for gathered in opened:
                gathered.check_unwritten()
            runtime.look_at_first(module, opened)
        if completed and module._fsdp.is_root:
            runtime.complete_iteration()
    finally:
        if module._fsdp.is_root:
            opened += runtime.shared_in_forward
            runtime.shared_in_forward.clear()
        for gathered in opened:
            gathered.hide()
        if module._fsdp.is_root:
            runtime.end_iteration()
    for gathered in opened if error is not None else ():
        gathered.leave_unread()
        gathered.check_unwritten(error)


@torch.compiler.disable
def _hide_after(error: BaseException, module: Any, opened: list[UnshardedUnit]) -> None:
    _hide(module, opened, error=error)


@torch.compiler.disable
def _post_forward(module: Any, opened: list[UnshardedUnit], inputs: Any, output: Any) -> None:
    """Prepare for backward, and free what it will gather again."""
    if current_transform() is not None:
        for gathered in opened:
            gathered.is_held = True
        with outside_of_transforms():
            return _post_forward(module, opened, inputs, output)
    _hide(module, opened, completed=True)
    for gathered in opened:
        with profiled("post", gathered.unit.path):
            keep = module._fsdp.is_root or module._fsdp_runtime.begins_backward(gathered)
            keep |= gathered.unit.reshard_after_forward is False
            gathered.end_forward(inputs, output, () if module._fsdp.is_root else kept_by_modules(module), keep)
        if not keep:
            _warn_if_it_stays(module, gathered)
        module._fsdp_runtime.end_forward(gathered)


def _warn_if_it_stays(module: nn.Module, gathered: UnshardedUnit) -> None:
    who = f"{original_class(module).__name__} with parameters {', '.join(gathered.unit.names[:2])}, ..."
    if gathered.opaque:
        warn_caller(
            f"{who} returns a {gathered.opaque.__name__}, which may have tensors inside that cannot be seen, so its "
            f"parameters stay unsharded until backward; return tensors, containers of them or a dataclass"
        )
    elif gathered.is_left:
        warn_caller(
            f"the forward of {who} computes something with gradients that it neither returns nor keeps as an "
            f"attribute, so its parameters stay unsharded until backward; return it, keep it as an attribute or in an "
            f"argument, or compute it under torch.no_grad()"
        )


def _recomputed(
    module: Any, run: Callable[..., Any], args: tuple, kwargs: Any, reader: Callable[..., Any] | None
) -> Any:
    """Run the forward again within backward, with all units unsharded."""
    sharded = [unit for unit in module._fsdp.units if not unit.is_unsharded]
    for unit in module._fsdp.units:
        for gathered in unit.awaiting_backward:
            if gathered.views is unit.unsharded_params or gathered.views is unit.unsharded_flats:
                gathered.recompute()
    gathered_here = list(filter(None, [_open_for_recomputation(module, unit, reader) for unit in sharded]))
    try:
        output = run(*args, **kwargs)
        for gathered in gathered_here:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
            gathered.end_forward((args, kwargs), output, (), keep=True)
    finally:
        if not torch.is_grad_enabled():  # it is within a checkpoint that is recomputed: its own recomputation follows
            for gathered in gathered_here:
                gathered.hide()
    return output


def _open_for_recomputation(module: Any, unit: Unit, reader: Callable[..., Any] | None) -> UnshardedUnit | None:
    """Show the recomputed forward the parameters that were unsharded for the first one.

    If several forwards of `unit` await their backward it is the last, as backward reverses forward: all ranks choose
    the same. Without one (a reentrant checkpoint ran the first forward without gradients) the recomputed forward is the
    real one and gathers for itself; return what it gathered.
    """
    awaiting = list(unit.awaiting_backward)
    if awaiting:
        gathered = awaiting[-1]
        gathered.readers |= Reader.RECOMPUTED_FORWARD
        gathered.is_lent = True
        gathered.reopen()
        return None
    streams = module._fsdp_runtime.streams_for(unit.device)
    if unit.is_sharded:
        unit.reduces_in_flight.order.next_in_backward("all-gather", unit)
    gathered = UnshardedUnit(unit, computes_in_full_precision(module), streams)
    gathered.open(reader)
    if not torch.is_grad_enabled():  # nothing will run backward through this one
        return gathered
    gathered.backward_pass = current_backward()
    unit.awaiting_backward[gathered] = None
    call_after_backward(gathered.close, if_failed=gathered.hide)  # also keeps it alive until then
    return gathered


# --- compiled ---------------------------------------------------------------------------------------------------------


@torch.compiler.disable
def _has_unsharded_flats(module: Any) -> bool:
    return any(
        unit.unsharded_flats is not None and unit.unsharded_params is None and unit.is_unsharded
        for unit in module._fsdp.units
    )


def _run_with_flats(module: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run eagerly inside `compiled_forward`: torch was told not to compile, or gave up."""
    units = [unit for unit in module._fsdp.units if unit.unsharded_params is None]
    try:
        for unit in units:
            wait_for_flats(unit.unsharded_flats)
            unit.unsharded_params = unit.split_flats(unit.unsharded_flats)
        return run(*args, **kwargs)
    finally:
        for unit in units:
            unit.unsharded_params = None


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    units = []
    for unit in module._fsdp.traced_units:
        if unit.unsharded_flats is not None:
            allowed_in_regions(_set_unsharded_params, unit, unit.split_flats(unit.unsharded_flats))
            units.append(unit)
        elif unit.unsharded_params is None or unit.backward_pass != -1:  # the latter: left by a failed backward pass
            params = unit.traced_unshard(computes_in_full_precision(module))
            allowed_in_regions(_set_unsharded_params, unit, params)
            units.append(unit)
    try:
        return forward(module, *args, **kwargs)
    finally:
        for unit in units:
            while_tracing(_renew_unit)
            allowed_in_regions(_set_unsharded_params, unit, None)


def _renew_unit(tracing: Any) -> None:
    renew_attributes(tracing, "unit")


def _set_unsharded_params(unit: Unit, params: list[Tensor] | None) -> None:
    """A function of its own, as Dynamo allows side effects in a checkpointed region only in calls that it is told of.

    It is undone before the region ends. Around a whole forward the permission would cover the user's code too.
    """
    unit.trace_unsharded(params)
