"""The forward of a sharded module: unshard, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of parameters are traced; graph passes decide what is freed and
gathered again. `torch.compiler.is_compiling()` in `sharded_forward` is the one place where the two ways part.

A module inside a sharded one that was compiled by itself goes both ways: `compiled_forward` gathers and frees eagerly,
as for its neighbors, and the graph in between reads unsharded flat parameters and packs their gradients.
"""

import functools
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_compile.comm.collectives import profiled
from fsdp_compile.core._torch import (
    allowed_in_regions,
    call_before_runs,
    current_transform,
    dynamo_is_active,
    has_global_hooks,
    in_backward,
    is_exporting,
    never_trace,
    outside_of_transforms,
    records_operators,
    traced_variable,
    while_tracing,
)
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.core.sharding import ModuleSharding, modules_below, original_class, sharding_of
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.block_reader import wait_for_flats
from fsdp_compile.eager.casting import cast_outputs, computes_in_full_precision, prepare_inputs
from fsdp_compile.eager.forward_pass import ForwardPass
from fsdp_compile.eager.runtime import Runtime, free_for_next_forward
from fsdp_compile.eager.unsharded import Reader, State, UnshardedUnit

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
    try:  # Note [Graph breaks in the forward of a sharded module]
        if not torch.compiler.is_compiling():
            return eager_forward(module, forward, args, kwargs, _UNTRACED)
        if not module._fsdp.in_hooked_call:
            args, kwargs = prepare_inputs(module, args, kwargs)
            return cast_outputs(module, _run_traced(module, forward, args, kwargs))
        return cast_outputs(module, forward(module, *args, **kwargs))
    finally:
        pass


def eager_forward(
    module: Any,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    steps: "_Steps",
    compiled: Callable[..., Any] | None = None,
) -> Any:
    """As `sharded_forward`, eagerly by `steps`; `compiled`, a block's forward, gets unsharded flat parameters."""
    try:  # Note [Graph breaks in the forward of a sharded module]
        sharding: ModuleSharding = module._fsdp
        if sharding.in_hooked_call:
            return cast_outputs(module, forward(module, *args, **kwargs))
        if compiled is not None:
            run = compiled
        else:
            args, kwargs = prepare_inputs(module, args, kwargs)
            run = partial(forward, module)
            if sharding.settings.output_dtype is not None:  # before outputs get hooks, which see what users see
                run = lambda *args, **kwargs: cast_outputs(module, forward(module, *args, **kwargs))  # noqa: E731
            if any(unit.written for unit in sharding.units):
                run = torch.compiler.disable(run)
            if split := steps.split_flats(module):
                return _run_with_flats(module, split, run, args, kwargs)
        if steps.in_backward():
            return _run_again(module, run, args, kwargs, compiled)
        if sharding.is_root and steps.is_inside_itself(module):
            return run(*args, **kwargs)
        opened: list[UnshardedUnit] = []
        try:
            steps.pre_forward(module, opened, compiled)
            output = run(*args, **kwargs)
            steps.post_forward(module, opened, (*args, *kwargs.values()), output)
            return output
        except BaseException as error:
            steps.hide(module, opened, error)
            raise
        finally:
            if sharding.is_root:  # no call, which could be interrupted: the next forward would not gather
                module._fsdp_runtime.running = None
    finally:
        pass


def compiled_forward(module: Any, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `compiled`, which traces the call of `module`, with its units gathered around it; a root does so inside."""
    if torch.compiler.is_compiling():
        return module._call_impl(*args, **kwargs)
    if module._fsdp.is_root:
        return compiled(*args, **kwargs)
    return eager_forward(module, compiled, args, kwargs, _UNTRACED if dynamo_is_active() else _DIRECT, compiled)


def hooked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, the `_call_impl` of a sharded module's class, with the units gathered around hooks and forward alike."""

    def call_inside(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        sharding = module._fsdp
        allowed_in_regions(setattr, sharding, "in_hooked_call", True)
        try:
            return call(module, *args, **kwargs)
        finally:
            allowed_in_regions(setattr, sharding, "in_hooked_call", False)

    return gathering(call_inside)


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
            self._fsdp.checked = None  # export copies what modules hold
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
                _prepare_forward(self)
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
        if torch.compiler.is_compiling() or dynamo_is_active():
            return sharded_forward(self, forward, args, kwargs)
        return eager_forward(self, forward, args, kwargs, _DIRECT)

    # A code object for each function: Dynamo counts recompilations per code object, and these are different programs.
    gathered_forward.__code__ = gathered_forward.__code__.replace(co_name="gathered_forward")
    gathered_forward = functools.wraps(forward)(gathered_forward)
    vars(gathered_forward)["gathers"] = True  # and so have functions that wrap it with functools.wraps
    return gathered_forward


@torch.compiler.disable
def gather_around_own_forward(module: nn.Module) -> None:
    """Gather the module's units around a `forward` that was set on `module` itself instead of its class, if any."""
    own: Any = vars(module).get("forward")
    if own is None or hasattr(own, "gathers"):
        return
    is_method = isinstance(own, MethodType) and own.__self__ is module
    function = own.__func__ if is_method else lambda self, *args, **kwargs: own(*args, **kwargs)
    vars(module)["forward"] = MethodType(gathering(function), module)


@torch.compiler.disable
def _prepare_forward(module: Any) -> None:
    """Apply what users did to parameters; free what was gathered for an eager forward. Raises what listeners do."""
    if in_backward():  # a forward that is recomputed: what the first one found is in force
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
            if unit.summoned is None:
                unit.hide_unsharded()  # what a backward pass has left that failed
            if unit.prefetched is not None:
                runtime.warn_compiled({"unshard"})
            for listen in runtime.heard.before_values:
                listen(unit)
            free_for_next_forward(unit)


def _check_before_runs(tracing: Any) -> None:
    """Dynamo traces a call of a sharded module: have its parameters checked before each run of the graph."""
    call_before_runs(tracing, _is_prepared, inside=sharded_forward.__code__)


def _is_prepared(module: Any) -> bool:
    """Prepare `module` for a compiled forward; whether graphs from before still hold: the same parameters train."""
    trained = _which_train(module)
    _prepare_forward(module)
    return trained == _which_train(module)


def _which_train(module: Any) -> list[bool]:
    return [flat.trains for unit in module._fsdp.units_below for flat in unit.flats]


# --- eager ------------------------------------------------------------------------------------------------------------


def _is_inside_itself(module: Any) -> bool:
    """Whether a forward that was set on the root `module` calls the one of its class."""
    return module._fsdp_runtime.running is not None


def _pre_forward(module: Any, opened: list[UnshardedUnit], compiled: Callable[..., Any] | None) -> None:
    """Gather the module's units, show them to module code, and begin to gather what comes next."""
    if current_transform() is not None:
        with outside_of_transforms():
            return _pre_forward(module, opened, compiled)
    runtime: Runtime = module._fsdp_runtime
    sharding: ModuleSharding = module._fsdp
    full_precision = computes_in_full_precision(module)
    if sharding.is_root:
        runtime.begin_iteration(module)
    forward = runtime.running or ForwardPass(runtime)
    for unit in sharding.units:
        if unit.is_unsharded or (unit.summoned is not None and _computes_summoned(unit, full_precision)):
            continue
        with profiled("pre", unit.path):
            gathered = runtime.gather(unit, full_precision, forward)
            is_alone = unit not in sharding.shared_units
            gathered.pre_forward(compiled, is_alone)  # one by one: if one fails, those before it are closed
            (opened if is_alone or not forward.of_root else forward.shared).append(gathered)
            for listen in runtime.heard.in_forward:
                listen(gathered)


def _computes_summoned(unit: Unit, full_precision: bool) -> bool:
    """Whether a forward may compute with the full parameters that `summon_full_params` shows (E-FWD-12)."""
    if torch.is_grad_enabled() or not unit.summoned.may_compute:
        return False
    return all(unit.compute_dtype(flat, full_precision) == flat.shard.dtype for flat in unit.flats)


def _hide_units(module: Any, opened: list[UnshardedUnit], error: BaseException | None = None) -> None:
    """Hide the units from module code: the forward has ended, or failed with `error`."""
    runtime: Runtime = module._fsdp_runtime
    try:
        if error is None:
            for gathered in [each for each in opened if each.state is State.FORWARD]:  # else backward has closed it
                gathered.check_unwritten()
                for listen in runtime.heard.after_forward:
                    listen(gathered, module)
            if module._fsdp.is_root:
                runtime.complete_iteration()
    finally:
        if module._fsdp.is_root:
            opened += runtime.running.shared if runtime.running is not None else ()
        for gathered in opened:
            gathered.hide()
        if module._fsdp.is_root:
            runtime.end_iteration()
    for gathered in opened if error is not None else ():
        gathered.leave_unread()
        gathered.check_unwritten(error)


def _post_forward(module: Any, opened: list[UnshardedUnit], inputs: tuple, output: Any) -> None:
    """Prepare for backward, and free what it will gather again."""
    if current_transform() is not None:
        for gathered in opened:
            gathered.hold()
        with outside_of_transforms():
            return _post_forward(module, opened, (), None)  # the transform's own tensors take no hooks
    _hide_units(module, opened)
    heard = module._fsdp_runtime.heard
    for gathered in [each for each in opened if each.state is State.FORWARD]:
        with profiled("post", gathered.unit.path):
            keep = module._fsdp.is_root or module._fsdp_runtime.begins_backward(gathered)
            keep |= gathered.unit.reshard_after_forward is False
            kept = () if module._fsdp.is_root else chain(*[listen(module) for listen in heard.kept_tensors])
            exits = gathered.post_forward(inputs, output, kept, keep)
            if not keep and exits is not None and (exits.opaque or exits.is_left):
                for listen in heard.stays:
                    listen(module, gathered.unit, exits.opaque)
            module._fsdp_runtime.end_forward(gathered)


class _Steps(NamedTuple):
    """What `eager_forward` calls around the module's own forward."""

    in_backward: Callable[[], bool]
    split_flats: Callable[[Any], list[Unit]]
    is_inside_itself: Callable[[Any], bool]
    pre_forward: Callable[[Any, list[UnshardedUnit], Any], None]
    post_forward: Callable[[Any, list[UnshardedUnit], Any, Any], None]
    hide: Callable[[Any, list[UnshardedUnit], BaseException], None]


def _split_flats(module: Any) -> list[Unit]:
    """Let module code read what was gathered for a graph, inside `compiled_forward`: return the units of which it was.
    Torch was told not to compile, or gave up.
    """
    units: list[Unit] = []
    for unit in module._fsdp.units:
        if unit.unsharded_flats is not None and unit.unsharded_params is None and unit.is_unsharded:
            wait_for_flats(unit.unsharded_flats)
            unit.unsharded_params = unit.split_flats(unit.unsharded_flats)
            units.append(unit)
    return units


_DIRECT = _Steps(in_backward, _split_flats, _is_inside_itself, _pre_forward, _post_forward, _hide_units)
_UNTRACED = _Steps(*map(torch.compiler.disable, _DIRECT))


def _run_again(
    module: Any, run: Callable[..., Any], args: tuple, kwargs: Any, compiled: Callable[..., Any] | None
) -> Any:
    """Run the forward again within backward, with all units unsharded."""
    backward = running_backward()
    assert backward is not None
    sharded = [unit for unit in module._fsdp.units if not unit.is_unsharded]
    for unit in module._fsdp.units:
        for gathered in unit.awaiting_backward:
            if gathered.views is unit.unsharded_params or gathered.views is unit.unsharded_flats:
                gathered.recompute()
    opened = [_open_for_recomputation(module, unit, backward, compiled) for unit in sharded]
    gathered_here = list(filter(None, opened))
    try:
        output = run(*args, **kwargs)
        for gathered in gathered_here:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
            gathered.post_forward((*args, *kwargs.values()), output, (), keep=True)
    finally:
        if not torch.is_grad_enabled():  # it is within a checkpoint that is recomputed: its own recomputation follows
            for gathered in gathered_here:
                gathered.hide()
    return output


def _open_for_recomputation(
    module: Any, unit: Unit, backward: BackwardPass, compiled: Callable[..., Any] | None
) -> UnshardedUnit | None:
    """Show the recomputed forward the parameters that were unsharded for the first one.

    If several forwards of `unit` await their backward it is the last, as backward reverses forward: all ranks choose
    the same. Without one (a reentrant checkpoint ran the first forward without gradients) the recomputed forward is the
    real one and gathers for itself; return what it gathered.
    """
    awaiting = list(unit.awaiting_backward)
    if awaiting:
        gathered = awaiting[-1]
        gathered.readers.add(Reader.RECOMPUTED_FORWARD)
        gathered.pre_backward(backward, State.LENT)
        return None
    runtime: Runtime = module._fsdp_runtime
    if unit.is_sharded:
        unit.reduces_in_flight.order.next_in_backward("all-gather", unit)
    for listen in runtime.heard.before_values:
        listen(unit)
    gathered = UnshardedUnit(unit, computes_in_full_precision(module), ForwardPass(runtime))
    gathered.pre_forward(compiled, is_alone=False)
    if not torch.is_grad_enabled():  # nothing will run backward through this one
        return gathered
    gathered.backward = backward
    unit.awaiting_backward[gathered] = None
    backward.at_end(gathered.post_backward, if_failed=gathered.hide)  # also keeps it alive until then
    return gathered


# --- compiled ---------------------------------------------------------------------------------------------------------


def _run_with_flats(module: Any, units: list[Unit], run: Callable[..., Any], args: tuple, kwargs: Any) -> Any:
    try:
        output = run(*args, **kwargs)
        for listen in module._fsdp_runtime.heard.after_split:
            listen(units)
        return output
    finally:
        for unit in units:
            unit.unsharded_params = None


def _run_traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    while_tracing(_gather_around_own_forwards)
    units = []
    for unit in module._fsdp.traced_units:
        if unit.unsharded_flats is not None:
            allowed_in_regions(setattr, unit, "unsharded_params", unit.split_flats(unit.unsharded_flats))
            units.append(unit)
        elif unit.unsharded_params is None:
            params = unit.traced_unshard(computes_in_full_precision(module))
            allowed_in_regions(setattr, unit, "unsharded_params", params)
            units.append(unit)
    try:
        return forward(module, *args, **kwargs)
    finally:
        for unit in units:
            allowed_in_regions(setattr, unit, "unsharded_params", None)


def _gather_around_own_forwards(tracing: Any) -> None:
    for each in filter(sharding_of, modules_below(traced_variable(tracing, "module").value)):
        gather_around_own_forward(each)
