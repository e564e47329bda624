"""Equal values on all ranks: the first rank sends its tensors to the others, many of them in one message."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.comm.groups import Groups
from fsdp_compile.core.ops import inner_tensors

BUCKET_BYTES = 250 * 2**20


def broadcast_states(params: Iterable[nn.Parameter], module: nn.Module, groups: Groups) -> None:
    """Overwrite `params` and all buffers of `module` with the values that the first rank has (E-SYNC-1, 3).

    Buffers that an earlier call has sent are left out (E-SYNC-2). All ranks must pass tensors of equal shapes, dtypes
    and order.
    """
    buffers = unsent_buffers(module)
    broadcast([*params, *buffers.values()], groups)
    for buffer in buffers.values():
        vars(buffer)["_fsdp_sent"] = True


def unsent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of `module`, by name, that are still to be sent; those on the meta device have nothing to send."""
    return {n: b for n, b in module.named_buffers() if not (b.is_meta or getattr(b, "_fsdp_sent", False))}


def broadcast(tensors: Iterable[Tensor], groups: Groups, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Copy `tensors`, of any shapes and dtypes, from the first rank of `groups` to all others, in place.

    First among replicas, so that the first rank of every shard group has the values when they go through shard groups.
    """
    plain = [inner.detach() for tensor in tensors for inner in inner_tensors(tensor) if inner.numel()]
    for group in (groups.replicate, groups.shard):
        if group is not None and group.size() > 1:
            for bucket in _buckets(plain, bucket_bytes):
                _send(bucket, group)


def _buckets(tensors: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Groups of tensors of one device that fill a bucket; a tensor that is larger than a bucket gets its own.

    Wide dtypes come first, so that every tensor starts at a multiple of its item size in a bucket of bytes.
    """
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in sorted(tensors, key=lambda t: (str(t.device), -t.itemsize)):
        if bucket and (nbytes + tensor.nbytes > bucket_bytes or tensor.device != bucket[0].device):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket


def _send(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    segments = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in bucket]
    message = segments[0] if len(segments) == 1 else torch.cat(segments)
    collectives.broadcast(message, group)
    for tensor, segment in zip(bucket, message.split([segment.numel() for segment in segments]), strict=True):
        tensor.copy_(segment.view(tensor.dtype).view(tensor.shape))
