"""Writer and reader for `torch.distributed.checkpoint` (DCP) that make a checkpoint complete or invisible.

Who does what when, for a save on several ranks; DCP's own exchange of plans and results are the barriers:

    rank 0    plans, makes a hidden folder |             | all results: manifest, sync, rename |
    others    plans                        | write, sync |                                     | learn how it went

Rank 0 renames only after it has every rank's result, which a rank sends when its file is on the disk. If a rank raises,
all raise; if one dies, the others raise when the process group notices. Either way the hidden folder stays hidden.

Files are those of DCP's own `FileSystemWriter`, so plain `torch.distributed.checkpoint.load` reads them too. One item
at a time is in memory beside the tensors themselves, and none of those that are contiguous and on the CPU.
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
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_compile.checkpoint._torch import StorageInfo
from fsdp_compile.checkpoint.directory import Aside, abandon, begin, prune, publish
from fsdp_compile.checkpoint.disk import in_order, sync
from fsdp_compile.checkpoint.manifest import METADATA, Manifest, Piece, checksum, pieces_by_file


class Place(NamedTuple):
    """Where a rank writes."""

    folder: str
    file: str


class Stored(NamedTuple):
    """What a rank tells rank 0 of an item that it has written."""

    info: StorageInfo
    crc32: int


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
        self._aside: Aside | None = None

    def storage_meta(self) -> StorageMeta:
        """An id of the save; no path, for the folder gets another name."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: rank 0 makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the folder and tell the others where it is."""
        self._aside = begin(self.root, self.step)
        folder = str(self._aside.path)
        return [replace(p, storage_data=Place(folder, f"__{rank}_0.distcp")) for rank, p in enumerate(plans)]

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
        assert self._aside is not None, "finish: expected prepare_global_plan before"
        self.path = self._aside.path
        describe(self.path, self.step, metadata, results, super().finish)
        self.path = publish(self._aside, self.root, self.step)
        self._aside = None
        if self.keep is not None:
            prune(self.root, self.keep, self.path)

    def abandon(self) -> None:
        """Remove what a failed save has written."""
        if self._aside is not None:
            abandon(self._aside)
            self._aside = None


def describe(
    folder: Path, step: int | None, metadata: Metadata, results: list[list[WriteResult]], write: Callable[..., None]
) -> None:
    """Add metadata, by `write`, a `FileSystemWriter.finish`, and manifest to files that are on the disk."""
    write(metadata, [[replace(result, storage_data=result.storage_data.info) for result in rank] for rank in results])
    pieces = [_piece(result) for rank in results for result in rank]
    Manifest(step, pieces_by_file([*pieces, (METADATA, checksum(folder / METADATA))])).write(folder)


class ItemFile:
    """A new file that items are written into one after the other; at the end of `with` it is on the disk."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __enter__(self) -> "ItemFile":
        self._file = open(Path(self.place.folder, self.place.file), "xb")
        return self

    def write(self, index: MetadataIndex, data: Tensor | io.BytesIO) -> WriteResult:
        """Write a tensor or pickled bytes."""
        stream, start = _Checksummed(self._file), self._file.tell()
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(_alone(data.detach().cpu()), stream)  # type: ignore[arg-type]  # torch names IO[bytes], and only writes
        size = self._file.tell() - start
        return WriteResult(index, size, Stored(StorageInfo(self.place.file, start, size), stream.crc32))

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if error is None:
                sync(self._file)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor on the CPU behind a storage that holds nothing else: torch.save writes whole storages.

    The same memory, if it is contiguous and not the lazy conjugate or negative of something; a subclass as it is.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    tensor = in_order(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class _Checksummed(io.RawIOBase):
    """A stream that passes bytes on and adds up their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.crc32 = file, 0

    def write(self, data: Any) -> int:
        """Write bytes, or anything that has a buffer of them."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.file.write(data)


def _piece(result: WriteResult) -> tuple[str, Piece]:
    info, crc32 = result.storage_data
    return info.relative_path, Piece(result.index.fqn, info.offset, info.length, crc32)


class DirectoryReader(FileSystemReader):
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
