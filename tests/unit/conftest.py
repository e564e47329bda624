"""What several files of this tier start from."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def emulated() -> Iterator[None]:
    """Rank 0 of 8 on an emulated link that takes no time; every graph is planned anew."""
    import torch
    import torch.distributed as dist

    from bench.link import FREE, start

    torch._dynamo.reset()
    start(8, 0.0, FREE)
    with torch._inductor.config.patch(force_disable_caches=True):  # on a hit nothing is planned
        yield
    dist.destroy_process_group()
