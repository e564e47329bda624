"""`fsdp-compile checkpoint`: convert any format to any other, with one tensor in memory at a time.

    format          read                                    written
    dcp             a folder that DCP wrote                 a folder, as N ranks would write it
    safetensors     a file or a Hugging Face folder         a Hugging Face folder, tensors only
    torch           a file of torch.save, mapped            a file of torch.save

A name is the keys that lead to a tensor or value, joined by dots, as in DCP.
"""

# Note [Why not torch's converters]
# `dcp_to_torch_save` and `torch_save_to_dcp` of torch.distributed.checkpoint.format_utils (torch 2.13) load the whole
# state into memory, unpickle whatever they find, know no checksums, and leave half a file behind when they fail. Here a
# source reads one tensor at a time, a target reserves space for every tensor before it writes the first, and the result
# gets its name by one rename at the end. Metadata, files and pickles are DCP's and torch.save's.

import io
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_compile.checkpoint import directory, hugging_face
from fsdp_compile.checkpoint.untrusted import METADATA, CheckpointError, SafeReader, load_item
from fsdp_compile.state_dict import _torch

Keys = tuple[str | int, ...]


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


def convert(
    source: Source, path: Path, to: str, files: int = 1, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write `source` as a checkpoint at `path`, visible when it is complete; FileExistsError if `path` exists.

    Args:
        source: what to read. CheckpointError if a file of it is damaged.
        path: a folder, or for "torch" a file.
        to: "dcp", "torch", or "safetensors", which drops entries that are not tensors. Tied tensors are written once:
            safetensors under their first name, as `save_safetensors` does, the others under each of them.
        files: how many files to spread the tensors over; "torch" writes one.
        progress: called with the bytes of each tensor that was written.
    """
    if path.exists():
        raise FileExistsError(f"{path}: expected a path that does not exist yet; remove it or choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with TARGETS[to](source, staged / path.name, files) as write:
            for name, tensor in source.tensors.items():
                if name not in source.tied:
                    write(name, source.read(name))
                    progress(tensor.nbytes)
        os.rename(staged / path.name, path)
        directory.sync_folder(path.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)  # or this would hide an earlier error


# --- sources ----------------------------------------------------------------------------------------------------------


def open_source(path: Path, trust: bool = False) -> Source:
    """Open a checkpoint of any format; FileNotFoundError if there is none, CheckpointError if a file is damaged.

    With `trust` values may be of any type, and loading can run code.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        return _torch_source(path)
    if path.is_file() or any(path.glob("*.safetensors*")):
        return _safetensors_source(path)
    if (path / METADATA).is_file():
        return _dcp_source(path, trust)
    if checkpoint := directory.open_checkpoint(path):
        return _dcp_source(checkpoint[0], trust)
    what = "no such file" if not path.exists() else "none of these"
    raise FileNotFoundError(
        f"{path}: expected a folder that torch.distributed.checkpoint wrote, a folder of checkpoints, a folder or file "
        f"of safetensors, or a file of torch.save; found {what}"
    )


def _dcp_source(path: Path, trust: bool) -> Source:
    """A folder that DCP wrote, with checksums compared if there is a manifest. A tensor and one chunk are in memory."""
    checked = directory.DirectoryReader(path) if (path / directory.MANIFEST).is_file() else None
    reader = checked or SafeReader(path)
    metadata = reader.read_metadata()
    described, locations = metadata.state_dict_metadata, metadata.storage_data

    def load(index: MetadataIndex, **options: bool) -> Any:
        location = locations[index]
        with open(path / location.relative_path, "rb") as file:  # which `read_metadata` has checked
            return load_item(reader._slice_file(file, location), index.fqn, **options)

    def read(name: str) -> Any:
        stored = described[name]
        if not isinstance(stored, dcp.TensorStorageMetadata):
            return load(MetadataIndex(name), is_value=True, trust=trust)
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise CheckpointError(f"{path}, with {name}: expected chunks of all of the tensor, found some missing; "
                                  f"the tensor was not saved completely")  # fmt: skip
        if len(stored.chunks) == 1:
            return directory.in_order(load(MetadataIndex(name, stored.chunks[0].offsets)).detach())
        full = torch.empty(stored.size, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            full[box] = load(MetadataIndex(name, chunk.offsets))
        return full

    tensors = {name: each for name, each in described.items() if isinstance(each, dcp.TensorStorageMetadata)}

    def places(name: str) -> Any:
        """Where the chunks of a tensor are, and what is in each file; None if it has none."""
        found = [(chunk, locations[MetadataIndex(name, chunk.offsets)]) for chunk in tensors[name].chunks]
        return tuple((*chunk.offsets, *chunk.sizes, at.relative_path, at.offset) for chunk, at in found) or None

    return Source(
        "torch.distributed.checkpoint",
        sorted({path / location.relative_path for location in locations.values()}),
        {n: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for n, each in tensors.items()},
        {name: tuple((metadata.planner_data or {}).get(name, (name,))) for name in described},
        read,
        checked.manifest.step if checked else None,
        directory.first_names({name: places(name) for name in tensors}),
    )


def _safetensors_source(path: Path) -> Source:
    stored = hugging_face.stored_tensors(path)

    def read(name: str) -> Tensor:
        tensor = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        hugging_face.read_range(name, stored[name], tensor.view(-1))
        return tensor

    files = sorted({each.file for each in stored.values()})
    tensors = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in stored.items()}
    return Source("safetensors", files, tensors, {name: (name,) for name in stored}, read)


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
        return directory.in_order(leaves[name].detach()) if isinstance(leaves[name], Tensor) else leaves[name]

    tensors = {name: torch.empty_like(t, device="meta") for name, t in leaves.items() if isinstance(t, Tensor)}
    memory = {name: directory.memory_read_by(leaves[name]) for name in tensors}
    return Source("torch.save", [path], tensors, keys, read, None, directory.first_names(memory))


# --- targets: context managers that yield a function, called once for each tensor, contiguous and on the CPU ----------

WriteTensor = Callable[[str, Tensor], None]


@contextmanager
def _dcp_target(source: Source, path: Path, files: int) -> Iterator[WriteTensor]:
    """A folder of DCP; each tensor is split along its first dimension into one chunk per file."""
    path.mkdir()
    metadata = dcp.Metadata({}, planner_data=source.keys)
    results: list[list[WriteResult]] = [[] for _ in range(files)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(directory.ItemFile(path / directory.rank_file(rank))) for rank in range(files)]
        for name in source.values:
            pickled = io.BytesIO()
            torch.save(source.read(name), pickled)
            results[0].append(outputs[0].write_item(MetadataIndex(name), pickled))
            metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()

        def write(name: str, tensor: Tensor) -> None:
            chunks, first = [], 0
            for rank, chunk in enumerate(tensor.chunk(files) if tensor.numel() and tensor.ndim else [tensor]):
                offsets = torch.Size([first, *[0] * tensor.ndim][: tensor.ndim])
                chunks.append(dcp.ChunkStorageMetadata(offsets, chunk.shape))
                results[rank].append(outputs[rank].write_item(MetadataIndex(name, offsets), chunk))
                first += len(chunk) if tensor.ndim else 0
            properties = TensorProperties(dtype=tensor.dtype)
            metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, tensor.shape, chunks)

        yield write
    for name, first in source.tied.items():
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
        for written in results:
            written += [
                replace(each, index=replace(each.index, fqn=name)) for each in written if each.index.fqn == first
            ]
    directory.describe(path, source.step, metadata, results, dcp.FileSystemWriter(path).finish)
    directory.sync_folder(path)


@contextmanager
def _safetensors_target(source: Source, path: Path, files: int) -> Iterator[WriteTensor]:
    tensors = {name: tensor for name, tensor in source.tensors.items() if name not in source.tied}
    export = hugging_face.Export(hugging_face.spread(tensors, files), path, source.tied)
    export.stage()
    with export.writing() as write:
        yield lambda name, tensor: write(name, tensor.view(-1), 0)
    export.commit()


@contextmanager
def _torch_target(source: Source, path: Path, files: int) -> Iterator[WriteTensor]:
    """A file of torch.save with the nesting of the keys: saved without values, which are then filled in one by one."""
    with _torch.no_memory():
        holes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in source.tensors.items()}
    holes |= {name: holes[first] for name, first in source.tied.items()}
    leaves = {name: holes[name] if name in holes else source.read(name) for name in source.keys}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_torch.unflatten_state_dict(leaves, source.keys), path)
    with _torch.no_memory():
        loaded, _ = _torch.flatten_state_dict(torch.load(path, weights_only=False))
    starts = {name: _torch.offset_in_file(loaded[name]) for name in holes}
    with open(path, "r+b") as file:  # the zip file's checksums do not cover the values; torch ignores them
        yield lambda name, tensor: hugging_face.write_all(file.fileno(), hugging_face.memory_of(tensor), starts[name])
        os.fsync(file.fileno())


TARGETS: dict[str, Callable[[Source, Path, int], AbstractContextManager[WriteTensor]]] = {
    "dcp": _dcp_target,
    "safetensors": _safetensors_target,
    "torch": _torch_target,
}
