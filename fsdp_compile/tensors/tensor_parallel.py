"""Parameters that tensor or expert parallelism has distributed already, and that are sharded over data-parallel ranks.

    DTensor of shape (8, 4), Shard(0) on "tp"      what parallelize_module or distribute_tensor made
    its local tensor, (4, 4)                       what is laid out, split over data-parallel ranks, gathered, reduced
    ShardedTensor of shape (8, 4)                  what the optimizer has: this rank stores a range of the local tensor
    DTensor of shape (8, 4), Shard(0) on "tp"      what module code finds during forward and backward

`TensorParallel` says how the local tensor lies in the full one; see Note [Two meshes] there. A DTensor may also be
replicated over the data-parallel ranks, on a mesh that has dimensions for both: see Note [One mesh].
"""

# Note [Two meshes]
# The ranks form a grid: along one direction they have different data and split the parameters between them, along the
# other they split each parameter, as DTensor describes, and share the data. Units communicate along the first alone:
# all that a flat parameter knows of has the local shape, which the ranks of its process group agree on. What a user
# sees outside of forward has the full shape, so only what leads from local elements to full tensors and back, a
# `ShardSpec`, knows both. Gradients that arrive partial, as that of a norm whose input is split along the sequence, are
# reduced over the second direction by `_ReducePartial`: in the dtype of reduces, as that of the computation would round
# at each rank. The sum is cast to the latter, in which one rank would have computed the gradient.

# Note [One mesh]
# Where DTensors are `Replicate` on the data-parallel dimensions, as FSDP2 wants them with `dp_mesh_dims`, the model
# computes with DTensors on the whole mesh, whose inputs are split over these dimensions. So module code finds such
# DTensors again. The gradient of one is a sum over all data-parallel ranks, and each rank has an addend, which the unit
# reduces. It is labeled `Partial`, or `Replicate` where the module computes with `weight.to_local()`; as in FSDP2 the
# label of these dimensions is not looked at. Dynamo, which guesses what gradients are like, does not trace into
# `_ReducePartial`: AOTAutograd does, and sees the labels. All else knows the other dimensions alone.

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile.comm import collectives
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.core._torch import local_shape_and_offset, never_compile

_MARK = "_fsdp_tensor_parallel"  # on a parameter that was a DTensor: how it is distributed where module code finds it


@dataclass(frozen=True)
class TensorParallel:
    """How one tensor is distributed over the ranks of tensor or expert parallelism."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # for each dimension of the mesh a `Shard` or `Replicate`
    shape: torch.Size  # of the full tensor
    stride: tuple[int, ...]  # of it, contiguous. A field, because Dynamo reads it and traces no cached property
    summed: tuple[int, ...] = ()  # dimensions of the mesh over which gradients are addends of a sum: Note [One mesh]

    def over_others(self) -> "TensorParallel | None":
        """How it is distributed over the dimensions of the mesh that are not `summed`; None if there are no others."""
        others = [dim for dim in range(self.mesh.ndim) if dim not in self.summed]
        if not self.summed or not others:
            return None if self.summed else self
        mesh = self.mesh[tuple((self.mesh.mesh_dim_names or ())[dim] for dim in others)]
        return TensorParallel(mesh, tuple(self.placements[dim] for dim in others), self.shape, self.stride)

    @cached_property
    def local_box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and offsets in the full tensor of what this rank and its data-parallel peers have."""
        return local_shape_and_offset(self.shape, self.mesh, self.placements)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The names of the process groups whose ranks have different parts."""
        dims = [dim for dim, placement in enumerate(self.placements) if placement.is_shard()]
        return tuple(shared_name(self.mesh.get_group(dim)) for dim in dims)

    def distribute(self, local: Tensor, reduce_dtype: torch.dtype) -> Tensor:
        """As `from_local`, with a gradient that is reduced in that dtype."""
        distributed = self.from_local(local)
        return _reduce_partial(distributed, self.summed, reduce_dtype) if local.requires_grad else distributed

    def from_local(self, local: Tensor) -> Tensor:
        """The DTensor whose local tensor is `local`, of the local shape; differentiable, and nothing is copied."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def gather(self, local: Tensor) -> Tensor:
        """The full tensor, plain, on every rank of the mesh: they all take part."""
        with torch.no_grad():
            full: Tensor = self.from_local(local.detach()).full_tensor()  # type: ignore[attr-defined]  # a DTensor
        return full

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of a plain tensor that broadcasts to the full shape: a view."""
        missing = len(self.shape) - full.dim()
        for dim, (size, offset) in enumerate(zip(*self.local_box, strict=True)):
            if dim >= missing and full.shape[dim - missing] == self.shape[dim]:
                full = full.narrow(dim - missing, offset, size)
        return full

    def all_reduce(self, value: Tensor, op: str) -> Tensor:
        """Reduce `value`, plain, over the ranks that have different parts."""
        for group in self.groups:
            value = collectives.all_reduce(value, group, op)
        return value


class _ReducePartial(torch.autograd.Function):
    """A DTensor itself, whose gradient is reduced over its mesh but for the dimensions `summed`: Note [One mesh]."""

    @staticmethod
    def forward(ctx: Any, param: Any, summed: tuple[int, ...], reduce_dtype: torch.dtype) -> Any:
        ctx.set_materialize_grads(False)
        ctx.placements, ctx.summed, ctx.reduce_dtype = param.placements, summed, reduce_dtype
        return param.view_as(param)

    @staticmethod
    @never_compile
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
        if grad is None:
            return None, None, None
        pairs = enumerate(zip(grad.placements, ctx.placements, strict=True))
        wanted = tuple(of_grad if dim in ctx.summed else of_param for dim, (of_grad, of_param) in pairs)
        if grad.placements != wanted:
            grad = grad.to(ctx.reduce_dtype).redistribute(placements=wanted).to(grad.dtype)
        if wanted != ctx.placements:  # each rank's addend, which the unit reduces
            labeled = {"run_check": False, "shape": grad.shape, "stride": grad.stride()}
            grad = DTensor.from_local(grad.to_local(), grad.device_mesh, ctx.placements, **labeled)
        return grad, None, None


@torch.compiler.allow_in_graph
def _reduce_partial(param: Tensor, summed: tuple[int, ...], reduce_dtype: torch.dtype) -> Any:
    return _ReducePartial.apply(param, summed, reduce_dtype)


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor of torch: sharded tensors say of themselves that they are."""
    return issubclass(type(value), DTensor)


def tensor_parallel_of(param: Tensor) -> TensorParallel | None:
    """How other ranks than its data-parallel peers have a parameter made by `with_local_parameters`; else None."""
    found = in_forward(param)
    return None if found is None else found.over_others()


def in_forward(param: Tensor) -> TensorParallel | None:
    """How a parameter made by `with_local_parameters` is distributed where module code finds it; else None."""
    parallel: TensorParallel | None = vars(param).get(_MARK)
    return parallel


def _dimensions_of_peers(param: DTensor, peers: set[int]) -> tuple[int, ...]:
    """The dimensions of its mesh on which `param` is replicated over ranks of `peers` alone."""
    mesh = param.device_mesh
    if mesh.size() == 1 or (mesh.mesh_dim_names is None and mesh.ndim > 1):
        return ()
    of_dims = [set(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]
    return tuple(dim for dim in range(mesh.ndim) if param.placements[dim].is_replicate() and of_dims[dim] <= peers)


def with_local_parameters(
    model: nn.Module, params: list[tuple[str, nn.Parameter]], peers: Iterable[int]
) -> list[tuple[str, nn.Parameter]]:
    """Replace each DTensor of `params`, in `model` too, by a plain parameter over its local tensor; return all.
    `peers` are the ranks that gradients are averaged over.
    """
    local: dict[nn.Parameter, nn.Parameter] = {}
    for _, each in params:
        if isinstance(each, DTensor):  # none is sharded
            local[each] = plain = nn.Parameter(each.to_local().detach(), each.requires_grad)
            vars(plain).update(vars(each))  # a DTensor keeps its own fields elsewhere, in slots
            stride, summed = torch.empty(each.shape, device="meta").stride(), _dimensions_of_peers(each, set(peers))
            found = TensorParallel(each.device_mesh, tuple(each.placements), each.shape, stride, summed)
            vars(plain)[_MARK] = found
    for module in model.modules() if local else ():
        for name, param in module._parameters.items():
            if param is not None and param in local:
                module._parameters[name] = local[param]
    return [(name, local.get(param, param)) for name, param in params]


def check_distribution(name: str, param: DTensor, peers: list[int], ranks: int) -> None:
    """Check that `param` can be sharded over data-parallel ranks as well.

    Args:
        name: of the parameter, for errors.
        param: on a mesh that has all data-parallel dimensions, replicated over them, or none of them.
        peers: this rank, and those that it averages gradients with, over shards and replicas.
        ranks: how many data-parallel ranks there are.

    Raises:
        ValueError: it has hooks, a placement other than `Shard` and `Replicate`, or is distributed over several of
            `peers` otherwise.
    """
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter {name} is a DTensor with hooks; fully_shard replaces it by another object, which would not "
            f"have them: register hooks after fully_shard"
        )
    unknown = [placement for placement in param.placements if type(placement) not in (Shard, Replicate)]
    if unknown:
        raise ValueError(
            f"parameter {name} is a DTensor with placement {unknown[0]}; only Shard and Replicate can be sharded "
            f"further: redistribute it first"
        )
    common = set(peers) & set(param.device_mesh.mesh.flatten().tolist())
    dims, mesh = _dimensions_of_peers(param, set(peers)), param.device_mesh
    if len(common) > 1 and math.prod(mesh.size(dim) for dim in dims) != ranks:
        raise ValueError(
            f"parameter {name} is distributed over ranks {sorted(common)} already, and its unit would be sharded over "
            f"them again: pass mesh=mesh['dp'] of one mesh with a dimension for each, or list it in ignored_params"
        )
