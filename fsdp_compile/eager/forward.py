"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.
"""

from collections.abc import Callable
from typing import Any

import torch

from fsdp_compile.eager.gathered import Gathered, open_for_recomputation
from fsdp_compile.eager.inputs import computes_in_full_precision, prepare_inputs
from fsdp_compile.eager.root import Root
from fsdp_compile.eager.torch_private import current_backward
from fsdp_compile.unit import Unit


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp_scope` gathered.

    A unit that is gathered already, by an enclosing module or by the backward pass that recomputes this forward, is
    used as it is. If forward raises, the units are closed and the module stays usable.
    """
    args, kwargs = prepare_inputs(module, args, kwargs)
    if torch.compiler.is_compiling():
        return _traced(module, forward, args, kwargs)
    closed = [unit for unit in module._fsdp_scope if not _is_open(unit)]
    if current_backward() != -1:
        return _recomputed(module, closed, forward, args, kwargs)
    root: Root = module._fsdp_root
    if module._fsdp_is_root:
        root.begin_iteration()
    opened: list[Gathered] = []
    try:
        for unit in closed:
            gathered = root.gather(unit, computes_in_full_precision(module))
            gathered.open()  # one by one: if one fails, those before it are closed
            opened.append(gathered)
        output = forward(module, *args, **kwargs)
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
    fresh = [gathered for unit in closed if (gathered := open_for_recomputation(unit, full_precision))]
    output = forward(module, *args, **kwargs)
    for gathered in fresh:  # a reentrant checkpoint: a backward pass of its own follows, and may free them
        gathered.end_forward((args, kwargs), output, keep=True)
    return output


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp_scope:
        if unit.views is None or unit.views_backward != -1:  # the latter: left behind by a backward pass that failed
            unit.views = unit.traced_views(computes_in_full_precision(module))
            opened.append(unit)
    try:
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            unit.views = None


def _is_open(unit: Unit) -> bool:
    """Whether the unit's views are good to use: set by a forward under way, or by the backward pass now running.

    Views left behind by a backward pass that failed belong to none of these, and are gathered anew.
    """
    return unit.views is not None and unit.views_backward in (-1, current_backward())
