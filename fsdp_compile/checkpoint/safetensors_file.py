"""Files and folders of safetensors, as Hugging Face lays them out, read and written in place at known bytes.

    model.safetensors                      8 bytes: n; n bytes of JSON: dtype, shape and place of tensors; their bytes
    model-00001-of-00002.safetensors ...   several files, and model.safetensors.index.json says which has which

A tensor is one run of bytes, and so is what a rank stores of it. The `safetensors` package reads and writes whole
tensors or slices along a dimension, so it is not what is needed here; tests compare with it.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_compile.checkpoint.disk import in_order, memory_of, sync, sync_folder, write_fully, write_synced
from fsdp_compile.checkpoint.manifest import CheckpointError

INDEX = "model.safetensors.index.json"
CHUNK = 1 << 24  # bytes of a buffer where values are converted or come from another device

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Spec(NamedTuple):
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are."""

    spec: Spec
    file: Path
    start: int  # of its first byte in the file


def find(path: Path) -> dict[str, Place]:
    """The tensors of a file, or of a folder with an index or one file, by name.

    Raises:
        FileNotFoundError: there is no such file, or no file of safetensors in the folder.
        CheckpointError: a file is not what its header says; or the index and the files disagree.
    """
    if path.is_file():
        return read_header(path)[0]
    if not (path / INDEX).is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{path}: expected {INDEX} or one file *.safetensors, found {len(files)} files")
        return read_header(files[0])[0]
    where = _read_index(path / INDEX)
    for file in where.values():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"{path / INDEX}: expected names of files in the folder, found {file!r}")
    headers = {file: read_header(path / file)[0] for file in dict.fromkeys(where.values())}
    for name, file in where.items():
        if name not in headers[file]:
            raise CheckpointError(f"{path / INDEX}: expected {name} in {file}, which does not have it")
    return {name: headers[file][name] for name, file in where.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected JSON with a weight_map, found {error!r}") from None


def read_header(path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    CheckpointError if the header cannot be read, or names bytes that a tensor does not have or the file does not have.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        metadata = header.pop("__metadata__", {})
        places = {name: _place(path, 8 + length, name, said) for name, said in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path}: expected a header of safetensors, found {error!r}") from None
    for name, place in places.items():
        if place.start + place.spec.nbytes > size:
            end = place.start + place.spec.nbytes
            raise CheckpointError(f"{path}, with {name}: expected {end} bytes at least, found {size}; it was truncated")
    return places, metadata


def _place(path: Path, base: int, name: str, said: Mapping[str, Any]) -> Place:
    begin, end = said["data_offsets"]
    dtype, shape = DTYPES.get(said["dtype"]), tuple(said["shape"])
    if dtype is None:
        raise ValueError(f"{name} of dtype {said['dtype']}, which is none of {', '.join(DTYPES)}")
    if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} of shape {shape} at bytes {begin} to {end}")
    spec = Spec(name, dtype, shape)
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} at bytes {begin} to {end}, but its shape and dtype say {spec.nbytes} bytes")
    return Place(spec, path, base + begin)


# --- writing ----------------------------------------------------------------------------------------------------------


Metadata = Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """Which file of a folder holds which tensors, and where."""

    places: dict[str, Place]
    headers: dict[Path, bytes]
    sizes: dict[Path, int]  # bytes of each file

    @staticmethod
    def of(groups: Sequence[Sequence[Spec]], folder: Path, metadata: Metadata) -> "Plan":
        """One file for each of `groups`: `model.safetensors`, or numbered ones if there are several."""
        plan = Plan({}, {}, {})
        for number, group in enumerate(groups, 1):
            many = len(groups) > 1
            file = folder / (f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else "model.safetensors")
            header = _header(group, {"format": "pt", **metadata})
            start = len(header)
            for spec in group:
                plan.places[spec.name] = Place(spec, file, start)
                start += spec.nbytes
            plan.headers[file], plan.sizes[file] = header, start
        return plan

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return next(iter(self.headers)).parent

    def begin(self) -> None:
        """Make the files, hidden, with their headers and sizes and holes for the values."""
        for file, header in self.headers.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(hidden(file), "wb") as stream:
                stream.write(header)
                stream.truncate(self.sizes[file])
                sync(stream)

    def end(self) -> None:
        """Give the files, whose values are on the disk, their names, and remove those of an earlier export.

        Whenever this stops: the folder has all of one export, or several files without an index, which `find` refuses.
        So an earlier index goes first and the new one comes last.
        """
        folder = self.folder
        (folder / INDEX).unlink(missing_ok=True)
        sync_folder(folder)
        for file in self.headers:
            hidden(file).rename(file)
        sync_folder(folder)
        for old in {*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors"} - set(self.headers):
            old.unlink(missing_ok=True)
        sync_folder(folder)
        if len(self.headers) > 1:
            size = {"total_size": sum(place.spec.nbytes for place in self.places.values())}
            index = {"metadata": size, "weight_map": {name: place.file.name for name, place in self.places.items()}}
            write_synced(hidden(folder / INDEX), json.dumps(index, indent=2).encode())
            hidden(folder / INDEX).rename(folder / INDEX)
            sync_folder(folder)

    def abandon(self) -> None:
        """Remove what was not given its name."""
        for file in (*self.headers, self.folder / INDEX):
            hidden(file).unlink(missing_ok=True)


def hidden(file: Path) -> Path:
    """The name of a file that is being written."""
    return file.with_name(f".{file.name}.partial")


def _header(specs: Sequence[Spec], metadata: Metadata) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in specs:
        if dtype not in _NAMES:
            raise ValueError(f"{name}: expected a dtype that safetensors has, found {dtype}")
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def fill_up(specs: Iterable[Spec], limit: int) -> list[list[Spec]]:
    """Put tensors, in order, into groups of at most `limit` bytes each; one that is larger is alone."""
    groups: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


def spread(specs: Sequence[Spec], count: int) -> list[list[Spec]]:
    """Put tensors, in order, into `count` groups of about equal size; fewer where there are fewer tensors."""
    total, done = sum(spec.nbytes for spec in specs), 0
    groups: list[list[Spec]] = [[] for _ in range(count)]
    for spec in specs:
        middle = done + spec.nbytes / 2
        groups[min(count - 1, int(middle * count / total)) if total else 0].append(spec)
        done += spec.nbytes
    return [group for group in groups if group] or [[]]


class Writer:
    """Writes runs of values to the places of a plan; at the end of `with` they are on the disk."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._files = plan, dict[Path, int]()

    def __enter__(self) -> "Writer":
        return self

    def write(self, name: str, values: Tensor, first: int = 0) -> None:
        """Write `values`, 1-D, as the elements from `first` on of the flattened tensor `name`, in its dtype."""
        place = self.plan.places[name]
        if place.file not in self._files:
            self._files[place.file] = os.open(hidden(place.file), os.O_WRONLY)
        at = place.start + first * place.spec.dtype.itemsize
        for part in _parts(values, place.spec.dtype):
            write_fully(self._files[place.file], memory_of(part), at)
            at += part.nbytes

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        try:
            for file in self._files.values() if error is None else ():
                os.fsync(file)
        finally:
            for file in self._files.values():
                os.close(file)
            self._files.clear()


def _parts(values: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    """`values` on the CPU in `dtype`: themselves if they are, else copies of a part at a time."""
    if values.device.type == "cpu" and values.dtype == dtype:
        yield in_order(values)
    else:
        for part in values.split(CHUNK // max(dtype.itemsize, values.element_size())):
            yield in_order(part.to("cpu", dtype))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_run(place: Place, target: Tensor, first: int = 0) -> None:
    """Fill `target`, 1-D and contiguous, with the elements from `first` on of a tensor; no other bytes are read.

    Values are converted to the dtype of `target`. CheckpointError if the file ends before.
    """
    file = os.open(place.file, os.O_RDONLY)
    try:
        at = place.start + first * place.spec.dtype.itemsize
        lazy = target.is_conj() or target.is_neg()  # memory is not the values
        if target.device.type == "cpu" and target.dtype == place.spec.dtype and not lazy:
            _fill(file, at, target, place)
            return
        for part in target.split(CHUNK // place.spec.dtype.itemsize):
            read = torch.empty(part.shape, dtype=place.spec.dtype)
            _fill(file, at, read, place)
            part.copy_(read)
            at += read.nbytes
    finally:
        os.close(file)


def _fill(file: int, at: int, target: Tensor, place: Place) -> None:
    left = memory_of(target)
    while left:
        count = os.preadv(file, [left], at)
        if not count:
            raise CheckpointError(f"{place.file}, with {place.spec.name}: expected {len(left)} more bytes at {at}")
        left, at = left[count:], at + count
