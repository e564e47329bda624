"""How nested state is written under flat names, and what a checkpoint says of its nesting.

    {"seen": {3: 120}, "last": (a, b), "empty": {}}       what is saved
    {"seen": {"3": 120}, "last": [a, b]}                  what DCP can write: dicts with strings as keys, and lists
    seen.3, last.0, last.1                                its names, with the paths ("seen", "3"), ("last", 0), ...
    {("seen",): ("dict", [3]), ("last",): ("tuple",), ("empty",): ("dict", [])}    what is missing there: the notes

An empty dict is written as None, for it would have no name.

DCP writes each dict, and each list that holds tensors, item by item, and pickles anything else as one value. So a tuple
or a dataclass with sharded tensors would be written as one rank's part. `pack` turns these into lists and dicts, and
notes their types, which are saved as one more value; `unpack` makes them again.
"""

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_compile.checkpoint.by_rank import VALUES, Apart, PerRank, own_name
from fsdp_compile.checkpoint.untrusted import CheckpointError
from fsdp_compile.state_dict._torch import unflatten_state_dict
from fsdp_compile.tensors.nested import Path, dotted, is_dataclass, is_named_tuple, leaves

NOTES = "structure_of_state"  # the name in a checkpoint of what is noted here, and of which values ranks do not share
Notes = dict[Path, tuple[Any, ...]]  # for a container that DCP does not restore: its kind, and what `unpack` needs


class Stored:
    """A value of a checkpoint, and how it is read.

    Args:
        name: of the value.
        tensor: the description of a tensor; None: another value.
        of_ranks: for a value of which each rank has saved its own, the names of these in order; None: it had none.
        mine: which of these this rank has saved; None: another number of ranks has saved.
    """

    def __init__(
        self,
        name: str,
        tensor: dcp.TensorStorageMetadata | None = None,
        of_ranks: Sequence[str | None] = (),
        mine: str | None = None,
    ) -> None:
        self.name, self.tensor, self.of_ranks, self.mine = name, tensor, of_ranks, mine
        self.target: Tensor | None = None  # which is filled
        self.is_of_some = False  # a tensor that not all ranks had, of which `state` says whether this one needs it
        self._own: Any = None  # what `state` has in its place

    @property
    def outline(self) -> Tensor | None:
        """A tensor of its shape and dtype without values; None for other values."""
        stored = self.tensor
        return None if stored is None else torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")

    def fill(self, own: Any) -> None:
        """Let `own`, what `state` has in its place, be filled if it is a tensor; otherwise a new, full one, or a value.

        Raises:
            CheckpointError: `own` has another shape; or another number of ranks has saved its own values, and `own` is
                no `PerRank`.
        """
        self._own = own
        if self.of_ranks:
            if self.mine is None and not isinstance(own, PerRank):
                raise CheckpointError(
                    f"{self.name} differs between the {len(self.of_ranks)} ranks that have saved it, and another "
                    f"number of ranks loads it; put checkpoint.PerRank(value) in its place in state, whose of_ranks "
                    f"then has the values of all of them"
                )
        elif self.tensor is not None:
            size, dtype = self.tensor.size, self.tensor.properties.dtype
            self.target = own if isinstance(own, Tensor) else torch.empty(size, dtype=dtype)
            if self.target.shape != self.tensor.size:
                raise CheckpointError(
                    f"{self.name}: expected shape {tuple(self.target.shape)}, as in state, found "
                    f"{tuple(self.tensor.size)} in the checkpoint; put a tensor of that shape there"
                )

    def to_read(self) -> dict[str, Tensor | None]:
        """The names that are read, with the tensor to fill; None for values."""
        if not self.of_ranks:
            return {self.name: self.target}
        wanted = self.of_ranks if isinstance(self._own, PerRank) else [self.mine]
        return {name: None for name in wanted if name is not None}

    def loaded(self, values: dict[str, Any]) -> Any:
        """What `state` has in its place afterwards, of what was read by name."""
        if not self.of_ranks:
            found = values[self.name] if self.target is None else self.target
            if isinstance(self._own, PerRank):
                self._own.value, found = found, self._own
            return found
        if isinstance(self._own, PerRank):
            self._own.of_ranks = [None if name is None else values[name][0] for name in self.of_ranks]
            if self.mine is not None:
                self._own.value = values[self.mine][0]
            return self._own
        (found,) = values[self.mine or ""]
        is_alike = isinstance(found, Tensor) and isinstance(self._own, Tensor) and found.shape == self._own.shape
        return self._own.copy_(found) if is_alike else found


# --- containers that DCP writes ---------------------------------------------------------------------------------------


def pack(value: Any, path: Path, notes: Notes) -> Any:
    """`value`, found at `path`, as dicts with strings as keys and lists; adds to `notes` what these do not say."""
    if isinstance(value, Mapping):
        keys, names = list(value), [str(key) for key in value]
        if not keys or keys != names or type(value) is not dict:
            notes[path] = ("dict", keys, *_kind_of_dict(value))
        if not keys:
            return None
        return {name: pack(value[key], (*path, name), notes) for key, name in zip(keys, names, strict=True)}
    if isinstance(value, list) or _has_tensors(value):
        if is_dataclass(value):
            notes[path] = ("dataclass", type(value))
            return {field.name: pack(getattr(value, field.name), (*path, field.name), notes) for field in fields(value)}
        if is_named_tuple(value):
            notes[path] = ("namedtuple", type(value))
        elif isinstance(value, deque):
            notes[path] = ("deque", value.maxlen)
        elif isinstance(value, tuple):
            notes[path] = ("tuple",)
        return [pack(item, (*path, index), notes) for index, item in enumerate(value)]
    return value


def merge_notes(of_ranks: Iterable[Notes]) -> Notes:
    """The notes of all ranks, whose dicts may have different keys."""
    merged: Notes = {}
    for notes in of_ranks:
        for path, note in notes.items():
            before = merged.setdefault(path, note)
            if before[0] == note[0] == "dict" and before != note:
                merged[path] = ("dict", list(dict.fromkeys((*before[1], *note[1]))), *note[2:])
    return merged


def _has_tensors(value: Any) -> bool:
    is_nested = isinstance(value, (tuple, deque)) or is_dataclass(value)
    return is_nested and any(isinstance(leaf, Tensor) for _, leaf in leaves(value))


_KINDS = {"OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}  # others have to be trusted
_FACTORIES = {each.__name__: each for each in (int, float, list, dict, set)}


def _kind_of_dict(value: Any) -> tuple[Any, ...]:
    """What `_empty_dict` makes a dict of the same type of."""
    kind: Any = type(value)
    if kind is dict:
        return ()
    kind = next((name for name, each in _KINDS.items() if each is kind), kind)
    factory = getattr(getattr(value, "default_factory", None), "__name__", None)
    return (kind, factory) if factory in _FACTORIES else (kind,)


def _empty_dict(kind: Any = dict, factory: str | None = None) -> Any:
    made = _KINDS.get(kind, kind)
    return made() if factory is None else made(_FACTORIES[factory])


def unpack(value: Any, notes: Notes, path: Path = ()) -> Any:
    """What `pack` was given, or a part of it; CheckpointError if notes do not fit."""
    kind, *rest = notes.get(path, ("",))
    if isinstance(value, Stored) and value.tensor is None and kind == "dict" and not rest[0]:
        value = {}
    if isinstance(value, dict):
        items = {name: unpack(item, notes, (*path, name)) for name, item in value.items()}
        if kind == "dataclass":
            return _make_dataclass(rest[0], items, path)
        keys = {str(key): key for key in rest[0]} if kind == "dict" else {}
        made = _empty_dict(*rest[1:])
        for name in dict.fromkeys((*keys, *items)):
            if name in items:
                made[keys.get(name, name)] = items[name]
        return made
    if isinstance(value, list):
        new = [unpack(item, notes, (*path, index)) for index, item in enumerate(value)]
        if kind == "namedtuple":
            return rest[0](*new)
        return tuple(new) if kind == "tuple" else deque(new, rest[0]) if kind == "deque" else new
    return value


def _make_dataclass(cls: Any, items: dict[str, Any], path: Path) -> Any:
    made = object.__new__(cls)
    for field in fields(cls):
        if field.name not in items:
            raise CheckpointError(f"{dotted(path)}: expected a {cls.__name__} with {field.name}, found none saved")
        object.__setattr__(made, field.name, items[field.name])
    return made


# --- what a checkpoint has --------------------------------------------------------------------------------------------


def tree(stored: Iterable[tuple[Path, Stored]], notes: Notes) -> dict[str, Any]:
    """What was saved, nested as it was, with a `Stored` for each value. What lies below a value is of other ranks."""
    of_path = dict(stored)
    mine = {path: each for path, each in of_path.items() if not any(path[:n] in of_path for n in range(1, len(path)))}
    packed = unflatten_state_dict(mine, {path: path for path in mine})  # type: ignore[arg-type,misc]  # any keys will do
    return {key: unpack(value, notes, (key,)) for key, value in packed.items()}


def stored_values(metadata: dcp.Metadata, apart: list[Any], rank: int, size: int) -> Iterator[tuple[Path, Stored]]:
    """What `rank` of `size` ranks finds in a checkpoint, with the path of each.

    Args:
        metadata: what DCP says of the checkpoint.
        apart: what `save` has noted of values that ranks do not share, as `Apart`.
        rank: of the reader.
        size: how many read.
    """
    paths: dict[str, Path] = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
    of_name = {each.name: each for each in itertools.starmap(Apart, apart)}
    for name in dict.fromkeys((*paths, *metadata.state_dict_metadata, *of_name)):  # as they were nested, and others
        described, path = metadata.state_dict_metadata.get(name), paths.get(name, (name,))
        noted = of_name.get(name)
        if noted is not None and size == noted.ranks and rank not in noted.having:
            continue
        if noted is not None and noted.is_own:
            of_ranks = [own_name(name, each) if each in noted.having else None for each in range(noted.ranks)]
            yield tuple(noted.path), Stored(name, None, of_ranks, of_ranks[rank] if size == noted.ranks else None)
        elif described is not None and name != NOTES and path[0] != VALUES:
            stored = Stored(name, described if isinstance(described, dcp.TensorStorageMetadata) else None)
            stored.is_of_some = noted is not None and size != noted.ranks
            yield path, stored
