"""What the package has to do with the program around it: switches in the environment, and warnings.

Each switch is read when a unit is made, and on if its variable, or that of torch's wrapper, is exactly "1" (E-ENV-6).
"""

import logging
import os
import sys
import warnings
from dataclasses import dataclass

_PACKAGE = __name__.partition(".")[0]
_PREFIXES = ("FSDP_COMPILE_", "FSDP_USE_")  # the latter: of torch's wrapper

_log = logging.getLogger("fsdp_compile")
_warned: set[str] = set()


@dataclass(frozen=True)
class Switches:
    """What the environment asked for when a unit was made.

    Attributes:
        full_precision_in_eval: modules in eval mode compute without mixed precision.
        fake_all_gather: eager gathers are left out. Full parameters hold whatever was in memory: for timing only.
        fake_reduce: eager reduce-scatters are left out. Each rank keeps its own gradients: for timing only.
    """

    full_precision_in_eval: bool = False
    fake_all_gather: bool = False
    fake_reduce: bool = False

    @classmethod
    def from_environment(cls) -> "Switches":
        """Read all variables; those that make results wrong are logged as warnings, once per process."""
        return cls(
            full_precision_in_eval=_is_on("FULL_PREC_IN_EVAL"),
            fake_all_gather=_is_on("FAKE_ALL_GATHER", "parameters are not gathered"),
            fake_reduce=_is_on("FAKE_REDUCE", "gradients are not reduced"),
        )


def check_ranks_timeout() -> float | None:
    """Seconds that a rank waits for others to compare with; None: `FSDP_COMPILE_DISABLE` names `check_ranks`.

    Raises:
        ValueError: `FSDP_COMPILE_CHECK_RANKS_TIMEOUT` is no number.
    """
    if "check_ranks" in map(str.strip, os.environ.get("FSDP_COMPILE_DISABLE", "").split(",")):
        return None
    given = os.environ.get("FSDP_COMPILE_CHECK_RANKS_TIMEOUT") or "600"
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"FSDP_COMPILE_CHECK_RANKS_TIMEOUT: expected a number, found {given!r}") from None


def _is_on(name: str, harm: str | None = None) -> bool:
    variable = next((prefix + name for prefix in _PREFIXES if os.environ.get(prefix + name) == "1"), None)
    if variable and harm and variable not in _warned:
        _warned.add(variable)
        _log.warning("%s=1: %s, all results are wrong; unset it for anything but timing", variable, harm)
    return variable is not None


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message`, attributed to the innermost calling line outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
