"""One process, one GPU, an NCCL group of one rank; all is skipped where there is no GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def nccl() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_compiler(nccl: None) -> None:
    torch._dynamo.reset()
