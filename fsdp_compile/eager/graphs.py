"""What compiled backward passes leave to the eager runtime: the real bodies of two marker operators.

A graph that hands its gradients over reduces nothing itself: what becomes of them is decided here, as soon as they are
packed and by the same code as in eager backward. A graph that reduces asks, just before, for what no_sync has kept. So
ranks that have kept nothing and ranks that have run one reduce each, and what users do to the gradients that are shown
meanwhile counts up to this moment.
"""

import torch
from torch import Tensor

from fsdp_compile.core.flat_param import flat_param_by_id
from fsdp_compile.core.unit import unit_of
from fsdp_compile.eager._torch import current_backward
from fsdp_compile.eager.accumulate import take_accumulated
from fsdp_compile.eager.reduce import keep_or_reduce
from fsdp_compile.eager.streams import NO_STREAMS


@torch.library.impl("fsdp_flat::defer_reduce", "default")
def _defer_reduce(packed: Tensor, number: Tensor, layout: str, owned: bool = False) -> Tensor:
    """`owned`: nothing else reads or writes `packed` from now on."""
    flat = flat_param_by_id(number)
    found = unit_of(flat.params[0]) if flat is not None else None
    if flat is None or found is None:
        raise RuntimeError("backward: expected the model of this forward, found it deleted; keep it until backward")
    unit = found[0]
    full_precision = packed.dtype != unit.sent_dtype(flat)
    mine = packed if owned else packed.clone()
    reduced = keep_or_reduce(unit, flat, mine, NO_STREAMS, full_precision)
    if reduced is not None:
        flat.reduction.results.append((current_backward(), reduced))
    return packed.new_zeros((), dtype=torch.float32)


@torch.library.impl("fsdp_flat::add_accumulated", "default")
def _add_accumulated(packed: Tensor, number: Tensor, in_place: bool = False) -> Tensor:
    kept = _take_kept(number)
    return packed.clone() if kept is None else packed + kept


@torch.library.impl("fsdp_flat::add_accumulated_", "default")
def _add_accumulated_in_place(packed: Tensor, number: Tensor) -> None:
    kept = _take_kept(number)
    if kept is not None:
        packed.add_(kept)


def _take_kept(number: Tensor) -> Tensor | None:
    flat = flat_param_by_id(number)
    if flat is None:  # the model was deleted, and what it had kept with it
        return None
    flat.reduction.backward = current_backward()
    return take_accumulated(flat)
