"""One process that plays rank 1 of 4 on a fake process group: collectives return at once, values are not real."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from generated import kernels_not_built
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log

WORLD_SIZE, RANK = 4, 1


@pytest.fixture(scope="package", autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="package", autouse=True)
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely: compilers make many objects, and looking at all of them takes a tenth of the time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of our own for Inductor's caches: another thread writes to them, whose configuration is not patched.

    A graph that was not built must not be found there by the next run, or by anybody else.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compile anew in every test, as passes do not run on a cache hit, up to the generated code and no further."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), kernels_not_built():
        yield


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Plan]:
    """The plans of the graphs that are compiled, by direction."""
    found: dict[str, Plan] = {}
    monkeypatch.setattr(plan_log, "debug", lambda _, direction, plan, **__: found.update({direction: plan}))
    return found
