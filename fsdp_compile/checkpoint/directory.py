"""A folder of checkpoints: the names in it, the manifest of each checkpoint, and its writer and reader for DCP.

checkpoints/
    step-00000010/           committed: it gets this name when all its files are on the disk
        manifest.json        the files, with sizes and checksums
        .metadata            DCP's list of what was saved
        __0_0.distcp ...     what each rank has written
    step-00000010.1/         the same step saved again; it replaces the one above, which is removed afterwards
    .step-00000020.k3x9/     staged: being written, or left over from a killed save; then the next save removes it
"""

# Note [A checkpoint is complete or invisible]
# A save writes all files into a staged folder, whose name is hidden, and fsyncs each file, then the folder. Only then
# does it commit: one rename within the folder of checkpoints, which happens or does not happen, whenever the machine
# stops. The manifest is written last, carries its own checksum, and lists the bytes of every other file, so a reader
# recognizes a file that was truncated, altered or lost by any other means. The process that writes a staged folder
# holds a lock in it, which tells saves under way from leftovers of killed ones; making and locking it happens under a
# lock on the folder of checkpoints. Nothing in a committed folder ever changes: removing it begins with a rename to a
# hidden name, under the same lock that a search for the newest holds, so two jobs in one folder leave each other one.
#
# On several ranks the first one stages and commits; DCP's exchange of plans and results are the barriers:
#
#     rank 0    plans, stages a folder |             | all results: manifest, sync, commit |
#     others    plans                  | write, sync |                                     | learn how it went
#
# A rank sends its result when its file is on the disk. If a rank raises, all raise; if one dies, the others raise when
# the process group notices. Either way the staged folder stays hidden.

import fcntl
import io
import json
import os
import re
import secrets
import shutil
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, SafeReader, file_in, path_in
from fsdp_compile.config import read_json
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.state_dict._torch import StorageInfo
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.sharded_view import ShardedView

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
BLOCK = 1 << 20  # bytes that are read at a time to check a file
_COMMITTED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_HIDDEN = re.compile(r"\.step-\d{8,}\..+")
_LOCK = ".lock"


# --- committed checkpoints --------------------------------------------------------------------------------------------


def _step_and_take(path: Path) -> tuple[int, int]:
    """The step in the name of a checkpoint, and how often it had been saved before; (-1, 0) for any other name."""
    match = _COMMITTED.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def committed(root: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `root`, oldest step first; empty if there is no such folder."""
    return sorted((path for path in Path(root).glob("*") if step_of(path) >= 0 and path.is_dir()), key=_step_and_take)


def step_of(path: Path) -> int:
    """The step in the name of a committed checkpoint; -1 for any other name."""
    return _step_and_take(path)[0]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `root` whose files all exist with the right sizes; None if there is none.

    Warns about newer ones that it passes over. Checksums are compared when the checkpoint is loaded.
    """
    newest = open_checkpoint(root)
    return newest[0] if newest else None


def open_checkpoint(root: str | os.PathLike[str], step: int | None = None) -> tuple[Path, "Manifest"] | None:
    """The checkpoint of `step`, or `latest(root)`, or `root` itself, with its manifest; None if there is none.

    CheckpointError if the checkpoint of `step`, or the one that `root` is, is not complete.
    """
    if (Path(root) / MANIFEST).is_file() and step is None:
        return Path(root), Manifest.read(Path(root))
    with _locked(Path(root)):  # nobody removes the newest meanwhile
        for path in reversed(committed(root)):
            if step is None:
                try:
                    return path, Manifest.read(path_in(Path(root), path.name))
                except CheckpointError as error:
                    warn_caller(f"passed over a damaged checkpoint: {error}")
            elif step_of(path) == step:
                return path, Manifest.read(path_in(Path(root), path.name))
    return None


def _remove(path: Path) -> None:
    """Remove a checkpoint, or a link to one, as far as that is possible."""
    hidden = path.with_name(f".{path.name}.removed")
    try:
        _delete(path.rename(hidden))
    except OSError as error:  # the new checkpoint is complete all the same
        warn_caller(f"could not remove an old checkpoint: {error}")


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, flags: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Lock a file or folder, if it exists, against other processes. Yields whether that was possible."""
    with ExitStack() as stack:
        try:
            file = os.open(path, os.O_RDWR if path.name == _LOCK else os.O_RDONLY)
            stack.callback(os.close, file)
            fcntl.flock(file, flags)
            is_ours = True
        except OSError:  # no such file, somebody else's lock, or a file system without locks
            is_ours = False
        yield is_ours


def _is_left(path: Path) -> bool:
    """Whether the save that has staged a folder was killed."""
    with _locked(path / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_free:
        return is_free or not (path / _LOCK).exists()


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, in the place of an earlier one, and wait until it is on the disk."""
    path.unlink(missing_ok=True)  # a link would lead the bytes elsewhere
    with open(path, "xb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Wait until an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# --- what a checkpoint holds ------------------------------------------------------------------------------------------


class FileSegment(NamedTuple):
    """A chunk of a tensor in a file, a pickled object, or all of `.metadata`; with a checksum, to check it alone."""

    name: str  # of the tensor or object, for errors
    start: int
    bytes: int
    crc32: int


class Manifest(NamedTuple):
    """The files of a checkpoint, the segments that fill each, and the step at which it was saved, if known."""

    step: int | None
    files: dict[str, list[FileSegment]]  # sorted by `start`

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; it carries its own checksum."""
        body = {"format": FORMAT, **self._asdict()}
        write_synced(folder / MANIFEST, json.dumps({"crc32": _crc_of_json(body), "manifest": body}).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a manifest, and check the size of each file and the bytes of `.metadata`; CheckpointError if wrong."""
        path = file_in(folder, MANIFEST)
        try:
            body = (read := read_json(path))["manifest"]
            if (_crc_of_json(body), body["format"]) != (read["crc32"], FORMAT):
                raise ValueError(f"another text than was written, or format {body['format']}")
            files = {name: [FileSegment(*each) for each in segments] for name, segments in body["files"].items()}
            numbers = [number for segments in files.values() for each in segments for number in each[1:]]
            if not all(type(each) is int and each >= 0 for each in numbers) or not all(files.values()):
                raise ValueError("a file without bytes, or segments without places")
            if METADATA not in files or type(body["step"]) not in (int, type(None)):
                raise ValueError("no list of tensors, or no step")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damage_error(path, "all tensors", f"expected a manifest, found {error!r}") from None
        manifest = cls(body["step"], files)
        for name, segments in files.items():
            size = path.stat().st_size if (path := file_in(folder, name)).is_file() else -1
            if size != (expected := sum(segment.bytes for segment in segments)):
                lost = next((each.name for each in segments if each.start + each.bytes > size), segments[-1].name)
                raise _damage_error(path, lost, f"expected {expected} bytes, found {'no file' if size < 0 else size}")
        with open(file_in(folder, METADATA), "rb") as stream:
            manifest.check(folder, METADATA, stream, 0)
        return manifest

    def check(self, folder: Path, file: str, stream: IO[bytes], start: int) -> None:
        """Check the segment at byte `start` of `file`, open as `stream`; CheckpointError if wrong or not listed."""
        segments = self.files.get(file, [])
        at = bisect_left(segments, start, key=lambda segment: segment.start)
        if at == len(segments) or segments[at].start != start:
            raise _damage_error(folder / file, "?", f"{MANIFEST} knows nothing that begins at byte {start}")
        stream.seek(start)
        crc, left = 0, segments[at].bytes
        while left and (block := stream.read(min(left, BLOCK))):
            crc, left = zlib.crc32(block, crc), left - len(block)
        if left or crc != segments[at].crc32:
            raise _damage_error(folder / file, segments[at].name, "its bytes are not those that were written")


def _damage_error(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}, with {name}: {what}; load an older checkpoint")


def _crc_of_json(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# --- writing and reading one checkpoint -------------------------------------------------------------------------------


class _SummedFile(io.BufferedWriter):
    """A new file, with the checksums of what was written from each `tell` to the next one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.sums: dict[int, int] = {}  # by the first byte
        self._start = self._crc32 = 0

    def write(self, data: Any) -> int:
        """Write anything with a buffer of bytes."""
        self._crc32 = zlib.crc32(data, self._crc32)
        return super().write(data)

    def tell(self) -> int:
        """The end of what was written."""
        if (here := super().tell()) != self._start:
            self.sums[self._start] = self._crc32
            self._start, self._crc32 = here, 0
        return here

    def fileno(self) -> int:
        """For os.fsync, before which torch 2.13 does not flush."""
        self.flush()
        return super().fileno()


class _SummedFiles(FileSystem):
    """torch's files, of which `sums` has checksums by name and first byte."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A new file."""
        with _SummedFile(path) as stream:
            yield stream
        self.sums |= {(Path(path).name, start): crc32 for start, crc32 in stream.sums.items()}


class FolderWriter(FileSystemWriter):
    """DCP's writer, into a folder without files, with a manifest. What shares its memory is written once.

    Args:
        path: the folder, made by somebody else.
        step: at which the state is saved, if known.
    """

    keeps_chunks = True  # see Note [Writers that keep one item]
    fs: _SummedFiles
    path: Path

    def __init__(self, path: str | os.PathLike[str], step: int | None) -> None:
        super().__init__(path)
        self.step, self.fs = step, _SummedFiles()

    def storage_meta(self) -> StorageMeta:
        """The id of the save, without a path: the folder will be renamed."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one file and wait until it is on the disk; results have checksums too.

        A tensor that shares its memory with an earlier one, as tied parameters do under each of their names, is not
        written again: both have one place, which any reader of DCP follows.
        """
        done: Future[list[WriteResult]] = Future()
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        data = [planner.resolve_data(item) for item in tensors]  # all alive, so that no memory is used twice
        firsts: dict[Any, WriteItem] = {}
        same = {item.index: firsts.setdefault(memory_read_by(each) or item.index, item)
                for item, each in zip(tensors, data, strict=True)}  # fmt: skip
        items = [item for item in plan.items if same.get(item.index, item) is item]
        written = super().write_data(replace(plan, items=items), planner).value() if items else []
        found = {each.index: self.with_checksum(each) for each in written}
        firsts_of = ((item.index, same.get(item.index, item).index) for item in plan.items)
        done.set_result([replace(found[first], index=index) for index, first in firsts_of])
        return done

    def with_checksum(self, written: WriteResult) -> WriteResult:
        """What `finish` takes: a place with the checksum of what was written there."""
        place = written.storage_data
        return replace(written, storage_data=(place, self.fs.sums[place.relative_path, place.offset]))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """When all ranks have written: write `.metadata` and the manifest."""
        super().finish(metadata, [[replace(each, storage_data=each.storage_data[0]) for each in r] for r in results])
        files: dict[str, dict[int, FileSegment]] = {}
        for result in (each for rank in results for each in rank):
            place, crc32 = result.storage_data
            segment = FileSegment(result.index.fqn, place.offset, place.length, crc32)
            files.setdefault(place.relative_path, {}).setdefault(place.offset, segment)  # tied tensors share one
        listed = (Path(self.path) / METADATA).read_bytes()
        found = {name: [segments[start] for start in sorted(segments)] for name, segments in files.items()}
        found[METADATA] = [FileSegment("the list of all tensors", 0, len(listed), zlib.crc32(listed))]
        Manifest(self.step, found).write(Path(self.path))


class DirectoryWriter(FolderWriter):
    """Writes one checkpoint into the folder `root`; make a new writer for each.

        dcp.save(state_dict, storage_writer=DirectoryWriter("checkpoints", step=10))

    Args:
        root: the folder of checkpoints, which all ranks share.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.

    Raises:
        ValueError: `step` is below 0 or `keep` below 1.
    """

    def __init__(self, root: str | os.PathLike[str], step: int, keep: int | None = None) -> None:
        if step < 0 or (keep is not None and keep < 1):
            raise ValueError(f"expected step of at least 0 and keep of at least 1 or None, found {step} and {keep}")
        super().__init__(root, step)
        self.root, self.keep = Path(root), keep
        self._staged = ExitStack()  # at whose end the staged folder is removed, unless it was committed

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: rank 0 makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: remove the leftovers of killed saves, stage a folder, and tell the others where it is."""
        for folder in reversed([path for path in (self.root, *self.root.parents) if not path.is_dir()]):
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)
        with _locked(self.root):  # to another save the folder, before it is locked, would be a leftover
            for path in self.root.iterdir():
                if _HIDDEN.fullmatch(path.name) and (path.is_symlink() or _is_left(path)):
                    _delete(path)
            self.path = self.root / f".step-{self.step:08d}.{secrets.token_hex(4)}"
            self.path.mkdir()
            (self.path / _LOCK).touch()
            self._staged.enter_context(_locked(self.path / _LOCK))
            self._staged.callback(shutil.rmtree, self.path, ignore_errors=True)
        return [
            replace(plan, storage_data=(self.path, plan.storage_data)) for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As above; FileNotFoundError if this rank does not see the folder that rank 0 made."""
        self.path, of_rank = plan.storage_data
        return super().write_data(replace(plan, storage_data=of_rank), planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: write metadata and manifest, commit, and remove what is to go."""
        super().finish(metadata, results)
        sync_folder(self.path)
        with _locked(self.root):  # or two jobs might each remove the last checkpoint of the other
            others = committed(self.root)
            takes = [take for step, take in map(_step_and_take, self.root.iterdir()) if step == self.step]
            take = 1 + max(takes, default=-1)
            self.path = self.path.rename(self.root / f"step-{self.step:08d}{f'.{take}' if take else ''}")
            sync_folder(self.root)
            (self.path / _LOCK).unlink()
            self.discard()
            same = [path for path in others if step_of(path) == self.step]
            older = [path for path in others if step_of(path) != self.step]
            for path in same + (older[: max(0, len(older) + 1 - self.keep)] if self.keep else []):
                _remove(path)

    def discard(self) -> None:
        """Remove what a failed save has written; does nothing after success."""
        self._staged.close()


class DirectoryReader(SafeReader):
    """Reads a checkpoint that `DirectoryWriter` wrote; compares the checksum of each item before loading it.

    Args:
        path: the checkpoint, as `latest` returns it.
        manifest: its manifest, if already read.

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


# --- tensors that share their memory ----------------------------------------------------------------------------------


def memory_read_by(tensor: Any) -> Any:
    """Equal for two tensors that are alive and read the same memory in the same way; None if that is not known.

    Of a value over a shard, it is the object that has its elements: some ranks have none, and all find the same.
    """
    if isinstance(tensor, (ShardedTensor, ShardedView)):
        return id(tensor.local), getattr(tensor, "geometry", None)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy


def first_names(memory: Mapping[str, Any]) -> dict[str, str]:
    """For each name that has the same memory as one before it, that one."""
    firsts: dict[Any, str] = {}
    found = {name: firsts.setdefault(each, name) for name, each in memory.items() if each is not None}
    return {name: first for name, first in found.items() if name != first}
