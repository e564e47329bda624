"""How a flat parameter is gathered and how its gradients are reduced, as one string that a graph carries.

An all-gather goes through one process group, or through two of them, one after the other; a reduce-scatter goes
through the same groups in reverse:

    one stage      every rank's shard is gathered from the whole group; rank r stores shard r
    two stages     peers, then neighbors: 4 ranks, 2 neighbors

        rank              0    1    2    3
        stores shard      0    2    1    3       its rank among its peers + peers * its rank among its neighbors
        with peers        0 1  2 3  0 1  2 3     one half of the buffer, contiguous: what is retained for backward
        with neighbors    0 1 2 3   ...          gathered again in backward

With shards in this order each stage concatenates what it gathers: nothing is moved, and no rank appears in a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple
from urllib.parse import quote, unquote

import torch
import torch.distributed as dist

from fsdp_compile.core.layout import FlatParamLayout


class NamedGroup(NamedTuple):
    """A process group as a graph refers to it. Its ranks are as many on every rank; the name may differ."""

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "NamedGroup":
        """The name and the size of `group`."""
        return cls(group.group_name, group.size())


# Note [One string describes an unshard]
# A traced graph must be the same program on every rank, Dynamo must guard on as little as possible at every call, and
# AOTAutograd must be able to cache the graph. A string constant meets all three: it is compared once per flat
# parameter, it is hashed by its text, and it holds nothing that depends on the rank. An object as an operator's
# argument would have to be registered with the compiler, and a list of separate arguments is guarded one by one.
# Passes and the operators' bodies read the string back with `UnshardSpec.parse`, which is cached.


@dataclass(frozen=True)
class UnshardSpec:
    """How one flat parameter is gathered and its gradient reduced; equal on all ranks.

    Attributes:
        layout: where parameters lie in the full buffer. With a `world_size` of 1 nothing is gathered.
        groups: what all-gathers go through, in order: one group or two. For an unsharded layout the group that
            gradients are averaged over; empty if there is none.
        reshard_after_forward: whether the full buffer is freed between forward and backward; None: a pass decides.
        replicas: hybrid sharding: the group whose ranks store the same shard; gradients are averaged over it too.
        compute_dtype: the dtype of the full buffer; None: that of the shard.
        reduce_dtype: the dtype in which gradients are reduced; None: that of the full buffer.
    """

    layout: FlatParamLayout
    groups: tuple[NamedGroup, ...]
    reshard_after_forward: bool | None
    replicas: NamedGroup | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different slices of the buffer."""
        return self.layout.world_size > 1

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return prod(group.size for group in self.groups) * (1 if self.replicas is None else self.replicas.size)

    @cached_property
    def text(self) -> str:
        """The specification as a constant for compilers; `parse` reads it back.

        Grammar: the layout's text, `groups=name:size[,name:size]`, `reshard=True|False|None`, and where they are not
        the default `replicas=name:size`, `compute=dtype` and `reduce=dtype`; separated by blanks.
        """
        fields = [self.layout.text, f"groups={_print(self.groups)}", f"reshard={self.reshard_after_forward}"]
        if self.replicas is not None:
            fields.append(f"replicas={_print([self.replicas])}")
        for name, dtype in (("compute", self.compute_dtype), ("reduce", self.reduce_dtype)):
            if dtype is not None:
                fields.append(f"{name}={str(dtype).removeprefix('torch.')}")
        return " ".join(fields)

    @staticmethod
    @lru_cache(maxsize=1024)  # read at every run of an operator; specifications are immutable
    def parse(text: str) -> "UnshardSpec":
        """The specification that wrote `text`, except for parameter names. ValueError quotes a malformed text."""
        layout, *pairs = text.split(" ")
        fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if len(fields) != len(pairs) or not {"groups", "reshard"} <= fields.keys() <= _FIELDS:
            raise ValueError(
                f"{text!r} is not an unshard specification; expected LAYOUT groups=NAME:SIZE,... "
                f"reshard=True|False|None [replicas=NAME:SIZE] [compute=DTYPE] [reduce=DTYPE]"
            )
        replicas = _parse(fields.get("replicas", ""))
        return UnshardSpec(
            FlatParamLayout.parse(layout),
            _parse(fields["groups"]),
            {"True": True, "False": False, "None": None}[fields["reshard"]],
            replicas[0] if replicas else None,
            getattr(torch, fields["compute"]) if "compute" in fields else None,
            getattr(torch, fields["reduce"]) if "reduce" in fields else None,
        )


_FIELDS = {"groups", "reshard", "replicas", "compute", "reduce"}


def _print(groups: Sequence[NamedGroup]) -> str:
    return ",".join(f"{quote(group.name, safe='')}:{group.size}" for group in groups)


def _parse(text: str) -> tuple[NamedGroup, ...]:
    pairs = (group.split(":") for group in text.split(",") if group)
    return tuple(NamedGroup(unquote(name), int(size)) for name, size in pairs)


def shard_order(groups: Sequence[NamedGroup]) -> tuple[int, ...]:
    """For each rank of the group that is sharded over, which slice it stores; empty if rank r stores slice r."""
    if len(groups) == 1:
        return ()
    peers, neighbors = (group.size for group in groups)
    return tuple(rank // neighbors + peers * (rank % neighbors) for rank in range(peers * neighbors))
