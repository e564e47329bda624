"""`fsdp-compile checkpoint`: convert any format to any other, with one tensor and one of its chunks in memory.

    format          read                                    written
    dcp             a folder that DCP wrote                 a folder, as one rank would write it
    safetensors     a file or a Hugging Face folder         a Hugging Face folder, tensors only
    torch           a file of torch.save, mapped            a file of torch.save, for which all is in memory

A name is the keys that lead to a tensor or value, joined by dots, as in DCP.
"""

# Note [Why not torch's converters]
# `dcp_to_torch_save` and `torch_save_to_dcp` of torch.distributed.checkpoint.format_utils (torch 2.13) load the whole
# state into memory, unpickle whatever they find, know no checksums, and leave half a file behind when they fail. Here
# DCP's readers read one tensor at a time, and the result gets its name by one rename at the end. Metadata, files and
# pickles are DCP's and torch.save's.

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_compile.checkpoint import directory, hugging_face, untrusted
from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, SafeReader
from fsdp_compile.state_dict import _torch
from fsdp_compile.tensors.write_items import with_own_storage

Keys = tuple[str | int, ...]
FILE = "__0_0.distcp"  # as DCP names the first file of the first rank


@dataclass
class Source:
    """Tensors and other values of a checkpoint, by name."""

    format: str  # for people to read
    files: list[Path]
    tensors: dict[str, Tensor]  # without values, on the meta device
    keys: dict[str, Keys]  # of each tensor and each other value
    read: Callable[[str], Any]  # returns a tensor, contiguous and on the CPU, or another value
    step: int | None = None  # at which it was saved, if known
    tied: dict[str, str] = field(default_factory=dict)  # further names of a tensor, and its first one

    @property
    def values(self) -> list[str]:
        """Names of entries that are not tensors."""
        return [name for name in self.keys if name not in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied ones count once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.tied)

    def below(self, part: str) -> "Source":
        """The entries under the first key `part`, without that key. ValueError if there is no such key."""
        old = {
            ".".join(map(str, keys[1:])): name for name, keys in self.keys.items() if keys[0] == part and len(keys) > 1
        }
        if not old:
            firsts = ", ".join(dict.fromkeys(str(keys[0]) for keys in self.keys.values() if len(keys) > 1)) or "none"
            raise ValueError(f"part {part!r}: expected one of {firsts}, found no such key; pass one of them")
        return replace(
            self,
            tensors={new: self.tensors[name] for new, name in old.items() if name in self.tensors},
            keys={new: self.keys[name][1:] for new, name in old.items()},
            read=lambda name: self.read(old[name]),
            tied=directory.first_names({new: self.tied.get(name, name) for new, name in old.items()}),
        )


def convert(source: Source, path: Path, to: str) -> None:
    """Write `source` as a checkpoint at `path`, visible when it is complete; FileExistsError if `path` exists.

    Args:
        source: what to read. CheckpointError if a file of it is damaged.
        path: a folder, or for "torch" a file.
        to: "dcp", "torch", or "safetensors", which drops entries that are not tensors. Tied tensors are written once:
            safetensors under their first name, as `save_safetensors` does, the others under each of them.
    """
    if path.exists():
        raise FileExistsError(f"{path}: expected a path that does not exist yet; remove it or choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    tensors = ((name, source.read(name)) for name in source.tensors if name not in source.tied)
    try:
        TARGETS[to](source, staged / path.name, tensors)
        os.rename(staged / path.name, path)
        directory.sync_folder(path.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)  # or this would hide an earlier error


# --- sources ----------------------------------------------------------------------------------------------------------


def open_source(path: Path, trust: bool = False) -> Source:
    """Open a checkpoint of any format; FileNotFoundError if there is none, CheckpointError if a file is damaged.

    With `trust` values may be of any type, and loading can run code.
    """
    reader: SafeReader | hugging_face.SafetensorsReader
    if path.is_file() and zipfile.is_zipfile(path):
        return _torch_source(path)
    if is_safetensors := path.is_file() or any(path.glob("*.safetensors*")):
        reader = hugging_face.SafetensorsReader(path)
    elif (path / METADATA).is_file() and not (path / directory.MANIFEST).is_file():
        reader = SafeReader(path)
    elif checkpoint := directory.open_checkpoint(path):
        reader = directory.DirectoryReader(*checkpoint)
    else:
        what = "no such file" if not path.exists() else "none of these"
        raise FileNotFoundError(
            f"{path}: expected a folder that torch.distributed.checkpoint wrote, a folder of checkpoints, a folder or "
            f"file of safetensors, or a file of torch.save; found {what}"
        )
    metadata = reader.read_metadata()
    described: dict[str, Any] = metadata.state_dict_metadata
    places: Any = metadata.storage_data
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in described.items()
        if isinstance(each, dcp.TensorStorageMetadata)
    }

    def read(name: str) -> Any:
        target = torch.empty_like(tensors[name], device="cpu") if name in tensors else None
        return untrusted.read(reader, {name: target}, trust)[name]

    def memory(name: str) -> Any:
        """Where the chunks of a tensor are, and what is in each file; None if it has none."""
        found = [(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in described[name].chunks]
        return tuple((*chunk.offsets, *chunk.sizes, at.relative_path, at.offset) for chunk, at in found) or None

    return Source(
        "safetensors" if is_safetensors else "torch.distributed.checkpoint",
        sorted({reader.path / place.relative_path for place in places.values()}),
        tensors,
        {name: tuple((metadata.planner_data or {}).get(name, (name,))) for name in described},
        read,
        reader.manifest.step if isinstance(reader, directory.DirectoryReader) else None,
        {} if is_safetensors else directory.first_names({name: memory(name) for name in tensors}),
    )


def _torch_source(path: Path) -> Source:
    """A file of torch.save with dicts and lists of tensors, which are mapped and not read before they are used."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path}: expected a torch.save of tensors and plain values: {error}") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a torch.save of a dict, found {type(loaded).__name__}")
    leaves, keys = _torch.flatten_state_dict(loaded)

    def read(name: str) -> Any:
        leaf = leaves[name]
        return leaf.detach().contiguous().resolve_conj().resolve_neg() if name in tensors else leaf

    tensors = {name: torch.empty_like(t, device="meta") for name, t in leaves.items() if isinstance(t, Tensor)}
    memory = {name: directory.memory_read_by(leaves[name]) for name in tensors}
    return Source("torch.save", [path], tensors, keys, read, None, directory.first_names(memory))


# --- targets ----------------------------------------------------------------------------------------------------------

Tensors = Iterator[tuple[str, Tensor]]  # names and values, contiguous, on the CPU; delete one before the next


def _write_dcp(source: Source, path: Path, tensors: Tensors) -> None:
    """A folder of DCP with one file."""
    path.mkdir()
    writer, metadata = directory.FolderWriter(path, source.step), dcp.Metadata({}, planner_data=source.keys)
    results: dict[str, WriteResult] = {}
    with writer.fs.create_stream(path / FILE, "wb") as stream:

        def put(index: MetadataIndex, value: Any) -> None:
            start = stream.tell()
            torch.save(value, stream)
            size = stream.tell() - start
            results[index.fqn] = WriteResult(index, size, _torch.StorageInfo(FILE, start, size))

        for name in source.values:
            put(MetadataIndex(name), source.read(name))
            metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
        for name, tensor in tensors:
            offsets = torch.Size([0] * tensor.ndim)
            put(MetadataIndex(name, offsets), with_own_storage(tensor))
            properties, chunk = TensorProperties(dtype=tensor.dtype), dcp.ChunkStorageMetadata(offsets, tensor.shape)
            metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, tensor.shape, [chunk])
            del tensor
        os.fsync(stream.fileno())
    for name, tied in source.tied.items():
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[tied]
        results[name] = replace(results[tied], index=replace(results[tied].index, fqn=name))
    writer.finish(metadata, [list(map(writer.with_checksum, results.values()))])
    directory.sync_folder(path)


def _write_safetensors(source: Source, path: Path, tensors: Tensors) -> None:
    outlines = {name: tensor for name, tensor in source.tensors.items() if name not in source.tied}
    export = hugging_face.Export(hugging_face.fill_up(outlines, hugging_face.MOST), path, source.tied)
    export.stage()
    export.write(tensors, {})
    export.commit()


def _write_torch(source: Source, path: Path, tensors: Tensors) -> None:
    """A file of torch.save with the nesting of the keys."""
    found = dict(tensors)
    leaves = {name: found[source.tied.get(name, name)] if name in source.tensors else source.read(name)
              for name in source.keys}  # fmt: skip
    with open(path, "xb") as file:
        torch.save(_torch.unflatten_state_dict(leaves, source.keys), file)
        directory.sync(file)


TARGETS: dict[str, Callable[[Source, Path, Tensors], None]] = {
    "dcp": _write_dcp,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}
