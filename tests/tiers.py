"""Which tests run: those of every day, or with FSDP_COMPILE_TESTS=nightly all. This module imports no torch."""

import os

import pytest

NIGHTLY = os.environ.get("FSDP_COMPILE_TESTS") == "nightly"
LATE = pytest.mark.nightly
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)
both_ways = pytest.mark.parametrize("how", ["eager", "aot_eager"])
compiled_late = pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=LATE)])
