"""Models to and from safetensors files in Hugging Face's layout. Every rank writes and reads only its shard.

model.safetensors                      8 bytes: n; n bytes of JSON: dtype, shape and bytes of each tensor; the values
model-00001-of-00002.safetensors ...   several files, and model.safetensors.index.json says which tensor is where
"""

# Note [Why not torch's writer of safetensors]
# torch's reader reads these files here, too. Its HuggingFaceStorageWriter (torch 2.11 to 2.14) does not write what is
# promised. A rank's file has one item of each name, so that ranks exchange rows first. One rank merges these files, and
# so writes every byte once more: TypeError for integers, such as the counters of BatchNorm; zeros, without an error, in
# the place of a tensor of shape (); and the merged file has its final name from the beginning, so that an interrupted
# export leaves neither the old files nor the new ones. Here, what a rank stores of a parameter is one range of bytes of
# a file whose size is known before: every rank writes its bytes once, in place, and nothing is gathered.

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem

from fsdp_compile.checkpoint.directory import first_names, memory_read_by, sync, sync_folder, write_synced
from fsdp_compile.checkpoint.entries import Model
from fsdp_compile.checkpoint.save_load import all_succeed, load_entries
from fsdp_compile.checkpoint.untrusted import CheckpointError, file_in
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import is_first, on_first_rank
from fsdp_compile.config import read_json
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.state_dict.model import model_state
from fsdp_compile.state_dict.sharded_value import full_tensor
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.sharded_view import ShardedView

INDEX = "model.safetensors.index.json"
MOST = 5_000_000_000  # bytes of a file, as in transformers
BUFFER = 1 << 24  # elements that are copied at a time from another device
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip


# --- a model ----------------------------------------------------------------------------------------------------------


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = MOST,
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
    tensors = _tensors_of(model, "save_safetensors")
    tied = first_names({name: memory_read_by(value) for name, value in tensors.items()})
    tensors = {name: value for name, value in tensors.items() if name not in tied}
    export = Export(fill_up(tensors, max_shard_size), Path(folder), tied)
    parts, firsts = {}, {}
    for name, tensor in tensors.items():
        parts[name], firsts[name] = _part_to_write(tensor, process_group)
    try:
        on_first_rank(export.stage, process_group)
        all_succeed(lambda: export.write(parts.items(), firsts), f"writing {folder}", process_group)
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
    _tensors_of(model, "load_safetensors", strict)
    path = Path(folder)
    metadata = on_first_rank(lambda: SafetensorsReader(path).metadata, process_group)
    metadata.planner_data = {name: ("model", name) for name in metadata.state_dict_metadata}
    reader, entry = SafetensorsReader(path, metadata), Model("model", model, strict=strict)
    load_entries({"model": entry}, reader, f"loading {folder}", not strict, False, process_group)


def _tensors_of(model: nn.Module, caller: str, strict: bool = True) -> dict[str, Tensor]:
    """The tensors of `model.state_dict()`, over memory of the model."""
    for unit in units_used_below(model):
        if unit.summoned is not None:
            raise ValueError(f"{caller}: parameters of {unit} are summoned; leave summon_full_params first")
    state = model_state(model)
    for name, value in state.items():
        if strict and not isinstance(value, Tensor):
            raise ValueError(
                f"{caller}: files of safetensors have tensors alone, and {name} of the model's state_dict() is a "
                f"{type(value).__name__}; use checkpoint.save and checkpoint.load"
            )
        if isinstance(value, (ShardedTensor, ShardedView)) and value.spec.tensor_parallel is not None:
            raise ValueError(
                f"{name} is sharded by tensor parallelism too, which safetensors are not written from or read into; "
                f"use torch.distributed.checkpoint, then `fsdp-compile checkpoint convert`"
            )
    return state


def _part_to_write(value: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """What this rank writes of a tensor, 1-D, and the index of its first element in the flattened full one."""
    if isinstance(value, ShardedTensor):
        replicas = value.spec.ranks.replicas
        part, first, writes = value.local, value.spec.first, replicas is None or is_first(group_named(replicas))
    else:
        part, first, writes = full_tensor(value).reshape(-1), 0, is_first(group)  # of a view all ranks gather it
    return part if writes else part[:0], first


# --- reading files ----------------------------------------------------------------------------------------------------


class _OneFile(FileSystem):
    """A folder with one file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def ls(self, _: Any) -> list[str]:
        return [self.file]


class SafetensorsReader(dcp.HuggingFaceStorageReader):
    """torch's reader, of a file or of a folder with one file or an index, which says what is read of its files.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a file is not what its header says, or the index and the files disagree.
    """

    def __init__(self, path: Path, metadata: dcp.Metadata | None = None) -> None:
        super().__init__(str(path))
        self.metadata = metadata or self._metadata_of(path)

    def read_metadata(self) -> dcp.Metadata:
        """What `__init__` has read."""
        return self.metadata

    def _metadata_of(self, path: Path) -> dcp.Metadata:
        index, file_of = path / INDEX, {}
        files: dict[str | None, Path] = {None: path}
        if index.is_file():
            try:
                file_of = dict(read_json(file_in(path, INDEX))["weight_map"])
                files = {name: file_in(path, name) for name in file_of.values()}
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index}: expected JSON with a weight_map, found {error!r}") from None
        elif not path.is_file():
            found = list(path.glob("*.safetensors"))
            if len(found) != 1:
                raise FileNotFoundError(f"{path}: expected {INDEX} or one file *.safetensors, found {len(found)} files")
            files = {None: file_in(path, found[0].name)}
        metadata = dcp.Metadata({}, {}, {})
        for listed, file in files.items():
            if file.suffix != ".safetensors":
                raise CheckpointError(f"{file}: expected a file of safetensors, found no name that ends so")
            self.fs = _OneFile(file)
            try:
                read = super().read_metadata()
            except Exception as error:  # also of the headers' parser, which has a class of its own
                raise CheckpointError(f"{file}: expected a file of safetensors, found {error!r}") from None
            here = {name: each for name, each in read.state_dict_metadata.items() if file_of.get(name) == listed}
            metadata.state_dict_metadata |= here
            metadata.storage_data |= {at: place for at, place in read.storage_data.items() if at.fqn in here}
        if lost := [name for name in file_of if name not in metadata.state_dict_metadata]:
            raise CheckpointError(f"{index}: {', '.join(lost)} not in the files that it names")
        return metadata


# --- writing files ----------------------------------------------------------------------------------------------------


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
        self.places: dict[str, tuple[Path, int]] = {}  # of each tensor, the file and the first byte
        self.sizes: dict[Path, int] = {}
        for index, group in enumerate(groups, 1):
            number = "" if len(groups) == 1 else f"-{index:05d}-of-{len(groups):05d}"
            file, end = folder / f"model{number}.safetensors", 0
            entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
            for name, tensor in group.items():
                if tensor.dtype not in NAMES:
                    raise ValueError(f"{name}: safetensors has no {tensor.dtype}; convert it first")
                offsets = [end, end := end + tensor.nbytes]
                entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            self.headers[file], self.sizes[file] = struct.pack("<Q", len(text)) + text, 8 + len(text) + end
            self.places |= {name: (file, 8 + len(text) + entries[name]["data_offsets"][0]) for name in group}

    def stage(self) -> None:
        """Make the files under hidden names, with headers and space for the values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, header in self.headers.items():
            write_synced(_hidden_path(file), header)
            os.truncate(_hidden_path(file), self.sizes[file])

    def write(self, parts: Iterable[tuple[str, Tensor]], firsts: Mapping[str, int]) -> None:
        """Write to the disk parts of tensors, each from the element in `firsts` on, or else from the first one."""
        with ExitStack() as stack:
            files: dict[Path, IO[bytes]] = {}
            for name, values in parts:
                file, start = self.places[name]
                if file not in files:
                    files[file] = stack.enter_context(open(_hidden_path(file), "r+b"))
                files[file].seek(start + firsts.get(name, 0) * values.dtype.itemsize)
                for part in values.reshape(-1).split(BUFFER):
                    files[file].write(bytes_of(part))
                del values, part  # before the next are read
            for stream in files.values():
                sync(stream)

    def commit(self) -> None:
        """Rename the files to their final names and remove those of an earlier export.

        Interrupted anywhere, the folder has all of one export, or several files without an index, which
        `SafetensorsReader` refuses: an earlier index is removed first and the new one is written last.
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
            size = {"total_size": sum(self.sizes[file] - len(header) for file, header in self.headers.items())}
            content = {"metadata": size, "weight_map": {name: file.name for name, (file, _) in self.places.items()}}
            write_synced(_hidden_path(index), json.dumps(content, indent=2).encode())
            _hidden_path(index).rename(index)
            sync_folder(self.folder)

    def discard(self) -> None:
        """Remove what was not committed."""
        for file in (*self.headers, self.folder / INDEX):
            _hidden_path(file).unlink(missing_ok=True)


def _hidden_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.partial")


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, with its values in order; not copied if they lie so on the CPU."""
    here = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return here.reshape(-1).view(torch.uint8).numpy()


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
