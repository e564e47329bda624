"""What a rank puts on the wire: kind, size and dtype of each collective; and whether what it gathered is still there.

with wire() as sent:
    step()
assert sum(each.nbytes for each in sent if each.kind == "reduce") == ...
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile.comm import collectives

from .training import units

KINDS = {"start_all_gather": "gather", "start_reduce_scatter": "reduce", "start_all_reduce": "all_reduce"}


class Sent(NamedTuple):
    """A collective that was started."""

    kind: str  # gather, reduce or all_reduce
    numel: int  # of the full buffer; blocks of one kind share one size
    part: int  # of this rank's part
    dtype: torch.dtype
    address: int  # of the memory that it fills
    memory: StorageWeakRef

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.numel * self.dtype.itemsize


@contextmanager
def wire() -> Iterator[list[Sent]]:
    """Record the collectives that start inside."""
    sent: list[Sent] = []

    def recording(name: str, kind: str) -> Any:
        start = getattr(collectives, name)

        def starts(full: Tensor, *rest: Any) -> Any:
            started = start(full, *rest)
            filled = started[0]
            part, storage = rest[0] if kind == "gather" else filled, filled.untyped_storage()
            memory = StorageWeakRef(storage)
            sent.append(Sent(kind, full.numel(), part.numel(), full.dtype, storage.data_ptr(), memory))
            return started

        return mock.patch.object(collectives, name, starts)

    with ExitStack() as stack:
        for name, kind in KINDS.items():
            stack.enter_context(recording(name, kind))
        yield sent


def per_unit(model: nn.Module, sent: list[Sent], kind: str) -> list[int]:
    """How often the root, and how often on average each block, was gathered or reduced."""
    counts = Counter(each.numel for each in sent if each.kind == kind)
    sizes = Counter(unit.flats[0].layout.numel for unit in units(model))
    assert counts.keys() <= sizes.keys() and all(count % sizes[numel] == 0 for numel, count in counts.items()), counts
    return [counts[numel] // sizes[numel] for numel in sizes]


def gathered_bytes(sent: list[Sent]) -> Counter[int]:
    """Bytes that are left of what all-gathers made, by the size of the unit's full buffer in elements."""
    nbytes: Counter[int] = Counter()
    for key, numel in {each.memory.cdata: each.numel for each in sent if each.kind == "gather"}.items():
        alive = torch.UntypedStorage._new_with_weak_ptr(key)
        nbytes[numel] += alive.nbytes() if alive is not None else 0
    return nbytes


def soon(holds: Callable[[], bool]) -> bool:
    """Whether `holds` within two seconds: gloo's threads drop tensors a moment after the collective has ended."""
    deadline = time.monotonic() + 2.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def assert_freed(sent: list[Sent], when: str) -> None:
    """Nothing is left of what all-gathers made."""
    assert soon(lambda: gathered_bytes(sent).total() == 0), f"kept {when}: {gathered_bytes(sent)} bytes"
