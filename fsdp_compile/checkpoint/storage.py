"""Writer and reader for `torch.distributed.checkpoint` (DCP) that make a checkpoint complete or invisible.

Who does what when, for a save on several ranks; DCP's own exchange of plans and results are the barriers:

    rank 0    plans, stages a folder |             | all results: manifest, sync, commit |
    others    plans                  | write, sync |                                     | learn how it went

Rank 0 commits only after it has every rank's result, which a rank sends when its file is on the disk. If a rank raises,
all raise; if one dies, the others raise when the process group notices. Either way the staged folder stays hidden, see
Note [A checkpoint is complete or invisible].

Files are those of DCP's own `FileSystemWriter`, so plain `torch.distributed.checkpoint.load` reads them too. Beside the
tensors themselves one item at a time is in memory, and not even that if it is contiguous and on the CPU.
"""

import io
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_compile.checkpoint.directory import (
    FileSegment,
    Manifest,
    StagedCheckpoint,
    commit,
    discard,
    prune,
    stage,
    sync,
)
from fsdp_compile.checkpoint.untrusted import METADATA, SafeReader
from fsdp_compile.state_dict._torch import StorageInfo


class DirectoryWriter(FileSystemWriter):
    """Writes one checkpoint into the folder `root`, which all ranks share; use a new one for each.

        dcp.save(state_dict, storage_writer=DirectoryWriter("checkpoints", step=10))

    Args:
        root: the folder of checkpoints.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.

    Raises:
        ValueError: `step` is below 0 or `keep` below 1.
    """

    def __init__(self, root: str | os.PathLike[str], step: int, keep: int | None = None) -> None:
        if step < 0 or (keep is not None and keep < 1):
            raise ValueError(f"expected step of at least 0 and keep of at least 1 or None, found {step} and {keep}")
        super().__init__(root)
        self.root, self.step, self.keep = Path(root), step, keep
        self._staged: StagedCheckpoint | None = None

    def storage_meta(self) -> StorageMeta:
        """An id of the save, without a path: the folder will have another name."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: rank 0 makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the folder and tell the others where it is."""
        self._staged = stage(self.root, self.step)
        folder = self._staged.path
        return [replace(plan, storage_data=folder / rank_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one file, in the order of the plan, and wait until it is on the disk.

        Raises:
            FileNotFoundError: this rank does not see the folder that rank 0 made.
        """
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        with ItemFile(plan.storage_data) as file:
            done.set_result([file.write(item.index, planner.resolve_data(item)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: metadata, manifest, then the name under which it is seen."""
        assert self._staged is not None, "finish: expected prepare_global_plan before"
        self.path = self._staged.path
        describe(self.path, self.step, metadata, results, super().finish)
        self.path = commit(self._staged, self.root, self.step)
        self._staged = None
        if self.keep is not None:
            prune(self.root, self.keep, self.path)

    def discard(self) -> None:
        """Remove what a failed save has written; after success nothing is left to remove."""
        if self._staged is not None:
            discard(self._staged)
            self._staged = None


class DirectoryReader(SafeReader):
    """Reads a checkpoint that `DirectoryWriter` wrote, and compares each item with its checksum before it is loaded.

    Args:
        path: the checkpoint, as `latest` returns it.
        manifest: what was read of it; None: read it.

    Raises:
        CheckpointError: a file is missing or has another size. When loading, on all ranks: an item was altered.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        super().__init__(path)
        self.folder = Path(path)
        self.manifest = manifest or Manifest.read(self.folder)
        self._checked: set[tuple[str, int]] = set()

    def _slice_file(self, file: Any, sinfo: StorageInfo) -> Any:  # called before each item is loaded
        if (key := (sinfo.relative_path, sinfo.offset)) not in self._checked:
            self.manifest.check(self.folder, sinfo.relative_path, file, sinfo.offset)
            self._checked.add(key)
        return super()._slice_file(file, sinfo)


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes, as DCP calls it."""
    return f"__{rank}_0.distcp"


def describe(
    folder: Path,
    step: int | None,
    metadata: Metadata,
    results: list[list[WriteResult]],
    finish: Callable[[Metadata, list[list[WriteResult]]], None],
) -> None:
    """Add metadata, by `finish` of a `FileSystemWriter`, and a manifest to files that are on the disk."""
    finish(metadata, [[replace(each, storage_data=each.storage_data.info) for each in rank] for rank in results])
    files: dict[str, list[FileSegment]] = {}
    for result in (each for rank in results for each in rank):
        info, crc32 = result.storage_data
        segment = FileSegment(result.index.fqn, info.offset, info.length, crc32)
        files.setdefault(info.relative_path, []).append(segment)
    for segments in files.values():
        segments.sort(key=lambda segment: segment.start)
    files[METADATA] = [FileSegment.of_file(folder / METADATA)]
    Manifest(step, files).write(folder)


class StoredItem(NamedTuple):
    """What a rank tells rank 0 of an item that it has written."""

    info: StorageInfo
    crc32: int


class ItemFile:
    """A new file that items are written into one after the other; at the end of `with` it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "ItemFile":
        self._file = open(self.path, "xb")
        return self

    def write(self, index: MetadataIndex, data: Tensor | io.BytesIO) -> WriteResult:
        """Write a tensor or pickled bytes."""
        stream, start = _Checksummed(self._file), self._file.tell()
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(_alone(data.detach().cpu()), stream)  # type: ignore[arg-type]  # an IO[bytes] by its type
        size = self._file.tell() - start
        return WriteResult(index, size, StoredItem(StorageInfo(self.path.name, start, size), stream.crc32))

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if error is None:
                sync(self._file)


def in_order(tensor: Tensor) -> Tensor:
    """The tensor such that its memory is its values in order: no transposed, conjugate or negative view."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _alone(tensor: Tensor) -> Tensor:
    """A tensor on the CPU whose storage holds nothing else: torch.save writes complete storages.

    It is the same memory if it is contiguous and no lazy conjugate or negative; a subclass is returned as it is.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    tensor = in_order(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class _Checksummed(io.RawIOBase):
    """A stream that writes bytes to a file and computes their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.crc32 = file, 0

    def write(self, data: Any) -> int:
        """Write bytes, or anything that has a buffer of them."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.file.write(data)
