"""Backends of torch.compile that are not ours, operators that hold a graph of their own, methods that graphs ignore."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import small
from models import mlp
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed.fsdp import ShardingStrategy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from fsdp_compile import fully_shard
from fsdp_compile.agree import rank_order as order
from fsdp_compile.construct import units as construct_units

NO_SHARD = ShardingStrategy.NO_SHARD


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.nightly), "aot_eager"])
def test_without_our_passes_what_is_gathered_stays_and_a_warning_says_so(backend: str) -> None:
    """FULL_SHARD in a graph that no pass of ours has seen keeps what its forward gathered; the first run warns."""
    order._warn_of_other_backend.cache_clear()
    with pytest.warns(UserWarning, match="stays in memory until backward, and no communication is hidden"):
        torch.compile(fully_shard(mlp()), backend=backend)(torch.randn(2, 7))


@pytest.mark.parametrize(
    ("how", "strategy", "syncs"),
    [
        ("eager", "FULL_SHARD", True),
        ("module", "NO_SHARD", True),
        pytest.param("blocks", "FULL_SHARD", False, marks=pytest.mark.nightly),
        pytest.param("module", "FULL_SHARD", False, marks=pytest.mark.nightly),
        pytest.param("inductor", "FULL_SHARD", True, marks=pytest.mark.nightly),
    ],
)
def test_compiled_autograd_is_refused(how: str, strategy: str, syncs: bool) -> None:
    """Backward raises, also under no_sync, and the next one is as if that step had not been."""
    torch._dynamo.reset()
    model: Any = small()
    with mock.patch.object(construct_units, "_worth_a_collective", return_value=1):  # a flat parameter for each
        fully_shard(model, auto_wrap_policy={nn.Linear}, sharding_strategy=ShardingStrategy[strategy])
    if how in ("blocks", "inductor"):  # whose graphs start reduces themselves
        model[0].compile(backend="aot_eager" if how == "blocks" else "inductor")
    run = torch.compile(model, backend="aot_eager") if how == "module" else model
    inputs = torch.randn(2, *[next(iter(model.parameters())).shape[1]])
    model.set_requires_gradient_sync(syncs)
    refusal = r"\.(weight|bias): compiled autograd cannot"  # of the flat parameter whose gradient comes first
    if strategy == "FULL_SHARD" and how != "module":  # it unpacks all saved tensors before any unit is gathered
        refusal += r"|its base has been modified inplace|is at version 10000\d+"
    with _enable(torch.compile(backend="eager")), pytest.raises(Exception, match=refusal):
        run(inputs).sum().backward()
    model.set_requires_gradient_sync(True)
    run(inputs).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("how", ["eager", "blocks"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_changes_of_saved_tensors_are_refused(how: str, strategy: str) -> None:
    """Forward raises within the context that saves what is overwritten, and runs again outside of it."""
    model: Any = small()
    fully_shard(model, auto_wrap_policy={nn.Linear}, sharding_strategy=ShardingStrategy[strategy])
    if how == "blocks":
        model[0].compile(backend="aot_eager")
    with allow_mutation_on_saved_tensors(), pytest.raises(RuntimeError, match=r"0\.weight: .* within .*saved_tensors"):
        model(torch.randn(2, 3))
    with allow_mutation_on_saved_tensors(), torch.no_grad():
        model(torch.randn(2, 3))
    model(torch.randn(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


class _Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sin()
        result = self.down(hidden.exp())
        hidden.zero_()  # which `exp` and `down` have saved
        return result


@pytest.mark.parametrize("how", ["eager", "blocks"])
def test_saved_tensors_may_change_where_nothing_is_gathered(how: str) -> None:
    """Under NO_SHARD gradients in the context are those of an unsharded model."""
    torch.manual_seed(0)
    plain = nn.Sequential(_Overwrites())
    model: Any = fully_shard(copy.deepcopy(plain), auto_wrap_policy={_Overwrites}, sharding_strategy=NO_SHARD)
    if how == "blocks":
        model[0].compile(backend="aot_eager")
    for each in (plain, model):
        with allow_mutation_on_saved_tensors():
            each(torch.linspace(-1, 1, 6).view(2, 3)).sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


class _Branches(nn.Module):
    """A choice between two functions, which `reads` the parameter in them or computes with it before."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.layer = reads, nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.reads:
            return torch.cond(x.sum() > 0, lambda x: self.layer(x).sin(), lambda x: self.layer(x).cos(), (x,))
        return self.layer(torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.layer(x),)))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_control_flow_operators(reads: bool, hooked: bool) -> None:
    """Behind torch.cond a compiled forward ends as others do, though Dynamo loses changes of attributes there."""
    model: Any = nn.Sequential(_Branches(reads), _Branches(reads))
    for block in model:
        fully_shard(block)
        if hooked:
            block.register_forward_hook(lambda *call: 2 * call[-1])
    fully_shard(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    grads = []
    for each in (model, run, run, model):
        for param in model.parameters():
            param.grad = None
        each(x).sum().backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
        assert all(block._fsdp.units[0].unsharded_params is None for block in model)
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0])


RECORDERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
    "make_fx": lambda model, x: make_fx(model)(x),
    "export": lambda model, x: torch.export.export(model, (x,)),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True),
}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_recording_is_refused(recorder: str) -> None:
    """What records a sharded model, or a block of it, says what to do; the model trains on as before."""
    model: Any = fully_shard(small(), auto_wrap_policy={nn.Linear})
    for each in (model, model[0]):
        model(torch.randn(2, 3)).sum().backward()
        with pytest.raises(Exception, match=r"is sharded: torch\.export, torch\.jit\.trace and make_fx cannot record"):
            RECORDERS[recorder](each, torch.randn(2, 3))
        for param in model.parameters():
            param.grad = None
        model(torch.randn(2, 3)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


def test_pickling_is_refused() -> None:
    """A sharded module cannot be pickled, which `torch.save(model)` would do; it runs on."""
    model: Any = fully_shard(small(), auto_wrap_policy={nn.Linear})
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(model)
    model(torch.randn(2, 3)).sum().backward()


class _Keeps(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight, self.when, self.kept = nn.Parameter(torch.ones(3, 3)), when, dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and self.when == "evaluation":
            self.kept["turned"] = self.weight.t()
        if self.when == "training":
            self.turned = self.weight.t()
        return x @ self.weight + self.weight.t().clone()[:2]


@pytest.mark.parametrize("when", ["never", "evaluation", "training"])
def test_views_that_modules_keep(when: str) -> None:
    """A view of a parameter that outlives its forward is warned of in the first forward of each mode, and once."""
    model: Any = fully_shard(nn.Sequential(_Keeps(when), nn.Linear(3, 3)), auto_wrap_policy={_Keeps})
    texts = []
    for enabled in (True, False, True, False):
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(enabled):
            warnings.simplefilter("always")
            model(torch.ones(2, 3))
        texts.append([str(each.message) for each in caught if "keeps a view of gathered" in str(each.message)])
    name, first = ("kept", [0, 1]) if when == "evaluation" else ("turned", [1, 1])
    assert list(map(len, texts)) == ([0] * 4 if when == "never" else [*first, 0, 0])
    assert all(f"_Keeps keeps a view of gathered parameters as {name}: " in text for each in texts for text in each)


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


@pytest.mark.parametrize("how", ["eager", "module", "function"])
def test_ranks_compare_their_units_once(how: str) -> None:
    """Before the first forward, eager or compiled, and not before later ones."""
    model = fully_shard(small())
    run = {"eager": model, "module": torch.compile(model, backend="eager")}.get(
        how, torch.compile(lambda x: model(x), backend="eager")
    )
    with mock.patch.object(model._fsdp_runtime.heard, "compare", (mock.Mock(return_value=True),)) as (compare,):
        for _ in range(3):
            run(torch.ones(2, 3))
    compare.assert_called_once_with(model, mock.ANY, how != "eager")
