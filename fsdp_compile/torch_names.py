"""Whether torch has the private names that the package uses, as the `_torch.py` files spell them; needs no ranks.

`fsdp-compile selfcheck --names` calls this. What is looked for is read from the files by `ast`, so nothing has to be
listed a second time:

    from torch.x import _y                   `torch.x._y` exists
    torch._x.y, Optimizer._y, _config.y      the same, through any name that the file imported from torch
    of._y, for an argument `of: Optimizer`   the class has it, declares it, or assigns it to `self`
    _x.y(a, b=c)                             the function takes such arguments, if it is written in Python

What a file asks for by `getattr` with a default, or gets from a value of unknown type, is not looked for.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

TESTED_TORCH = ("2.11", "2.13", "2.14")
"""The versions of torch that the tests have run on, the newest last; docs/upgrading_torch.md says how many of them."""

_MISSING = object()


def is_untested(version: str) -> bool:
    """Whether torch's `version` is newer than all that the package was tested on."""
    running, newest = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, TESTED_TORCH[-1]))
    return running > newest


@dataclass
class Names:
    """What a file asks of torch.

    Attributes:
        names: each name that was looked for, dotted.
        calls: those whose arguments were compared.
        faults: a line for each name that is missing, and for each function with other arguments.
    """

    names: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def check_all() -> dict[str, Names]:
    """What each `_torch.py` of the package asks of torch, by the path of the file within it."""
    package = Path(__file__).parent
    files = sorted(package.rglob("_torch.py"))
    return {path.relative_to(package).as_posix(): check(path.read_text(encoding="utf-8")) for path in files}


def check(source: str) -> Names:
    """What a file with this text asks of torch."""
    found, tree = Names(), ast.parse(source)
    imported = dict(_imported_names(tree, found))
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            _check_arguments(scope, imported, found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            _resolve_expression(node, imported, found)
        elif isinstance(node, ast.Call):
            _check_call(node, imported, found)
    return found


def _imported_names(tree: ast.AST, found: Names) -> Iterator[tuple[str, Any]]:
    """The local names that the file imports from torch, with what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    value = _look_up(alias.name, node, found)
                    yield (alias.asname, value) if alias.asname else ("torch", import_module("torch"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, _look_up(f"{node.module}.{alias.name}", node, found)


def _look_up(name: str, node: ast.AST, found: Names) -> Any:
    """What `name` is, a module or an attribute of one; notes if it is missing."""
    found.names.add(name)
    module, _, last = name.rpartition(".")
    try:
        return import_module(name) if not module else _member(import_module(module), last)
    except (ImportError, AttributeError) as error:
        found.faults.append(f"line {node.lineno}: {name} is missing ({error})")  # type: ignore[attr-defined]
        return _MISSING


def _member(of: Any, name: str) -> Any:
    if inspect.ismodule(of) and not hasattr(of, name):
        return import_module(f"{of.__name__}.{name}")
    return getattr(of, name)


def _resolve_expression(node: ast.expr, imported: dict[str, Any], found: Names) -> Any:
    """What an expression such as `torch._C.f` is; `_MISSING` if it starts with no imported name, or torch lacks it."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, _MISSING)
    if not isinstance(node, ast.Attribute):
        return _MISSING
    of = _resolve_expression(node.value, imported, found)
    if of is _MISSING:
        return _MISSING
    name = f"{getattr(of, '__module__', '') or ''}.{getattr(of, '__qualname__', '')}".strip(".")
    name = f"{of.__name__ if inspect.ismodule(of) else name or type(of).__name__}.{node.attr}"
    found.names.add(name)
    try:
        return _member(of, node.attr)
    except (ImportError, AttributeError):
        fault = f"line {node.lineno}: {name} is missing"
        found.faults += [fault] if fault not in found.faults else []
        return _MISSING


def _check_call(call: ast.Call, imported: dict[str, Any], found: Names) -> None:
    function = _resolve_expression(call.func, imported, found)
    if function is _MISSING or not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C++
        return
    name = ast.unparse(call.func)
    found.calls.add(name)
    is_open = any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    )
    bind = signature.bind_partial if is_open else signature.bind
    try:
        bind(
            *(None for each in call.args if not isinstance(each, ast.Starred)),
            **{each.arg: None for each in call.keywords if each.arg is not None},
        )
    except TypeError as error:
        found.faults.append(f"line {call.lineno}: {name}{signature} is called with other arguments: {error}")


def _check_arguments(scope: ast.AST, imported: dict[str, Any], found: Names) -> None:
    """Look for what a function reads of its arguments whose annotation is a class of torch."""
    arguments = getattr(scope, "args", None)
    if not isinstance(arguments, ast.arguments):
        return
    kinds = {}
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        kind = _resolve_expression(each.annotation, imported, Names()) if each.annotation is not None else _MISSING
        if inspect.isclass(kind):
            kinds[each.arg] = kind
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            kind = kinds.get(node.value.id)
            if kind is not None:
                name = f"{kind.__module__}.{kind.__qualname__}.{node.attr}"
                found.names.add(name)
                if not _has_attribute(kind, node.attr):
                    found.faults.append(f"line {node.lineno}: {name} is missing")


def _has_attribute(kind: type, name: str) -> bool:
    """Whether instances of `kind` have an attribute, as far as the class and its source say."""
    if hasattr(kind, name):
        return True
    for base in kind.__mro__:
        if name in getattr(base, "__annotations__", {}):
            return True
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # of C++
            continue
        if f"self.{name} " in source or f"self.{name}:" in source or f'"{name}"' in source:
            return True
    return False
