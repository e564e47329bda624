"""Nested state under flat names: what is packed for DCP, and what is made of it again."""

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdp_compile.checkpoint.structure import Notes, Stored, merge_notes, pack, tree
from fsdp_compile.state_dict._torch import flatten_state_dict
from fsdp_compile.tensors.nested import leaves, map_leaves, nested_as


class Pair(NamedTuple):
    """Two tensors."""

    left: Tensor
    right: Any


@dataclass(frozen=True)
class Frozen:
    """A tensor and what belongs to it."""

    tensor: Tensor
    rest: tuple[int, ...]


T = torch.ones(2)
NESTED = [
    {"a": {"b": [T, {"c": 1}]}},
    {3: T, (1, 2): {None: 4}},
    [T, (T, 5), Pair(T, {"x": (1, 2)}), deque([T, T], maxlen=2)],
    Frozen(T, (1, 2)),
    {"plain": (1, [2, {"a": 3}]), "empty": {}, "list": [], "nothing": ()},
    [{}, [], {1: {}}, [T, {}]],
    {"counted": Counter({30: 1, 80: 2}), "ordered": OrderedDict(b=1, a=2), "default": defaultdict(int, {1: 2})},
    5,
    T,
]


@pytest.mark.parametrize("value", NESTED, ids=str)
def test_comes_back_as_it_was(value: Any) -> None:
    """Types, keys and their order, whatever is nested in what."""
    notes: Notes = {}
    found, paths = flatten_state_dict({"key": pack(value, ("key",), notes)})
    assert not any(isinstance(each, (dict, Frozen, deque)) for each in found.values())
    stored = []
    for name, each in found.items():
        described = TensorStorageMetadata(TensorProperties(each.dtype), each.shape, []) if each is T else None
        stored.append((paths[name], Stored(name, described)))
    saved = tree(stored, notes)["key"]
    made = map_leaves(lambda _, each: found[each.name], saved)
    assert repr(made) == repr(value) and type(made) is type(value)
    assert all(one is other for (_, one), (_, other) in zip(leaves(made), leaves(value), strict=True) if other is T)


def test_notes_of_ranks() -> None:
    """Dicts of ranks with other keys are one dict with all of them."""
    merged = merge_notes([{("a",): ("dict", [1, 2])}, {("a",): ("dict", [3, 2]), ("b",): ("tuple",)}])
    assert merged == {("a",): ("dict", [1, 2, 3]), ("b",): ("tuple",)}


def test_keys_that_torch_has_turned_into_strings() -> None:
    """They become those of the state that there is, and what was loaded takes the place of what was there."""
    own = {0: T, "x": {1: (2, 3)}, 7: "kept"}
    assert nested_as(own, {"0": 5, "x": {"1": [4, 5]}, 7: 8}) == {0: 5, "x": {1: (4, 5)}, 7: 8}
    assert nested_as({0: "stale"}, {0: "stale", "0": "loaded"}) == {0: "loaded"}
    assert nested_as({}, {"0": 1}) == {"0": 1}
