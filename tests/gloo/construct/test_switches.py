"""The switch in the environment, also by the name of torch's wrapper: on at exactly "1", read when a unit is made."""

import os
from unittest import mock

import pytest
from models import MODELS

from fsdp_compile.core.sharding import sharding_of

from ..ranks import Ranks
from ..training import shard


def _make_under_a_switch(rank: int, variable: str, value: str) -> bool:
    with mock.patch.dict(os.environ, {variable: value}):
        model = shard(MODELS["mlp"])
    return sharding_of(model).settings.full_precision_in_eval  # the variable is gone again


@pytest.mark.parametrize(
    ("variable", "value", "is_on"),
    [
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "1", True),
        ("FSDP_USE_FULL_PREC_IN_EVAL", "1", True),
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "true", False),
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "0", False),
        ("FSDP_FULL_PREC_IN_EVAL", "1", False),
    ],
)
def test_a_switch_is_read_when_units_are_made(two: Ranks, variable: str, value: str, is_on: bool) -> None:
    """What counts is the environment of the call of `fully_shard`, and the value 1 alone (E-ENV-6)."""
    assert two.run(_make_under_a_switch, variable, value) == [is_on] * 2
