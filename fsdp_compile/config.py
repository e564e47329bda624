"""What users may choose about compilation."""

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompileConfig:
    """Choices for the graph passes; every field decides generated code and is part of the compile caches' key.

    `torch.compile(model, backend="fsdp_compile", options={...})` takes the fields as options; plain
    `torch.compile(model)` takes them from the environment (`FSDP_COMPILE_DISABLE=pin,reorder`) when
    the first model is sharded.

    Attributes:
        disable: names of passes to leave out (`fsdp_compile.passes.PASSES` lists them).
        reduces_in_flight: how many reduce-scatters may run before the oldest is waited for. Each keeps its unit's full
            gradients alive until its wait. 1: they take turns with gathers, so that either the last unit's gradients
            or the next one's parameters are alive beside a unit that computes. None: wait for all at the end.
        check_ranks_timeout: seconds that a rank waits, before it runs a compiled graph for the first time, for the others
            to come to the same point; compilation may take longer on some of them.
        link: what connects the ranks, a name in `fsdp_compile.passes.cost.hardware.LINKS` or
            `custom:<latency in s>,<bandwidth in bytes/s>`: graphs are then planned by time. Without it each unit is
            gathered one ahead and reduced at once, whatever that costs. Ranks must have batches of equal sizes then,
            or they plan differently and say so.
        device: what computes, a name in `DEVICES` there; None: found by the device's own name.
        budget: bytes that may live at once in a graph: shards, activations, gathered and packed buffers. Needs `link`.
        profile: path of a JSON file with measured seconds (`fsdp_compile.passes.post_grad.marks` writes it). Needs
            `link`, and the same file on all ranks.
        plan: path of a file with plans to follow, as `str(plan)` or JSON under the headings `forward:` and `backward:`.
        record_profile: measure the seconds of each task while the graph runs, for `profile`.
    """

    disable: tuple[str, ...] = ()
    reduces_in_flight: int | None = 1
    check_ranks_timeout: float = 600.0
    link: str | None = None
    device: str | None = None
    budget: int | None = None
    profile: str | None = None
    plan: str | None = None
    record_profile: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "disable", tuple(self.disable))
        if self.reduces_in_flight is not None and self.reduces_in_flight < 1:
            raise ValueError(
                f"reduces_in_flight: expected at least 1, or None for no limit, found {self.reduces_in_flight}"
            )
        if not self.check_ranks_timeout > 0:
            raise ValueError(f"check_ranks_timeout: expected seconds above 0, found {self.check_ranks_timeout}")
        for name in ("device", "budget", "profile"):
            if getattr(self, name) is not None and self.link is None:
                raise ValueError(f"{name}: expected a link beside it, for without one nothing is planned, found none")

    @property
    def files(self) -> tuple[str, ...]:
        """Contents of the files that are named: they decide generated code, so compile caches ask for them."""
        return tuple(pathlib.Path(path).read_text() for path in (self.profile, self.plan) if path is not None)

    @classmethod
    def from_environment(cls) -> "CompileConfig":
        """The configuration of plain `torch.compile`: field `name` from `FSDP_COMPILE_NAME`, where that is set.

        Raises:
            ValueError: a variable has a value of another type than its field, and is named.
        """
        return cls(**{name: _read(f"FSDP_COMPILE_{name.upper()}", read) for name, read in _READERS.items()
                      if os.environ.get(f"FSDP_COMPILE_{name.upper()}")})  # fmt: skip


_READERS: dict[str, Callable[[str], Any]] = {
    "disable": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    "check_ranks_timeout": float,
    "link": str,
    "device": str,
    "budget": int,
    "profile": str,
    "plan": str,
}


def _read(variable: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(os.environ[variable])
    except ValueError:
        raise ValueError(f"{variable}: expected a number, found {os.environ[variable]!r}") from None
