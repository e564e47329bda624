"""A plan is data: which unit is gathered, waited for, freed and reduced before which task of a step.

As text, one line for each step, to read, edit and load again:

    at   0  gather       blocks.0 blocks.1      # one launch for both
    at   1  wait         blocks.0 blocks.1
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["gather", "wait", "free", "reduce", "wait_reduce"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: gather (start an all-gather), wait (for it), free (the gathered buffer), reduce (start a reduce-scatter),
            wait_reduce (wait for it, which frees its input; hybrid sharding: and start the all-reduce over replicas).
        units: names; several of a gather or reduce are launched together.
        at: the task that follows; the number of tasks for what comes after the last one.
    """

    kind: Kind
    units: tuple[str, ...]
    at: int

    def __str__(self) -> str:
        return f"at {self.at:3}  {self.kind:<11}  {' '.join(self.units)}"


class PlanError(ValueError):
    """A plan that cannot be read, or that breaks a rule (verify.py)."""


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they are issued; equal on all ranks."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) + "\n"

    def of(self, *kinds: Kind) -> list[Step]:
        """The steps of some kinds, in order."""
        return [step for step in self.steps if step.kind in kinds]

    @property
    def order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The collectives in the order of their launches: what has to be equal on all ranks."""
        return tuple((step.kind, step.units) for step in self.of("gather", "reduce"))

    def to_json(self) -> str:
        """A JSON list of `[at, kind, [unit, ...]]`, one step a line."""
        lines = (json.dumps([step.at, step.kind, list(step.units)]) for step in self.steps)
        return "[\n" + ",\n".join(lines) + "\n]\n"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read the text form or the JSON form. PlanError, with the number of the line, if it is neither."""
        return cls(tuple(_from_json(text) if text.lstrip().startswith("[") else _from_text(text)))


def _from_text(text: str) -> Iterable[Step]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if words:
            if len(words) < 4 or words[0] != "at":
                raise PlanError(f"line {number}: expected 'at TASK KIND UNIT...', found {line.strip()!r}")
            yield _step(f"line {number}", words[1], words[2], words[3:])


def _from_json(text: str) -> Iterable[Step]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}: expected JSON, found {error.msg}") from None
    for number, entry in enumerate(found, 1):
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], list)):
            raise PlanError(f"step {number}: expected [TASK, KIND, [UNIT, ...]], found {json.dumps(entry)}")
        yield _step(f"step {number}", entry[0], entry[1], entry[2])


def _step(where: str, at: object, kind: object, units: Iterable[object]) -> Step:
    if not str(at).isdecimal():
        raise PlanError(f"{where}: expected the number of a task, found {at}")
    if kind not in KINDS:
        raise PlanError(f"{where}: expected one of {', '.join(KINDS)}, found {kind}")
    return Step(kind, tuple(map(str, units)), int(str(at)))  # type: ignore[arg-type]  # checked in the line above
