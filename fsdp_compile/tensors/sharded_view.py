"""`ShardedView`: a lazy view of a sharded tensor, such as `weight.t()`, or what a hook puts into a state dict."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsdp_compile.core._torch import NO_TORCH_FUNCTION, break_graph, new_wrapper, unchanged
from fsdp_compile.tensors.as_dtensor import AsDTensor
from fsdp_compile.tensors.shard_spec import Chunk, chunks_of_view
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, is_tracked
from fsdp_compile.tensors.write_items import chunks_of, tensor_of, write_items


class ShardedView(AsDTensor, Tensor):
    """A lazy view of a sharded tensor. Reads and writes are collective, but those of checkpoints, for which it has
    `chunks` as its base has.
    """

    is_dtensor, is_view = False, True  # the former but in a state dict
    spec = property(lambda self: self.base.spec)
    local = property(lambda self: self.base.local)
    base: ShardedTensor
    steps: tuple[Callable[[Tensor], Tensor], ...]  # from the full tensor to the view
    _gathered: tuple[int, Tensor, Tensor] | None  # the base's version, its elements, and the view of them
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, base: ShardedTensor, steps: tuple[Callable[[Tensor], Tensor], ...], like: Tensor) -> "ShardedView":
        """A view of `base` with the shape and strides of `like`."""
        self: ShardedView = new_wrapper(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=base.device
        )
        self.base, self.steps, self._gathered = base, steps, None
        return self

    @property
    def outline(self) -> Tensor:
        """The view of a full tensor without values."""
        full = torch.empty(self.base.shape, dtype=self.base.dtype, device="meta")
        return functools.reduce(lambda view, step: step(view), self.steps, full)

    @property
    def geometry(self) -> tuple[torch.Size, tuple[int, ...], int] | None:
        """Shape, strides and offset in the flattened base; None if these do not say where each element lies."""
        like = self.outline
        is_plain = like.dtype is self.base.dtype and not like.is_conj() and not like.is_neg()
        is_plain = is_plain and chunks_of_view(like, 0, 0) is not None
        return (like.shape, like.stride(), int(like.storage_offset())) if is_plain else None

    def read(self) -> Tensor:
        """The view's elements, plain; gathered again if the base has changed since."""
        version = self.base.local._version
        if self._gathered is None or self._gathered[0] != version:
            full = view = self.base.elements()
            for step in self.steps:
                view = step(view)
            self._gathered = (version, full, view)
        return self._gathered[2]

    def write(self, view: Tensor) -> None:
        """Write `view`, which `read` returned and somebody changed since, back to the base."""
        if self._gathered is not None:
            full = self._gathered[1]
            self.base.write(full)
            self._gathered = (self.base.local._version, full, view)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The view's elements, plain, on every rank; differentiable."""
        return unchanged(self) if is_tracked(self) else self.read()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those elements that this rank stores of the base, as chunks of the view; RuntimeError if it has none."""
        if self.geometry is None:
            raise RuntimeError(f"{self}: its elements lie nowhere; call full_tensor()")
        return chunks_of_view(self.outline, self.spec.first, self.spec.numel) or ()

    def view_of(self, chunk: Chunk) -> Tensor:
        """One of `chunks` in its n-D shape: memory of the shard."""
        local = self.local.detach()
        return local.as_strided(chunk.sizes, self.stride(), local.storage_offset() + chunk.start)

    numpy, tolist, to_local = ShardedTensor.numpy, ShardedTensor.tolist, ShardedTensor.to_local
    storage, data_ptr = ShardedTensor.storage, ShardedTensor.data_ptr
    __create_chunk_list__, __create_write_items__, __get_tensor_shard__ = chunks_of, write_items, tensor_of

    def over(self, base: ShardedTensor) -> "ShardedView":
        """The same view of another tensor."""
        assert self.geometry is not None
        view: Any = base.as_strided(*self.geometry)
        view.is_dtensor = self.is_dtensor
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.over(self.base.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self.base.detach(), self.geometry)

    def _whole(self) -> Tensor:
        self.base._whole()  # or TypeError
        return self.read()

    @property
    def __tensor_flatten__(self) -> NoReturn:
        """Absent: a compiler asks for it before it puts a view into a graph, which could not write to the base."""
        break_graph(f"a view of a sharded parameter, shape {tuple(self.shape)}: use the parameter itself")
        raise AttributeError("__tensor_flatten__")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"ShardedView(shape={tuple(self.shape)} of {self.base!r})"

    __torch_dispatch__: Any = ShardedTensor.__torch_dispatch__


def in_state(stored: Any) -> Any:
    """What sharded state dicts have for a sharded tensor or a view of one; some views are gathered, by all ranks."""
    if not isinstance(stored, ShardedView):
        return stored
    if stored.geometry is None or stored.spec.tensor_parallel is not None:
        return stored.full_tensor()
    stored.is_dtensor = True
    return stored


def _unpickled(base: ShardedTensor, geometry: tuple[Any, ...]) -> Any:
    return in_state(base.as_strided(*geometry))


torch.serialization.add_safe_globals([_unpickled])
