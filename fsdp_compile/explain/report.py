"""Predictions of one model, or the plan of a sharded one, and the forms in which they are read.

str(report)        a table, and one setting in detail; of `explain_plan` each collective: text.py
report.to_json()   every field; `read_report` gives back an equal report
report.to_trace()  for ui.perfetto.dev: what computes, links, memory in use
report.to_html()   one page that fetches nothing, drawn by page/page.js from that JSON
"""

import html
import json
import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_compile.config import read_json
from fsdp_compile.explain.prediction import FORMAT, BlockChoice, Collective, Prediction, Scheduled
from fsdp_compile.explain.text import as_text, plan_as_text, words_of
from fsdp_compile.passes.plan.plan import Plan, Timeline
from fsdp_compile.passes.plan.workload import Workload

DERIVED = {"format", "fits"}  # what `to_dict` adds to the fields
LANES = {"compute": "compute", "node": "links within nodes", "network": "links between nodes"}


@dataclass(frozen=True)
class Report:
    """What one step of a model takes in each of some settings, or of a sharded model by its plan.

    Attributes:
        predictions: one for each setting, in the order in which they were asked for; at least one.
        scheduled: of `explain_plan`: the step as the planner has it, which JSON leaves out. None of `explain`, in whose
            report the attributes from `workload` to `collectives` are an AttributeError.
    """

    predictions: tuple[Prediction, ...]
    scheduled: Scheduled | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.predictions:
            raise ValueError("predictions: expected at least one, found none")

    @property
    def best(self) -> Prediction | None:
        """The one with the most tokens per second and GPU of those that fit into memory, or None."""
        fitting = [each for each in self.predictions if each.fits is not False]
        return max(fitting, key=lambda each: each.tokens_per_second, default=None)

    @property
    def workload(self) -> Workload:
        """What the step of `explain_plan` computes and communicates."""
        return self._planned.workload

    @property
    def plan(self) -> Plan:
        """When it communicates."""
        return self._planned.plan

    @property
    def timeline(self) -> Timeline:
        """The seconds and bytes that this takes."""
        return self._planned.timeline

    @property
    def budget(self) -> int | None:
        """The number of bytes that may live at once, or None for no limit."""
        return self._planned.budget

    @property
    def blocks(self) -> tuple[BlockChoice, ...]:
        """What becomes of each block between forward and backward, where that was chosen."""
        return self._planned.blocks

    @property
    def bound(self) -> float:
        """A lower bound: no plan takes fewer seconds."""
        return self._planned.bound

    @property
    def collectives(self) -> list[Collective]:
        """All launches."""
        return self._planned.collectives

    @property
    def _planned(self) -> Scheduled:
        if self.scheduled is None:
            raise AttributeError("explain reports no plan; explain_plan does")
        return self.scheduled

    def __str__(self) -> str:
        if self.scheduled is not None:
            return plan_as_text(self.scheduled)
        return as_text(self.predictions, self.best or self.predictions[0])

    def to_dict(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {"format": FORMAT, "predictions": [each.to_dict() for each in self.predictions]}

    def to_json(self) -> str:
        """JSON with every field of every prediction."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def to_trace(self) -> str:
        """JSON for Perfetto or chrome://tracing: a process for each setting, a track for each lane, memory below."""
        events = [event for at, each in enumerate(self.predictions) for event in _events(at + 1, each)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """A page of HTML that refers to nothing outside of itself."""
        data = json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)
        return Template(_resource("page.html")).substitute(
            title=html.escape(f"{self.predictions[0].model}: predicted step"),
            style=_resource("page.css"),
            script=_resource("page.js"),
            text=html.escape(str(self)),
            data=re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", data),  # nothing may end the element
        )


@cache
def _resource(name: str) -> str:
    return (files("fsdp_compile.explain") / "page" / name).read_text(encoding="utf-8")


def _events(process: int, prediction: Prediction) -> Iterator[dict[str, Any]]:
    """Trace events, in microseconds."""
    yield _named(process, 0, "process_name", f"{prediction.model}: {words_of(prediction.setting)}")
    yield from (_named(process, at, "thread_name", name) for at, name in enumerate(LANES.values()))
    for span in prediction.timeline:
        where = {"pid": process, "tid": list(LANES).index(span.lane)}
        about = {} if span.lane == "compute" else {"args": {"exposed ms": 1e3 * span.exposed}}
        seconds = span.end - span.start
        yield {"ph": "X", "name": span.name, **where, "ts": 1e6 * span.start, "dur": 1e6 * seconds, **about}
    for seconds, size in prediction.memory_over_time:
        yield {"ph": "C", "name": "memory", "pid": process, "ts": 1e6 * seconds, "args": {"bytes": size}}


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_report(path: Path) -> Report:
    """The report that `to_json` wrote to a file, which may have been changed by anybody.

    Raises:
        ValueError: the file is no such JSON; the field that is wrong is named.
    """
    table = read_json(path)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        given = table.get("format") if isinstance(table, dict) else table
        raise ValueError(f"format: expected {FORMAT}, found {reprlib.repr(given)}")
    return Report(_decode(tuple[Prediction, ...], table.get("predictions"), "predictions"))


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value`, from JSON, as the type `kind` of a field called `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if origin in (Union, UnionType):
        rest = next(each for each in arguments if each is not NoneType)
        return None if value is None else _decode(rest, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            return tuple(_decode(each, item, f"{where}[{at}]")
                         for at, (each, item) in enumerate(zip(kinds, value, strict=True)))  # fmt: skip
    if origin is Literal and value in arguments and isinstance(value, str):
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    expected = " or ".join(map(repr, arguments)) if origin is Literal else getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where}: expected {expected}, found {reprlib.repr(value)}")


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {reprlib.repr(value)}")
    inside, types = f"{where}." if where else "", get_type_hints(kind)
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(value) - known - DERIVED):
        raise ValueError(f"{inside}{reprlib.repr(unknown[0])}: expected no such field, found one")
    for each in fields(kind):
        if each.name not in value and each.default is MISSING:
            raise ValueError(f"{inside}{each.name}: expected a value, found none")
    return kind(**{name: _decode(types[name], value[name], inside + name) for name in known & set(value)})
