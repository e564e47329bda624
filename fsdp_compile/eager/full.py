"""Full tensors from shards, outside of forward and backward: what manual unsharding shows and checkpoints store.

Everything here is in the dtype in which it is stored, whatever the unit computes in. All ranks of a unit's group take
part in each gather, in the same order.
"""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.comm.stages import gather
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import view_parameters
from fsdp_compile.core.unit import Unit


def gather_flat(unit: Unit, flat: FlatParam, local: Tensor) -> Tensor:
    """Gather `local`, laid out like the shard, 1-D `[shard_numel]`, from all ranks into 1-D `[layout.numel]`.

    The result has the dtype of `local` and lies where the unit computes. Without sharding it is `local` itself.
    """
    if not unit.is_sharded:
        return local
    with torch.inference_mode(False), torch.no_grad():
        return gather(local.to(unit.device), unit.stages)


def full_parameters(unit: Unit, flat: FlatParam) -> list[Tensor]:
    """The parameters of `flat` in full shape: views of one gathered buffer; without sharding, of the shard."""
    return view_parameters(gather_flat(unit, flat, flat.shard), flat.layout.text)


def full_gradients(unit: Unit) -> list[Tensor | None]:
    """The gradients of the unit's parameters in full shape, in the parameters' stored dtype.

    None for a parameter that has a gradient on no rank. A rank that lacks one that others have takes part with zeros of
    that same dtype (E-SUM-9, E-SUM-10) and warns at TORCH_DISTRIBUTED_DEBUG=INFO.
    """
    if not unit.is_sharded:
        return [param.grad for param in unit.params]
    anywhere = _has_gradient_anywhere(unit)
    found: list[Tensor | None] = []
    for flat, wanted in unit.by_flat(anywhere):
        if any(wanted):
            views = view_parameters(gather_flat(unit, flat, _shard_gradients(flat)), flat.layout.text)
            found += [view if there else None for view, there in zip(views, wanted, strict=True)]
        else:
            found += [None] * len(flat.params)
    return found


def _has_gradient_anywhere(unit: Unit) -> list[bool]:
    """For each parameter whether any rank has a gradient of it: one all-reduce of as many numbers."""
    here = [param.grad is not None for param in unit.params]
    counts = torch.tensor(here, dtype=torch.float32, device=unit.device)
    collectives.start_all_reduce(counts, unit.group_name, "sum")
    collectives.wait(counts)
    anywhere = [count > 0 for count in counts.tolist()]
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        for index, (mine, wanted, record) in enumerate(zip(here, anywhere, unit.records, strict=True)):
            if wanted and record and not mine:
                warnings.warn(
                    f"rank {unit.rank}: parameter {unit.names[index]} has a gradient on other ranks and none here; "
                    f"zeros stand for this rank's part",
                    UserWarning,
                    stacklevel=2,
                )
    return anywhere


def _shard_gradients(flat: FlatParam) -> Tensor:
    """The gradients laid out like the shard, 1-D `[shard_numel]` in its dtype; zeros where there is none."""
    packed = torch.zeros_like(flat.shard)
    with torch.no_grad():
        for param, part in zip(flat.params, flat.split(packed), strict=True):
            if part is not None and param.grad is not None:
                part.copy_(param.grad)
    return packed
