"""Pools of ranks that all tests of the session share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .ranks import POOLS, START, Ranks


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the files of all pools; Inductor's caches in it serve them all."""
    return tmp_path_factory.mktemp("ranks")


def _pool(count: int) -> Any:
    @pytest.fixture(scope="session", name=POOLS[count])
    def pool(folder: Path) -> Iterator[Ranks]:
        """So many ranks."""
        ranks = Ranks(count, folder, differs=count == 2 and START != "fork")
        yield ranks
        ranks.stop()

    return pool


one, two, three, four = map(_pool, POOLS)
