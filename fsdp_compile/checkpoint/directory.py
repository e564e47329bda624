"""A folder of checkpoints: the names in it, and the manifest with which each checkpoint says what it holds.

checkpoints/
    step-00000010/           committed: it gets this name after all its files have reached the disk
        manifest.json        which files there are, with sizes and checksums
        .metadata            DCP's list of what was saved
        __0_0.distcp ...     what each rank has written
    step-00000010.1/         the same step saved once more; it replaces the one above, which is removed afterwards
    .step-00000020.k3x9/     staged: being written, or left over from a killed save; then the next save removes it
"""

# Note [A checkpoint is complete or invisible]
# A save writes all files of a checkpoint into a staged folder, whose name is hidden, and waits until they are on the
# disk (fsync of each file, then of the folder). Only then does it commit the checkpoint: one rename within the folder
# of checkpoints, which happens or does not happen, whenever the machine stops. The manifest is written last, carries
# its own checksum, and lists the bytes of every other file, so a reader recognizes a file that was truncated, altered
# or lost by any other means. A staged folder is locked by the process that writes it, so that the leftovers of killed
# saves can be told from saves under way; making and locking it happens under a lock on the folder of checkpoints.
# Nothing in a committed folder is ever changed: to remove it, it is first renamed to a hidden name, under the same lock
# that is held while the newest checkpoint is looked for, so that two jobs in one folder leave each other one to load.
# On several ranks the first one stages and commits, and DCP's exchange of plans and results are the barriers (see
# storage.py).

import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, file_in
from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.text_files import read_json

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
BLOCK = 1 << 20  # bytes of a file that are in memory while it is checked
_COMMITTED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_HIDDEN = re.compile(r"\.step-\d{8,}\..+")
_LOCK = ".lock"


# --- committed checkpoints --------------------------------------------------------------------------------------------


def committed(root: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `root`, oldest step first; empty if there is no such folder."""
    steps = []
    for path in Path(root).iterdir() if Path(root).is_dir() else ():
        if (match := _COMMITTED.fullmatch(path.name)) and path.is_dir():
            steps.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(steps)]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `root` whose files are all there with their sizes; None if there is none.

    Warns of newer ones that it passes over. What the files hold is compared with checksums when it is loaded.
    """
    newest = open_checkpoint(root)
    return newest[0] if newest else None


def open_checkpoint(root: str | os.PathLike[str], step: int | None = None) -> tuple[Path, "Manifest"] | None:
    """The checkpoint of `step`, or what `latest` returns, with its manifest; None if there is none.

    If `root` is a checkpoint itself, that is the newest.

    Raises:
        CheckpointError: the checkpoint of `step`, or the one that `root` is, is not complete.
    """
    if (Path(root) / MANIFEST).is_file() and step is None:
        return Path(root), Manifest.read(Path(root))
    with _one_at_a_time(Path(root)):  # nobody removes the newest while it is looked for
        same = [path for path in committed(root) if step in (None, step_of(path))]
        if step is not None:
            return (same[-1], Manifest.read(same[-1])) if same else None
        for path in reversed(same):
            try:
                return path, Manifest.read(path)
            except CheckpointError as error:
                warn_caller(f"passed over a damaged checkpoint: {error}")
    return None


def step_of(path: Path) -> int:
    """The step in the name of a committed checkpoint. ValueError for another name."""
    match = _COMMITTED.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"{path}: expected a name such as step-00000010, found {path.name}; pass a committed checkpoint"
        )
    return int(match[1])


def prune(root: Path, keep: int, last: Path) -> None:
    """Remove all but `keep` checkpoints: `last`, whatever its step is, if it exists, and the newest of the others."""
    with _one_at_a_time(root):  # or two jobs might each remove the last one of the other
        existing = committed(root)
        others = [path for path in existing if path != last]
        for path in others[: max(0, len(existing) - keep)]:
            _remove(path)


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    try:
        path.rename(hidden)
    except OSError as error:  # nothing is lost, and the save that this ends is complete
        warn_caller(f"could not remove an old checkpoint: {error}")
        return
    shutil.rmtree(hidden, ignore_errors=True)


# --- staged checkpoints -----------------------------------------------------------------------------------------------


class StagedCheckpoint(NamedTuple):
    """A checkpoint that is being written."""

    path: Path
    lock: IO[bytes]  # held until this is closed, or the process dies


def stage(root: Path, step: int) -> StagedCheckpoint:
    """Make a hidden folder for a checkpoint, after removing the leftovers of killed saves."""
    _make(root)
    with _one_at_a_time(root):  # another save would take the folder, before it is locked, for a leftover
        for path in root.iterdir():
            if _HIDDEN.fullmatch(path.name) and not _is_locked(path):
                shutil.rmtree(path, ignore_errors=True)
        path = root / f".step-{step:08d}.{secrets.token_hex(4)}"
        path.mkdir()
        lock = open(path / _LOCK, "wb")  # noqa: SIM115  (its lock is held until the save ends)
        _try_lock(lock)
    return StagedCheckpoint(path, lock)


def commit(staged: StagedCheckpoint, root: Path, step: int) -> Path:
    """Let a checkpoint whose files are on the disk be seen, and return its path."""
    sync_folder(staged.path)
    same = [path for path in committed(root) if step_of(path) == step]
    path = _take_name(staged.path, root, step)
    sync_folder(root)
    (path / _LOCK).unlink(missing_ok=True)  # another job may have removed the checkpoint already
    staged.lock.close()
    with _one_at_a_time(root):
        for old in same if path.is_dir() else ():  # unless another job has removed this one to make room
            _remove(old)
    return path


def _take_name(folder: Path, root: Path, step: int) -> Path:
    """Rename `folder` to the first free name for a checkpoint of `step`, and return it."""
    names = filter(None, (_COMMITTED.fullmatch(path.name) for path in root.iterdir()))  # of other files too
    take = 1 + max((int(match[2] or 0) for match in names if int(match[1]) == step), default=-1)
    while True:
        path = root / (f"step-{step:08d}.{take}" if take else f"step-{step:08d}")
        try:
            return folder.rename(path)
        except OSError:
            if not path.exists():
                raise
            take += 1  # another job has committed the same step meanwhile


def discard(staged: StagedCheckpoint) -> None:
    """Remove a checkpoint that was not committed."""
    shutil.rmtree(staged.path, ignore_errors=True)
    staged.lock.close()


def _make(folder: Path) -> None:
    """Make a folder, and wait until its name is on the disk, as are those of the folders around it."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with this folder, if it exists."""
    with ExitStack() as stack:
        with suppress(OSError):  # no such folder, or a file system without locks
            file = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it; or the file system has no locks, and nobody can tell
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with open(path / _LOCK, "rb+") as lock:
            return not _try_lock(lock)
    except FileNotFoundError:
        return False


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Wait until what was written to an open file is on the disk."""
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
    """A range of bytes of a file: a chunk of a tensor, a pickled object, or all of `.metadata`.

    A checksum belongs to a segment, so that an error can name the tensor, and loading few tensors checks these alone.
    """

    name: str  # of the tensor or object that it belongs to
    start: int
    bytes: int
    crc32: int

    @classmethod
    def of_file(cls, file: Path) -> "FileSegment":
        """A complete file as one segment."""
        segment = cls("the list of all tensors", 0, file.stat().st_size, 0)
        with open(file, "rb") as stream:
            return segment._replace(crc32=_crc_of_stream(stream, segment))


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint with the segments that fill them, and the step at which it was saved, if any."""

    step: int | None
    files: dict[str, list[FileSegment]]  # those of each file in the order of its bytes

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; it carries its own checksum."""
        body = {"format": FORMAT, "step": self.step, "files": self.files}
        write_synced(folder / MANIFEST, json.dumps({"crc32": _crc_of_json(body), "manifest": body}).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint, after a look at the size of each file and at DCP's metadata.

        Raises:
            CheckpointError: the manifest or the metadata is missing or damaged; or a file is missing or has another
                size.
        """
        manifest = cls._parse(folder / MANIFEST)
        for name, segments in manifest.files.items():
            path, expected = file_in(folder, name, MANIFEST), sum(segment.bytes for segment in segments)
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                ends = ((segment.name, segment.start + segment.bytes) for segment in segments)
                lost = next((tensor for tensor, end in ends if end > (size or 0)), segments[-1].name)
                raise _damaged(path, lost, f"expected {expected} bytes, found {'no file' if size is None else size}")
        try:
            with open(file_in(folder, METADATA, MANIFEST), "rb") as stream:
                manifest.check(folder, METADATA, stream, 0)
        except OSError as error:  # it was there just now
            raise _damaged(folder / METADATA, "all tensors", f"could not be read: {error}") from None
        return manifest

    @classmethod
    def _parse(cls, path: Path) -> "Manifest":
        try:
            read = read_json(path)
            body, crc = read["manifest"], read["crc32"]
            if _crc_of_json(body) != crc:
                raise _damaged(path, "all tensors", "its text is not what was written")
            if body["format"] != FORMAT:
                raise _damaged(path, "all tensors", f"expected format {FORMAT}, found {body['format']}")
            files = {name: list(map(_segment, segments)) for name, segments in body["files"].items()}
            if METADATA not in files or not all(files.values()) or type(body["step"]) not in (int, type(None)):
                raise ValueError("no list of tensors, a file without bytes, or no step")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, "all tensors", f"expected a manifest, found {error!r}") from None
        return cls(body["step"], files)

    def check(self, folder: Path, file: str, stream: IO[bytes], start: int) -> None:
        """Compare the segment of `file` that begins at byte `start` of the open `stream` with its checksum.

        Raises:
            CheckpointError: they differ, or the manifest knows no such segment.
        """
        segments = self.files.get(file, [])
        at = bisect_left(segments, start, key=lambda segment: segment.start)
        if at == len(segments) or segments[at].start != start:
            raise _damaged(folder / file, "?", f"{MANIFEST} knows nothing that begins at byte {start}")
        if _crc_of_stream(stream, segments[at]) != segments[at].crc32:
            raise _damaged(folder / file, segments[at].name, "its bytes are not those that were written")


def _segment(fields: Any) -> FileSegment:
    segment = FileSegment(*fields)
    numbers = (segment.start, segment.bytes, segment.crc32)
    if type(segment.name) is not str or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{segment}")
    return segment


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}, with {name}: {what}; load an older checkpoint")


def _crc_of_json(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _crc_of_stream(stream: IO[bytes], segment: FileSegment) -> int:
    stream.seek(segment.start)
    crc, left = 0, segment.bytes
    while left and (block := stream.read(min(left, BLOCK))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    return crc if not left else -1
