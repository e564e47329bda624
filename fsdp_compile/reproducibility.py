"""What a script needs beside `reduction_order="tree"` to end with the same bits on any number of ranks.

microbatch_seed(index)      random operators draw by microbatch, not by rank
mean_over_ranks(losses)     the mean over the microbatches of a step, for logs and decisions
model.fingerprint()         a text that is equal for equal parameters, on any number of ranks
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm.collectives import add_in_pairs, traceable_all_gather
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PIECE = 2**20  # elements that are hashed at once
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd and arbitrary


def microbatch_seed(index: int, seed: int = 0) -> None:
    """Seed torch's random numbers, of all devices, by a microbatch of the whole training, in place of the rank.

    Call it before the forward of each microbatch: dropout and other random operators of that forward, and of what
    checkpoints recompute in its backward, then draw the same numbers on whichever rank that microbatch is computed.

    Args:
        index: the number of the microbatch among those of all steps and all ranks. With A microbatches on each of W
            ranks, number k of rank r in step s is `(s * W + r) * A + k`.
        seed: of the run.
    """
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8]) >> 1)


def mean_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of the `values` of all ranks, of shape `()`, added up in pairs: alike for any number of ranks.

    Args:
        values: what this rank has of each of its microbatches of a step, such as losses: of any shape, in their order.
        group: the ranks, each with equally many values; None: all.

    Raises:
        ValueError: there are not 1, 2, 4, 8, ... values in all.
    """
    rows = values.detach().reshape(-1)
    if dist.is_initialized():
        ranks: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]  # set, as is_initialized() said
        rows = traceable_all_gather(rows.contiguous(), ranks.size(), ranks.group_name, values.shape)
    count = rows.numel()
    if count < 1 or count & (count - 1):
        raise ValueError(f"values: {count} on all ranks together; a tree needs a power of two of them")
    total = rows.new_empty(())
    add_in_pairs(rows.clone(), out=total)
    return total / count


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits that tell named tensors of other values, shapes, dtypes or names apart.

    Their order does not matter. Of sharded tensors each rank reads what it stores, and all ranks must call this: one
    all-reduce for each group of ranks and device. Plain tensors are read as this rank has them.
    """
    alike: dict[Any, tuple[ShardSpec | None, list[str], list[Tensor]]] = {}
    for name, tensor in tensors:
        spec = tensor.spec if isinstance(tensor, ShardedTensor) else None
        stored = tensor.detach() if spec is None else tensor.local  # type: ignore[attr-defined]  # a sharded tensor
        _, texts, hashes = alike.setdefault((spec and spec.reducing_groups, stored.device), (spec, [], []))
        texts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        hashes.append(hash_of(stored, 0 if spec is None else spec.first))
    lines = []
    for spec, texts, hashes in alike.values():
        totals = torch.stack(hashes)
        totals = totals if spec is None else spec.all_reduce(totals, "sum")
        lines += [f"{text} {total}" for text, total in zip(texts, totals.tolist(), strict=True)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def hash_of(values: Tensor, first: int = 0) -> Tensor:
    """A sum, int64 `()`, over the elements of `values` of hashes of their bits and places, which begin with `first`.
    Integers add up, modulo 2^64, to the same number in any order.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    real = torch.view_as_real(values) if values.is_complex() else values
    width = real.numel() // max(1, values.numel())
    bits = real.contiguous().view(-1).view(_INTEGERS[real.itemsize])
    by_value, by_place, mixing = _FACTORS
    for begin, piece in enumerate(bits.split(_PIECE)):
        place = torch.arange(piece.numel(), device=bits.device) + (first * width + begin * _PIECE)
        mixed = piece.long() * by_value + (place + 1) * by_place
        mixed = (mixed ^ (mixed >> 29)) * mixing
        total += (mixed ^ (mixed >> 32)).sum()
    return total
