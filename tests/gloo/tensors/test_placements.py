"""Public readers of placements in torch, on sharded parameters: right, or an error that says why, never another value.

Readers are what `grep placements` finds in torch 2.11, 2.13 and 2.14 outside of what DTensor does within itself.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_chunk_from_dtensor, _create_write_items_for_dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import fully_shard

from ..ranks import Ranks, on_ranks

CASES: dict[str, Any] = {"cut": ((33, 7), {}), "rows": ((12, 16), {}), "guaranteed": ((12, 16), {"shards": "rows"})}
ELSEWHERE = [Replicate()]


def values(param: Any) -> Tensor:
    return torch.arange(1.0, param.numel() + 1).view(param.shape)


def same(found: Any, expected: Tensor) -> bool:
    return torch.equal((found.full_tensor() if hasattr(found, "full_tensor") else found).detach(), expected)


def by_helper(p: Any, _: Any = None) -> bool:
    """Whether the box that is announced holds what `to_local` gives."""
    size, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    box = values(p)[tuple(slice(start, start + count) for start, count in zip(offset, size, strict=True))]
    return torch.equal(p.to_local().detach().reshape(size), box)


def by_placement(p: Any, _: Any) -> bool:
    size, offset = p.placements[0].local_shard_size_and_offset(p.shape[0], 2, p.device_mesh.get_local_rank())
    return torch.equal(p.to_local().detach().reshape(size, *p.shape[1:]), values(p)[offset : offset + size])


def mapped(p: Any, placements: Any, redistribute: bool) -> bool:
    options: Any = {"redistribute_inputs": redistribute, "device_mesh": p.device_mesh}
    summed: Any = ELSEWHERE if placements is ELSEWHERE else [Partial()]
    return same(local_map(torch.sum, summed, (placements,), **options)(p.detach()), values(p).sum())


def copied(p: Any, _: Any) -> bool:
    other = pickle.loads(pickle.dumps(p.placements))
    equal = other == copy.deepcopy(p.placements) == p.placements != (Shard(0),) and hash(other) == hash(p.placements)
    return equal and p.placements[0].is_shard(0)


def counted(p: Any, model: Any) -> bool:
    with CommDebugMode() as mode:
        model(torch.ones(2, model.in_features))
    return bool(mode.get_total_counts() >= 0)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "compute_local_shape_and_global_offset": by_helper,
    "local_shard_size_and_offset": by_placement,
    "full_tensor": lambda p, m: same(p, values(p)),
    "redistribute": lambda p, m: same(p.redistribute(placements=ELSEWHERE), values(p)),
    "redistribute to Shard(0)": lambda p, m: same(p.redistribute(placements=[Shard(0)]), values(p)),
    "redistribute to its own": lambda p, m: p.redistribute(placements=p.placements) is p,
    "redistribute another to its own": lambda p, m: same(
        distribute_tensor(values(p), p.device_mesh, ELSEWHERE).redistribute(placements=p.placements), values(p)
    ),
    "distribute_tensor": lambda p, m: same(distribute_tensor(values(p), p.device_mesh, p.placements), values(p)),
    "distribute_tensor of it": lambda p, m: distribute_tensor(p, p.device_mesh, p.placements) is p,
    "... to Shard(0)": lambda p, m: same(distribute_tensor(p, p.device_mesh, [Shard(0)]), values(p)),
    "from_local": lambda p, m: same(
        DTensor.from_local(p.to_local().detach(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()),
        values(p),
    ),
    "... without a shape": lambda p, m: same(
        DTensor.from_local(p.to_local().detach(), p.device_mesh, p.placements), values(p)
    ),
    "ones": lambda p, m: same(
        dtensor.ones(p.shape, device_mesh=p.device_mesh, placements=p.placements), torch.ones(p.shape)
    ),
    "local_map": lambda p, m: mapped(p, [Shard(0)], False),
    "local_map, redistributed": lambda p, m: mapped(p, [Shard(0)], True),
    "local_map of all": lambda p, m: mapped(p, ELSEWHERE, True),
    "to_local's gradient": lambda p, m: same(p.to_local(grad_placements=ELSEWHERE), values(p)),
    "visualize_sharding": lambda p, m: visualize_sharding(p) is None,
    "CommDebugMode": counted,
    "pickle": copied,
    "parallelize_module": lambda p, m: parallelize_module(m, p.device_mesh, {"": ColwiseParallel()}),
    "distribute_module": lambda p, m: distribute_module(m, p.device_mesh) is m and same(p, values(p)),
    "FSDP2 over it": lambda p, m: bool(fsdp.fully_shard(nn.Sequential(m), mesh=p.device_mesh)) and same(p, values(p)),
    "assert_close": lambda p, m: torch.testing.assert_close(p.detach(), values(p)) is None,
    "it and a DTensor": lambda p, m: same(
        p.detach() + distribute_tensor(values(p), p.device_mesh, [Shard(0)]), 2 * values(p)
    ),
    "a DTensor and it": lambda p, m: same(
        distribute_tensor(values(p), p.device_mesh, [Shard(0)]) + p.detach(), 2 * values(p)
    ),
}
SAYS = ("shard", "placement", "DTensor", "rows", "full_tensor", "tabulate", "Invariant")  # one is in each error


@on_ranks(2)
def test_readers() -> None:
    """Each reader is right, or raises an error that says what is sharded how: of rows, ranges and guaranteed rows."""
    found = {}
    for what, (shape, options) in CASES.items():
        for kind in ("weight", "bias"):
            for name, reader in READERS.items():
                linear = nn.Linear(*reversed(shape))
                for param in linear.parameters():
                    param.data.copy_(values(param))
                model: Any = fully_shard(linear, **options)
                try:
                    said = "right" if reader(getattr(model, kind), model) is True else "WRONG"
                except Exception as error:
                    says = any(each in str(error) for each in SAYS)
                    said = f"{'raises' if says else 'SAYS NOTHING'} {type(error).__name__}: {str(error)[:200]}"
                found[f"{what} {kind}: {name}"] = said
    silent = [f"{name}: {said}" for name, said in found.items() if not said.startswith(("right", "raises"))]
    assert not silent, "\n".join(silent)
    right = {name for name, said in found.items() if said == "right"}
    for helper in ("compute_local_shape_and_global_offset", "local_shard_size_and_offset"):
        assert {f"{what} {kind}: {helper}" for what in ("rows", "guaranteed") for kind in ("weight", "bias")} <= right
        assert f"cut weight: {helper}" not in right
    assert len(right) >= 70, "\n".join(f"{name}: {said}" for name, said in found.items())


@on_ranks(4)
def test_beside_tensor_parallelism() -> None:
    """The helper is right, or refuses, of what tensor parallelism has split before, on one mesh or another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for style, is_right in ((RowwiseParallel(), True), (ColwiseParallel(), False)):
        for given in (mesh["dp"], None):
            linear = nn.Linear(8, 16, bias=False)
            linear.weight.data.copy_(values(linear.weight))
            parallelize_module(linear, mesh["tp"], style)
            group = {"mesh": given} if given else {"process_group": mesh["dp"].get_group()}
            weight: Any = fully_shard(linear, **group).weight
            if is_right and given:
                assert by_helper(weight)
            else:
                with pytest.raises(ValueError, match="which are no rows of the tensor"):
                    by_helper(weight)


def net(seed: int = 0) -> nn.Sequential:
    """Rows of 16, 48 and 12 elements, and biases."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 12), nn.Linear(12, 5))


def exported(model: nn.Module) -> dict[str, Tensor]:
    """A weight exporter: each rank announces which rows it has, and sends them."""
    found = {}
    for name, param in model.named_parameters():
        size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        rows: Any = param.to_local().detach()
        assert tuple(rows.shape) == tuple(size) == tuple(param._local_tensor.shape), name
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, (offset[0] if rows.numel() else 0, rows))
        found[name] = torch.full(param.shape, torch.nan)
        for first, piece in pieces:
            found[name][first : first + len(piece)] = piece
    return found


def _rows(rank: int, folder: str) -> None:
    expected, model = net().state_dict(), fully_shard(net(), shards="rows", auto_wrap_policy=None)
    assert all(torch.equal(value, expected[name]) for name, value in exported(model).items())
    for name, param in model.named_parameters():
        spec = param._spec
        assert (spec.mesh, spec.placements, spec.shape) == (param.device_mesh, param.placements, param.shape), name
        assert spec.tensor_meta.stride == param.stride() and spec == param._spec and {spec} == {param._spec}
        (squares,) = torch.autograd.grad(param.to_local().square().sum(), param)
        assert torch.equal(squares.full_tensor(), 2 * expected[name])
    state, other = model.state_dict(), fully_shard(net(1), shards="rows", auto_wrap_policy=None).state_dict()
    kind: Any = type(state["0.weight"])
    with pytest.MonkeyPatch.context() as patch:
        for name, planned in PLANNERS.items():
            patch.setattr(kind, name, planned)
        dcp.save(state, checkpoint_id=folder)
        dcp.load(other, checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in expected.items()}
    dcp.load(rows, checkpoint_id=folder)
    for name, value in expected.items():
        assert same(other[name], value) and same(rows[name], value), name
        assert state[name].spec.is_one_chunk_on_all_ranks  # for writers that keep one item of each name


PLANNERS = {  # as torch plans for DTensors
    "__create_write_items__": lambda tensor, name, _: [_create_write_items_for_dtensor(name, tensor)],
    "__create_chunk_list__": lambda tensor: [_create_chunk_from_dtensor(tensor)],
    "__get_tensor_shard__": lambda tensor, _: tensor.detach().to_local(),
}


def test_rows(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """Shape, offset, `to_local`, `_local_tensor` and `_spec` say the same rows, which torch's own planner saves and
    loads, and the gradient of what is computed from them arrives."""
    two.run(_rows, str(tmp_path / "two"))
    four.run(_rows, str(tmp_path / "four"))


@on_ranks(2)
def test_rows_that_cannot_be() -> None:
    """Rows that no padding of 2 % lets ranks share, and numbers, are refused by name, and nothing was changed."""
    model = nn.Sequential(nn.Linear(7, 33))
    refused = r"parameter 0.weight, shape \(33, 7\): on 2 ranks a shard ends within a row; .* padding changes that"
    with pytest.raises(ValueError, match=refused):
        fully_shard(model, shards="rows", auto_wrap_policy=None)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="parameter scale is a number"):
        fully_shard(model, shards="rows", auto_wrap_policy=None)
    with pytest.raises(ValueError, match="shards: expected 'any' or 'rows', found 'columns'"):
        fully_shard(model, shards="columns")  # type: ignore[call-overload]  # that is refused
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
