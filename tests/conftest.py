"""Its being here puts this folder on `sys.path`: every tier can import `models`."""

import os

import pytest
from tiers import NIGHTLY

# Before torch is imported, here and in what tests start: a pool of compilers would import it again for each process,
# and to try which vectors the machine has takes ten seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", str(int(NIGHTLY)))  # by day not behind each graph


def is_nightly(item: pytest.Item) -> bool:
    """Whether a test is marked so, or is the compiled variant of one that has other strategies than FULL_SHARD.

    What these strategies change in a graph is shown by their rows of the feature table and by tests/fake.
    """
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    repeats = params.get("strategy") in ("SHARD_GRAD_OP", "NO_SHARD") and params.get("how") in (
        "aot_eager",
        "inductor",
        "backend",
    )
    return repeats or item.get_closest_marker("nightly") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly tests, unless FSDP_COMPILE_TESTS=nightly asks for them."""
    if NIGHTLY:
        return
    late = [item for item in items if is_nightly(item)]
    config.hook.pytest_deselected(items=late)
    items[:] = [item for item in items if item not in late]
