"""Exceptions in the midst of the package: `interrupted` raises one at a call of a function of it."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import fsdp_compile

PACKAGE = fsdp_compile.__path__[0]


class Interruption(Exception):
    """What is raised."""


def interrupted(function: Callable[[], Any], at: int) -> int:
    """Call `function`, whose call number `at` of a function of the package raises Interruption, which autograd and
    Dynamo may turn into a RuntimeError; how many such calls there were."""
    calls = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        # Not generators: Python closes one where it is collected, which ranks do at other times, and ignores the error.
        is_ours = frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if event == "call" and is_ours:
            calls += 1
            if calls == at:
                sys.setprofile(None)
                raise Interruption(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
