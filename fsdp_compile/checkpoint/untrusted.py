"""Read checkpoints of unknown origin: no code in them runs, no file outside of their folder is read.

path_in, file_in     resolve a name, refuse one outside of the folder
SafeReader           DCP's reader, with an unpickler for `.metadata` that knows only DCP's own classes
read                 fill tensors and load plain values, through any reader of DCP

Pickled values of other types are loaded only with `trust` (`checkpoint.load`, `fsdp-compile checkpoint convert`).
"""

import io
import math
import pickle
from collections import OrderedDict
from functools import cached_property, partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_compile import config
from fsdp_compile.state_dict._torch import MemoryFormatEncoding, StorageInfo, layout_named

METADATA = ".metadata"  # DCP's list of what was saved
MOST_BYTES = 1 << 30  # of that file, which has about 200 bytes per chunk of a tensor
_MOST = 1 << 63  # sizes, strides and bytes are below it

_CLASSES: tuple[Any, ...] = (
    dcp.Metadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.TensorStorageMetadata, MetadataIndex,
    StorageMeta, TensorProperties, MemoryFormatEncoding, StorageInfo, torch.Size, OrderedDict, layout_named,
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {(each.__module__, each.__name__): each for each in _CLASSES}
for _module in ("pathlib", "pathlib._local"):  # paths of the saving machine; `_local` in Python 3.13
    _ALLOWED |= {(_module, "PosixPath"): PurePosixPath, (_module, "WindowsPath"): PureWindowsPath}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


# --- files ------------------------------------------------------------------------------------------------------------


path_in, file_in = (partial(find, error=CheckpointError) for find in (config.path_in, config.file_in))


# --- the list of what was saved ---------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _ALLOWED.get((module, name))
        if known is None and module == "torch":
            known = getattr(torch, name, None)
            known = known if isinstance(known, (torch.dtype, torch.layout)) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a list of tensors")
        return known


class SafeReader(dcp.FileSystemReader):
    """DCP's reader; unpickles `.metadata` without calling anything, and checks it."""

    _place: StorageInfo | None = None  # of the item that is read

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Read `.metadata`, once; CheckpointError if it names files outside of the folder or makes no sense."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned; CheckpointError, with the name, if it is not what torch.save writes."""
        try:
            return super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file raises nearly anything
            found = (index.fqn for index, place in self.storage_data.items() if place is self._place)
            name = next(found, self.path)
            raise CheckpointError(f"{name}: expected what torch.save writes, found {error!r}") from error

    def _slice_file(self, file: Any, sinfo: StorageInfo) -> Any:  # called before each item is loaded
        self._place = sinfo
        return super()._slice_file(file, sinfo)

    @cached_property
    def _metadata(self) -> dcp.Metadata:
        folder = Path(self.path)
        path = file_in(folder, METADATA)
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has {path.stat().st_size} bytes, and {MOST_BYTES} are the most that is read")
            with open(path, "rb") as file:
                metadata: dcp.Metadata = _Unpickler(file).load()
            _check_metadata(metadata)
            for name in {location.relative_path for location in metadata.storage_data.values()}:
                file_in(folder, name)
        except CheckpointError:
            raise
        except Exception as error:  # an unpickler raises nearly anything
            raise CheckpointError(f"{path}: this is not the list of tensors that torch.distributed.checkpoint writes: "
                                  f"{error!r}; do not use this checkpoint") from None  # fmt: skip
        return metadata


def _check_metadata(metadata: Any) -> None:
    """Raise an exception if fields do not have the types and ranges that DCP gives them."""

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"it has {what}")

    expect(type(metadata) is dcp.Metadata, "no Metadata")  # whose fields raise where they are no dicts
    expect(isinstance(metadata.state_dict_metadata, dict), "no names")
    paths = (metadata.planner_data or {}).values()
    for keys in paths:  # of which each item of a list has one at least
        expect(all(type(key) is str or (type(key) is int and 0 <= key < len(paths)) for key in keys), f"keys {keys!r}")
    for index, location in metadata.storage_data.items():
        expect(type(index) is MetadataIndex and type(location) is StorageInfo, f"{index!r} at {location!r}")
        expect(type(location.relative_path) is str, f"{index.fqn} in {location.relative_path!r}")
        numbers = location.offset, location.length
        expect(all(type(each) is int and each >= 0 for each in numbers), f"{index.fqn} at {location}")
    for name, stored in metadata.state_dict_metadata.items():
        expect(type(name) is str, f"the name {name!r}")
        if type(stored) is not dcp.TensorStorageMetadata:
            expect(type(stored) is dcp.BytesStorageMetadata, f"{name} as {stored!r}")
            continue
        dtype, shape = stored.properties.dtype, tuple(stored.size)
        expect(isinstance(dtype, torch.dtype), f"{name} of dtype {dtype!r}")
        are_sizes = all(type(size) is int and 0 <= size < _MOST for size in shape)
        expect(are_sizes and math.prod(size or 1 for size in shape) * dtype.itemsize < _MOST, f"{name} of {shape}")
        for chunk in stored.chunks:
            box = zip(chunk.offsets, chunk.sizes, shape, strict=True)
            expect(all(at >= 0 and size >= 0 and at + size <= of for at, size, of in box), f"{name} in {chunk}")
            location = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if not getattr(location, "transform_descriptors", None):  # else it may be compressed
                nbytes = math.prod(chunk.sizes) * dtype.itemsize
                expect(nbytes <= location.length, f"{nbytes} bytes of {name} in {location.length} of a file")


# --- tensors and values -----------------------------------------------------------------------------------------------


def load_item(file: IO[bytes], name: str, is_value: bool = False, trust: bool = False) -> Any:
    """Load what torch.save wrote: a tensor or a plain value, with `trust` a value of any type; else CheckpointError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a damaged file raises nearly anything
        if is_value and not trust and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{name}: expected tensors and plain values, found a value that may run code when it "
                                  f"is loaded; pass trust=True, or --trust to the command, if you know who wrote it"
                                  ) from None  # fmt: skip
        raise CheckpointError(f"{name}: expected what torch.save writes, found {error!r}") from error


class ValuePlanner(dcp.DefaultLoadPlanner):
    """DCP's planner; loads values that are not tensors with `load_item`."""

    def __init__(self, trust: bool, **options: bool) -> None:
        super().__init__(**options)
        self.trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state that is loaded. Raises CheckpointError as `load_item` does."""
        if not self.trust:  # DCP itself loads any type: hand it what has plain types
            loaded, value = load_item(value, read_item.dest_index.fqn, is_value=True), io.BytesIO()
            torch.save(loaded, value)
            value.seek(0)
        super().load_bytes(read_item, value)


def read(reader: dcp.StorageReader, wanted: dict[str, Any], trust: bool = False) -> dict[str, Any]:
    """Read the names of `wanted`: tensors, sharded or not, are filled in place, and for None a value is loaded.

    Each rank reads the bytes that it needs, and communicates nothing. CheckpointError if a part of a tensor was not
    saved, a file is damaged, or a value needs `trust`.
    """
    metadata, planner = reader.read_metadata(), ValuePlanner(trust, flatten_state_dict=False)
    for name in wanted:
        stored = metadata.state_dict_metadata[name]
        if isinstance(stored, dcp.TensorStorageMetadata):
            found, expected = sum(math.prod(chunk.sizes) for chunk in stored.chunks), math.prod(stored.size)
            if found != expected:
                raise CheckpointError(f"{name}: expected chunks of all its {expected} elements, found {found}; the "
                                      f"tensor was not saved completely")  # fmt: skip
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return planner.state_dict
