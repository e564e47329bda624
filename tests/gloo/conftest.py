"""Pools of ranks that all tests of the session share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .ranks import START, Ranks


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the files of all pools; Inductor's caches in it serve them all."""
    return tmp_path_factory.mktemp("ranks")


def _pool(world_size: int, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(world_size, folder, differs=world_size == 2 and START != "fork")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one(folder: Path) -> Iterator[Ranks]:
    """One rank."""
    yield from _pool(1, folder)


@pytest.fixture(scope="session")
def two(folder: Path) -> Iterator[Ranks]:
    """Two ranks."""
    yield from _pool(2, folder)


@pytest.fixture(scope="session")
def three(folder: Path) -> Iterator[Ranks]:
    """Three ranks."""
    yield from _pool(3, folder)


@pytest.fixture(scope="session")
def four(folder: Path) -> Iterator[Ranks]:
    """Four ranks."""
    yield from _pool(4, folder)
