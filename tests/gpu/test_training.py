"""Training on a GPU: the sharded state against the plain module, run eagerly and in torch.compile's modes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import MODELS, Case
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsdp_compile import CPUOffload, MixedPrecision, fully_shard
from fsdp_compile.passes.inductor import fsdp_compile_backend

STEPS = 5
HOWS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "inductor": lambda model: torch.compile(model, fullgraph=True),
    "backend": lambda model: torch.compile(model, fullgraph=True, backend=fsdp_compile_backend),
    "reduce-overhead": lambda model: torch.compile(model, fullgraph=True, mode="reduce-overhead"),
    "max-autotune": lambda model: torch.compile(model, fullgraph=True, mode="max-autotune"),
}


def _train(case: Case, how: str, sharded: bool, **options: Any) -> list[Tensor]:
    """The parameters in full, on the CPU, after a few steps."""
    torch.manual_seed(0)
    model = case.build().cuda()
    if sharded:
        fully_shard(model, **options)
    run, optimizer = HOWS[how](model), torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = tree_map(lambda value: value.cuda() if isinstance(value, Tensor) else value, case.batch(step, 4))
        case.loss(run, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().cpu().reshape(-1) for param in model.parameters()]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["gpt", "mlp", "tied", "conv"])
def test_parity(name: str, how: str) -> None:
    """The sharded model trains as the plain one does; CUDA graphs and autotuned products change rounding alone."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    expected = _train(MODELS[name], "eager", sharded=False)
    for found, whole in zip(_train(MODELS[name], how, sharded=True), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-5)


def test_steady_state_compiles_nothing() -> None:
    """Under CUDA graphs too, steps after the first compile nothing."""
    torch._dynamo.utils.counters.clear()
    _train(MODELS["mlp"], "reduce-overhead", sharded=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- streams ----------------------------------------------------------------------------------------------------------


@contextmanager
def _synchronised() -> Iterator[None]:
    """Every module's forward and backward starts when the device has nothing left to do."""

    def idle(*_: Any) -> None:
        torch.cuda.synchronize()

    handles = [
        nn.modules.module.register_module_forward_pre_hook(idle),
        nn.modules.module.register_module_full_backward_pre_hook(idle),
    ]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("offload", [False, True])
def test_streams_order_all_that_they_share(offload: bool) -> None:
    """Casts, copies from and to host memory, and frees run in streams: the same bits as with a device kept idle."""
    options = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32), "cpu_offload": CPUOffload(offload)}
    case = Case(lambda: MODELS["mlp"].build(), MODELS["mlp"].batch, _in_single)
    free = _train(case, "eager", sharded=True, **options)
    with _synchronised():
        bound = _train(case, "eager", sharded=True, **options)
    assert all(map(torch.equal, free, bound))


def _in_single(model: nn.Module, inputs: Any) -> Tensor:
    return nn.functional.mse_loss(model(*inputs[:-1]).float(), inputs[-1])
