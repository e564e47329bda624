"""Files of users that define models. This module imports no torch."""

import ast
import difflib
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def run_file(path: Path) -> dict[str, Any]:
    """The names that a Python file defines. ValueError if it raises an error.

    It becomes a module: compilers and dataclasses look for that of a class by its name.
    """
    name = _module_name(path)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    parsed = _parse(path)
    try:
        exec(compile(parsed, path, "exec"), vars(module))
        return vars(module)
    except Exception as error:
        raise _does_not_run(path, error) from error


def _parse(path: Path) -> ast.Module:
    """What the file says. Its folder is searched for what it imports, as by `python FILE.py`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a Python file, found none")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise _does_not_run(path, error) from error


def _does_not_run(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: expected a file that runs, found {type(error).__name__}: {error}")


def check_factory(text: str) -> None:
    """Raise what `load_factory` would, as far as reading the file shows it: importing what it needs takes long."""
    path, name = split_factory(text)
    parsed = _parse(Path(path))
    for module in _imported(parsed):
        if module not in sys.modules and find_spec(module) is None:
            raise _does_not_run(Path(path), ModuleNotFoundError(f"No module named '{module}'"))
    symbols = symtable.symtable(Path(path).read_text(encoding="utf-8"), path, "exec").get_symbols()
    made = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    found = [*ast.walk(parsed)]
    hidden = {"exec", "globals", "setattr", "vars", "*"}.intersection(
        each.id if isinstance(each, ast.Name) else each.name
        for each in found
        if isinstance(each, (ast.Name, ast.alias))
    )
    if name not in made and not hidden:
        raise _no_function(path, name, made)


def _imports(parsed: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports at the file's top level, outside of `try` and `if`."""
    return (each for each in parsed.body if isinstance(each, (ast.Import, ast.ImportFrom)))


def _imported(parsed: ast.Module) -> Iterator[str]:
    """The first names of the modules."""
    for each in _imports(parsed):
        names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else [each.module or ""]
        yield from (name.partition(".")[0] for name in names if not getattr(each, "level", 0))


def import_for(path: str) -> None:
    """Import what the file imports, where processes fork afterwards that run it. What fails does so again there."""
    for each in _imports(_parse(Path(path))):
        with suppress(Exception):
            exec(compile(ast.Module([each], []), path, "exec"), {})


def load_factory(text: str) -> tuple[Callable[[], Any], Callable[..., Sequence[Any]] | None]:
    """The function that `FILE.py:FUNCTION` names, and the file's `example_inputs`, if it has one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text has another form, the file raises an error, or does not define the function.
    """
    make, inputs = load_functions(text)
    try:
        if inputs is not None:
            inspect.signature(inputs).bind(1, 1)
    except (TypeError, ValueError):
        expected = "a function example_inputs(batch, sequence) beside it"
        raise ValueError(f"{text}: expected {expected}, found {inputs!r}") from None
    return make, inputs


def load_functions(text: str) -> tuple[Callable[[], Any], Callable[..., Any] | None]:
    """As `load_factory`; `example_inputs` may have any arguments."""
    path, name = split_factory(text)
    names = run_file(Path(path))
    if not callable(names.get(name)):
        raise _no_function(path, name, (each for each, value in names.items() if callable(value)))
    return names[name], names.get("example_inputs")


def names_beside(text: str, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The functions of these names in the file of a loaded `FILE.py:FUNCTION`. ValueError if one is no function."""
    path, _ = split_factory(text)
    made = vars(sys.modules[_module_name(Path(path))])
    found = {name: made[name] for name in names if name in made}
    for name, value in found.items():
        if not callable(value):
            raise ValueError(f"{path}: expected {name} to be a function, found {type(value).__name__}")
    return found


def _module_name(path: Path) -> str:
    return f"fsdp_compile_file_{path.stem}"


def split_factory(text: str) -> tuple[str, str]:
    """File and function of `FILE.py:FUNCTION`. ValueError if the text has another form."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"FILE.py:FUNCTION: expected a file, a colon and the name of a function, found {text!r}")
    return path, name


def _no_function(path: str, name: str, names: Iterable[str]) -> ValueError:
    close = difflib.get_close_matches(name, names, 1)
    said = f"; did you mean {close[0]}?" if close else ""
    return ValueError(f"{path}: expected a function {name}() without arguments, found none{said}")
