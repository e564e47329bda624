"""What has to be equal under one root: settings of its units, and on all ranks the order in which units run.

Ranks that gather in different orders wait for each other for ever, or read each other's parameters as their own. At
`TORCH_DISTRIBUTED_DEBUG=DETAIL` the first training iteration compares the order before each gather, and later ones are
compared with the first, on each rank by itself (E-ORD-3).
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.unit import Unit

_SETTINGS = {
    "limit_all_gathers": "_fsdp_limit_all_gathers",
    "FSDP_COMPILE_FULL_PREC_IN_EVAL": "_fsdp_full_precision_in_eval",
}


def check_settings(module: nn.Module) -> None:
    """Raise ValueError if units of `module` and below differ in a setting that a root has once (E-STRAT-11)."""
    scopes = {path: each for path, each in module.named_modules() if "_fsdp_scope" in each.__dict__}
    for setting, attribute in _SETTINGS.items():
        values = {path: getattr(scope, attribute) for path, scope in scopes.items()}
        expected = values[""]
        for path, found in values.items():
            if found != expected:
                raise ValueError(
                    f"{setting}: expected one value for all units under one root, found {expected} for "
                    f"{type(module).__name__} and {found} for {path}; use the same in every call of fully_shard"
                )


def holds_on_all_ranks(unit: Unit, holds: bool) -> bool:
    """Whether `holds` is true on every rank that shards `unit`: an all-reduce of one number.

    To be asked before a rank leaves out a gather, where what it knows may differ from rank to rank.
    """
    if not unit.is_sharded:
        return holds
    denials = torch.tensor([not holds], dtype=torch.float32, device=unit.device)
    collectives.start_all_reduce(denials, unit.group_name, "sum")
    collectives.wait(denials)
    return denials.item() == 0


def wants_order_check(module: nn.Module) -> bool:
    """Whether an iteration of the root `module` is to be compared."""
    return module.training and dist.get_debug_level() == dist.DebugLevel.DETAIL


class OrderCheck:
    """Compares the order in which units run in forward: among ranks at first, later with the first iteration.

    Args:
        module: the root. A unit's number is its place among all units of the root, equal on all ranks.
    """

    def __init__(self, module: Any) -> None:
        self.names = _describe(module)
        self.numbers = {unit: number for number, unit in enumerate(self.names)}
        self.first: list[int] = []
        self.is_fixed = False  # whether the first iteration has come to its end
        self.place = 0
        self.warned = False

    def begin(self) -> None:
        """An iteration starts."""
        self.place = 0
        if not self.is_fixed:
            self.first.clear()

    def next(self, unit: Unit) -> None:
        """`unit` is about to run.

        Raises:
            RuntimeError: in the first iteration, on all ranks: a rank runs another one.
        """
        self._note(self.numbers[unit])

    def end(self) -> None:
        """The iteration has run to its end. Raises as `next` does if another rank still has units to run."""
        self._note(len(self.names))
        self.is_fixed = True

    def _note(self, number: int) -> None:
        if not self.is_fixed:
            self._compare_ranks(number)
            self.first.append(number)
        elif not self.warned and (self.place >= len(self.first) or self.first[self.place] != number):
            self.warned = True
            expected = self.first[self.place] if self.place < len(self.first) else len(self.names)
            warnings.warn(
                f"order of units: expected {self._name(expected)} next, as in the first iteration, found "
                f"{self._name(number)}; prefetching works for one order, and ranks must change it together",
                UserWarning,
                stacklevel=2,
            )
        self.place += 1

    def _compare_ranks(self, number: int) -> None:
        group = next(iter(self.names)).group
        device = next(iter(self.names)).device
        mine = torch.tensor([len(self.names), number], device=device)
        found = collectives.all_gather(mine, group.size(), group.group_name).view(-1, 2).tolist()
        if all(each == found[0] for each in found):
            return
        ranks = dist.get_process_group_ranks(group)
        if any(count != len(self.names) for count, _ in found):
            said = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in zip(ranks, found, strict=True))
            raise RuntimeError(f"order of units: expected equally many units on all ranks, found {said}; build and "
                               f"shard the same model on all")  # fmt: skip
        said = "; ".join(f"rank {rank}: {self._name(next)}" for rank, (_, next) in zip(ranks, found, strict=True))
        raise RuntimeError(
            f"order of units: expected the same unit next on all ranks after {self.place} equal ones, found {said}; "
            f"let forward call the same modules in the same order on all ranks"
        )

    def _name(self, number: int) -> str:
        return list(self.names.values())[number] if number < len(self.names) else "the end of forward"


def _describe(module: nn.Module) -> dict[Unit, str]:
    """The units of `module` and below, each once, with words for messages."""
    names: dict[Unit, str] = {}
    for path, each in module.named_modules():
        for unit in each.__dict__.get("_fsdp_scope", ()):
            some = ", ".join(unit.names[:3]) + (", ..." if len(unit.names) > 3 else "")
            names.setdefault(unit, f"{path or type(each).__name__} ({some})")
    return names
