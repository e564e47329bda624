"""Error feedback: what the format of a reduce has rounded away of a gradient goes into the next one.

    values    = gradient + residual          of this rank, for the whole flat parameter
    message   = encode(values)               what is sent
    residual  = values - decode(message)     float32, 1-D `[layout.numel]`: the flat parameter keeps it until the next

So the sum of all that was sent differs from the sum of all gradients by one residual, however many steps there are. The
reduce is that of the wire's hop; graphs leave it to the eager runtime, as they do with communication hooks.

A residual is this rank's own. Other numbers of ranks share residuals anew: what counts is their mean over the ranks,
which is what they will add to the mean of gradients, and that stays as it was.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.comm.formats import add_up, decode, encode
from fsdp_compile.comm.hops import hops_of
from fsdp_compile.core.flat_collectives import start_average
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import view_parameters
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.unit import Unit

State = Mapping[str, Tensor]


def use_error_feedback(units: Iterable[Unit]) -> None:
    """Let those of `units` whose wires ask for it keep residuals from now on."""
    for unit in units:
        if any(map(_keeps_residual, unit.flats)):
            unit.set_comm_hook((None, _reduce_with_residual), _reduce_by, compresses=False)


def _keeps_residual(flat: FlatParam) -> bool:
    return flat.wire is not None and flat.wire.error_feedback


def _reduce_by(unit: Unit, flat: FlatParam, _state: Any, reduce: Any, packed: Tensor) -> Tensor:
    """Reduce `packed`, 1-D `[layout.numel]`, over the unit's group; eager/reduce.py averages it over replicas."""
    if not unit.is_sharded:  # on one rank nothing is rounded; what more of them had lost is still added
        lost, flat.residual = flat.residual, None
        return packed if lost is None else packed.add_(lost.to(packed.device))
    if _keeps_residual(flat):
        reduced: Tensor = reduce(unit, flat, packed)
        return reduced
    groups, _ = hops_of(flat.wire, unit.stages)
    mean, finish = start_average(packed, groups, True, at_once=False, same_bits=False)
    finish()
    return mean if unit.divisor is None else mean.mul_(unit.data_parallel_size / unit.divisor)


def _reduce_with_residual(unit: Unit, flat: FlatParam, packed: Tensor) -> Tensor:
    ((hop,), _), ranks = hops_of(flat.wire, unit.stages), unit.group.size
    values = packed.float() if packed.dtype != torch.float32 else packed
    if flat.residual is not None:
        values = values + flat.residual.to(values.device)
    rows = values.view(ranks, -1)
    numel = rows.shape[1]
    messages = encode(rows, hop.reduce)
    exchange = collectives.start_exchange(messages.view(-1), hop.name)
    lost = (rows - decode(messages, numel, hop.reduce, torch.float32)).view(-1)
    exchange.wait()
    flat.residual = lost.masked_fill_(~lost.isfinite(), 0.0)  # not before: an error leaves the residual as it was
    total = add_up(exchange.full.view(ranks, -1), numel, hop.reduce, "sum", torch.float32)
    replicas = 1 if unit.replicas is None else unit.replicas.size
    return total.div_((unit.divisor or ranks * replicas) / replicas).to(packed.dtype)


# --- state ------------------------------------------------------------------------------------------------------------


def state_of_residuals(units: Iterable[Unit]) -> dict[str, Tensor]:
    """Copies of this rank's residuals, by name of the parameter and in its shape; none before the first reduce."""
    found: dict[str, Tensor] = {}
    for flat in (flat for unit in units for flat in unit.flats):
        if flat.residual is not None:
            views = view_parameters(flat.residual, flat.layout.text)
            found.update((name, view.clone()) for name, view in zip(flat.names, views, strict=True))
    return found


def load_residuals(units: Sequence[Unit], states: Sequence[State | None]) -> None:
    """Go on with the residuals of `states`, one of each rank that has saved; with a warning without what does not fit.

    With as many ranks this rank has its own again. With other numbers the mean over ranks stays.
    """
    flats = [(unit, flat) for unit in units for flat in unit.flats if _keeps_residual(flat)]
    for unit, flat in flats:
        flat.residual = None
        ranks, rank, saved = unit.data_parallel_size, _rank(unit), len(states)
        own = [each or {} for each in states[rank::ranks]] if saved else []
        wrong = [name for name, shape in zip(flat.names, flat.layout.shapes, strict=True) for each in states
                 if each and (name not in each or tuple(each[name].shape) != shape)]  # fmt: skip
        if wrong:
            warn_caller(
                f"load_error_feedback: parameter {wrong[0]}: no residual of its shape was saved, so what rounding has "
                f"lost of its gradients so far is dropped"
            )
            continue
        parts = [flat.pack([each[name] for name in flat.names], torch.float32, unit.device) for each in own if each]
        if parts:
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            flat.residual = total if ranks == saved else total.mul_(ranks / saved)


def _rank(unit: Unit) -> int:
    """This rank among all that average the unit's gradients."""
    return unit.group.find().rank() + (unit.replicas.find().rank() * unit.group.size if unit.replicas else 0)
