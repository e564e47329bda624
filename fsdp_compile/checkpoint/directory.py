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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, SafeReader, file_in, path_in
from fsdp_compile.config import read_json
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.state_dict._torch import StorageInfo
from fsdp_compile.state_dict.sharded_value import with_own_storage

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
    with _one_at_a_time(Path(root)):  # nobody removes the newest meanwhile
        for path in reversed(committed(root)):
            if step is None:
                try:
                    return path, Manifest.read(path_in(Path(root), path.name))
                except CheckpointError as error:
                    warn_caller(f"passed over a damaged checkpoint: {error}")
            elif step_of(path) == step:
                return path, Manifest.read(path_in(Path(root), path.name))
    return None


def prune(root: Path, keep: int, last: Path) -> None:
    """Remove all but `keep` checkpoints: `last`, whatever its step, if it exists, and the newest of the others."""
    with _one_at_a_time(root):  # or two jobs might each remove the last one of the other
        existing = committed(root)
        others = [path for path in existing if path != last]
        for path in others[: max(0, len(existing) - keep)]:
            _remove_checkpoint(path)


def _remove_checkpoint(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    try:
        path.rename(hidden)
    except OSError as error:  # the new checkpoint is complete all the same
        warn_caller(f"could not remove an old checkpoint: {error}")
        return
    _delete(hidden)


def _delete(path: Path) -> None:
    """Remove a folder, or a link to one, as far as that is possible."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# --- staged checkpoints -----------------------------------------------------------------------------------------------


class StagedCheckpoint(NamedTuple):
    """A checkpoint that is being written."""

    path: Path
    lock: IO[bytes]  # held until this is closed or the process dies


def stage(root: Path, step: int) -> StagedCheckpoint:
    """Make a hidden folder for a checkpoint, after removing the leftovers of killed saves."""
    for folder in reversed([path for path in (root, *root.parents) if not path.is_dir()]):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    with _one_at_a_time(root):  # to another save the folder, before it is locked, would be a leftover
        for path in root.iterdir():
            if _HIDDEN.fullmatch(path.name) and (path.is_symlink() or not _is_locked(path)):
                _delete(path)
        path = root / f".step-{step:08d}.{secrets.token_hex(4)}"
        path.mkdir()
        lock = open(path / _LOCK, "wb")  # noqa: SIM115  (its lock is held until the save ends)
        _try_lock(lock)
    return StagedCheckpoint(path, lock)


def commit(staged: StagedCheckpoint, root: Path, step: int) -> Path:
    """Make a checkpoint whose files are on the disk visible, and return its path."""
    sync_folder(staged.path)
    same = [path for path in committed(root) if step_of(path) == step]
    take = 1 + max((_step_and_take(path)[1] for path in root.iterdir() if step_of(path) == step), default=-1)
    while True:
        path = root / (f"step-{step:08d}.{take}" if take else f"step-{step:08d}")
        try:
            staged.path.rename(path)
            break
        except OSError:
            if not path.exists():
                raise
            take += 1  # another job has committed the same step meanwhile
    sync_folder(root)
    (path / _LOCK).unlink(missing_ok=True)  # another job may have removed the checkpoint already
    staged.lock.close()
    with _one_at_a_time(root):
        for old in same if path.is_dir() else ():  # unless another job has removed this one to make room
            _remove_checkpoint(old)
    return path


def discard(staged: StagedCheckpoint) -> None:
    """Remove a checkpoint that was not committed."""
    shutil.rmtree(staged.path, ignore_errors=True)
    staged.lock.close()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder, if it exists, against other processes."""
    with ExitStack() as stack:
        with suppress(OSError):  # no such folder, or a file system without locks
            file = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with open(path / _LOCK, "rb+") as lock:
            return not _try_lock(lock)
    except FileNotFoundError:
        return False


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


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, the segments that fill each, and the step at which it was saved, if known."""

    step: int | None
    files: dict[str, list[FileSegment]]  # sorted by `start`

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; it carries its own checksum."""
        body = {"format": FORMAT, "step": self.step, "files": self.files}
        write_synced(folder / MANIFEST, json.dumps({"crc32": _crc_of_json(body), "manifest": body}).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a manifest, and check the size of each file and the bytes of `.metadata`; CheckpointError if wrong."""
        manifest = cls._parse(file_in(folder, MANIFEST))
        for name, segments in manifest.files.items():
            path, expected = file_in(folder, name), sum(segment.bytes for segment in segments)
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                ends = ((segment.name, segment.start + segment.bytes) for segment in segments)
                lost = next((tensor for tensor, end in ends if end > (size or 0)), segments[-1].name)
                raise _damage_error(
                    path, lost, f"expected {expected} bytes, found {'no file' if size is None else size}"
                )
        try:
            with open(file_in(folder, METADATA), "rb") as stream:
                manifest.check(folder, METADATA, stream, 0)
        except OSError as error:  # it was there just now
            raise _damage_error(folder / METADATA, "all tensors", f"could not be read: {error}") from None
        return manifest

    @classmethod
    def _parse(cls, path: Path) -> "Manifest":
        try:
            read = read_json(path)
            body, crc = read["manifest"], read["crc32"]
            if _crc_of_json(body) != crc:
                raise _damage_error(path, "all tensors", "its text is not what was written")
            if body["format"] != FORMAT:
                raise _damage_error(path, "all tensors", f"expected format {FORMAT}, found {body['format']}")
            files = {name: list(map(_parsed_segment, segments)) for name, segments in body["files"].items()}
            if METADATA not in files or not all(files.values()) or type(body["step"]) not in (int, type(None)):
                raise ValueError("no list of tensors, a file without bytes, or no step")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damage_error(path, "all tensors", f"expected a manifest, found {error!r}") from None
        return cls(body["step"], files)

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


def _parsed_segment(fields: Any) -> FileSegment:
    segment = FileSegment(*fields)
    numbers = (segment.start, segment.bytes, segment.crc32)
    if type(segment.name) is not str or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{segment}")
    return segment


def _damage_error(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}, with {name}: {what}; load an older checkpoint")


def _crc_of_json(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# --- writing and reading one checkpoint -------------------------------------------------------------------------------


class DirectoryWriter(FileSystemWriter):
    """Writes one checkpoint into the folder `root`; make a new writer for each.

        dcp.save(state_dict, storage_writer=DirectoryWriter("checkpoints", step=10))

    Args:
        root: the folder of checkpoints, which all ranks share.
        step: names the checkpoint; 0 or more.
        keep: how many checkpoints stay, this one included; None: all.

    Raises:
        ValueError: `step` is below 0 or `keep` below 1.
    """

    keeps_chunks = True  # see Note [Writers that keep one item]

    def __init__(self, root: str | os.PathLike[str], step: int, keep: int | None = None) -> None:
        if step < 0 or (keep is not None and keep < 1):
            raise ValueError(f"expected step of at least 0 and keep of at least 1 or None, found {step} and {keep}")
        super().__init__(root)
        self.root, self.step, self.keep = Path(root), step, keep
        self._staged: StagedCheckpoint | None = None

    def storage_meta(self) -> StorageMeta:
        """The id of the save, without a path: the folder will be renamed."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: rank 0 makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the folder and tell the others where it is."""
        self._staged = stage(self.root, self.step)
        folder = self._staged.path
        return [replace(plan, storage_data=folder / rank_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one file and wait until it is on the disk.

        A tensor that shares its memory with an earlier one, as tied parameters do under each of their names, is not
        written again: both have one place, which any reader of DCP follows. FileNotFoundError if this rank does not see
        the folder that rank 0 made.
        """
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        data = [planner.resolve_data(item) for item in plan.items]  # all alive, so that no memory is used twice
        results: dict[Any, WriteResult] = {}
        keys = [memory_read_by(each) or item.index for item, each in zip(plan.items, data, strict=True)]
        with ItemFile(plan.storage_data) as file:
            for key, item, each in zip(keys, plan.items, data, strict=True):
                if key not in results:
                    results[key] = file.write_item(item.index, each)
        done.set_result([replace(results[key], index=item.index) for key, item in zip(keys, plan.items, strict=True)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: write metadata and manifest, then commit."""
        assert self._staged is not None, "finish: expected prepare_global_plan before"
        self.path = self._staged.path
        describe(self.path, self.step, metadata, results, super().finish)
        self.path = commit(self._staged, self.root, self.step)
        self._staged = None
        if self.keep is not None:
            prune(self.root, self.keep, self.path)

    def discard(self) -> None:
        """Remove what a failed save has written; does nothing after success."""
        if self._staged is not None:
            discard(self._staged)
            self._staged = None


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


def rank_file(rank: int) -> str:
    """The name that DCP gives to a rank's file."""
    return f"__{rank}_0.distcp"


def describe(
    folder: Path,
    step: int | None,
    metadata: Metadata,
    results: list[list[WriteResult]],
    finish: Callable[[Metadata, list[list[WriteResult]]], None],
) -> None:
    """Write `.metadata`, by `finish` of a `FileSystemWriter`, and the manifest of files that are on the disk."""
    finish(metadata, [[replace(each, storage_data=each.storage_data[0]) for each in rank] for rank in results])
    files: dict[str, dict[int, FileSegment]] = {}
    for result in (each for rank in results for each in rank):
        info, crc32 = result.storage_data
        segment = FileSegment(result.index.fqn, info.offset, info.length, crc32)
        files.setdefault(info.relative_path, {}).setdefault(info.offset, segment)  # tied tensors share one
    listed = (folder / METADATA).read_bytes()
    found = {name: [segments[start] for start in sorted(segments)] for name, segments in files.items()}
    found[METADATA] = [FileSegment("the list of all tensors", 0, len(listed), zlib.crc32(listed))]
    Manifest(step, found).write(folder)


class ItemFile(io.RawIOBase):
    """A new file of items; at the end of `with` it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  (closed at the end of `with`)
        self._name, self._crc32 = path.name, 0

    def write_item(self, index: MetadataIndex, data: Tensor | io.BytesIO) -> WriteResult:
        """Write a tensor or pickled bytes; the result has place and checksum."""
        start, self._crc32 = self._file.tell(), 0
        if isinstance(data, io.BytesIO):
            self.write(data.getbuffer())
        else:
            torch.save(_tensor_to_write(data.detach().cpu()), self)  # type: ignore[arg-type]  # an IO[bytes] by its type
        size = self._file.tell() - start
        return WriteResult(index, size, (StorageInfo(self._name, start, size), self._crc32))

    def write(self, data: Any) -> int:
        """Write anything with a buffer of bytes."""
        self._crc32 = zlib.crc32(data, self._crc32)
        return self._file.write(data)

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if error is None:
                sync(self._file)


def memory_read_by(tensor: Any) -> Any:
    """Equal for two tensors that are alive and read the same memory in the same way; None if that is not known."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy


def first_names(memory: Mapping[str, Any]) -> dict[str, str]:
    """For each name that has the same memory as one before it, that one."""
    firsts: dict[Any, str] = {}
    found = {name: firsts.setdefault(each, name) for name, each in memory.items() if each is not None}
    return {name: first for name, first in found.items() if name != first}


def in_order(tensor: Tensor) -> Tensor:
    """`tensor` with its values in order in memory: not transposed, no lazy conjugate or negative."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _tensor_to_write(tensor: Tensor) -> Tensor:
    """A CPU tensor over a storage of its own, as torch.save writes whole storages; subclasses stay as they are."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return with_own_storage(in_order(tensor)) if is_plain else tensor
