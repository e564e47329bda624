"""When parameters may be shown in full shape, and the methods of sharded modules that do."""

from typing import Any

import pytest
import torch
from models import MLP, MODELS
from tiers import all_strategies, compiled_late
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import FSDPModule, fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import assert_same_parameters, build, executor, follow, mine, reference_and_model, shard, units

# --- refusals ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_refused_combinations() -> None:
    """Combinations that are not offered raise NotImplementedError and name both options (E-SUM-2, E-ERR-44).

    The limits that are kept: edits by one rank alone, gradients in host memory (E-LIM-8, E-LIM-9).
    """
    reference, model = reference_and_model(MLP)
    combinations = {
        "rank0_only and writeback": dict(rank0_only=True),
        "with_grads and offload_to_cpu": dict(with_grads=True, offload_to_cpu=True),
    }
    for named, options in combinations.items():
        with pytest.raises(NotImplementedError, match=named), summon_full_params(model, **options):
            pass
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_nesting_is_refused() -> None:
    """It does not nest, nor allow apply, conversion, no_sync or unshard (E-SUM-4, E-STATE-4, E-ERR-46)."""
    reference, model = reference_and_model(MLP)
    with summon_full_params(model):
        for nested in (model, model.blocks[1], model.blocks[1].up):
            refused = pytest.raises(AssertionError, match=r"summon_full_params needs idle units.* inside summon")
            with refused, summon_full_params(nested):
                pass
        with pytest.raises(ValueError, match="no_sync needs idle units"), model.no_sync():
            pass
        with pytest.raises(ValueError, match="apply needs idle units"):
            model.apply(lambda module: None)
        with pytest.raises(ValueError, match="_apply needs idle units"):
            model.double()
        with pytest.raises(AssertionError, match="unshard needs sharded parameters"):
            model.unshard()
    follow(model, reference, MLP)


@all_strategies
@compiled_late
@on_ranks(2)
def test_no_forward_or_backward_inside(how: str, strategy: str) -> None:
    """A forward inside raises, but for an eager one under no_grad, and so does a backward; then all is well.

    E-FWD-12, E-SUM-14, E-LIM-7, E-ERR-10.
    """
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    follow(run, reference, MLP)
    loss = MLP.loss(run, mine(MLP, 1))
    with summon_full_params(model):
        with pytest.raises(Exception, match="needs sharded parameters") as caught:
            run(mine(MLP, 1)[0])
        if how == "eager":
            assert caught.type is AssertionError
            with torch.no_grad():
                torch.testing.assert_close(run(mine(MLP, 1)[0]), reference(mine(MLP, 1)[0]))
            with pytest.raises(AssertionError, match="backward needs sharded parameters"):
                loss.backward()
        else:
            with torch.no_grad(), pytest.raises(Exception, match="needs sharded parameters"):
                run(mine(MLP, 1)[0])
            if strategy != "NO_SHARD":
                with pytest.raises(RuntimeError, match="was replaced between forward and backward"):
                    loss.backward()
    model.zero_grad()
    follow(run, reference, MLP)


class _Summons(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refused = pytest.raises(AssertionError, match=r"summon_full_params needs idle units.* in its forward")
        with refused, summon_full_params(self):
            pass
        with pytest.raises(ValueError, match=r"apply needs idle units"):
            self.apply(lambda module: None)
        with pytest.raises(ValueError, match=r"reshard: .* is in its forward or backward"):
            self.reshard()
        return super().forward(x)


@on_ranks(2)
def test_not_in_forward_or_backward() -> None:
    """Inside a forward or backward it raises AssertionError, others ValueError, and say what the unit does.

    E-SUM-4, E-SUM-14, E-ERR-9, E-ERR-46, E-MOD-1, E-STATE-3, E-STATE-4.
    """
    model = fully_shard(_Summons(7, 5))
    output = model(torch.randn(3, 7))
    errors: list[Any] = []

    def hook(grad: torch.Tensor) -> None:
        with pytest.raises(AssertionError, match="summon_full_params needs idle"), summon_full_params(model):
            pass
        errors.append(1)

    output.register_hook(hook)
    output.sum().backward()
    assert errors


# --- apply, listing ---------------------------------------------------------------------------------------------------


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert module.weight.shape == (module.out_features, module.in_features)
        with torch.no_grad():
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / module.weight.numel() / 20)


@pytest.mark.parametrize("name", ["mlp", "tied", "gpt"])
@on_ranks(2)
def test_apply(name: str) -> None:
    """`apply` hands full parameters to its function and keeps the edits; roots stay roots (E-MOD-1, E-MOD-2)."""
    reference, model = reference_and_model(MODELS[name])
    seen: list[nn.Module] = []
    for each in (reference, model):
        assert each.apply(_initialise) is each
    assert_same_parameters(model, reference)
    model.apply(seen.append)
    assert [id(m) for m in seen][-1] == id(model) and len(seen) == sum(1 for _ in model.modules())
    assert all(each.is_root() == (each is model) for each in FSDPModule.fsdp_modules(model))
    follow(model, reference, MODELS[name])


@on_ranks(2)
def test_apply_gathers_one_unit_at_a_time() -> None:
    """While a unit's modules are visited only it and those around it are gathered (E-MOD-1)."""
    model = shard(MLP)
    most = []

    def look(module: nn.Module) -> None:
        most.append(sum(unit.summoned is not None for unit in units(model)))

    model.apply(look)
    assert max(most) == 2 and units(model)[0].summoned is None


@on_ranks(2)
def test_listing() -> None:
    """Sharded modules of any tree are listed, or its roots; containers keep len, iteration and indexing.

    E-MOD-5, E-MOD-7.
    """
    model = shard(MLP)
    both = nn.ModuleList([model, nn.Linear(2, 2), fully_shard(build(MLP))])
    listed = FSDPModule.fsdp_modules(both)
    assert listed == [m for m in both.modules() if isinstance(m, FSDPModule)] and len(listed) == 8
    assert FSDPModule.fsdp_modules(both, root_only=True) == [both[0], both[2]]
    assert len(model.blocks) == 3 and next(iter(model.blocks)) is model.blocks[0]
    sequence = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert len(sequence) == 2 and sequence[0] is next(iter(sequence))
