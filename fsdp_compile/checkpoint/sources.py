"""What `fsdp-compile checkpoint` reads, one tensor at a time: folders of DCP and of safetensors, files of torch.save.

A name is the path of keys that lead to a tensor or value, joined by dots, as DCP has it.
"""

import math
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from fsdp_compile.checkpoint import safetensors_file
from fsdp_compile.checkpoint._torch import flatten_state_dict
from fsdp_compile.checkpoint.directory import newest
from fsdp_compile.checkpoint.disk import in_order
from fsdp_compile.checkpoint.manifest import METADATA, CheckpointError
from fsdp_compile.checkpoint.manifest import NAME as MANIFEST
from fsdp_compile.checkpoint.safetensors_file import Spec
from fsdp_compile.checkpoint.storage import DirectoryReader

Keys = tuple[str | int, ...]


class Source(ABC):
    """Tensors and other values of a checkpoint, by name.

    Attributes:
        format: what it is, in words.
        files: where it is.
        step: at which it was saved; None if nothing says so.
        tensors: names, dtypes and shapes, in order.
        values: names of what is no tensor.
        keys: for each name the keys that lead there.
    """

    format: str
    files: list[Path]
    step: int | None = None

    def __init__(self) -> None:
        self.tensors: dict[str, Spec] = {}
        self.values: list[str] = []
        self.keys: dict[str, Keys] = {}

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A tensor, contiguous, on the CPU."""

    def value(self, name: str) -> Any:
        """A value that is no tensor."""
        raise KeyError(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())


def open_source(path: Path) -> Source:
    """Find out what `path` is.

    Raises:
        FileNotFoundError: there is nothing that is a checkpoint.
        CheckpointError: a file is damaged.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        return TorchSource(path)
    if (path / METADATA).is_file():
        return DcpSource(path)
    if found := newest(path):
        return DcpSource(found[0])
    if path.is_file() or any(path.glob("*.safetensors*")):
        return SafetensorsSource(path)
    what = "no such file" if not path.exists() else "none of these"
    raise FileNotFoundError(
        f"{path}: expected a folder that torch.distributed.checkpoint wrote, a folder of checkpoints, a folder or file "
        f"of safetensors, or a file of torch.save; found {what}"
    )


class DcpSource(Source):
    """A folder that DCP wrote. Checksums are compared where there is a manifest.

    Memory: a tensor that was saved in one piece is read as it is; else the tensor and one of its pieces.
    """

    format = "torch.distributed.checkpoint"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._reader = FileSystemReader(path)
        if (path / MANIFEST).is_file():
            self._reader = DirectoryReader(path)
            self.step = self._reader.manifest.step
        metadata = self._reader.read_metadata()
        self._path, self._places = path, metadata.storage_data
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self.files = sorted({path / place.relative_path for place in self._places.values()})
        for name, found in metadata.state_dict_metadata.items():
            self.keys[name] = tuple((metadata.planner_data or {}).get(name, (name,)))
            if isinstance(found, TensorStorageMetadata):
                self._chunks[name] = found.chunks
                self.tensors[name] = Spec(name, found.properties.dtype, tuple(found.size))
            else:
                self.values.append(name)

    def read(self, name: str) -> Tensor:
        """Put together from its pieces. CheckpointError if they are not all there, or altered."""
        spec, chunks = self.tensors[name], self._chunks[name]
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(spec.shape):
            raise CheckpointError(f"{self._path}, with {name}: its pieces are not the whole tensor; it was not saved")
        if len(chunks) == 1:
            return in_order(self._load(MetadataIndex(name, chunks[0].offsets)).detach())
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for chunk in chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self._load(MetadataIndex(name, chunk.offsets))
        return whole

    def value(self, name: str) -> Any:
        """Unpickled, as DCP itself does: whatever was saved runs."""
        return self._load(MetadataIndex(name), weights_only=False)

    def _load(self, index: MetadataIndex, weights_only: bool = True) -> Any:
        place = self._places[index]
        with open(self._path / place.relative_path, "rb") as file:
            slice_ = self._reader._slice_file(file, place)
            return torch.load(slice_, map_location="cpu", weights_only=weights_only)


class SafetensorsSource(Source):
    """A file of safetensors, or a folder in Hugging Face's layout."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._places = safetensors_file.find(path)
        self.files = sorted({place.file for place in self._places.values()})
        self.tensors = {name: place.spec for name, place in self._places.items()}
        self.keys = {name: (name,) for name in self.tensors}

    def read(self, name: str) -> Tensor:
        """Read into new memory. CheckpointError if the file ends before."""
        place = self._places[name]
        read = torch.empty(math.prod(place.spec.shape), dtype=place.spec.dtype)
        safetensors_file.read_run(place, read)
        return read.view(place.spec.shape)


class TorchSource(Source):
    """A file of torch.save, with dicts and lists of tensors; its tensors are mapped, not read, until they are used."""

    format = "torch.save"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.files = [path]
        try:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: expected a torch.save of tensors and plain values: {error}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: expected a torch.save of a dict, found {type(loaded).__name__}")
        self._leaves, self.keys = flatten_state_dict(loaded)
        for name, leaf in self._leaves.items():
            if isinstance(leaf, Tensor):
                self.tensors[name] = Spec(name, leaf.dtype, tuple(leaf.shape))
            else:
                self.values.append(name)

    def read(self, name: str) -> Tensor:
        """The mapped file, unless its values have to be put in order."""
        return in_order(self._leaves[name].detach())

    def value(self, name: str) -> Any:
        """As it was loaded."""
        return self._leaves[name]
