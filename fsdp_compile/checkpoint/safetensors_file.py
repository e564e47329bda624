"""Files and folders of safetensors, as Hugging Face lays them out, read and written in place at known bytes.

model.safetensors                      8 bytes: n; n bytes of JSON: dtype, shape and bytes of each tensor; the values
model-00001-of-00002.safetensors ...   several files, and model.safetensors.index.json says which tensor is where
"""

# Note [Why files of safetensors are written in place]
# A tensor is one range of bytes in its file, and so is what a rank stores of it. Therefore every rank writes exactly
# its elements, once, to where they belong, and reads exactly its elements from there. The `safetensors` package writes
# complete tensors, and reads complete tensors or slices along a dimension. The HuggingFaceStorageWriter of
# torch.distributed.checkpoint, as of torch 2.13, is built on it: each rank writes its chunks into a file of its own,
# and when all have done so one rank copies everything into the final files, under their final names from the start. So
# each byte is written twice, and an export that stops leaves a folder that is neither the old one nor the new one. The
# format is small; it is read and written here, and tests compare with the package in both directions.

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_compile.checkpoint.directory import sync, sync_folder, write_synced
from fsdp_compile.checkpoint.storage import in_order
from fsdp_compile.checkpoint.untrusted import CheckpointError, file_in
from fsdp_compile.core.text_files import read_json

INDEX = "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
BUFFER = 1 << 24  # bytes of a buffer where values are converted or come from another device
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """Where a tensor's bytes are."""

    spec: TensorSpec
    file: Path
    start: int  # of its first byte in the file


# --- reading ----------------------------------------------------------------------------------------------------------


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, or of a folder with an index or one file, by name.

    Raises:
        FileNotFoundError: there is no such file, or no file of safetensors in the folder.
        CheckpointError: a file is not what its header says; or the index and the files disagree.
    """
    if path.is_file():
        return _read_header(path)
    index = path / INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{path}: expected {INDEX} or one file *.safetensors, found {len(files)} files")
        return _read_header(files[0])
    try:
        file_of = dict(read_json(index)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: expected JSON with a weight_map, found {error!r}") from None
    for file in file_of.values():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: expected names of files in the folder, found {file!r}")
    headers = {file: _read_header(file_in(path, file, INDEX)) for file in dict.fromkeys(file_of.values())}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise CheckpointError(f"{index}: expected {name} in {file}, which does not have it")
    return {name: headers[file][name] for name, file in file_of.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. CheckpointError if the header cannot be read, or names bytes that are not there."""
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a regular file, found another kind, or none")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length} bytes, and {MOST_HEADER} are the most that is read")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        tensors = {name: _parse_entry(path, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path}: expected a header of safetensors, found {error!r}") from None
    for name, tensor in tensors.items():
        end = tensor.start + tensor.spec.nbytes
        if end > size:
            raise CheckpointError(f"{path}, with {name}: expected {end} bytes at least, found {size}; it was truncated")
    return tensors


def _parse_entry(path: Path, base: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    if dtype is None:
        raise ValueError(f"{name} of dtype {entry['dtype']}, which is none of {', '.join(DTYPES)}")
    if not all(isinstance(count, int) and count >= 0 for count in (begin, end, *shape)):
        raise ValueError(f"{name} of shape {shape} at bytes {begin} to {end}")
    spec = TensorSpec(name, dtype, shape)
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} at bytes {begin} to {end}, but its shape and dtype say {spec.nbytes} bytes")
    return StoredTensor(spec, path, base + begin)


def read_range(source: StoredTensor, target: Tensor, first: int = 0) -> None:
    """Fill `target`, 1-D and contiguous, with the elements from `first` on of a tensor; no other bytes are read.

    Values are converted to the dtype of `target`. CheckpointError if the file ends before.
    """
    dtype = source.spec.dtype
    at = source.start + first * dtype.itemsize
    lazy = target.is_conj() or target.is_neg()  # then its memory is not its values
    file = os.open(source.file, os.O_RDONLY)
    try:
        if target.device.type == "cpu" and target.dtype == dtype and not lazy:
            _fill(file, at, target, source)
            return
        for part in target.split(BUFFER // dtype.itemsize):
            buffer = torch.empty(part.shape, dtype=dtype)
            _fill(file, at, buffer, source)
            part.copy_(buffer)
            at += buffer.nbytes
    finally:
        os.close(file)


def _fill(file: int, at: int, target: Tensor, source: StoredTensor) -> None:
    left = memory_of(target)
    while left:
        count = os.preadv(file, [left], at)
        if not count:
            raise CheckpointError(f"{source.file}, with {source.spec.name}: expected {len(left)} more bytes at {at}, "
                                  f"found the end of the file; it was truncated")  # fmt: skip
        left, at = left[count:], at + count


# --- writing ----------------------------------------------------------------------------------------------------------

WriteRange = Callable[[str, Tensor, int], None]  # name, 1-D values, index of the first of them in the flattened tensor


@dataclass(frozen=True)
class Export:
    """A folder that is going to be written: which file holds which tensors, and at which bytes.

    One process stages it, any number of processes write to it, and one process commits or discards it.
    """

    tensors: dict[str, StoredTensor]
    headers: dict[Path, bytes]
    sizes: dict[Path, int]  # bytes of each file

    @classmethod
    def of(cls, groups: Sequence[Sequence[TensorSpec]], folder: Path, metadata: Mapping[str, str]) -> "Export":
        """One file for each of `groups`: `model.safetensors`, or numbered files if there are several.

        ValueError for a dtype that safetensors does not have.
        """
        export, count = cls({}, {}, {}), len(groups)
        for index, group in enumerate(groups, 1):
            name = "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors"
            file = folder / name
            header = _header(group, {"format": "pt", **metadata})
            start = len(header)
            for spec in group:
                export.tensors[spec.name] = StoredTensor(spec, file, start)
                start += spec.nbytes
            export.headers[file], export.sizes[file] = header, start
        return export

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return next(iter(self.headers)).parent

    def stage(self) -> None:
        """Make the files under hidden names, with their headers and sizes and holes for the values."""
        for file, header in self.headers.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(_hidden(file), "wb") as stream:
                stream.write(header)
                stream.truncate(self.sizes[file])
                sync(stream)

    @contextmanager
    def writing(self) -> Iterator[WriteRange]:
        """A function that writes values, in the stored dtype; at the end of `with` they are on the disk."""
        files: dict[Path, int] = {}

        def write(name: str, values: Tensor, first: int) -> None:
            target = self.tensors[name]
            if target.file not in files:
                files[target.file] = os.open(_hidden(target.file), os.O_WRONLY)
            at = target.start + first * target.spec.dtype.itemsize
            for part in _on_cpu(values, target.spec.dtype):
                write_all(files[target.file], memory_of(part), at)
                at += part.nbytes

        try:
            yield write
            for file in files.values():
                os.fsync(file)
        finally:
            for file in files.values():
                os.close(file)

    def commit(self) -> None:
        """Give the files, whose values are on the disk, their names, and remove those of an earlier export.

        Whenever this stops, the folder has all of one export, or several files without an index, which
        `stored_tensors` refuses. So an earlier index goes first and the new one comes last.
        """
        folder = self.folder
        (folder / INDEX).unlink(missing_ok=True)
        sync_folder(folder)
        for file in self.headers:
            _hidden(file).rename(file)
        sync_folder(folder)
        for old in {*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors"} - set(self.headers):
            old.unlink(missing_ok=True)
        sync_folder(folder)
        if len(self.headers) > 1:
            size = {"total_size": sum(tensor.spec.nbytes for tensor in self.tensors.values())}
            index = {"metadata": size, "weight_map": {name: each.file.name for name, each in self.tensors.items()}}
            write_synced(_hidden(folder / INDEX), json.dumps(index, indent=2).encode())
            _hidden(folder / INDEX).rename(folder / INDEX)
            sync_folder(folder)

    def discard(self) -> None:
        """Remove what was not committed."""
        for file in (*self.headers, self.folder / INDEX):
            _hidden(file).unlink(missing_ok=True)


def _hidden(file: Path) -> Path:
    """The name of a file that is being written."""
    return file.with_name(f".{file.name}.partial")


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise ValueError(
                f"{spec.name}: expected a dtype that safetensors has, found {spec.dtype}; convert it first"
            )
        offsets = [start, start + spec.nbytes]
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        start += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def fill_up(specs: Iterable[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Put tensors, in order, into groups of at most `limit` bytes each; one that is larger is alone."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


def spread(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Put tensors, in order, into `count` groups of about equal size; fewer where there are fewer tensors."""
    total, done = sum(spec.nbytes for spec in specs), 0
    groups: list[list[TensorSpec]] = [[] for _ in range(count)]
    for spec in specs:
        middle = done + spec.nbytes / 2
        groups[min(count - 1, int(middle * count / total)) if total else 0].append(spec)
        done += spec.nbytes
    return [group for group in groups if group] or [[]]


def _on_cpu(values: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    """`values` on the CPU in `dtype`: themselves if they are, else copies of some elements at a time."""
    if values.device.type == "cpu" and values.dtype == dtype:
        yield in_order(values)
    else:
        for part in values.split(BUFFER // max(dtype.itemsize, values.element_size())):
            yield in_order(part.to("cpu", dtype))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and write, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 0)).cast("B")


def write_all(file: int, content: memoryview, at: int) -> None:
    """Write all of `content` at byte `at` of an open file."""
    while content:
        written = os.pwrite(file, content, at)
        content, at = content[written:], at + written
