"""Exceptions in the midst of the package: `interrupted` raises one at a call of a function of it."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import fsdp_compile

PACKAGE = fsdp_compile.__path__[0]
_WAITS = "comm/waits.py"


class Interruption(Exception):
    """What is raised."""


def _is_counted(frame: FrameType) -> bool:
    """Whether all ranks make this call: not to generators, which Python closes where it collects them, and ignores the
    error; nor what a wait calls only if it takes long."""
    code, caller = frame.f_code, frame.f_back
    if not code.co_filename.startswith(PACKAGE) or code.co_flags & inspect.CO_GENERATOR:
        return False
    return not any(each.co_filename.endswith(_WAITS) for each in (code, caller.f_code if caller else code))


def interrupted(function: Callable[[], Any], at: int) -> int:
    """Call `function`, whose call number `at` of a function of the package raises Interruption, which autograd and
    Dynamo may turn into a RuntimeError; how many such calls there were."""
    calls = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event == "call" and _is_counted(frame):
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
