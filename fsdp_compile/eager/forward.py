"""The forward of a sharded module: gather, run the module's own forward, free.

Under Dynamo only the marker operators and the look-up of views are traced; freeing and gathering again are decided by
the graph passes. `torch.compiler.is_compiling()` below is the one place where the two ways part.
"""

from collections.abc import Callable
from typing import Any

import torch

from fsdp_compile.eager.gathered import Gathered, open_for_recomputation
from fsdp_compile.eager.inputs import cast_inputs, computes_in_full_precision
from fsdp_compile.eager.root import Root
from fsdp_compile.eager.state import is_open
from fsdp_compile.eager.torch_private import current_backward


def sharded_forward(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `forward(module, *args, **kwargs)` with the units in `module._fsdp_scope` gathered.

    A unit that is gathered already, by an enclosing module or by the backward pass that recomputes this forward, is
    used as it is. If forward raises, the units are closed and the module stays usable.
    """
    if torch.compiler.is_compiling():
        return _traced(module, forward, *cast_inputs(module, args, kwargs))
    closed = [unit for unit in module._fsdp_scope if not is_open(unit)]
    root: Root = module._fsdp_root
    if current_backward() != -1:
        for unit in closed:
            open_for_recomputation(unit, root.streams_for(unit.device))
        return forward(module, *args, **kwargs)
    if module._fsdp_is_root:
        root.begin_iteration(module)
    args, kwargs = cast_inputs(module, args, kwargs)
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


def _traced(module: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    opened = []
    for unit in module._fsdp_scope:
        if unit.views is None or unit.views_backward != -1:  # the latter: left behind by a backward pass that failed
            unit.views = unit.traced_views()
            opened.append(unit)
    try:
        return forward(module, *args, **kwargs)
    finally:
        for unit in opened:
            unit.views = None
