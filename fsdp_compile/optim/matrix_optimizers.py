"""Optimizers that compute with complete matrices, by three functions: Muon's, and those of an optimizer of one's own.

    before(shard)            on the elements that each rank stores      Muon: momentum, the cast to bfloat16
    whole(matrix, group)     on a complete matrix, on its owner         Muon: Newton-Schulz
    after(shard, update)     on the elements that each rank stores      Muon: weight decay, the update

matrix_step.py calls them for sharded parameters; on one process `MatrixOptimizer.step` calls one after the other.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from fsdp_compile.optim._torch import adjusted_lr, orthogonalized
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_rules import plain
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient, UnshardedTensor, refuse_unreduced


class MatrixShard:
    """What this rank stores of a parameter, in one step; on one process all of it, flattened.

    Attributes:
        param: 1-D `[n]`, to be changed in place; n may be 0.
        grad: 1-D `[n]`; None in `after`.
        shape: of the parameter on one process.
        group: the parameter group, with its options.
        state: of the parameter. Numbers may be read and written here; for tensors there is `zeros`.
    """

    def __init__(self, param: Tensor, shape: tuple[int, ...], spec: ShardSpec | None) -> None:
        self.param, self.shape, self._spec = param, shape, spec
        self.grad: Tensor | None = None
        self.group: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    def zeros(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """State of the parameter's shape, of which this rank stores as much, 1-D `[n]`: zeros where it is new.

        Args:
            dtype: of new state; None: the parameter's.
        """
        found: Any = self.state.get(name)
        spec = self._spec
        if found is None:
            zeros = torch.zeros_like(self.param, dtype=dtype or self.param.dtype)
            found = zeros.view(self.shape) if spec is None else ShardedTensor(zeros, spec)
        elif spec is not None and not (type(found) is ShardedTensor and found.spec.same_ranges(spec)):
            found = ShardedTensor(spec.local_of(plain(found)).clone(), spec)  # such as of a loaded state dict
        self.state[name] = found
        return found.view(-1) if spec is None else found.local


class MatrixOptimizer(Optimizer):
    """An optimizer whose update needs complete matrices: a subclass says `before`, `whole` and `after`.

    Each matrix is computed by one rank, its owner, while others are on the way (docs/optimizers.md). All ranks must
    give it the same parameters in the same order.

    Attributes:
        dims: of a matrix. A parameter of more dimensions is a batch of matrices, each with an owner of its own. None: a
            parameter is one matrix, whatever its dimensions.

    Raises:
        TypeError: a subclass has a `step` of its own.
    """

    dims: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            raise TypeError(f"{cls.__name__}.step: a MatrixOptimizer steps by before, whole and after; leave step out")

    def before(self, shard: MatrixShard) -> Tensor:
        """What the owner needs of this rank, 1-D `[n]`, of any floating dtype. Each element must follow from those at
        the same place. Called once in each step for each parameter that has a gradient; not always where this rank
        stores nothing of it and its state has no numbers.
        """
        raise NotImplementedError

    def whole(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """The update of one `matrix`, with the shape and the dtype of that, which may be overwritten; called on its
        owner alone.
        """
        raise NotImplementedError

    def after(self, shard: MatrixShard, update: Tensor) -> None:
        """Change `shard.param` by what `whole` has returned, of which `update`, 1-D `[n]`, is this rank's part."""
        raise NotImplementedError

    def cost(self, shape: tuple[int, ...], group: dict[str, Any]) -> int:
        """Operations of `whole` for a matrix of this shape: ranks own equal sums of them."""
        return 2 * prod(shape) * min(shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what `closure` returned, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _step_alone(self, group, param)
        return loss


class _Muon:
    """The three functions of `torch.optim.Muon`, with its kernels in its order."""

    dims = 2

    def before(self, shard: MatrixShard) -> Tensor:
        grad, group = shard.grad, shard.group
        assert grad is not None
        momentum = shard.zeros("momentum_buffer", grad.dtype)
        momentum.lerp_(grad, 1 - group["momentum"])
        return (grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()

    def whole(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def after(self, shard: MatrixShard, update: Tensor) -> None:
        group = shard.group
        lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        shard.param.mul_(1 - lr * group["weight_decay"])
        shard.param.add_(update, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], shard.shape))

    def cost(self, shape: tuple[int, ...], group: dict[str, Any]) -> int:
        few, many = sorted(shape)
        return int(group["ns_steps"]) * (4 * few * few * many + 2 * few**3)


Functions = MatrixOptimizer | _Muon
_MUON = _Muon()


def takes_matrices(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is torch's Muon, or a `MatrixOptimizer`."""
    return type(optimizer) is Muon or isinstance(optimizer, MatrixOptimizer)


def functions_of(optimizer: Optimizer) -> Functions:
    """The three functions of an optimizer that `takes_matrices`."""
    return optimizer if isinstance(optimizer, MatrixOptimizer) else _MUON


def matrix_shape(functions: Functions, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what one rank computes of a parameter of `shape`."""
    return shape if functions.dims is None else tuple(shape[-functions.dims :])


def local_data(param: ShardedTensor) -> Tensor:
    """What this rank stores of `param`, 1-D; RuntimeError if parameters are summoned."""
    if isinstance(param, UnshardedTensor):
        raise RuntimeError("step: parameters are unsharded by summon_full_params; leave it first")
    return param.local.detach()


def local_gradient(param: ShardedTensor) -> Tensor:
    """What this rank stores of its gradient, 1-D, in its dtype; RuntimeError if that was not reduced."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, UnreducedGradient):
        refuse_unreduced("step")
    if type(grad) is ShardedTensor and grad.spec.same_ranges(param.spec):
        return grad.local.to(param.dtype)
    return param.spec.local_of(plain(grad)).to(param.dtype)


def run_before(functions: Functions, shard: MatrixShard, grad: Tensor) -> Tensor:
    """What owners need of this rank, from its part of the gradient, 1-D; TypeError if that has another shape."""
    shard.grad = grad
    found = _check(functions, "before", functions.before(shard), (shard.param.numel(),), None)
    shard.grad = None
    return found


def run_whole(functions: Functions, shard: MatrixShard, matrix: Tensor) -> Tensor:
    """The update of a complete `matrix` of the parameter, 1-D both; TypeError if `whole` returns another kind."""
    shape = matrix_shape(functions, shard.shape)
    found = functions.whole(matrix.view(shape), shard.group)
    return _check(functions, "whole", found, shape, matrix.dtype).reshape(-1)


def _check(of: Functions, name: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    if tuple(found.shape) != shape or found.dtype != (dtype or found.dtype):
        wanted = f"shape {shape}" + (f" and dtype {dtype}" if dtype else "")
        raise TypeError(f"{of.__class__.__name__}.{name}: expected a tensor of {wanted}, found one of shape "
                        f"{tuple(found.shape)} and dtype {found.dtype}")  # fmt: skip
    return found


def _step_alone(optimizer: MatrixOptimizer, group: dict[str, Any], param: Tensor) -> None:
    """Step on a plain parameter, or on a sharded one of which every rank computes all matrices."""
    spec, stored, grad = None, param.detach().contiguous().view(-1), param.grad
    if isinstance(param, ShardedTensor):
        spec, stored, grad = param.spec, local_data(param), local_gradient(param)
    assert grad is not None
    shard = MatrixShard(stored, tuple(param.shape), spec)
    shard.group, shard.state = group, optimizer.state[param]
    sent = run_before(optimizer, shard, grad.reshape(-1))
    full = sent.clone() if spec is None else spec.gather(sent)
    matrices = full.view(-1, prod(matrix_shape(optimizer, shard.shape)))
    update = torch.cat([run_whole(optimizer, shard, matrix) for matrix in matrices])
    optimizer.after(shard, update if spec is None else spec.local_of(update.view(param.shape)))
    if spec is None and stored.data_ptr() != param.data_ptr():
        param.copy_(stored.view(param.shape))
    else:
        torch.autograd.graph.increment_version(param)
