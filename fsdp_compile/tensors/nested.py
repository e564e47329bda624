"""Values nested in dicts, lists, tuples and dataclasses, such as an optimizer's state of one parameter.

    state = {"step": 3, "last": [a, b], "factors": Factors(left=c, right=d)}
    leaves(state)                      ("step",): 3, ("last", 0): a, ("last", 1): b, ("factors", "left"): c, ...
    map_leaves(convert, state)         the same containers, of what `convert(path, leaf)` returns for each leaf

Containers are copied, and keep their types. Other than to torch's pytrees, each dataclass is a container, and so is
each subclass of dict.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

ABSENT = object()  # in the place of a value that another rank has
Path = tuple[Any, ...]  # keys of dicts, indices of lists, names of fields


def dotted(path: Path) -> str:
    """A path as messages have it."""
    return ".".join(map(str, path))


def is_dataclass(value: Any) -> bool:
    """Whether `value` is an object of a dataclass, not the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_named_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether `value` is a tuple of a class that `namedtuple` made."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_container(value: Any) -> bool:
    """Whether `value` has items that `map_items` replaces."""
    return isinstance(value, (dict, list, tuple, deque)) or is_dataclass(value)


def items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container, each with its key, index or name of a field."""
    if isinstance(value, dict):
        yield from value.items()
    elif is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        yield from enumerate(value)


def map_items(convert: Callable[[Any, Any], Any], value: Any) -> Any:
    """A copy of the container `value` with `convert(key, item)` in the place of each item; any other value as it is."""
    if not is_container(value):
        return value
    new = [convert(key, item) for key, item in items(value)]
    if is_named_tuple(value):
        return type(value)(*new)
    if isinstance(value, deque):
        return type(value)(new, value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(new)
    copied = copy.copy(value)
    for (key, _), item in zip(items(value), new, strict=True):
        if isinstance(value, dict):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)  # also of a frozen dataclass
    return copied


def map_leaves(convert: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """A copy of `value` with `convert(path, leaf)` in the place of each leaf, which is what is no container."""
    if not is_container(value):
        return convert(path, value)
    return map_items(lambda key, item: map_leaves(convert, item, (*path, key)), value)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What is in `value` and is no container, each with its path."""
    if not is_container(value):
        yield path, value
        return
    for key, item in items(value):
        yield from leaves(item, (*path, key))


def nested_as(own: Any, value: Any) -> Any:
    """`value` with the keys and tuples of `own` where torch's functions have made strings and lists of them."""
    if isinstance(own, dict) and isinstance(value, dict):
        lost = {str(key): key for key in own if not isinstance(key, str)}
        lost = {name: key for name, key in lost.items() if name in value and name not in own}
        stale = set(lost.values())  # DCP fills a string's item, and leaves the one that was there
        kept = [(lost.get(key, key), item) for key, item in value.items() if key not in stale]
        return {key: nested_as(own.get(key), item) for key, item in kept}
    if isinstance(own, (list, tuple)) and isinstance(value, list):
        new = [nested_as(own[index] if index < len(own) else None, item) for index, item in enumerate(value)]
        if is_named_tuple(own):
            return type(own)(*new)
        return tuple(new) if isinstance(own, tuple) else new
    return value
