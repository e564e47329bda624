"""Its being here puts this folder on `sys.path`: every tier can import `models`."""

import os

import pytest

# Before torch is imported, here and in what tests start: a pool of compilers would import it once more for each process,
# and to try which vectors the machine has takes ten seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `nightly`, unless FSDP_COMPILE_TESTS=nightly asks for them."""
    if os.environ.get("FSDP_COMPILE_TESTS") == "nightly":
        return
    late = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if item not in late]
