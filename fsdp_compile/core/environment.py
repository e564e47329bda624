"""What the package has to do with the program around it: switches in the environment, and warnings.

Each switch is read when a unit is made, and on if its variable, or that of torch's wrapper, is exactly "1" (E-ENV-6).
"""

import os
import sys
import warnings
from dataclasses import dataclass

_PACKAGE = __name__.partition(".")[0]
_PREFIXES = ("FSDP_COMPILE_", "FSDP_USE_")  # the latter: of torch's wrapper


@dataclass(frozen=True)
class Switches:
    """What the environment asked for when a unit was made.

    Attributes:
        full_precision_in_eval: modules in eval mode compute without mixed precision.
    """

    full_precision_in_eval: bool = False

    @classmethod
    def from_environment(cls) -> "Switches":
        """Read all variables."""
        return cls(full_precision_in_eval=any(os.environ.get(f"{each}FULL_PREC_IN_EVAL") == "1" for each in _PREFIXES))


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


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message`, attributed to the innermost calling line outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
