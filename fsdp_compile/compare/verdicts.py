"""What a check has found, as text and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_compile.compare.values import Difference

FORMAT = 1
EQUAL, ROUNDING, DIFFERS, FAILED, LEFT_OUT = "equal", "rounding", "differs", "failed", "left out"
WORDS = {
    EQUAL: "equal bit for bit",
    ROUNDING: "within rounding (the unsharded model differs by as much)",
    DIFFERS: "DIFFERS",
    FAILED: "FAILED",
    LEFT_OUT: "left out",
}
COMPILED = "within rounding of the compiler (the unsharded model differs by as much)"


@dataclass(frozen=True)
class Fault:
    """The first difference that rounding does not explain.

    Attributes:
        step: in which, from 1 on; 0: before the first.
        rank: which rank sees it.
        difference: what differs, such as the output of a module, and both values.
        note: how it was found, if not by the modules' values.
    """

    step: int
    rank: int
    difference: Difference
    note: str = ""

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "as it was loaded"
        note = f" ({self.note})" if self.note else ""
        return f"{when}, rank {self.rank}: {self.difference.key}: {self.difference}{note}"


@dataclass(frozen=True)
class Row:
    """A way.

    Attributes:
        way: its name.
        ranks: how many ran it.
        verdict: "equal", "rounding", "differs", "failed" or "left out".
        resumed: whether it is the part behind a load.
        fault: where it differs.
        why: it failed or was left out.
        largest: of the differences within rounding, that which is closest to what rounding explains.
        seconds: it took.
        compiled: whether a compiler had part in it.
    """

    way: str
    ranks: int
    verdict: str
    resumed: bool = False
    fault: Fault | None = None
    why: str = ""
    largest: str = ""
    seconds: float = 0.0
    compiled: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether the sharded model is wrong, or cannot do what the unsharded one can."""
        return self.verdict in (DIFFERS, FAILED)

    def __str__(self) -> str:
        name = f"{self.way}, loaded on {self.ranks}" if self.resumed else self.way
        words = COMPILED if self.verdict == ROUNDING and self.compiled else WORDS[self.verdict]
        lines = [f"{name:26} {self.seconds:6.1f} s  {words}"]
        details = [str(self.fault) if self.fault else "", self.why, self.largest]
        return "\n".join([*lines, *(f"{'':4}{line}" for each in details if each for line in each.splitlines())])


@dataclass(frozen=True)
class Report:
    """Whether a model trains sharded as it does unsharded, by each way.

    Attributes:
        where: the model, the ranks, the steps, and what ran them.
        rows: the ways.
    """

    where: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Whether no way is wrong or fails."""
        return not any(row.is_fault for row in self.rows)

    @property
    def faults(self) -> Sequence[Row]:
        """The ways that are wrong or fail."""
        return [row for row in self.rows if row.is_fault]

    def __str__(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.where.items())
        wrong = ", ".join(f"{row.way}{', loaded' * row.resumed}" for row in self.faults)
        said = f"wrong: {wrong}" if wrong else "all hold"
        return "\n".join([about, "", *map(str, self.rows), "", said]) + "\n"

    def to_json(self) -> str:
        """All of it."""
        found = _for_json({"format": FORMAT, "holds": self.holds, **asdict(self)})
        return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _for_json(value: Any) -> Any:
    """With "inf" and "nan" as texts, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: _for_json(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_for_json(each) for each in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
