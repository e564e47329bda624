"""Models to and from safetensors files in Hugging Face's layout. Every rank writes and reads only its shard.

model.safetensors                      8 bytes: n; n bytes of JSON: dtype, shape and bytes of each tensor; the values
model-00001-of-00002.safetensors ...   several files, and model.safetensors.index.json says which tensor is where
"""

# Note [Why not torch's writer and reader of safetensors]
# A sharded parameter is one range of bytes in its file, and so is what a rank stores of it. So every rank writes its
# bytes once, in place, and reads only its bytes; no rank gathers anything. torch's HuggingFaceStorageWriter (torch
# 2.13) cannot do this. A rank's file holds one chunk per name, but a range of a flattened tensor is up to 2 * dims - 1
# chunks: the last one replaces the others. Merging the ranks' files raises TypeError for integers (the counters of
# BatchNorm) and writes zeros for tensors of shape (). It copies every byte once more on one rank, into the final names,
# so that an interrupted export leaves neither the old files nor the new ones. Its reader takes all *.safetensors of a
# folder whatever the index says: links to other folders, leftovers of an interrupted export, a second copy of the same
# model. The format is small enough to read and write here without a further dependency; tests compare with the
# safetensors package in both directions.

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.checkpoint.directory import (
    first_names,
    in_order,
    memory_read_by,
    sync,
    sync_folder,
    write_synced,
)
from fsdp_compile.checkpoint.save_load import all_succeed
from fsdp_compile.checkpoint.untrusted import CheckpointError, check_shape, file_in
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import is_first, on_first_rank
from fsdp_compile.config import read_json
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.state_dict.model import load_model_state, model_state
from fsdp_compile.state_dict.sharded_value import ShardedValue, full_tensor

INDEX = "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
BUFFER = 1 << 24  # bytes that are copied at a time between devices or dtypes
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# --- a model ----------------------------------------------------------------------------------------------------------


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = 5_000_000_000,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the state dict of `model`, sharded or not; all ranks must call it.

    Names, order and values are those of `model.state_dict()`, also where modules make them by hooks or methods of their
    own. A tied parameter is written once, under its first name; the files' metadata have its other names. The files
    replace those of an earlier export at the end; other files stay.

    Args:
        model: the model, while no forward or backward is running.
        folder: shared by all ranks; made if it does not exist.
        max_shard_size: the most bytes of a file. A larger tensor gets a file of its own.
        process_group: the ranks that call it; default: all.

    Raises:
        CheckpointError: on all ranks, if one of them could not write its part. Earlier files stay.
        OSError: on all ranks, if the first one could not make the files or rename them.
        ValueError: parameters are summoned; or safetensors does not have a dtype, or values other than tensors.
    """
    tensors, tied = _tensors_of(model, "save_safetensors")
    for name in tied:
        del tensors[name]
    export = Export(fill_up(tensors, max_shard_size), Path(folder), tied)
    parts = {name: _part_to_write(each, process_group) for name, each in tensors.items()}

    def write_own() -> None:
        with export.writing() as write:
            for name, (local, first) in parts.items():
                if local.numel():
                    write(name, local, first)

    try:
        on_first_rank(export.stage, process_group)
        all_succeed(write_own, f"writing {folder}", process_group)
        on_first_rank(export.commit, process_group)
    except Exception:
        if is_first(process_group):
            export.discard()
        raise


def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load the state dict of `model`, sharded or not, in its dtypes; all ranks must call it.

    Its names are those of `model.state_dict()`. What was read goes through `model.load_state_dict()`.

    Args:
        model: the model, while no forward or backward is running.
        folder: a file `*.safetensors`, or a folder with one such file, or with several and an index.
        strict: whether the files and the model must have the same names. One name of a tied parameter is enough.
        process_group: the ranks that call it; default: all.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: on all ranks, if a file is damaged or truncated, or names or shapes differ; the latter before
            anything is changed.
        ValueError: parameters are summoned, or the state dict has values other than tensors.
    """
    tensors, tied = _tensors_of(model, "load_safetensors", strict)
    stored = on_first_rank(lambda: stored_tensors(Path(folder)), process_group)
    called: dict[str, list[str]] = {}  # all names of each tensor, by the first
    for name in tensors:
        called.setdefault(tied.get(name, name), []).append(name)
    all_succeed(lambda: _check_names_and_shapes(stored, tensors, called, strict), f"loading {folder}", process_group)

    def read() -> None:
        state: dict[str, Any] = {}
        for first, names in called.items():
            if source := next((name for name in names if name in stored), None):
                state |= dict.fromkeys(names, _read(source, stored[source], tensors[first]))
        load_model_state(model, state, strict)

    all_succeed(read, f"loading {folder}", process_group)


def _tensors_of(model: nn.Module, caller: str, strict: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of `model.state_dict()`, over memory of the model, and for further names of one its first name."""
    for unit in units_used_below(model):
        if unit.summoned is not None:
            raise ValueError(f"{caller}: parameters of {unit} are summoned; leave summon_full_params first")
    tensors = model_state(model)
    for name, value in tensors.items():
        if strict and not isinstance(value, Tensor):
            raise ValueError(
                f"{caller}: files of safetensors have tensors alone, and {name} of the model's state_dict() is a "
                f"{type(value).__name__}; use checkpoint.save and checkpoint.load"
            )
        if isinstance(value, ShardedValue) and value.spec.tensor_parallel is not None:
            raise ValueError(
                f"{name} is sharded by tensor parallelism too, which safetensors are not written from or read into; "
                f"use torch.distributed.checkpoint, then `fsdp-compile checkpoint convert`"
            )
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    return tensors, first_names({name: _memory(value) for name, value in tensors.items()})


def _memory(value: Tensor) -> Any:
    """Equal for two names of one tensor. Of a value, it is the object that has its elements, of which some ranks have
    none, and all ranks must find the same names.
    """
    return (id(value.local), value.geometry) if isinstance(value, ShardedValue) else memory_read_by(value)


def _has_range(value: Tensor) -> TypeGuard[ShardedValue]:
    """Whether what each rank stores of `value` is one range of bytes in the file."""
    return isinstance(value, ShardedValue) and value.geometry is None


def _part_to_write(value: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """What this rank writes of a tensor, 1-D, and the index of its first element in the flattened full one."""
    if _has_range(value):
        replicas = value.spec.ranks.replicas
        part, first, writes = value.local, value.spec.first, replicas is None or is_first(group_named(replicas))
    else:
        part, first, writes = full_tensor(value).reshape(-1), 0, is_first(group)  # of a view all ranks gather it
    return part if writes else part[:0], first


def _check_names_and_shapes(
    stored: dict[str, "StoredTensor"], tensors: dict[str, Tensor], called: dict[str, list[str]], strict: bool
) -> None:
    shapes = [
        f"{name} of shape {stored[name].shape}, expected {tuple(each.shape)}"
        for name, each in tensors.items()
        if name in stored and stored[name].shape != tuple(each.shape)
    ]
    wrong = [f"no {' or '.join(names)}" for names in called.values() if stored.keys().isdisjoint(names)]
    if unknown := [name for name in stored if name not in tensors]:
        wrong.append(f"{', '.join(unknown)}, which the model does not have")
    if shapes:
        raise ValueError(f"found {'; '.join(shapes + wrong * strict)}; make the model that the files are of")
    if wrong and strict:
        raise ValueError(f"found {'; '.join(wrong)}; pass strict=False to load what fits by name")


def _read(name: str, source: "StoredTensor", value: Tensor) -> Tensor:
    """Fill `value`, or a new tensor where its memory is not one range of the file, with what this rank stores of it."""
    if _has_range(value):
        read_range(name, source, value.local, value.spec.first)
        return value
    is_range = type(value) is Tensor and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    target = value if is_range else torch.empty(value.shape, dtype=value.dtype)
    read_range(name, source, target.view(-1))
    return target


# --- reading files ----------------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor in a file; no values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors, by name, of a file or of a folder with an index or one file; FileNotFoundError if there is none.

    CheckpointError if a file is not what its header says, or the index and the files disagree.
    """
    index = path / INDEX
    if not index.is_file():
        if path.is_file():
            return _read_header(path)
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{path}: expected {INDEX} or one file *.safetensors, found {len(files)} files")
        return _read_header(file_in(path, files[0].name))
    try:
        file_of = dict(read_json(file_in(path, INDEX))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: expected JSON with a weight_map, found {error!r}") from None
    if not all(isinstance(file, str) for file in file_of.values()):
        raise CheckpointError(f"{index}: expected names of files in the folder, found {set(file_of.values())}")
    headers = {file: _read_header(file_in(path, file)) for file in dict.fromkeys(file_of.values())}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise CheckpointError(f"{index}: {name} is not in {file}")
    return {name: headers[file][name] for name, file in file_of.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a regular file, found another kind, or none")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length} bytes, and {MOST_HEADER} are the most that is read")
            tensors = _tensors_of_header(json.loads(file.read(min(length, size))), path, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path}: expected a header of safetensors, found {error!r}") from None
    for name, tensor in tensors.items():
        if (needed := tensor.start + tensor.nbytes) > size:
            raise CheckpointError(f"{path}, with {name}: expected {needed} bytes at least, found {size}; "
                                  f"it was truncated")  # fmt: skip
    return tensors


def _tensors_of_header(entries: dict[str, Any], path: Path, values: int) -> dict[str, StoredTensor]:
    """The tensors of a header, whose values begin at byte `values`; raises if the numbers make no sense."""
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} of dtype {entry['dtype']}, which is none of {', '.join(DTYPES)}")
        if not all(type(count) is int and count >= 0 for count in (begin, end)):
            raise ValueError(f"{name} at bytes {begin} to {end}")
        check_shape(name, shape, DTYPES[entry["dtype"]])
        tensor = tensors[name] = StoredTensor(DTYPES[entry["dtype"]], shape, path, values + begin)
        if end - begin != tensor.nbytes:
            raise ValueError(f"{name} at bytes {begin} to {end}, but its shape and dtype say {tensor.nbytes} bytes")
    return tensors


def read_range(name: str, source: StoredTensor, target: Tensor, first: int = 0) -> None:
    """Fill `target`, 1-D, contiguous, of any dtype, with a stored tensor's elements from `first` on; read no others."""
    is_lazy = target.is_conj() or target.is_neg()  # then its memory is not its values
    is_direct = target.device.type == "cpu" and target.dtype == source.dtype and not is_lazy
    at = source.start + first * source.dtype.itemsize
    with open(source.file, "rb") as file:
        for part in target.split(BUFFER // source.dtype.itemsize):
            buffer = part if is_direct else torch.empty(part.shape, dtype=source.dtype)
            left = memory_of(buffer)
            while left:
                count = os.preadv(file.fileno(), [left], at)
                if not count:
                    raise CheckpointError(f"{source.file}, with {name}: expected {len(left)} more bytes at {at}, "
                                          f"found the end of the file; it was truncated")  # fmt: skip
                left, at = left[count:], at + count
            if not is_direct:
                part.copy_(buffer)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, readable and writable, without numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 0)).cast("B")


# --- writing files ----------------------------------------------------------------------------------------------------

WriteRange = Callable[[str, Tensor, int], None]  # name, 1-D values, index of the first of them in the flattened tensor


class Export:
    """A folder of safetensors that is being written: one process stages and commits it, any number write values.

    Args:
        groups: the tensors, without their values, of each file: `model.safetensors`, or numbered files if several.
        folder: where the files are.
        metadata: further entries of each file's metadata.

    Raises:
        ValueError: safetensors does not have a dtype.
    """

    def __init__(self, groups: Sequence[Mapping[str, Tensor]], folder: Path, metadata: Mapping[str, str]) -> None:
        self.folder = folder
        self.headers: dict[Path, bytes] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._sizes: dict[Path, int] = {}
        for index, group in enumerate(groups, 1):
            number = "" if len(groups) == 1 else f"-{index:05d}-of-{len(groups):05d}"
            file = folder / f"model{number}.safetensors"
            entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
            end = 0
            for name, tensor in group.items():
                if tensor.dtype not in _NAMES:
                    raise ValueError(f"{name}: safetensors has no {tensor.dtype}; convert it first")
                offsets = [end, end + tensor.nbytes]
                entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
                end = offsets[1]
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            header = self.headers[file] = struct.pack("<Q", len(text)) + text
            self._sizes[file] = len(header) + end
            self.tensors |= _tensors_of_header(entries, file, len(header))

    def stage(self) -> None:
        """Make the files under hidden names, with headers and space for the values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, header in self.headers.items():
            _hidden_path(file).unlink(missing_ok=True)  # a link would lead the values elsewhere
            with open(_hidden_path(file), "xb") as stream:
                stream.write(header)
                stream.truncate(self._sizes[file])
                sync(stream)

    @contextmanager
    def writing(self) -> Iterator[WriteRange]:
        """Yield a function that writes values of the stored dtype; at the end of `with` they are on the disk."""
        files: dict[Path, int] = {}

        def write(name: str, values: Tensor, first: int) -> None:
            target = self.tensors[name]
            if target.file not in files:
                files[target.file] = os.open(_hidden_path(target.file), os.O_WRONLY)
            at = target.start + first * target.dtype.itemsize
            for part in values.split(BUFFER // target.dtype.itemsize):
                content = in_order(part.cpu())
                write_all(files[target.file], memory_of(content), at)
                at += content.nbytes

        try:
            yield write
            for file in files.values():
                os.fsync(file)
        finally:
            for file in files.values():
                os.close(file)

    def commit(self) -> None:
        """Rename the files to their final names and remove those of an earlier export.

        Interrupted anywhere, the folder has all of one export, or several files without an index, which
        `stored_tensors` refuses: an earlier index is removed first and the new one is written last.
        """
        index = self.folder / INDEX
        index.unlink(missing_ok=True)
        sync_folder(self.folder)
        for file in self.headers:
            _hidden_path(file).rename(file)
        sync_folder(self.folder)
        old = {*self.folder.glob("model-*-of-*.safetensors"), self.folder / "model.safetensors"}
        for file in old - self.headers.keys():
            file.unlink(missing_ok=True)
        sync_folder(self.folder)
        if len(self.headers) > 1:
            size = {"total_size": sum(tensor.nbytes for tensor in self.tensors.values())}
            content = {"metadata": size, "weight_map": {name: each.file.name for name, each in self.tensors.items()}}
            write_synced(_hidden_path(index), json.dumps(content, indent=2).encode())
            _hidden_path(index).rename(index)
            sync_folder(self.folder)

    def discard(self) -> None:
        """Remove what was not committed."""
        for file in (*self.headers, self.folder / INDEX):
            _hidden_path(file).unlink(missing_ok=True)


def _hidden_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.partial")


def fill_up(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into groups of at most `limit` bytes; a larger tensor is a group of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def spread(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into `count` groups of about equal bytes; fewer if there are fewer tensors."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    groups: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        middle = done + tensor.nbytes / 2
        groups[min(count - 1, int(middle * count / total)) if total else 0][name] = tensor
        done += tensor.nbytes
    return [group for group in groups if group] or [{}]


def write_all(file: int, content: memoryview, at: int) -> None:
    """Write all of `content` at byte `at` of an open file."""
    while content:
        written = os.pwrite(file, content, at)
        content, at = content[written:], at + written
