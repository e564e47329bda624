"""What tests run inside the ranks: a sharded model next to an unsharded one that sees every rank's part of the batch.

reference, model = reference_and_model(case)                      equal initial values
model = executor(model, "aot_eager")                how to run it
follow(model, reference, case)                      train both; same gradients and parameters at each step
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import Case, Inputs, part
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

PER_RANK = 3  # examples that a rank sees of a batch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    """The case's model, the same for the same seed."""
    torch.manual_seed(seed)
    return case.build().to(torch.get_default_device())


def shard(case: Case, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    """The case's model, sharded over all ranks."""
    return fully_shard(build(case), sharding_strategy=ShardingStrategy[strategy], **options)


def reference_and_model(case: Case, strategy: str = "FULL_SHARD") -> tuple[nn.Module, nn.Module]:
    """The model unsharded and sharded, with equal values."""
    return build(case), shard(case, strategy)


def executor(model: nn.Module, how: str) -> nn.Module:
    """The model as it is run: "eager", "inductor" (the default), "backend" (ours) or the name of a backend."""
    if how == "eager":
        return model
    backends: dict[str, Any] = {"inductor": "inductor", "backend": fsdp_compile_backend}
    return torch.compile(model, backend=backends.get(how, how), fullgraph=True)


def whole(case: Case, seed: int) -> Inputs:
    """A global batch, equal on all ranks."""
    return case.batch(seed, PER_RANK * dist.get_world_size())


def mine(case: Case, seed: int) -> Inputs:
    """This rank's part of it."""
    return part(whole(case, seed), dist.get_rank(), dist.get_world_size())


def backward(model: nn.Module, case: Case, inputs: Inputs) -> Tensor:
    """Forward and backward; the loss."""
    loss = case.loss(model, inputs)
    loss.backward()
    return loss.detach()


def follow(model: nn.Module, reference: nn.Module, case: Case, steps: int = 2, first_seed: int = 100) -> None:
    """Train both from where they are, on fresh batches; assert equal gradients, then equal parameters, at each step.

    After the first of these steps nothing may be compiled again.
    """
    both = [OPTIMIZERS["momentum"](m.parameters()) for m in (model, reference)]
    for seed in range(first_seed, first_seed + steps):
        for optimizer in both:
            optimizer.zero_grad()
        backward(reference, case, whole(case, seed))
        with torch._dynamo.config.patch(error_on_recompile=seed > first_seed):
            backward(model, case, mine(case, seed))
        assert_same_gradients(model, reference)
        for optimizer in both:
            optimizer.step()
        assert_same_parameters(model, reference)


# --- comparing sharded with full tensors ------------------------------------------------------------------------------


def units(model: nn.Module) -> list[Unit]:
    """The units of a sharded model, each once, in the order in which modules reach them."""
    return list(dict.fromkeys(unit for module in model.modules() for unit in getattr(module, "_fsdp_units", ())))


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters by name, gathered from all ranks."""
    found = {name: param.detach() for name, param in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, ShardedTensor) else p.clone() for name, p in found.items()}


def stored_here(param: nn.Parameter, full: Tensor) -> Tensor | None:
    """What this rank stores of `full`, a tensor in the full shape of the sharded `param`; None if nothing."""
    found = unit_of(param)
    assert found is not None, "expected a sharded parameter"
    unit, index = found
    record = unit.records[index]
    return full.reshape(-1)[record.first : record.last + 1].view_as(local(param)) if record else None


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a sharded tensor, 1-D; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """The gradients of sharded parameters are this rank's slices of the unsharded model's."""
    for name, param, expected in _paired(model, reference):
        if expected.grad is None:
            assert param.grad is None, f"{name}.grad: expected None, found {param.grad}"
            continue
        assert param.grad is not None, f"{name}.grad: expected {expected.grad}, found None"
        here = stored_here(param, expected.grad)
        if here is not None:
            # float32 rounds a small element beside large ones, with an error that the large ones set
            atol = 1e-6 * max(1.0, *expected.grad.abs().flatten().tolist())
            torch.testing.assert_close(
                local(param.grad), here, rtol=1e-4, atol=atol, check_device=False, msg=_say(f"{name}.grad")
            )


def assert_same_parameters(model: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Sharded parameters are this rank's slices of the unsharded model's."""
    for name, param, expected in _paired(model, reference):
        here = stored_here(param, expected.detach())
        if here is not None:
            torch.testing.assert_close(
                local(param.detach()), here, rtol=rtol, atol=atol, check_device=False, msg=_say(name)
            )


def assert_bitwise(ours: nn.Module, theirs: nn.Module, when: str) -> None:
    """Two models that are sharded alike, or not at all, have equal parameters and gradients, bit for bit."""
    for name, one, other in _paired(ours, theirs):
        _assert_equal(local(one), local(other), f"{when}: {name}")
        assert (one.grad is None) == (other.grad is None), f"{when}: {name}.grad: {one.grad} against {other.grad}"
        if one.grad is not None and other.grad is not None:
            _assert_equal(local(one.grad), local(other.grad), f"{when}: {name}.grad")


def _assert_equal(one: Tensor, other: Tensor, what: str) -> None:
    assert torch.equal(one.cpu(), other.cpu()), f"{what} differs by {(one.cpu() - other.cpu()).abs().sum()}"


def _paired(model: nn.Module, reference: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Name, parameter of the one and of the other model; compiled ones share the parameters of what they run."""
    others = {clean_name(name): param for name, param in reference.named_parameters()}
    found = {clean_name(name): param for name, param in model.named_parameters()}
    assert list(found) == list(others), f"expected parameters {list(others)}, found {list(found)}"
    return ((name, param, others[name]) for name, param in found.items())


def _say(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"
