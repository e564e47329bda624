"""`fsdp-compile selfcheck` on a GPU: all rows hold, and those about memory and streams find seeded faults."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_compile import fully_shard
from fsdp_compile import selfcheck as module
from fsdp_compile.compare.training import Training
from fsdp_compile.selfcheck import selfcheck

GPU = torch.device("cuda", 0)
STEP = Training.step
KEPT: list[torch.Tensor] = []


def test_all_rows_hold() -> None:
    """Values, order, memory, streams, speed; the latter with figures of all five systems."""
    report = selfcheck(GPU)
    assert report.holds, str(report)
    found = {row.name: row.found for row in report.rows}
    assert found["streams"] == "no wait of the host for the device in a step of eager, compiled, step"
    assert "a step leaves none behind" in found["memory"]
    assert report.speed is not None and [row.system for row in report.speed.ran] == list(module.SPEED)


def _reads(training: Training, batch: Any) -> torch.Tensor:
    loss = STEP(training, batch)
    loss.item()
    return loss


def _idles(training: Training, batch: Any) -> torch.Tensor:
    torch.cuda.synchronize()
    return STEP(training, batch)


@pytest.mark.parametrize(("step", "called"), [(_reads, "cudaStreamSynchronize in "), (_idles, "cudaDeviceSynchronize")])
def test_a_wait_of_the_host_is_found(step: Callable[..., Any], called: str) -> None:
    """Reading a value, and waiting for the whole device, within the step."""
    with (
        mock.patch.object(Training, "step", step),
        pytest.raises(AssertionError, match=f"eager: the host waits for the device within a step: {called}"),
    ):
        module._check_streams(GPU)


def test_memory_that_is_kept_is_found() -> None:
    """A step that leaves a tensor behind."""

    def leaking(model: Any) -> Any:
        fully_shard(model).register_forward_hook(lambda *_: KEPT.append(torch.empty(1000, device=GPU)))
        return model

    with (
        mock.patch.object(module, "fully_shard", leaking),
        pytest.raises(AssertionError, match="a step leaves 4,096 bytes behind"),
    ):
        module._check_memory(GPU)
