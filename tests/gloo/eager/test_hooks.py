"""Hooks of users on sharded modules, beside FSDP2, whose gather and reshard are hooks themselves."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from fsdp_compile import fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import NIGHTLY, on_ranks
from ..wire import per_unit, wire

LOW = stock.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

Seen = list[tuple[str, bool]]


class Scaled(nn.Module):
    """A linear layer and a weight of the module's own, which hooks read."""

    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.inside = inside or nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inside(x @ self.weight).tanh() * scale


def _model(seen: Seen, backward: bool) -> nn.Module:
    """A root and a block with hooks of all kinds; with `backward` those that Dynamo does not trace as well."""
    torch.manual_seed(0)
    model = Scaled(Scaled())

    def note(kind: str, module: Any) -> Tensor:
        weight: Tensor = module.weight
        seen.append((kind, not isinstance(weight, (DTensor, ShardedTensor))))
        return weight

    def replace_input(module: nn.Module, args: tuple) -> tuple:
        return (args[0] @ note("pre-forward", module),)

    def replace_both(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return (args[0] * note("pre-forward with kwargs", module).mean(),), {**kwargs, "scale": 0.5}

    def replace_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output @ note("forward", module)

    def replace_with_kwargs(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return output + note("forward with kwargs", module).sum() * kwargs["scale"]

    def note_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        note("backward", module)

    def note_pre_backward(module: nn.Module, grad_output: Any) -> None:
        note("pre-backward", module)

    for module in (model, model.inside):
        module.register_forward_pre_hook(replace_input)
        module.register_forward_pre_hook(replace_both, with_kwargs=True)
        module.register_forward_hook(replace_output)
        module.register_forward_hook(replace_with_kwargs, with_kwargs=True)
        if backward:
            module.register_full_backward_hook(note_backward)
            module.register_full_backward_pre_hook(note_pre_backward)
    return model


def _batch(rank: int | None = None) -> Tensor:
    torch.manual_seed(1)
    whole = torch.rand(6, 4)
    return (whole if rank is None else whole.chunk(2)[rank]).requires_grad_()


def _run(model: nn.Module, inputs: Tensor, run: Callable[..., Tensor]) -> None:
    model.zero_grad()
    run(inputs, scale=2.0).square().mean().backward()


def _gradients(model: nn.Module, inputs: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
    _run(model, inputs, run)
    return _full_gradients(model)


def _full_gradients(model: nn.Module) -> list[Tensor]:
    grads: list[Any] = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, (DTensor, ShardedTensor)) else grad for grad in grads]


@on_ranks(2)
def test_hooks_see_unsharded_weights(rank: int) -> None:
    """All kinds of hooks, on a unit and on a root, compute with complete weights: gradients as in one process."""
    for backward in (True, False):
        seen_here: Seen = []
        seen_there: Seen = []
        ours, theirs = _model(seen_here, backward), _model(seen_there, backward)
        expected = _gradients(alone_model := copy.deepcopy(ours), _batch(), alone_model)
        alone, seen_here[:] = seen_here[:], []
        assert [kind for kind, _ in alone]
        for each in (theirs.inside, theirs):
            stock.fully_shard(each)
        for each in (ours.inside, ours):
            fully_shard(each, auto_wrap_policy=None)
        torch.testing.assert_close(_gradients(theirs, _batch(rank), theirs), expected)
        for _ in range(2):
            seen_here.clear()
            torch.testing.assert_close(_gradients(ours, _batch(rank), ours), expected)
            assert seen_here == alone, (seen_here, alone)
        assert [kind for kind, unsharded in seen_there if not unsharded] == ["pre-backward"] * backward
    for how in (torch.compile(ours, backend="aot_eager", fullgraph=True), ours.inside):
        if how is ours.inside:
            for each in (ours.inside, ours):
                each.compile(backend="aot_eager", fullgraph=True)
            how = ours
        for _ in range(2):
            seen_here.clear()
            with wire() as calls:
                _run(ours, _batch(rank), how)
            torch.testing.assert_close(_full_gradients(ours), expected)
            assert seen_here == alone, (seen_here, alone)
            assert max(per_unit(ours, calls, "gather")) <= 2 and per_unit(ours, calls, "reduce") == [1, 1]


def _dtypes(rank: int, shard: Callable[..., Any]) -> list[Any]:
    """What hooks around casts see, and those of all modules; `always_call` after an error; other entries."""
    seen: list[Any] = []
    model = Scaled()
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, output: output * 2)
    shard(model, mp_policy=LOW)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0].dtype))
    output = model(_batch(rank), scale=1)
    output.sum().backward()
    seen.append(output.dtype)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(tuple(module.weight.shape)) if module is model else None
    )
    model(_batch(rank))
    handle.remove()
    last = model.register_forward_hook(lambda module, *_: seen.append(type(module).__name__), always_call=True)
    try:
        model(_batch(rank)[:, :2])
    except RuntimeError:
        seen.append("error")
    last.remove()
    seen.append(model(_batch(rank)).dtype)
    return seen


@on_ranks(2)
def test_hooks_see_what_casts_leave(rank: int) -> None:
    """Inputs are cast before hooks, outputs before later hooks; a forward that raises leaves the module usable."""
    assert _dtypes(rank, fully_shard) == _dtypes(rank, stock.fully_shard)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@on_ranks(2)
def test_weights_that_hooks_compute(rank: int) -> None:
    """Old weight_norm, spectral_norm and prune, on units and within: gradients and buffers as in one process."""
    for name, norm in NORMS.items():
        compiles = name == "spectral_norm" or (name == "weight_norm" and NIGHTLY)
        for how in ("eager", "aot_eager") if compiles else ("eager",):
            pairs = []
            for shards in (False, True):
                torch.manual_seed(0)
                model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()))
                if shards:
                    fully_shard(model[0])
                    fully_shard(model, auto_wrap_policy=None)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                if how == "aot_eager" and shards:
                    model.compile(backend=how, fullgraph=True)
                for _ in range(2):
                    grads = _gradients(model, _batch(rank if shards else None), lambda x, scale, model=model: model(x))
                    optimizer.step()
                model.eval()
                output = model(_batch())
                buffers = [buffer.clone() for buffer in model.buffers()]
                pairs.append([*grads, *buffers, output.detach()])
            torch.testing.assert_close(*pairs, msg=lambda text, at=(name, how): f"{at}: {text}")
