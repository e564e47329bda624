"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.
"""

from collections.abc import Callable
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
    closed = [unit for unit in module._fsdp_scope if not is_open(unit)]
    root: Root = module._fsdp_root
    if current_backward() != -1:
        return _recomputed(module, closed, forward, args, kwargs)
    if module._fsdp_is_root:
        root.begin_iteration(module)
    opened: list[Gathered] = []
    try:
        for unit in closed:
            gathered = root.gather(unit, computes_in_full_precision(module))
            gathered.open()  # one by one: if one fails, those before it are closed
            opened.append(gathered)
            root.prefetch_forward(gathered)
        output = forward(module, *args, **kwargs)
        if module._fsdp_is_root:
            root.complete_iteration()
    finally:
        for gathered in opened:
            gathered.unit.views = None
        if module._fsdp_is_root:
            root.end_iteration()
    for gathered in opened:
        gathered.end_forward((args, kwargs), output, keep=module._fsdp_is_root)
        root.ended_forward(gathered)
    return output


def _recomputed(module: Any, closed: list[Unit], forward: Callable[..., Any], args: tuple, kwargs: Any) -> Any:
    """Run the forward again within backward; `closed` are the units that have no views to use."""
    full_precision = computes_in_full_precision(module)
    streams_for = module._fsdp_root.streams_for
    found = [open_for_recomputation(unit, full_precision, streams_for(unit.device)) for unit in closed]
    fresh = [gathered for gathered in found if gathered is not None]
    output = forward(module, *args, **kwargs)
    for gathered in fresh:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
        gathered.end_forward((args, kwargs), output, keep=True)
    return output


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp_scope:
        if unit.views is None or unit.views_backward != -1:  # the latter: left behind by a backward pass that failed
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
