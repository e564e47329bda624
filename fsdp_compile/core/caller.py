"""Warnings that point at the line of the user's program, however deep in the package their reason is found."""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message`, attributed to the innermost calling line outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
