"""Sharded tensors with all elements here, as a parameter must remain the same object and its gradient must fit it.

UnshardedTensor      a parameter within `summon_full_params`
UnreducedGradient    a gradient under `no_sync`
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import never_compile
from fsdp_compile.tensors.sharded_tensor import RULES, ShardedTensor, check_full_shape, set_local

aten = torch.ops.aten
_UPDATES = ("aten::_fused_", "aten::_amp_")


class UnshardedTensor(ShardedTensor):
    """A parameter of a sharded unit while `summon_full_params` shows it in full: `local` has all elements.

    Operators take it for a plain tensor, and their results are plain.
    """

    is_dtensor = False  # plain, to those who ask
    is_alone = False  # whether other ranks do not have theirs (`rank0_only`)

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        name = func._schema.name
        if func is aten.add_.Tensor and isinstance(args[0], UnreducedGradient) and type(args[1]) is ShardedTensor:
            # A use of the parameter outside of its unit's forward, or a penalty. It is reduced already, so each rank
            # adds what it stores, times what the reduce will divide by: a gather would need one order on all ranks.
            spec, added = args[1].spec, torch.zeros_like(args[0].local)
            added[spec.first : spec.first + spec.numel] = args[1].local * (spec.ranks.size * args[0].divided_by)
            args = (args[0], added.view(spec.split_shape), *args[2:])
        elif UnreducedGradient in types and (ShardedTensor in types or "norm" in name or name.startswith(_UPDATES)):
            refuse_unreduced(name)
        return RULES.gather(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """All elements, 1-D; it shares memory with this tensor."""
        return self.full_tensor().view(-1)

    def elements(self) -> Tensor:
        """This tensor as a plain one that shares its memory, without autograd."""
        return self.local.view(self.shape)

    def _whole(self) -> Tensor:
        return self.elements()

    @property
    def data(self) -> Tensor:
        """This tensor without autograd, plain; it shares memory."""
        return self.elements().detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_full_shape(self, value)
        set_local(self, value.detach().contiguous().view(-1), self.spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        what = "Parameter" if isinstance(self, nn.Parameter) else type(self).__name__
        return f"{what} containing:\n{self.elements()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.elements().clone()
        return (nn.Parameter if isinstance(self, nn.Parameter) else Tensor.detach, (plain,))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain = self.elements().clone()
        memo[id(self)] = nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain
        return memo[id(self)]


class UnreducedGradient(UnshardedTensor):
    """A gradient that this rank has accumulated under `no_sync`: `local` has all elements, of this rank's sum alone.

    For a DTensor parameter, `local` has the elements of its local tensor. It can be read, scaled and cleared as a plain
    tensor. Norms and optimizer updates are refused: ranks would get different results.
    """

    is_reduced = False
    divided_by = 1.0  # what the reduce divides by that is to come, for each rank

    def elements(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's accumulated gradient, plain; it shares memory. Other ranks have other values."""
        return self.local.view(self.spec.split_shape)

    full_tensor = to_local = elements
    __deepcopy__, __reduce_ex__ = ShardedTensor.__deepcopy__, ShardedTensor.__reduce_ex__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"UnreducedGradient({self.full_tensor()}, accumulated on rank {self.spec.ranks.rank} under no_sync)"


def refuse_unreduced(name: str) -> NoReturn:
    """Raise RuntimeError: operator `name` must not read an accumulated gradient."""
    raise RuntimeError(
        f"{name.removeprefix('aten::')}: a gradient was accumulated under no_sync and not reduced; run a backward pass "
        f"outside no_sync before clipping or optimizer.step()"
    )
