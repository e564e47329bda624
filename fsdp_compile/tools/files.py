"""Files of users that define models. This module imports no torch."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHTITAN = "torchtitan:"  # before MODULE:CONFIG, where FILE.py:FUNCTION may be


def run_file(path: Path) -> dict[str, Any]:
    """The names that a Python file defines. ValueError if it raises an error.

    It becomes a module: compilers and dataclasses look for that of a class by its name.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a Python file, found none")
    name = f"fsdp_compile_file_{path.stem}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
        return vars(module)
    except Exception as error:
        raise ValueError(f"{path}: expected a file that runs, found {type(error).__name__}: {error}") from error


def load_factory(text: str) -> tuple[Callable[[], Any], Callable[..., Sequence[Any]] | None]:
    """The function that `FILE.py:FUNCTION` names, and the file's `example_inputs`, if it has one; behind `TORCHTITAN`
    those of a torchtitan config.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text has another form, the file raises an error, or does not define the function.
    """
    if text.startswith(TORCHTITAN):
        from fsdp_compile.integrations.torchtitan.compared import factory

        return factory(text.removeprefix(TORCHTITAN))
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
    return function_in(names, name, path), names.get("example_inputs")


def split_factory(text: str) -> tuple[str, str]:
    """File and function of `FILE.py:FUNCTION`. ValueError if the text has another form."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"FILE.py:FUNCTION: expected a file, a colon and the name of a function, found {text!r}")
    return path, name


def function_in(names: dict[str, Any], name: str, path: str | Path) -> Callable[..., Any]:
    """The function `name` among `names` of the file `path`. ValueError if there is none."""
    if not callable(names.get(name)):
        raise ValueError(f"{path}: expected a function {name}() without arguments, found none")
    return names[name]
