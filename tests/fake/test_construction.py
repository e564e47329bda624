"""Odd shapes, settings of units, devices and refusals of `fully_shard`; on a fake group."""

import inspect
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RANK, WORLD_SIZE
from models import Residual, mlp
from refusing import local, managed, refused, units
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compile import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compile.api import shard_module

# --- parameters of unusual shapes -------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A linear layer times a 0-d parameter, plus a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.shape == () and self.empty.shape == (0, 3)
        return self.linear(x) * self.scale + self.empty.sum()


@pytest.mark.parametrize(
    ("second", "are_refused"),
    [
        (lambda w: w.data, True),
        (lambda w: w.data[:2], True),
        (lambda w: w.data.t()[1:], True),
        (lambda w: w.data.view(torch.int32).view(torch.float32)[3:], True),
        (lambda w: w.data.clone(), False),
    ],
)
def test_parameters_that_share_memory(second: Any, are_refused: bool) -> None:
    """Tied by their data and not as one object, they would go apart in training: refused by name, if either trains."""
    model = nn.Linear(4, 4, bias=False)
    model.other = nn.Parameter(second(model.weight))
    if are_refused:
        with pytest.raises(ValueError, match=r"parameters weight and other share memory, .*one nn\.Parameter"):
            fully_shard(model)
        model.requires_grad_(False)
    fully_shard(model)


def test_parameters_in_one_buffer_without_common_elements() -> None:
    """Columns, or what a file of many tensors was read into."""
    model, buffer = nn.Module(), torch.arange(12.0).view(3, 4)
    for index, data in enumerate((buffer[:, 0], buffer[:, 1:3], buffer[:2, 3], buffer.flatten()[11:])):
        model.register_parameter(f"part{index}", nn.Parameter(data))
    fully_shard(model)


def test_scalars_are_sharded() -> None:
    """A 0-d parameter is laid out like any other and is 0-d again in forward (E-FLAT-11, E-LIM-12, E-ERR-58)."""
    model = fully_shard(Scaled())
    (unit,) = units(model)
    assert any(spec.shape == () for spec in unit.specs)
    assert managed(model) == {"scale", "linear.weight", "linear.bias", "empty"}
    model(torch.ones(1, 3)).sum().backward()
    record = unit.records[unit.names.index("scale")]
    assert model.scale.shape == () and local(model.scale).shape == ((1,) if record else (0,))


def test_units_without_elements() -> None:
    """A unit whose parameters have no elements has no data and no collective; it runs and trains (E-FLAT-12)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 0))
    fully_shard(model, auto_wrap_policy={nn.Linear})
    assert model[1]._fsdp.units == () and model[1].weight.shape == (0, 3)
    assert len(units(model)) == 1
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_graphs_from_before(strategy: str) -> None:
    """Backward through a graph from before raises, where its gradients would be lost, for a module, a function and a
    parameter alone; later steps are right. Under NO_SHARD a parameter shares the shard's version counter."""
    for compute in (lambda m: m(torch.ones(1, 3)).sum(), lambda m: m.scale * 2, lambda m: m.linear.weight.norm()):
        model = Scaled()
        before = compute(model)
        fully_shard(model, sharding_strategy=ShardingStrategy[strategy])
        with pytest.raises(RuntimeError, match=r"parameter of shape \(.*\) through a graph from before it was sharded"):
            before.backward()
        model(torch.ones(1, 3)).sum().backward()
        assert model.scale.grad is not None
        (flat,) = units(model)[0].flats
        version = flat.shard._version
        with torch.no_grad():
            model.linear.weight.mul_(2)
        assert flat.shard._version > version


# --- settings of units ------------------------------------------------------------------------------------------------


def alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(WORLD_SIZE)][RANK]


def test_no_strategy() -> None:
    """The plan of a compiled step decides what is freed; with FSDP1's wrapper it is FULL_SHARD (E-STRAT-8)."""
    assert {unit.reshard_after_forward for unit in units(fully_shard(mlp(), sharding_strategy=None))} == {None}
    assert {unit.reshard_after_forward for unit in units(FullyShardedDataParallel(mlp()))} == {True}
    hybrid = fully_shard(mlp(), mesh=init_device_mesh("cpu", (1, WORLD_SIZE)))
    assert {unit.reshard_after_forward for unit in units(hybrid)} == {None}


def test_a_custom_policy_sets_what_the_wrapper_takes() -> None:
    """A module may have other arguments than the model: those that torch's wrapper passes on to it (E-INIT-5)."""
    model, group = mlp(), alone()
    with torch.device("meta"):
        model.blocks[1] = Residual(11, 23)
    made: list[nn.Module] = []
    prefetching = {"backward_prefetch": None, "forward_prefetch": True, "use_orig_params": True}
    own = {
        model.blocks[0]: {"cpu_offload": CPUOffload(True), "limit_all_gathers": True, **prefetching},
        model.blocks[1]: {"param_init_fn": lambda module: made.append(module.to_empty(device="cpu", recurse=False))},
        model.blocks[2]: {"process_group": group, "device_id": "cpu", "sync_module_states": False},
    }
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda module: own.get(module, False)))
    (first,), (second,), (third,) = (units(block) for block in model.blocks)
    assert [unit.settings.offload for unit in (first, second, third)] == [True, False, False]
    assert [unit.group.find() for unit in (first, second, third)] == [dist.group.WORLD, dist.group.WORLD, group]
    assert {id(module) for module in made} == {id(module) for module in model.blocks[1].modules()}


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"mixed": 1, "depth": 2}, ValueError, "module blocks.1: a unit may differ in sharding_strategy, .*, "
         "use_orig_params, not in depth, mixed"),
        ({"mixed_precision": "bf16"}, TypeError, "module blocks.1: mixed_precision: expected a MixedPrecision "
         "or None, found str"),
        ({"limit_all_gathers": False}, ValueError, "module blocks.1: limit_all_gathers must be True"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ValueError, "module blocks.1: HYBRID_SHARD in a "
         "model of FULL_SHARD needs other process groups; use hybrid strategies for all units or for none"),
    ],
)  # fmt: skip
def test_settings_that_units_cannot_have(own: dict[str, Any], error: type[Exception], message: str) -> None:
    """Settings that only the call has, or that need other groups: an error with module and setting (E-INIT-5)."""
    model = mlp()
    policy = CustomPolicy(lambda module: own if module is model.blocks[1] else False)
    refused(model, error, f"auto_wrap_policy, {message}", auto_wrap_policy=policy)


def test_containers_warn() -> None:
    """What has no forward that would gather it: UserWarning with its path (E-INIT-2, E-ERR-37, E-LIM-20)."""
    made = {
        nn.ModuleList: lambda: nn.ModuleList([nn.Linear(2, 2)]),
        nn.ModuleDict: lambda: nn.ModuleDict({"m": nn.Linear(2, 2)}),
        nn.ParameterList: lambda: nn.ParameterList([torch.ones(2)]),
        nn.ParameterDict: lambda: nn.ParameterDict({"p": torch.ones(2)}),
    }
    for kind, make in made.items():
        message = f"a {kind.__name__} has no forward, so its own parameters are never gathered"
        with pytest.warns(UserWarning, match=f"module model: {message}"):
            fully_shard(make())
        with pytest.warns(UserWarning, match=f"module 0: {message}"):
            fully_shard(nn.Sequential(make()), auto_wrap_policy={kind})


def test_warnings_point_at_the_caller() -> None:
    """A warning names the line that called `fully_shard`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=DeviceMesh.from_group(alone(), "cpu"))
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)] * 2


@pytest.mark.parametrize(
    ("variable", "value", "is_on"),
    [
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "1", True),
        ("FSDP_USE_FULL_PREC_IN_EVAL", "1", True),
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "true", False),
        ("FSDP_COMPILE_FULL_PREC_IN_EVAL", "0", False),
    ],
)
def test_a_switch_is_read_when_units_are_made(variable: str, value: str, is_on: bool) -> None:
    """What counts is the environment of the call of `fully_shard`, and the value 1 alone (E-ENV-6)."""
    with mock.patch.dict(os.environ, {variable: value}):
        model = fully_shard(mlp())
    assert model._fsdp.settings.full_precision_in_eval == is_on


# --- devices and broadcast --------------------------------------------------------------------------------------------


def test_broadcast_needs_tensors_that_the_group_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU buffer outside of what is moved, in a group for accelerators: ValueError with its name.

    E-SYNC-4, E-ERR-65.
    """
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr("fsdp_compile.construct.prepare.compute_device", lambda *_: torch.device("cpu"))
    message = r"parameter blocks.0.up.weight is on cpu, .* cannot send from \(cuda\), .*; pass device_id"
    refused(mlp(), ValueError, message, sync_module_states=True)
    monkeypatch.setattr("fsdp_compile.construct.prepare.compute_device", lambda *_: torch.device("cuda:0"))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    refused(model, ValueError, "buffer 1.running_mean is on cpu", sync_module_states=True, ignored_modules=[model[1]])


def test_batch_norms_are_announced() -> None:
    """With mixed precision and a policy that was given, exempt classes are units of their own: a warning (E-INIT-6)."""
    for policy in ({nn.Linear}, ModuleWrapPolicy({nn.Linear})):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with pytest.warns(UserWarning, match="modules of BatchNorm1d become units of their own, without mixed"):
            fully_shard(model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(torch.bfloat16))
    for quiet in ({}, {"auto_wrap_policy": {nn.Linear}}, {"mixed_precision": MixedPrecision(torch.bfloat16)}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            shard_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **quiet)


# --- parameters that cannot be sharded --------------------------------------------------------------------------------


def test_tensor_parallel_parameters_may_be_ignored() -> None:
    """A slice of a larger mesh is a mesh to shard over; what its other dimension distributes stays if it is listed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = mlp()
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"], ignored_states=list(model.head.parameters()))
    assert {type(param) for param in model.head.parameters()} == {DTensor}
    assert managed(model) == {name for name, _ in model.named_parameters() if not name.startswith("head")}
    assert all(dist.get_process_group_ranks(unit.group.find()) == [1, 3] for unit in units(model))
