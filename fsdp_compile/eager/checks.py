"""What is checked of a root: before its first forward, and the order in which units run on all ranks.

check_*       settings of units, parameters without a unit or without values, replication around the module
OrderCheck    the order in which units run in forward, at `TORCH_DISTRIBUTED_DEBUG=DETAIL`
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import sharding_of, units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager._torch import replicated_params

_SETTINGS = {
    "limit_all_gathers": "limit_all_gathers",
    "FSDP_COMPILE_FULL_PREC_IN_EVAL": "full_precision_in_eval",
}


def check_settings(module: nn.Module) -> None:
    """Raise ValueError if units of `module` and below differ in a setting that a root has once (E-STRAT-11)."""
    shardings = {path: sharding_of(each) for path, each in module.named_modules() if sharding_of(each)}
    for setting, attribute in _SETTINGS.items():
        values = {path: getattr(sharding, attribute) for path, sharding in shardings.items()}
        expected = values[""]
        for path, value in values.items():
            if value != expected:
                raise ValueError(
                    f"{setting}: expected one value for all units under one root, found {expected} for "
                    f"{type(module).__name__} and {value} for {path}; use the same in every call of fully_shard"
                )


def check_all_sharded(module: nn.Module) -> None:
    """Raise ValueError if a trained parameter of `module` or below belongs to no unit: nobody averages its gradient."""
    shardings = filter(None, map(sharding_of, module.modules()))
    ignored = frozenset[nn.Parameter]().union(*(sharding.ignored_params for sharding in shardings))
    for path, each in module.named_modules():
        looked_up = {lookup.name for lookup in getattr(type(each), "_fsdp_lookups", ())}  # also if replaced since
        for name, param in each._parameters.items():
            if param is None or name in looked_up or param in ignored or not (param.requires_grad and param.numel()):
                continue
            name = f"{path}.{name}" if path else name
            raise ValueError(
                f"parameter {name}: expected a parameter of a unit, found one that was added after fully_shard, whose "
                f"gradients no rank would average; add it before, or call fully_shard on its module before the root"
            )


def check_has_values(module: nn.Module) -> None:
    """Raise ValueError if a unit of `module` or below is still on the meta device."""
    for unit in units_gathered_below(module):
        for flat in unit.flats:
            if flat.shard.is_meta:
                raise ValueError(
                    f"parameter {flat.layout.names[0]}: expected values before the first forward, found it on the meta "
                    f"device; call model.to_empty(device=...) and initialize it, or pass param_init_fn to fully_shard"
                )


def check_not_replicated(module: Any) -> None:
    """Raise ValueError if DistributedDataParallel around `module` averages its gradients too: it would gather each."""
    replicated = replicated_params()
    for unit in module._fsdp.units_below if replicated else ():
        for name, param in zip(unit.names, unit.params, strict=True):
            if param in replicated:
                raise ValueError(
                    f"parameter {name}: expected fully_shard alone to average its gradient, found "
                    f"DistributedDataParallel around {type(module).__name__}; call fully_shard on the module around it "
                    f"instead, or torch.distributed._composable.replicate, which leaves sharded modules alone"
                )


class OrderCheck:
    """Compares the order in which units run in forward: among ranks at first, later with the first iteration.

    Ranks that gather in different orders wait for each other for ever, or read each other's parameters as their own. At
    `TORCH_DISTRIBUTED_DEBUG=DETAIL` the first training iteration compares the order before each all-gather, and later
    ones are compared with the first, on each rank by itself (E-ORD-3).

    Args:
        module: the root. Units are identified by their index among all units of the root, equal on all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = _describe(module)
        self.indices = {unit: index for index, unit in enumerate(self.names)}
        self.first: list[int] = []  # the units of the first iteration, in order
        self.is_recorded = False  # whether the first iteration has ended
        self.position = 0
        self.warned = False

    def begin(self) -> None:
        """An iteration starts."""
        self.position = 0
        if not self.is_recorded:
            self.first.clear()

    def next(self, unit: Unit) -> None:
        """`unit` is about to run. In the first iteration, RuntimeError on all ranks if a rank runs another one."""
        self._compare(self.indices[unit])

    def end(self) -> None:
        """The iteration has run to its end. Raises as `next` does if another rank still has units to run."""
        self._compare(len(self.names))
        self.is_recorded = True

    def _compare(self, index: int) -> None:
        if not self.is_recorded:
            self._compare_ranks(index)
            self.first.append(index)
        elif not self.warned and (self.position >= len(self.first) or self.first[self.position] != index):
            self.warned = True
            expected = self.first[self.position] if self.position < len(self.first) else len(self.names)
            warnings.warn(
                f"order of units: expected {self._name(expected)} next, as in the first iteration, found "
                f"{self._name(index)}; prefetching works for one order, and ranks must change it together",
                UserWarning,
                stacklevel=2,
            )
        self.position += 1

    def _compare_ranks(self, index: int) -> None:
        unit = next(iter(self.names))
        mine = torch.tensor([len(self.names), index], device=unit.device)
        of_ranks = collectives.all_gather(mine, unit.group.size(), unit.group.group_name).view(-1, 2).tolist()
        if all(each == of_ranks[0] for each in of_ranks):
            return
        ranks = dist.get_process_group_ranks(unit.group)
        if any(count != len(self.names) for count, _ in of_ranks):
            counts = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in zip(ranks, of_ranks, strict=True))
            raise RuntimeError(
                f"order of units: expected equally many units on all ranks, found {counts}; build and shard the same "
                f"model on all"
            )
        names = "; ".join(f"rank {rank}: {self._name(next)}" for rank, (_, next) in zip(ranks, of_ranks, strict=True))
        raise RuntimeError(
            f"order of units: expected the same unit next on all ranks after {self.position} equal ones, found "
            f"{names}; let forward call the same modules in the same order on all ranks"
        )

    def _name(self, index: int) -> str:
        return list(self.names.values())[index] if index < len(self.names) else "the end of forward"


def _describe(module: nn.Module) -> dict[Unit, str]:
    """The units of `module` and below, each once, with a description for messages."""
    names: dict[Unit, str] = {}
    for path, each in module.named_modules():
        sharding = sharding_of(each)
        for unit in sharding.units if sharding else ():
            some = ", ".join(unit.names[:3]) + (", ..." if len(unit.names) > 3 else "")
            names.setdefault(unit, f"{path or type(each).__name__} ({some})")
    return names
