"""`Settings`: the options of `fully_shard`, resolved and checked in api.py; environment switches; warnings."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import Shard

from fsdp_compile.comm.groups import Groups, Placement, place

InitFn = Callable[[nn.Module], Any]
PlacementFn = Callable[[nn.Parameter], Shard | None]


@dataclass(eq=False)
class Settings:
    """What one call of `fully_shard` asked for. A policy may give single units settings of their own (`replace`).

    Frozen, but not by `frozen=True`: Dynamo of torch 2.11 guards on every field of such a dataclass.

    Attributes:
        strategy: what `sharding_strategy` or `reshard_after_forward` says.
        groups: the process groups to shard and to replicate over.
        reshard_after_forward: as asked. "auto": the plan of a compiled step decides which units stay
            unsharded; an eager step keeps the last. "last", if nothing was asked: both keep the last.
        device: where units compute; None: each decides by its parameters.
        precision: dtypes of computation, reduction and buffers.
        output_dtype: the dtype that floating outputs are cast to, or None.
        offload: whether shards and gradients are stored on the CPU.
        pin_memory: whether what is stored there is pinned, if the unit computes elsewhere.
        same_bits: whether sums are in an order that does not depend on the number of ranks (`reduction_order="tree"`).
        find_unused_parameters: whether ranks tell each other which parameters they have used; None: where it matters.
        full_precision_in_eval: whether modules in eval mode compute without mixed precision (an environment switch).
    """

    strategy: ShardingStrategy
    groups: Groups
    reshard_after_forward: bool | int | str | None = None
    device: torch.device | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    output_dtype: torch.dtype | None = None
    offload: bool = False
    pin_memory: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    same_bits: bool = False
    rows: bool = False  # whether each rank stores complete rows of each parameter (`shards="rows"`)
    full_precision_in_eval: bool = False
    find_unused_parameters: bool | None = None
    param_init_fn: InitFn | None = None
    sync_module_states: bool = False
    shard_placement_fn: PlacementFn | None = None

    @property
    def placement(self) -> Placement:
        """How a unit with these settings lies in the groups."""
        return place(self.strategy, self.groups, self.same_bits)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError(f"{name}: Settings are frozen; use dataclasses.replace")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Settings":
        return self  # a copied model is sharded over the same groups


def full_precision_in_eval() -> bool:
    """Whether modules in eval mode compute without mixed precision, by exactly "1" (E-ENV-6; torch reads the second
    name).
    """
    names = ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "FSDP_USE_FULL_PREC_IN_EVAL")
    return any(os.environ.get(name) == "1" for name in names)


def warn_caller(message: str) -> None:
    """Warn with `message`, attributed to the innermost calling line outside of this package and of torch."""
    level, frame = 1, sys._getframe()  # as `skip_file_prefixes` of `warn`, which Python 3.11 lacks
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("fsdp_compile", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
