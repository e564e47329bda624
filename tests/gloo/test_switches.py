"""Environment switches, also by the names of torch's wrapper: each is on at exactly "1", is read when a unit is made,
and does what docs/ say.
"""

import logging
import os
from unittest import mock

import pytest
import torch
from models import MODELS

from fsdp_compile.core import environment
from fsdp_compile.core.environment import Switches

from .ranks import Ranks
from .training import backward, build, local, mine, shard, stored_here, units
from .wire import wire

MLP = MODELS["mlp"]


class _Heard(logging.Handler):
    """Keeps what the package's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


def _leave_out(rank: int, variable: str, value: str, strategy: str) -> tuple[list[str], list[str]]:
    heard, log = _Heard(), logging.getLogger("fsdp_compile")
    log.addHandler(heard)
    try:
        with mock.patch.dict(os.environ, {variable: value}), mock.patch.object(environment, "_warned", set()):
            model = shard(MLP, strategy)
            shard(MLP, strategy)
        with wire() as sent:
            backward(model, MLP, mine(MLP, 1))
            with torch.no_grad():
                model(mine(MLP, 1)[0])
    finally:
        log.removeHandler(heard)
    if (variable, value, strategy) == ("FSDP_COMPILE_FAKE_REDUCE", "1", "FULL_SHARD"):
        _check_local_gradients(model)
    return sorted({each.kind for each in sent}), heard.said


def _check_local_gradients(model: torch.nn.Module) -> None:
    """Without the reduce, each rank keeps its slice of its own gradients."""
    reference = build(MLP)
    backward(reference, MLP, mine(MLP, 1))
    for (name, param), full in zip(model.named_parameters(), reference.parameters(), strict=True):
        here = stored_here(param, full.grad) if full.grad is not None else None
        assert (param.grad is None) == (full.grad is None), name
        if here is not None:
            torch.testing.assert_close(local(param.grad), here)


@pytest.mark.parametrize(
    ("variable", "value", "strategy", "kinds"),
    [
        ("FSDP_COMPILE_FAKE_ALL_GATHER", "1", "FULL_SHARD", ["reduce"]),
        ("FSDP_COMPILE_FAKE_REDUCE", "1", "FULL_SHARD", ["gather"]),
        ("FSDP_COMPILE_FAKE_REDUCE", "1", "NO_SHARD", ["all_reduce"]),
        ("FSDP_USE_FAKE_REDUCE", "1", "FULL_SHARD", ["gather"]),
        ("FSDP_COMPILE_FAKE_ALL_GATHER", "true", "FULL_SHARD", ["gather", "reduce"]),
        ("FSDP_COMPILE_FAKE_REDUCE", "0", "FULL_SHARD", ["gather", "reduce"]),
        ("FSDP_FAKE_REDUCE", "1", "FULL_SHARD", ["gather", "reduce"]),
    ],
)
def test_left_out_collectives(two: Ranks, variable: str, value: str, strategy: str, kinds: list[str]) -> None:
    """For timing, gathers or reduce-scatters can be left out; one logged warning says that results are wrong.

    E-ENV-4..6, E-ERR-36.
    """
    on = value == "1" and variable.startswith(("FSDP_COMPILE", "FSDP_USE"))
    for found, said in two.run(_leave_out, variable, value, strategy):
        assert found == kinds
        assert len(said) == on and all(f"WARNING {variable}=1: " in line and "wrong" in line for line in said), said


def _make_under_a_switch(rank: int) -> Switches:
    with mock.patch.dict(os.environ, {"FSDP_COMPILE_FULL_PREC_IN_EVAL": "1"}):
        model = shard(MLP)
    return units(model)[0].switches  # the variable is gone again


def test_switches_are_read_when_units_are_made(two: Ranks) -> None:
    """What counts is the environment of the call of `fully_shard` (E-ENV-6)."""
    assert two.run(_make_under_a_switch) == [Switches(full_precision_in_eval=True)] * 2
