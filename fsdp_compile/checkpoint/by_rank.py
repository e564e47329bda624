"""Values of which each rank has its own, such as the state of its random numbers or of its sampler.

    state["rng"]                              differs between the ranks, which `save` compares
    rng                                       the value of the first rank that has one
    values_of_ranks.rank1.rng                 that of each rank, in a tuple, so that it is written as one value

`load` gives each rank its own value back, if as many ranks load as have saved. With another number it raises, unless
`state` has a `PerRank` in that place.
"""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm.collectives import gather_objects
from fsdp_compile.tensors.nested import Path

VALUES = "values_of_ranks"  # their first key in a checkpoint


class PerRank:
    """A value of this rank's own in the `state` that `checkpoint.save` and `checkpoint.load` take, at any depth.

        state = {"model": model, "rng": checkpoint.PerRank(torch.get_rng_state())}

    Attributes:
        value: what this rank saves. After `load` what this rank has saved; unchanged if another number of ranks has.
        of_ranks: after `load` the values of all ranks that have saved, in order, None for one that had no value. It is
            None before, and if all ranks had one value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.of_ranks: list[Any] | None = None


def own_name(name: str, rank: int) -> str:
    """The name of what `rank` has saved as its own value of `name`."""
    return f"{VALUES}.rank{rank}.{name}"


class Apart(NamedTuple):
    """What a checkpoint notes of a value that not all ranks share."""

    name: str
    path: Path
    ranks: int  # how many saved
    having: list[int]  # those that have a value
    is_own: bool  # each of these its own; False: a tensor that the others do not have


Checksums = dict[str, tuple[bool, int | None]]  # by name: whether it is a tensor; a checksum, None if in a `PerRank`


def checksums(found: dict[str, Any]) -> Checksums:
    """What is compared of this rank's values by name. Distributed tensors are equal: ranks share what they have."""
    sums: Checksums = {}
    for name, value in found.items():
        if isinstance(value, PerRank):
            sums[name] = False, None
        elif not isinstance(value, Tensor):
            sums[name] = False, zlib.crc32(pickle.dumps(value))
        elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            here: Any = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
            sums[name] = True, zlib.crc32(here, zlib.crc32(repr(value.shape).encode()))
        else:
            sums[name] = True, 0
    return sums


def values_apart(
    found: dict[str, Any], sums: Sequence[Checksums], paths: dict[str, Path], group: dist.ProcessGroup | None
) -> list[Apart]:
    """What ranks do not share; all ranks must call it.

    Args:
        found: this rank's values by name.
        sums: the `checksums` of all ranks, in order.
        paths: of all names.
        group: the ranks.
    """
    names = dict.fromkeys(name for theirs in sums for name in theirs)
    having = {name: [rank for rank, theirs in enumerate(sums) if name in theirs] for name in names}
    found_of = {name: {sums[rank][name] for rank in having[name]} for name in names}
    differing = [name for name in names if len(found_of[name]) > 1]
    own = set(_unequal_names(differing, found, group) if differing else ())  # equal values may be pickled differently
    return [
        Apart(name, paths[name], len(sums), having[name], name in own or not all(is_tensor for is_tensor, _ in of_name))
        for name, of_name in found_of.items()
        if name in own or (False, None) in of_name or len(having[name]) < len(sums)
    ]


def _unequal_names(names: list[str], found: dict[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """Those of `names` whose values are not equal on all ranks that have one."""
    firsts: dict[str, Any] = {}
    for theirs in gather_objects({name: found[name] for name in names if name in found}, group):
        for name, value in theirs.items():
            firsts.setdefault(name, []).append(value)
    return [name for name, (first, *others) in firsts.items() if not all(_are_equal(first, other) for other in others)]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, PerRank)) or type(one) is not type(other):
        return False  # of tensors the bytes were compared
    try:
        return bool(one == other)
    except Exception:  # of a type that cannot be compared
        return False
