"""What a rank puts on the wire: kind, size and dtype of each collective.

with wire() as sent:
    step()
assert sum(each.nbytes for each in sent if each.kind == "reduce") == ...
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fsdp_compile.comm import collectives


class Sent(NamedTuple):
    """A collective that was started."""

    kind: str  # gather, reduce or all_reduce
    numel: int  # of the full buffer
    part: int  # of this rank's part
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.numel * self.dtype.itemsize


@contextmanager
def wire() -> Iterator[list[Sent]]:
    """Record the collectives that start inside."""
    sent: list[Sent] = []

    def record(kind: str, full: Tensor, part: Tensor) -> None:
        sent.append(Sent(kind, full.numel(), part.numel(), full.dtype))

    def all_gather(full: Tensor, shard: Tensor, *where: Any) -> Any:
        record("gather", full, shard)
        return start_all_gather(full, shard, *where)

    def reduce_scatter(full: Tensor, *where: Any) -> Any:
        part, finish = start_reduce_scatter(full, *where)
        record("reduce", full, part)
        return part, finish

    def all_reduce(full: Tensor, *where: Any) -> Any:
        record("all_reduce", full, full)
        return start_all_reduce(full, *where)

    def reduced_copy(full: Tensor, *where: Any) -> Tensor:
        record("all_reduce", full, full)
        return all_reduce_copy(full, *where)

    start_all_gather, start_reduce_scatter = collectives.start_all_gather, collectives.start_reduce_scatter
    start_all_reduce, all_reduce_copy = collectives.start_all_reduce, collectives.all_reduce
    with ExitStack() as stack:
        for spy in (all_gather, reduce_scatter, all_reduce):
            stack.enter_context(mock.patch.object(collectives, f"start_{spy.__name__}", spy))
        stack.enter_context(mock.patch.object(collectives, "all_reduce", reduced_copy))
        yield sent
