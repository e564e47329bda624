"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.

A module inside a sharded one that was compiled by itself goes both ways: `compiled_forward` gathers and frees in eager,
as for its neighbours, and the graph in between reads whole flat parameters and packs their gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.eager.gathered import Gathered, open_for_recomputation
from fsdp_compile.eager.inputs import computes_in_full_precision, prepare_inputs
from fsdp_compile.eager.root import Root
from fsdp_compile.eager.state import is_open
from fsdp_compile.eager.torch_private import allowed_in_regions, current_backward
from fsdp_compile.unit import Unit


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp_scope` gathered.

    A unit that is gathered already, by an enclosing module or by the backward pass that recomputes this forward, is
    used as it is. If forward raises, the units are closed and the module stays usable.
    """
    args, kwargs = prepare_inputs(module, args, kwargs)
    if torch.compiler.is_compiling():
        return _traced(module, forward, args, kwargs)
    if any(unit.views is None and is_open(unit) for unit in module._fsdp_scope):
        return _uncompiled(module, forward, args, kwargs)
    return _gathered(module, partial(forward, module), args, kwargs)


def compiled_forward(module: Any, compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `compiled`, which traces the call of `module`, with its units gathered around it; a root gathers inside."""
    if module._fsdp_is_root:
        return compiled(*args, **kwargs)
    return _gathered(module, compiled, args, kwargs, whole=True)


def _gathered(module: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any], whole: bool = False) -> Any:
    """`run(*args, **kwargs)` with views of the units' parameters; if `whole`, of their flat parameters instead."""
    closed = [unit for unit in module._fsdp_scope if not is_open(unit)]
    root: Root = module._fsdp_root
    if current_backward() != -1:
        return _recomputed(module, closed, run, args, kwargs, whole)
    if module._fsdp_is_root:
        root.begin_iteration(module)
    opened: list[Gathered] = []
    try:
        for unit in closed:
            gathered = root.gather(unit, computes_in_full_precision(module))
            gathered.open(whole)  # one by one: if one fails, those before it are closed
            opened.append(gathered)
            root.prefetch_forward(gathered)
        output = run(*args, **kwargs)
        if module._fsdp_is_root:
            root.complete_iteration()
    finally:
        for gathered in opened:
            gathered.drop_views()
        if module._fsdp_is_root:
            root.end_iteration()
    for gathered in opened:
        gathered.end_forward((args, kwargs), output, keep=module._fsdp_is_root)
        root.ended_forward(gathered)
    return output


def _recomputed(module: Any, closed: list[Unit], run: Any, args: tuple, kwargs: Any, whole: bool) -> Any:
    """Run the forward again within backward; `closed` are the units that have no views to use."""
    full_precision = computes_in_full_precision(module)
    streams_for = module._fsdp_root.streams_for
    found = [open_for_recomputation(unit, full_precision, streams_for(unit.device), whole) for unit in closed]
    fresh = [gathered for gathered in found if gathered is not None]
    output = run(*args, **kwargs)
    for gathered in fresh:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
        gathered.end_forward((args, kwargs), output, keep=True)
    return output


def _uncompiled(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What was compiled runs eagerly after all: torch was told so, or gave up."""
    opened = [unit for unit in module._fsdp_scope if unit.views is None]
    try:
        for unit in opened:
            unit.views = unit.views_of(unit.fulls)
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            unit.views = None


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp_scope:
        if unit.fulls is not None:
            allowed_in_regions(_set_views, unit, unit.views_of(unit.fulls))
            opened.append(unit)
        elif unit.views is None or unit.views_backward != -1:  # the latter: left behind by a failed backward pass
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
    unit.views = views
