"""`check` on models of transformers, diffusers, timm and torchvision that no other test has."""

from importlib import import_module

import pytest
from unseen import UNSEEN

from fsdp_compile.tools.check import check

from .ranks import Ranks

pytestmark = pytest.mark.nightly  # up to two minutes each


def _check(rank: int, name: str) -> None:
    report = check(UNSEEN[name].make, UNSEEN[name].batch, ways=["eager", "aot_eager"])
    print(report)
    assert not report.faults, str(report)
    assert any(row.way == "eager" for row in report.rows)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_model(two: Ranks, name: str) -> None:
    """It trains sharded as it does unsharded, with accumulation and behind a load."""
    try:
        import_module(UNSEEN[name].library)
    except (ImportError, RuntimeError) as error:  # torchvision built for another torch raises the latter
        pytest.skip(f"{UNSEEN[name].library} cannot be imported: {error}")
    two.run(_check, name)
