"""Makes a failing case smaller while it fails: drops elements of tuples, sets fields back to their defaults."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .cases import Case, Node, Step, size_of


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 120.0) -> Case:
    """The smallest case that was found to fail within so many seconds."""
    deadline, smaller = time.monotonic() + seconds, True
    while smaller:
        smaller = False
        for candidate in sorted(set(_smaller(case)), key=size_of):
            if time.monotonic() > deadline:
                return case
            if not all(step.syncs[-1] for step in candidate.steps):
                continue
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def _smaller(value: Any) -> Iterator[Any]:
    """What is one change simpler than `value`."""
    if isinstance(value, tuple):
        for index, each in enumerate(value):
            rest = value[:index], value[index + 1 :]
            yield (*rest[0], *rest[1])
            if isinstance(each, Node):
                yield (*rest[0], *each.children, *rest[1])
            for simpler in _smaller(each):
                yield (*rest[0], simpler, *rest[1])
    elif isinstance(value, Case | Node | Step):
        for field in fields(value):
            now = getattr(value, field.name)
            if now == field.default or field.name == "seed":
                continue
            yield replace(value, **{field.name: field.default})
            for simpler in _smaller(now):
                if simpler or field.name not in ("steps", "syncs"):
                    yield replace(value, **{field.name: simpler})
