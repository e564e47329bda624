"""Parameters and the optimizer's state leave for host memory between steps, and come back."""

import gc
import operator
from typing import Any

import pytest
import torch
from models import MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

from fsdp_compile import load, offload
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from .ranks import NIGHTLY, on_ranks
from .training import OPTIMIZERS, assert_bitwise, backward, executor, mine, shard

GPT = MODELS["gpt"]
TIMES = 50 if NIGHTLY else 10


def _bytes_alive() -> int:
    gc.collect()
    tensors: Any = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter, ShardedTensor)]
    storages = [getattr(each, "local", each).untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def _memory(tensors: list[Any]) -> dict[int, Any]:  # which keeps it, so that no other tensor gets its address
    memory = (each.to_local().untyped_storage() for each in tensors)
    return {each.data_ptr(): each for each in memory if each.nbytes()}


@pytest.mark.parametrize(
    ("how", "parameters", "states"),
    [("eager", True, True), ("aot_eager", True, True), ("eager", True, False), ("eager", False, True)],
)
@on_ranks(2)
def test_sleep_and_wake(how: str, parameters: bool, states: bool) -> None:
    """Many times within and between steps, whole or in part: each step has the bits of a model that stays awake,
    asleep its values can be read, parameters stay the objects they were, nothing is compiled again, and no more memory
    is alive after each. On the CPU host memory is other memory of the same device.
    """
    model, reference = shard(GPT), shard(GPT)
    run = executor(model, how)
    optimizers = [OPTIMIZERS["adamw"](each.parameters()) for each in (model, reference)]
    params, sleeper = list(model.parameters()), optimizers[0] if states else None
    alive: list[int] = []
    for step in range(TIMES):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            backward(run, GPT, mine(GPT, step % 3))
        backward(reference, GPT, mine(GPT, step % 3))
        for moment in ("with gradients", "after the step"):
            before, of_states = _memory(params), _memory(_tensors_of(optimizers[0]))
            offload(run, sleeper, parameters=parameters)
            asleep, states_asleep = _memory(params), _memory(_tensors_of(optimizers[0]))
            assert (before.keys().isdisjoint(asleep), len(before)) == (parameters, len(asleep))
            assert not of_states or of_states.keys().isdisjoint(states_asleep) == states
            assert len(of_states) == len(states_asleep)  # what shares memory shares it there
            assert_bitwise(model, reference, f"{step}, asleep {moment}")
            load(run, sleeper, parameters=parameters)
            if moment == "with gradients":
                for optimizer in optimizers:
                    optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert all(map(operator.is_, params, model.parameters()))
        alive.append(_bytes_alive() if step in (TIMES // 5, TIMES - 1) else 0)
    assert_bitwise(model, reference, "at the end")
    found = [[value for state in each.state.values() for value in state.values()] for each in optimizers]
    for one, other in zip(*found, strict=True):
        assert type(one) is type(other) and torch.equal(*(getattr(each, "local", each) for each in (one, other)))
    assert alive[-1] == alive[TIMES // 5] > 0


@on_ranks(2)
def test_refused() -> None:
    """Within a forward, with gradients that are not reduced; and of a model that is not sharded or in host memory."""
    with pytest.raises(ValueError, match="expected one that fully_shard was called on, found a Linear"):
        offload(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected one without CPUOffload"):
        load(shard(GPT, cpu_offload=CPUOffload(offload_params=True)))
    model = shard(GPT)

    def within(*_: Any) -> None:
        with pytest.raises(ValueError, match="in its forward or backward"):
            offload(model)

    hook = model.head.register_forward_hook(within)
    model(mine(GPT, 0)[0])
    hook.remove()
    with model.no_sync():
        backward(model, GPT, mine(GPT, 0))
    with pytest.raises(RuntimeError, match="gradients from no_sync that are not reduced"):
        offload(model)
