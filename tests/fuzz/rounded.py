"""The weights that a sharded model computes with, where its parameters are sent in a format: rounded shard by shard."""

import copy
import math

import torch
from torch import Tensor, nn

from fsdp_compile.comm.formats import FORMATS, decode, encode
from fsdp_compile.comm.hops import hops_of
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit


@torch.no_grad()
def arrived_weights(model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter, by its name, what arrives where the sharded `model` computes. All ranks take part."""
    named = dict(model.named_parameters())
    names = {param: name for name, param in named.items()}
    arrived: dict[str, Tensor] = {}
    for unit in units_gathered_below(model):
        for flat in unit.flats:
            # One that was replaced since the last forward is found by its name, and one that was removed is not.
            places = [names.get(param, name) for name, param in zip(flat.names, flat.params, strict=True)]
            params = [named.get(name, param) for name, param in zip(places, flat.params, strict=True)]
            values = [_whole(param).contiguous() for param in params]
            if unit.is_sharded and flat.wire is not None and flat.wire.gather is not None:
                values = flat.views(_sent(unit, flat, values))
            arrived |= zip(places, values, strict=True)
    return arrived


def _whole(param: Tensor) -> Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param.clone()


def _sent(unit: Unit, flat: FlatParam, values: list[Tensor]) -> Tensor:
    """The unsharded flat parameter, 1-D: each hop encodes what the one before has decoded."""
    dtype = unit.compute_dtype(flat)
    full = flat.pack(values, flat.shard.dtype, torch.device("cpu")).to(dtype)
    stages, _ = hops_of(flat.wire, unit.stages)
    ranks = math.prod(hop.size for hop in stages)
    for hop in stages:
        rows = full.view(ranks, -1)
        if hop.gather in FORMATS:
            full = decode(encode(rows, hop.gather), rows.shape[1], hop.gather, dtype).reshape(-1)
        ranks //= hop.size
    return full


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of `model` that has `weights`, by name; without any, `model` itself."""
    if not weights:
        return model
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    return model
