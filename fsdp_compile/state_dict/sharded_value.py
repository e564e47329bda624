"""`PieceTensor`: a tensor of the original shape of which this rank stores one run; the value in sharded state dicts.

    state = model.state_dict()                       {"blocks.0.weight": PieceTensor of shape (64, 96), ...}
    torch.distributed.checkpoint.save(state, ...)    every rank writes its boxes, under original names and shapes
    torch.distributed.checkpoint.load(state, ...)    every rank reads its boxes, straight into the shards

It is a DTensor to torch, so what knows how to stage, offload and gather these does so here. A run of a flattened
tensor is no placement that DTensor has a word for; it says "replicated", and overrides all that would act on it. So
code that makes another DTensor "like this one" gets a whole one, which loads as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_compile.checkpoint._torch import asks_only, new_dtensor, run_plainly, strides_of
from fsdp_compile.comm import collectives
from fsdp_compile.state_dict.boxes import Box, Cut
from fsdp_compile.state_dict.share import Share


class PieceTensor(DTensor):
    """A tensor of which each rank of a group stores one run of its flattened elements, as `share` says.

    Or a number that belongs to such a tensor, such as a count of steps: every rank that stores some of the tensor has a
    copy, and no other rank.

    Args:
        local: what this rank stores, 1-D `[n]`, n >= 0: it is not copied. For a number, `[1]` or `[0]`.
        share: what that is of the tensor; one for all values that lie alike.

    Raises:
        ValueError: `local` has not the shape that `share` says.
    """

    share: Share

    def __new__(cls, local: Tensor, share: Share) -> "PieceTensor":
        """To torch a DTensor of the full shape; `local` has its dtype."""
        if local.shape != (share.numel,):
            raise ValueError(f"local: expected shape ({share.numel},) for {share.cut}, found {tuple(local.shape)}")
        piece: PieceTensor = new_dtensor(cls, local, share.spec(local.dtype))
        piece.share = share
        return piece

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def cut(self) -> Cut:
        """How the tensor, or the one that the number belongs to, is cut among the ranks."""
        return self.share.cut

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What this rank stores."""
        return self.share.boxes

    @property
    def is_number(self) -> bool:
        """Whether this is a number that belongs to the cut tensor, not elements of it."""
        return self.share.is_number

    @property
    def local(self) -> Tensor:
        """What this rank stores, 1-D: memory of the shard, not a copy."""
        return self._local_tensor

    def box(self, box: Box) -> Tensor:
        """One of `boxes` of what this rank stores, in its n-D shape: memory of the shard, not a copy.

        On the CPU it has a storage of its own size over that memory: writers copy what is a part of its storage.
        """
        run = self.local[box.start : box.start + box.numel]
        if run.device.type == "cpu":
            start = run.storage_offset() * run.element_size()
            storage = run.untyped_storage()[start : start + run.nbytes]
            return torch.empty(0, dtype=run.dtype).set_(storage, 0, box.sizes, strides_of(box.sizes))
        return run.view(box.sizes)

    # --- what torch.distributed.checkpoint asks ---------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not self.share.is_written:
            return []
        properties = TensorProperties.create_from_tensor(self.local)
        size = torch.Size(self.share.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.share.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self.share.chunks)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if box.offsets == index.offset:
                return self.box(box)
        found = [box.offsets for box in self.boxes]
        raise ValueError(
            f"{index.fqn}: expected the offsets of one of this rank's boxes, {found}, found {index.offset}"
        )

    # --- gathering --------------------------------------------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The tensor in its original shape, on every rank of the mesh: one all-gather, in which all take part."""
        mesh = self.device_mesh
        sizes = [sum(box.numel for box in self.share.boxes_of(rank)) for rank in range(mesh.size())]
        sent = self.local.new_zeros(max(sizes), device=self._compute_device())
        sent[: self.local.numel()] = self.local
        rows = collectives.all_gather(sent, mesh.size(), mesh.get_group().group_name).view(mesh.size(), -1)
        parts = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        if self.is_number:
            return torch.cat(parts)[0]
        in_order = sorted(range(mesh.size()), key=lambda rank: self.cut.run(rank)[0])
        return torch.cat([parts[rank] for rank in in_order]).view(self.shape)

    def _compute_device(self) -> torch.device:
        kind = self.device_mesh.device_type
        return self.local.device if self.local.device.type == kind else torch.device(kind)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> DTensor:
        """The whole tensor as a replicated DTensor, the only thing that this turns into.

        ValueError for another mesh or another placement.
        """
        if device_mesh not in (None, self.device_mesh) or list(placements or [Replicate()]) != [Replicate()]:
            raise ValueError(
                f"placements: expected [Replicate()] on the same mesh, found {placements} on {device_mesh}; call "
                f"full_tensor(), then distribute_tensor"
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Itself: what this rank stores has no n-D shape. `local` is it as a 1-D tensor."""
        return self

    # --- tensor functions -------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if asks_only(func):
            return run_plainly(func, types, args, kwargs)
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}: expected plain tensors, found a PieceTensor, of which this rank "
            f"stores a part; call full_tensor() on all ranks, or load it with load_state_dict of a sharded model or "
            f"with torch.distributed.checkpoint"
        )

    def _with(self, local: Tensor) -> "PieceTensor":
        return PieceTensor(local, self.share)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PieceTensor":
        copied = memo[id(self)] = self._with(self.local.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PieceTensor, (self.local.clone(), self.share)

    def __repr__(self) -> str:  # type: ignore[override]  # as in DTensor: without Tensor's argument
        return f"PieceTensor(shape={self.share.shape}, local={self.local}, boxes={self.boxes})"


def _to(piece: PieceTensor, *args: Any, **kwargs: Any) -> PieceTensor:
    moved = piece.local.to(*args, **kwargs)
    return piece if moved is piece.local else piece._with(moved)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, PieceTensor):
        raise RuntimeError(
            "copy_: expected a plain tensor to copy from, found a PieceTensor, of which this rank stores a part; call "
            "full_tensor() on all ranks"
        )
    if source.shape != target.shape:
        raise ValueError(f"copy_: expected shape {tuple(target.shape)}, found {tuple(source.shape)}")
    target.local.copy_(source.local if isinstance(source, PieceTensor) else target.share.part_of(source), non_blocking)
    return target


_HANDLERS: dict[str, Callable[..., Any]] = {
    "data_ptr": lambda piece: 0,  # no memory of its own: else torch takes the offset of `local` for an address
    "to": _to,
    "cpu": lambda piece, *_, **__: _to(piece, "cpu"),
    "detach": lambda piece: piece,
    "clone": lambda piece, *_, **__: piece._with(piece.local.clone()),
    "copy_": _copy_,
    "new_empty": lambda piece, size, *, dtype=None, device=None, **_: piece._with(  # what a stager fills
        piece.local.new_empty(piece.local.shape, dtype=dtype, device=device)
    ),
}

torch.serialization.add_safe_globals([PieceTensor, Share, Cut])
