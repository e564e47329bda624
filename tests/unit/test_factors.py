"""Gradient factors."""

import pytest

from fsdp_compile.core.flat_collectives import gradient_divide_factors

TABLE = {
    1: (1, 1),
    2: (2, 1),
    3: (2, 1.5),
    4: (2, 2),
    5: (2, 2.5),
    6: (4, 1.5),
    8: (4, 2),
    12: (4, 3),
    16: (4, 4),
    32: (8, 4),
    64: (8, 8),
    100: (8, 12.5),
}


@pytest.mark.parametrize("ranks", TABLE)
def test_gradient_divide_factors(ranks: int) -> None:
    """The table of E-PG-11; the product of both factors is the number of ranks."""
    assert gradient_divide_factors(ranks) == TABLE[ranks]


def test_factors_multiply_to_the_number_of_ranks() -> None:
    """For every number of ranks pre x post is that number, and pre is a power of two (E-PG-11)."""
    for ranks in range(1, 300):
        before, after = gradient_divide_factors(ranks)
        assert before * after == pytest.approx(ranks) and int(before).bit_count() == 1
