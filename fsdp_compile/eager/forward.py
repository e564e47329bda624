"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.

A module inside a sharded one that was compiled by itself goes both ways: `compiled_forward` gathers and frees in eager,
as for its neighbours, and the graph in between reads whole flat parameters and packs their gradients.

Note on graph breaks: where the code of a module breaks the graph, that module's unit is gathered eagerly, and Dynamo
compiles what it would compile without sharding. For Dynamo cannot leave a frame in the middle of a `try`, so it traces
`sharded_forward` as a whole or not at all; and it keeps out of functions that are disabled. A gather that was traced
alone would be kept until backward, as its views would be outputs of one graph and inputs of another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core.unit import Unit
from fsdp_compile.eager._torch import allowed_in_regions, current_backward
from fsdp_compile.eager.inputs import computes_in_full_precision, prepare_inputs
from fsdp_compile.eager.recompute import open_for_recomputation
from fsdp_compile.eager.runtime import Runtime
from fsdp_compile.eager.state import is_open
from fsdp_compile.eager.unsharded import UnshardedUnit


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp_scope` gathered.

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
    if module._fsdp_is_root:
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
    return any(unit.unsharded_params is None and is_open(unit) for unit in module._fsdp_scope)


@torch.compiler.disable
def _open(module: Any, opened: list[UnshardedUnit], whole: bool) -> None:
    root: Runtime = module._fsdp_runtime
    closed = [unit for unit in module._fsdp_scope if not is_open(unit)]
    if module._fsdp_is_root:
        root.begin_iteration(module)
    for unit in closed:
        gathered = root.gather(unit, computes_in_full_precision(module))
        gathered.open(whole)  # one by one: if one fails, those before it are closed
        opened.append(gathered)
        root.prefetch_forward(gathered)


@torch.compiler.disable
def _close(module: Any, opened: list[UnshardedUnit], completed: bool = False) -> None:
    try:
        if completed and module._fsdp_is_root:
            module._fsdp_runtime.complete_iteration()
    finally:
        for gathered in opened:
            gathered.drop_views()
        if module._fsdp_is_root:
            module._fsdp_runtime.end_iteration()


@torch.compiler.disable
def _end(module: Any, opened: list[UnshardedUnit], inputs: Any, output: Any) -> None:
    _close(module, opened, completed=True)
    for gathered in opened:
        gathered.end_forward(inputs, output, keep=module._fsdp_is_root)
        module._fsdp_runtime.ended_forward(gathered)


def _recomputed(module: Any, run: Callable[..., Any], args: tuple, kwargs: Any, whole: bool) -> Any:
    """Run the forward again within backward, with the units that have no views to use gathered."""
    closed = [unit for unit in module._fsdp_scope if not is_open(unit)]
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
    opened = [unit for unit in module._fsdp_scope if unit.unsharded_params is None]
    try:
        for unit in opened:
            unit.unsharded_params = unit.views_of(unit.unsharded_flats)
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            unit.unsharded_params = None


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp_scope:
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
