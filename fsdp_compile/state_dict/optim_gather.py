"""Optimizer state in full: ranks tell each other what state they have, as none stores some of every parameter; then
parameter after parameter is gathered.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateDictConfig
from torch.distributed.tensor import DTensor

from fsdp_compile.comm import collectives
from fsdp_compile.state_dict.optim_values import State, empty
from fsdp_compile.state_dict.pieces import managed


class _Entry(NamedTuple):
    """One value of a parameter's state, as ranks tell each other of it."""

    is_tensor: bool
    dtype: torch.dtype | None
    is_number: bool
    value: Any  # unless a tensor


def gathered(
    params: dict[str, nn.Parameter],
    states: dict[str, State],
    config: OptimStateDictConfig,
    keep: bool,
    group: dist.ProcessGroup,
) -> dict[str, State]:
    """All state in full, parameter after parameter; nothing is kept unless `keep`."""
    entries = _agree(params, states, group)
    full: dict[str, State] = {}
    for name in params:
        for key, entry in entries.get(name, {}).items():
            value = _full_value(params[name], states.get(name, {}).get(key), entry)
            if keep:
                full.setdefault(name, {})[key] = to_cpu(value) if config.offload_to_cpu else value
    return full


def to_cpu(value: Any) -> Any:
    """A tensor on the CPU; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value


def _full_value(param: nn.Parameter, mine: Any, entry: _Entry) -> Any:
    found = managed(param)
    if not entry.is_tensor:
        return entry.value
    if found is None:
        return mine.clone()
    if mine is None:
        like = torch.empty(() if entry.is_number else 1, dtype=entry.dtype, device=param.device)
        mine = empty(found, like)
    return mine.full_tensor() if isinstance(mine, DTensor) else mine


def _agree(
    params: dict[str, nn.Parameter], states: dict[str, State], group: dist.ProcessGroup
) -> dict[str, dict[str, _Entry]]:
    """What state each parameter has on the ranks that store some of it. RuntimeError on all ranks if they differ."""
    mine = {
        name: {key: _entry(value) for key, value in states.get(name, {}).items()}
        for name, param in params.items()
        if (found := managed(param)) is None or found.is_here
    }
    told = collectives.gather_objects((list(params), mine), group)
    for rank, (found_names, _) in enumerate(told):
        if found_names != list(params):
            raise RuntimeError(
                f"optim_state_dict: expected the same parameters in the same order on all ranks, found "
                f"{_first_difference(told[0][0], found_names)} on ranks 0 and {rank} of the group"
            )
    agreed: dict[str, dict[str, _Entry]] = {}
    for rank, (_, entries) in enumerate(told):
        for name, found_entries in entries.items():
            expected = agreed.setdefault(name, found_entries)
            if _kinds(found_entries) != _kinds(expected):
                raise RuntimeError(
                    f"optimizer state of parameter {name}: expected the same on all ranks that store some of it, found "
                    f"{_kinds(expected)} and on rank {rank} of the group {_kinds(found_entries)}"
                )
    return agreed


def _entry(value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry(False, None, True, value)
    return _Entry(True, value.dtype, value.dim() == 0, None)


def _kinds(entries: dict[str, _Entry]) -> dict[str, Any]:
    return {key: str(entry.dtype) if entry.is_tensor else type(entry.value).__name__ for key, entry in entries.items()}


def _first_difference(one: list[str], other: list[str]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a} and {b}"
    return f"{len(one)} and {len(other)} parameters"
