"""What `fully_shard` is told to leave alone; on a fake group."""

import pytest
import torch
from conftest import WORLD_SIZE
from models import mlp
from refusing import managed, refused, units
from torch import nn
from torch.distributed.tensor import init_device_mesh

from fsdp_compile import FSDPModule, FullyShardedDataParallel, fully_shard
from fsdp_compile.core.unit import unit_of


def names_below(model: nn.Module, *paths: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{path}." for path in paths))}


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_ignored_modules(argument: str) -> None:
    """An ignored module keeps its parameters as they are, with all below it; the rest is sharded (E-INIT-8, 9, 11)."""
    model = mlp()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    types = [type(module) for module in model.blocks[1].modules()]
    fully_shard(model, **{argument: {model.blocks[1], model.stem}})
    ignored = names_below(model, "blocks.1", "stem")
    assert managed(model) == set(before) - ignored
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters() if name in ignored)
    assert [type(module) for module in model.blocks[1].modules()] == types
    assert [isinstance(block, FSDPModule) for block in model.blocks] == [True, False, True]


def test_ignored_parameters_may_be_what_cannot_be_sharded() -> None:
    """What is ignored is not checked: another dtype, meta, or an integer type (E-INIT-11)."""
    model = mlp()
    model.odd = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    model.absent = nn.Parameter(torch.empty(3, device="meta"))
    fully_shard(model, ignored_states=iter([model.odd, model.absent]))
    assert model.absent.is_meta and unit_of(model.odd) is None


def test_what_nested_calls_ignored_stays_ignored() -> None:
    """An enclosing call does not take what a nested unit's call has left alone (E-INIT-9)."""
    model = mlp()
    fully_shard(model.blocks[1], auto_wrap_policy=None, ignored_modules=[model.blocks[1].up])
    fully_shard(model, ignored_states=[model.stem.bias])
    assert managed(model) == {n for n, _ in model.named_parameters()} - names_below(model, "blocks.1.up") - {
        "stem.bias"
    }


def test_nested_units_in_ignored_modules_are_units_still() -> None:
    """Ignoring a module covers its subtree but for nested units (E-INIT-9)."""
    model = mlp()
    fully_shard(model.blocks[1], auto_wrap_policy=None)
    fully_shard(model, ignored_modules=[model.blocks])
    assert managed(model) == names_below(model, "blocks.1", "stem", "head")
    assert units(model.blocks[1]) and not units(model.blocks[0])


def test_modules_of_another_sharding_api_are_ignored() -> None:
    """A submodule that torch's own `fully_shard` has is left to it (E-INIT-9)."""
    model = mlp()
    torch.distributed.fsdp.fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    fully_shard(model)
    assert managed(model) == {n for n, _ in model.named_parameters()} - names_below(model, "blocks.1")
    refused(model.blocks[1], ValueError, "module: torch has sharded this FSDPResidual already")


def test_ignoring_the_model_itself_warns() -> None:
    """UserWarning; then nothing is sharded (E-INIT-10, E-ERR-54)."""
    model = mlp()
    with pytest.warns(UserWarning, match="ignored modules: found the model itself, Stack; all of it is ignored"):
        fully_shard(model, ignored_modules=[model])
    assert not managed(model) and isinstance(model, FSDPModule)
    model(torch.ones(1, 7)).sum().backward()


def test_wrong_ignored_arguments() -> None:
    """Both, mixtures, other things, units: ValueError with the types in order; no iterable: TypeError.

    E-INIT-7, 8, E-ERR-52, 53, E-LIM-13.
    """
    model = mlp()
    refused(model, ValueError, "ignored_modules and ignored_states: pass only one of them",
            ignored_modules=[], ignored_states=[])  # fmt: skip
    refused(model, ValueError, "ignored_states: expected modules only or parameters only, found Linear, Parameter",
            ignored_states=[model.stem, model.stem.weight])  # fmt: skip
    refused(model, ValueError, "ignored_states: .*found Tensor, str", ignored_states=["stem", torch.ones(1)])
    refused(model, ValueError, "ignored_modules: expected modules, found Linear, Parameter",
            ignored_modules=[model.stem, model.stem.weight])  # fmt: skip
    refused(model, TypeError, "ignored_modules: expected an iterable, found int", ignored_modules=3)
    refused(model, TypeError, "ignored_states: expected an iterable, found Linear", ignored_states=model.stem)
    fully_shard(model.blocks[0])
    refused(model, ValueError, "FSDPResidual is sharded already; ignore it before", ignored_modules=[model.blocks[0]])
    model = mlp()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    refused(model, ValueError, "FullyShardedDataParallel is sharded already", ignored_modules=[model.blocks[0]])
