"""Names in a folder of checkpoints, each complete or invisible.

    checkpoints/
        step-00000010/           complete: it gets this name after all its files have reached the disk
        step-00000010.1/         the same step saved once more; it replaces the one above, which goes afterwards
        .step-00000020.k3x9/     being written; or left over from a killed save, then the next one removes it

What is being written is locked by the process that writes it, so that leftovers are told from saves under way; the
lock goes when the folder has its final name. Nothing else of a folder that was published is ever changed: it is renamed
to a hidden name before it is removed.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from fsdp_compile.checkpoint.disk import sync_folder
from fsdp_compile.checkpoint.manifest import NAME as MANIFEST
from fsdp_compile.checkpoint.manifest import CheckpointError, Manifest
from fsdp_compile.core.environment import warn_caller

_PUBLISHED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_HIDDEN = re.compile(r"\.step-\d{8,}\..+")
_LOCK = ".lock"


class Aside(NamedTuple):
    """A checkpoint that is being written."""

    path: Path
    lock: IO[bytes]  # held until this is closed, or the process dies


def published(root: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `root`, oldest step first; empty if there is no such folder."""
    found = []
    for path in Path(root).iterdir() if Path(root).is_dir() else ():
        if match := _PUBLISHED.fullmatch(path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `root` whose files are all there with their sizes; None if there is none.

    Warns of newer ones that it passes over. What the files hold is compared with checksums when it is loaded.
    """
    found = newest(root)
    return found[0] if found else None


def newest(root: str | os.PathLike[str]) -> tuple[Path, Manifest] | None:
    """What `latest` finds, with its manifest."""
    if (Path(root) / MANIFEST).is_file():  # a checkpoint itself
        return Path(root), Manifest.read(Path(root))
    for path in reversed(published(root)):
        try:
            return path, Manifest.read(path)
        except CheckpointError as error:
            warn_caller(f"passed over a damaged checkpoint: {error}")
    return None


def at_step(root: str | os.PathLike[str], step: int) -> tuple[Path, Manifest] | None:
    """The checkpoint of `step` with its manifest; None if there is none. CheckpointError if a file is not whole."""
    found = [path for path in published(root) if step_of(path) == step]
    return (found[-1], Manifest.read(found[-1])) if found else None


def step_of(path: Path) -> int:
    """The step in the name of a published checkpoint. ValueError for another name."""
    match = _PUBLISHED.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: expected a name such as step-00000010")
    return int(match[1])


def begin(root: Path, step: int) -> Aside:
    """Make a hidden folder for a checkpoint, after removing the leftovers of killed saves."""
    _make(root)
    with _one_at_a_time(root):  # another save would take the folder, before it is locked, for a leftover
        remove_leftovers(root)
        path = root / f".step-{step:08d}.{secrets.token_hex(4)}"
        path.mkdir()
        lock = open(path / _LOCK, "wb")  # noqa: SIM115  (its lock is held until the save ends)
        _try_lock(lock)
    return Aside(path, lock)


def _make(folder: Path) -> None:
    """Make a folder, and wait until its name is on the disk, as are those of the folders around it."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def publish(aside: Aside, root: Path, step: int) -> Path:
    """Let a checkpoint whose files are on the disk be seen, and return its path.

    A rename within a folder happens or does not happen, whenever the machine stops.
    """
    sync_folder(aside.path)
    same = [path for path in published(root) if step_of(path) == step]
    take = 1 + max((int(path.suffix[1:] or 0) for path in same), default=-1)
    path = root / (f"step-{step:08d}.{take}" if same else f"step-{step:08d}")
    aside.path.rename(path)
    sync_folder(root)
    (path / _LOCK).unlink()
    aside.lock.close()
    for old in same:
        _remove(old)
    return path


def abandon(aside: Aside) -> None:
    """Remove a checkpoint that was not published."""
    shutil.rmtree(aside.path, ignore_errors=True)
    aside.lock.close()


def prune(root: Path, keep: int, last: Path) -> None:
    """Remove all but `keep` checkpoints: `last`, whatever its step is, and the newest of the others."""
    others = [path for path in published(root) if path != last]
    for path in others[: max(0, len(others) - keep + 1)]:
        _remove(path)


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves left; what another process is writing stays."""
    for path in root.iterdir():
        if _HIDDEN.fullmatch(path.name) and not _is_locked(path):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    try:
        path.rename(hidden)
    except OSError as error:  # nothing is lost, and the save that this ends is complete
        warn_caller(f"could not remove an old checkpoint: {error}")
        return
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with this folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


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
