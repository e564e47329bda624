"""What a checkpoint holds, with sizes and checksums: `manifest.json`, written last.

A file is a sequence of pieces, each a box of a tensor or a pickled object. Checksums belong to pieces, so an error can
name the tensor, and who reads a few tensors checks these alone.
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_compile.checkpoint.disk import write_synced

NAME = "manifest.json"
METADATA = ".metadata"  # DCP's own list of what was saved
FORMAT = 1
CHUNK = 1 << 20  # bytes that a check holds in memory


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what was found is not what was written."""


class Piece(NamedTuple):
    """A run of bytes of a file."""

    name: str  # of the tensor or object it belongs to
    start: int
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Every file of a checkpoint with the pieces that fill it, and the step at which it was saved, if there is one."""

    step: int | None
    files: dict[str, list[Piece]]  # each file's in the order of its bytes

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; it carries its own checksum."""
        body = {"format": FORMAT, "step": self.step, "files": self.files}
        content = json.dumps({"crc32": _crc_of_json(body), "manifest": body})
        write_synced(folder / NAME, content.encode())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of a checkpoint, after a look at the size of each file and at DCP's metadata.

        Raises:
            CheckpointError: the manifest or the metadata is missing or damaged; or a file is missing or has another
                size.
        """
        manifest = _parse(folder / NAME)
        for name, pieces in manifest.files.items():
            path, expected = folder / name, sum(piece.bytes for piece in pieces)
            found = path.stat().st_size if path.is_file() else None
            if found != expected:
                lost = next((p.name for p in pieces if p.start + p.bytes > (found or 0)), pieces[-1].name)
                raise damaged(path, lost, f"expected {expected} bytes, found {'no file' if found is None else found}")
        with open(folder / METADATA, "rb") as stream:
            manifest.check(folder, METADATA, stream, 0)
        return manifest

    def check(self, folder: Path, file: str, stream: IO[bytes], start: int) -> None:
        """Compare the piece of `file` that begins at byte `start` of the open `stream` with its checksum.

        Raises:
            CheckpointError: they differ, or the manifest knows no such piece.
        """
        pieces = self.files.get(file, [])
        at = bisect_left(pieces, start, key=lambda piece: piece.start)
        if at == len(pieces) or pieces[at].start != start:
            raise damaged(folder / file, "?", f"{NAME} knows nothing that begins at byte {start}")
        if _crc_of_stream(stream, pieces[at]) != pieces[at].crc32:
            raise damaged(folder / file, pieces[at].name, "its bytes are not those that were written")


def damaged(path: Path, name: str, what: str) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(f"{path}, with {name}: {what}; load an older checkpoint")


def checksum(file: Path) -> Piece:
    """A whole file as one piece."""
    piece = Piece("the list of all tensors", 0, file.stat().st_size, 0)
    with open(file, "rb") as stream:
        return piece._replace(crc32=_crc_of_stream(stream, piece))


def _parse(path: Path) -> Manifest:
    try:
        read = json.loads(path.read_text())
        body, crc = read["manifest"], read["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, "all tensors", f"expected a manifest, found {error!r}") from None
    if _crc_of_json(body) != crc:
        raise damaged(path, "all tensors", "its text is not what was written")
    if body["format"] != FORMAT:
        raise damaged(path, "all tensors", f"expected format {FORMAT}, found {body['format']}")
    return Manifest(body["step"], {name: [Piece(*piece) for piece in found] for name, found in body["files"].items()})


def _crc_of_json(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _crc_of_stream(stream: IO[bytes], piece: Piece) -> int:
    stream.seek(piece.start)
    crc, left = 0, piece.bytes
    while left and (chunk := stream.read(min(left, CHUNK))):
        crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    return crc if not left else -1


def pieces_by_file(pieces: Iterable[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    """Group `(file, piece)` pairs, each file's pieces in the order of its bytes."""
    files: dict[str, list[Piece]] = {}
    for file, piece in sorted(pieces, key=lambda pair: (pair[0], pair[1].start)):
        files.setdefault(file, []).append(piece)
    return files
