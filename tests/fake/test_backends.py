"""Backends of torch.compile that are not ours, operators that hold a graph of their own, methods that graphs ignore."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from compiling import small
from models import mlp
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.attention.flex_attention import flex_attention

from fsdp_compile import fully_shard
from fsdp_compile.eager import order


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_without_our_passes_what_is_gathered_stays_and_a_warning_says_so(backend: str) -> None:
    """FULL_SHARD in a graph that no pass of ours has seen keeps what its forward gathered; the first run warns."""
    order._warn_of_other_backend.cache_clear()
    with pytest.warns(UserWarning, match="stays in memory until backward, and no communication is hidden"):
        torch.compile(fully_shard(mlp()), backend=backend)(torch.randn(2, 7))


EACH_TWO = {  # each value with each value of another parameter; the other triples are nightly
    ("eager", "FULL_SHARD", True), ("blocks", "FULL_SHARD", False), ("module", "FULL_SHARD", True),
    ("eager", "NO_SHARD", False), ("blocks", "NO_SHARD", True), ("module", "NO_SHARD", False),
}  # fmt: skip
TRIPLES = [
    pytest.param(*each, marks=() if each in EACH_TWO else pytest.mark.nightly)
    for each in product(("eager", "blocks", "module"), ("FULL_SHARD", "NO_SHARD"), (True, False))
]


@pytest.mark.parametrize(("how", "strategy", "syncs"), TRIPLES)
def test_compiled_autograd_is_refused(how: str, strategy: str, syncs: bool) -> None:
    """Backward raises, also under no_sync, and the next one is as if that step had not been."""
    torch._dynamo.reset()
    model: Any = small()
    fully_shard(model, auto_wrap_policy={nn.Linear}, sharding_strategy=ShardingStrategy[strategy])
    if how == "blocks":
        model[0].compile(backend="aot_eager")
    run = torch.compile(model, backend="aot_eager") if how == "module" else model
    inputs = torch.randn(2, *[next(iter(model.parameters())).shape[1]])
    model.set_requires_gradient_sync(syncs)
    with _enable(torch.compile(backend="eager")), pytest.raises(Exception, match=r"\.weight: compiled autograd cannot"):
        run(inputs).sum().backward()
    model.set_requires_gradient_sync(True)
    run(inputs).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("how", ["eager", "blocks"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_changes_of_saved_tensors_are_refused(how: str, strategy: str) -> None:
    """Forward raises within the context that saves what is overwritten, and runs again outside of it."""
    model: Any = small()
    fully_shard(model, auto_wrap_policy={nn.Linear}, sharding_strategy=ShardingStrategy[strategy])
    if how == "blocks":
        model[0].compile(backend="aot_eager")
    with allow_mutation_on_saved_tensors(), pytest.raises(RuntimeError, match=r"0\.weight: .* within .*saved_tensors"):
        model(torch.randn(2, 3))
    model(torch.randn(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        together = self.project(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        queries, keys, values = (each.relu() for each in together)  # on the CPU torch 2.11 takes no views of one tensor
        return flex_attention(queries, keys, values, score_mod=lambda score, b, h, i, j: score + (i - j)).sum()


@torch.no_grad()  # on the CPU it has no backward
def test_operators_with_a_subgraph_are_priced() -> None:
    """Inductor compiles a sharded model with `flex_attention`, whose `score_mod` is a graph in an argument."""
    assert torch.compile(fully_shard(nn.Sequential(_Attention())))(torch.randn(2, 16, 32)).shape == ()


# --- methods that compiled steps do not follow ------------------------------------------------------------------------

ONLY_EAGER: dict[str, Callable[[Any], Any]] = {
    "set_modules_to_forward_prefetch": lambda model: model.set_modules_to_forward_prefetch([model[0]]),
    "set_modules_to_backward_prefetch": lambda model: model.set_modules_to_backward_prefetch([model[0]]),
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "set_reshard_after_backward": lambda model: model[0].set_reshard_after_backward(False),
    "set_post_optim_event": lambda model: model.set_post_optim_event(torch.Event("cpu")),
    "unshard": lambda model: model[0].unshard(),
}


@pytest.mark.parametrize("how", ["eager", "blocks", "module", "function"])
def test_methods_without_effect_on_a_compiled_step(how: str) -> None:
    """Each method that a compiled step does not follow says so once, by its name, and not where it has its effect."""
    model: Any = small()
    if how == "blocks":
        model[0].compile(backend="aot_eager")
    for unit in (model[0], model):
        fully_shard(unit, auto_wrap_policy=None)
    step: Callable[[Tensor], Tensor] = model
    if how in ("module", "function"):
        step = torch.compile(model if how == "module" else lambda x: model(x), backend="aot_eager")
    found: list[str] = []
    for name, choose in ONLY_EAGER.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                choose(model)
                step(torch.ones(2, 3)).sum().backward()
        said = [str(each.message) for each in caught if "no effect on a compiled" in str(each.message)]
        assert len(said) <= 1 and all(each.startswith(name) for each in said)
        found += [name] * len(said)
    assert found == (list(ONLY_EAGER) if how in ("module", "function") else [])
