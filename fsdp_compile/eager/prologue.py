"""What a compiled step needs that is no part of its graph: one look at the parameters before it, outside of Dynamo.

    torch.compile(model), model.compile()   the call of the module itself is not traced: the look happens here
    a function that calls the model         the call is traced with it: nothing is looked at, nor guarded on

Measured on one CPU core, 13 units of 10 parameters: 6 us per unit and step by itself, 8 to 11 us between other work.
"""

from typing import Any

import torch

from fsdp_compile.eager._torch import current_backward, dynamo_runs, never_trace
from fsdp_compile.eager.state import is_open
from fsdp_compile.eager.unshard import discard_unsharded, drop_kept_unsharded
from fsdp_compile.eager.writeback import refresh


class Prologue:
    """A module whose compiled forward is preceded by a look at the parameters of `_fsdp_below`, a tuple of units."""

    _fsdp_below: tuple[Any, ...]
    _fsdp_is_root = True  # others that were compiled by themselves are gathered by the eager runtime, which looks too
    _compiled_call_impl: Any

    @never_trace
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.__call__`."""
        compiled = self._compiled_call_impl is not None and self._fsdp_is_root
        if not torch.compiler.is_compiling() and (compiled or dynamo_runs()):
            _prepare(self._fsdp_below)
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
