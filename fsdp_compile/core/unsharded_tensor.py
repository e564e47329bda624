"""Sharded tensors that have all elements here: shown parameters, and gradients accumulated under `no_sync`.

UnshardedTensor     a parameter within `summon_full_params`: an ordinary tensor to all operators
UnreducedGradient   a gradient that is this rank's sum alone; what would give ranks different results is refused

They are `ShardedTensor`s because a parameter must remain the same object, and its gradient must fit it.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import never_compile
from fsdp_compile.core.sharded_tensor import ShardedTensor, check_full_shape, set_local


class UnshardedTensor(ShardedTensor):
    """A parameter of a sharded unit while `summon_full_params` shows it in full: `local` has all elements.

    It is an ordinary tensor to all operators, whose results are plain. It is what a `ShardedTensor` turns into and out
    of, because a parameter must remain the same object.
    """

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        return _call_on_all_elements(func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """The tensor, plain; it shares memory."""
        return self.local.view(self.shape)

    def numpy(self, *, force: bool = False) -> Any:
        """As `Tensor.numpy`."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy(): expected a tensor that does not require grad; call detach() first")
        return self.full_tensor().detach().numpy(force=force)

    def tolist(self) -> Any:
        """As `Tensor.tolist`."""
        return self.full_tensor().detach().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    @property
    def data(self) -> Tensor:
        """This tensor without autograd, plain; it shares memory."""
        return self.full_tensor().detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_full_shape(self, value)
        set_local(self, value.detach().contiguous().view(-1), self.spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        what = "Parameter" if isinstance(self, nn.Parameter) else type(self).__name__
        return f"{what} containing:\n{self.full_tensor().detach()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.full_tensor().detach().clone()
        return (nn.Parameter if isinstance(self, nn.Parameter) else Tensor.detach, (plain,))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain = self.full_tensor().detach().clone()
        memo[id(self)] = nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain
        return memo[id(self)]


class UnreducedGradient(ShardedTensor):
    """A gradient that this rank has accumulated under `no_sync`: `local` has all elements, of this rank's sum alone.

    Of a parameter that is distributed over other ranks beside, these are the elements of its local tensor.

    It can be read, scaled and cleared as an ordinary tensor. Norms and optimizer updates are refused: ranks would get
    different results.
    """

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        name = func._schema.name
        if "norm" in name or name.startswith(("aten::_fused_", "aten::_amp_")):
            refuse_unreduced(name)
        return _call_on_all_elements(func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """This rank's accumulated gradient, plain; it shares memory. Other ranks have other values."""
        return self.local.view(self.spec.split_shape)

    def to_local(self) -> Tensor:
        """As `full_tensor`."""
        return self.full_tensor()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"UnreducedGradient({self.full_tensor()}, accumulated on rank {self.spec.ranks.rank} under no_sync)"


def refuse_unreduced(name: str) -> NoReturn:
    """Raise RuntimeError: operator `name` must not see an accumulated gradient."""
    raise RuntimeError(
        f"{name.removeprefix('aten::')}: expected a reduced gradient, found what this rank has summed up under "
        f"no_sync; run a backward pass outside no_sync before clipping or optimizer.step()"
    )


def _call_on_all_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with plain tensors in the place of those that have all elements here."""
    plain: dict[int, Any] = {}
    met = set()

    def unwrap(value: Any) -> Any:
        met.add(type(value))
        if isinstance(value, (UnshardedTensor, UnreducedGradient)):
            full = value.local.view(value.spec.split_shape if isinstance(value, UnreducedGradient) else value.shape)
            plain[id(full)] = value
            return full
        return type(value)(map(unwrap, value)) if isinstance(value, (list, tuple)) else value

    args, kwargs = unwrap(args), {key: unwrap(value) for key, value in kwargs.items()}
    if met.issuperset((ShardedTensor, UnreducedGradient)):
        refuse_unreduced(func._schema.name)
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        torch.autograd.graph.increment_version([tensor.local for tensor in plain.values()])
    return plain.get(id(result), result)
