"""Gradient factors."""

import pytest

from fsdp_compile.core.flat_collectives import gradient_divide_factors

BEFORE = {1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 4, 8: 4, 12: 4, 16: 4, 32: 8, 64: 8, 100: 8}


def test_gradient_divide_factors() -> None:
    """The table of E-PG-11. For every number of ranks pre x post is that number, and pre is a power of two."""
    for ranks in range(1, 300):
        before, after = gradient_divide_factors(ranks)
        assert before == BEFORE.get(ranks, before) and int(before).bit_count() == 1
        assert before * after == pytest.approx(ranks)
