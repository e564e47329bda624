"""Files of users that define models. This module imports no torch."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


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
