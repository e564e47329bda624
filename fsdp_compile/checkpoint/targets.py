"""What `fsdp-compile checkpoint convert` writes, one tensor at a time."""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_compile.checkpoint._torch import (
    flatten_state_dict,
    no_memory,
    offset_in_file,
    save_holes,
    unflatten_state_dict,
)
from fsdp_compile.checkpoint.disk import memory_of, sync_folder, write_fully
from fsdp_compile.checkpoint.safetensors_file import Plan, Spec, Writer, spread
from fsdp_compile.checkpoint.sources import Keys
from fsdp_compile.checkpoint.storage import ItemFile, Place, describe


class Target(ABC):
    """A checkpoint to be written at `path`, which does not exist yet: values first, then each of `specs` once.

    With it as a context, files are closed at the end, whatever happens.
    """

    def __init__(self, path: Path, specs: Sequence[Spec], keys: dict[str, Keys], step: int | None, files: int) -> None:
        self.path, self.specs, self.keys, self.step, self.files = path, specs, keys, step, files
        self._open = ExitStack()

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @abstractmethod
    def begin(self, values: dict[str, Any]) -> None:
        """Start, with what is no tensor."""

    @abstractmethod
    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, contiguous, on the CPU."""

    @abstractmethod
    def end(self) -> None:
        """Complete it, and wait until it is on the disk."""


class DcpTarget(Target):
    """A folder of DCP, as many ranks would write it: each tensor in as many pieces, cut along its first dimension."""

    def begin(self, values: dict[str, Any]) -> None:
        """Make the files; the first has what is no tensor."""
        self.path.mkdir()
        places = [Place(str(self.path), f"__{rank}_0.distcp") for rank in range(self.files)]
        self._files = [self._open.enter_context(ItemFile(place)) for place in places]
        self._results: list[list[WriteResult]] = [[] for _ in places]
        self._metadata = Metadata({}, planner_data=self.keys)
        for name, value in values.items():
            pickled = io.BytesIO()
            torch.save(value, pickled)
            self._results[0].append(self._files[0].write(MetadataIndex(name), pickled))
            self._metadata.state_dict_metadata[name] = BytesStorageMetadata()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one piece into each file."""
        chunks, at = [], 0
        for rank, piece in enumerate(tensor.chunk(self.files) if tensor.numel() and tensor.ndim else [tensor]):
            offsets = torch.Size([at, *[0] * tensor.ndim][: tensor.ndim])
            chunks.append(ChunkStorageMetadata(offsets, piece.shape))
            self._results[rank].append(self._files[rank].write(MetadataIndex(name, offsets), piece))
            at += len(piece) if tensor.ndim else 0
        properties = TensorProperties(dtype=tensor.dtype)
        self._metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)

    def end(self) -> None:
        """Add metadata and manifest to the files."""
        self._open.close()
        describe(self.path, self.step, self._metadata, self._results, FileSystemWriter(self.path).finish)
        sync_folder(self.path)


class SafetensorsTarget(Target):
    """A folder in Hugging Face's layout, without what is no tensor."""

    def begin(self, values: dict[str, Any]) -> None:
        """Make the files, with room for the tensors; `values` are left out."""
        self._plan = Plan.of(spread(self.specs, self.files), self.path, {})
        self._plan.begin()
        self._writer = self._open.enter_context(Writer(self._plan))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write it to its place."""
        self._writer.write(name, tensor.view(-1))

    def end(self) -> None:
        """Give the files their names."""
        self._open.close()
        self._plan.end()


class TorchTarget(Target):
    """One file of torch.save, nested as the keys say: first with holes for the values, which are filled one by one.

    The zip file's own checksums are those of the holes; torch does not look at them.
    """

    def begin(self, values: dict[str, Any]) -> None:
        """Write the file with holes, and find where they are."""
        with no_memory():
            tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in self.specs}
        found = values | tensors
        save_holes(unflatten_state_dict({name: found[name] for name in self.keys}, self.keys), self.path)
        with no_memory():
            read, _ = flatten_state_dict(torch.load(self.path, weights_only=False))
        self._holes = {spec.name: offset_in_file(read[spec.name]) for spec in self.specs}
        self._file = os.open(self.path, os.O_WRONLY)
        self._open.callback(os.close, self._file)

    def write(self, name: str, tensor: Tensor) -> None:
        """Fill its hole."""
        write_fully(self._file, memory_of(tensor), self._holes[name])

    def end(self) -> None:
        """Wait for the disk."""
        os.fsync(self._file)
        self._open.close()
