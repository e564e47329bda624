"""Predictions of one model, or the plan of a sharded one, and the forms in which they are read.

str(report)        a table of settings, and one of them in detail; of `explain_plan` each collective
report.to_json()   every field
report.to_trace()  for ui.perfetto.dev: what computes, links, memory in use
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from fsdp_compile.explain.prediction import FORMAT, CollectiveKind, Prediction, Setting
from fsdp_compile.explain.scheduled import Scheduled
from fsdp_compile.passes.plan.plan import Plan, simulate
from fsdp_compile.passes.plan.schedule import order_of_blocks

LANES = {"compute": "compute", "node": "links within nodes", "network": "links between nodes"}
LEVELS = {"node": "within nodes", "network": "between nodes"}
FITS = {True: "fits", False: "too much", None: "unknown"}
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "packed", "other")


@dataclass(frozen=True)
class Report:
    """What one step of a model takes in each of some settings, or of a sharded model by its plan.

    Attributes:
        predictions: one for each setting, in the order in which they were asked for; at least one.
        planned: `scheduled` of `explain_plan`, which JSON leaves out; None of `explain`.
    """

    predictions: tuple[Prediction, ...]
    planned: Scheduled | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.predictions:
            raise ValueError("predictions: expected at least one, found none")

    @property
    def best(self) -> Prediction | None:
        """The one with the most tokens per second and GPU of those that fit into memory, or None."""
        fitting = [each for each in self.predictions if each.fits is not False]
        return max(fitting, key=lambda each: each.tokens_per_second, default=None)

    @property
    def scheduled(self) -> Scheduled:
        """The step of `explain_plan` as the planner has it: workload, plan, timeline, bound, single collectives."""
        if self.planned is None:
            raise AttributeError("explain reports no plan; explain_plan does")
        return self.planned

    @property
    def plan(self) -> Plan:
        """When the step of `explain_plan` communicates."""
        return self.scheduled.plan

    def __str__(self) -> str:
        if self.planned is not None:
            return "\n".join(_plan(self.planned)) + "\n"
        return "\n".join(_predictions(self.predictions, self.best or self.predictions[0])) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """What the JSON holds: all fields by name, and whether each prediction fits."""
        return {"format": FORMAT, "predictions": [{"fits": each.fits, **asdict(each)} for each in self.predictions]}

    def to_json(self) -> str:
        """JSON of `to_dict`."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def to_trace(self) -> str:
        """JSON for Perfetto or chrome://tracing: a process for each setting, a track for each lane, memory below."""
        events = [event for at, each in enumerate(self.predictions) for event in _events(at + 1, each)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def _events(process: int, prediction: Prediction) -> Iterator[dict[str, Any]]:
    """Trace events, in microseconds."""
    yield _named(process, 0, "process_name", f"{prediction.model}: {_words(prediction.setting)}")
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


# --- text of predictions ----------------------------------------------------------------------------------------------


def _predictions(predictions: Sequence[Prediction], shown: Prediction) -> Iterator[str]:
    """All predictions in a table, if there are several, and `shown` in detail."""
    if len(predictions) > 1:
        best = "the most tokens/s per GPU that fits" if shown.fits is not False else "the first; none fits into memory"
        yield f"{shown.model}, {_count(shown.parameters)} parameters, in {len(predictions)} settings"
        yield from ("", *_settings(predictions), "", f"In detail, {best}:", "")
    yield from _detail(shown)


def _words(setting: Setting) -> str:
    """A setting in a line."""
    batch = f"batch {setting.batch} of {setting.sequence:,} tokens"
    accumulation = [f"{setting.accumulation} times accumulated"] if setting.accumulation > 1 else []
    checkpointing = f"checkpointing {setting.checkpointing}"
    update = setting.optimizer + (", clipped" if setting.clip and setting.optimizer != "none" else "")
    wires = {"gathers": setting.wire_gather, "reduces": setting.wire_reduce}
    sent = [f"{name} in {format}" for name, format in wires.items() if format]
    return ", ".join([f"{setting.world_size:,} x {setting.hardware}", setting.strategy, batch, *accumulation,
                      setting.precision, *sent, checkpointing, update])  # fmt: skip


def _detail(prediction: Prediction) -> Iterator[str]:
    p = prediction
    yield f"{p.model}, {_count(p.parameters)} parameters"
    yield _words(p.setting)
    yield ""
    sums = {"forward": p.forward, "backward": p.backward, "update": p.update, "exposed": p.exposed}
    yield f"step      {_ms(p.step)} ms = " + " + ".join(f"{name} {_ms(seconds)}" for name, seconds in sums.items())
    yield f"speed     {p.tokens_per_second:,.0f} tokens/s per GPU, MFU {p.mfu:.1%}, HFU {p.hfu:.1%}"
    fits = "the capacity is not known"
    if p.memory.capacity is not None:
        fits = f"{'fits' if p.fits else 'does not fit'} into {_gib(p.memory.capacity)}"
    yield f"memory    {_gib(p.memory.peak)} GiB at most: {fits}; the peak is at: {p.memory.peak_at}"
    sizes = [f"{part} {_gib(getattr(p.memory, part))}" for part in MEMORY if getattr(p.memory, part)]
    yield from ("          " + ", ".join(sizes[at : at + 4]) for at in range(0, len(sizes), 4))
    if p.collectives:
        rows = [(str(each.kind), LEVELS[each.level], f"{each.count:,}", _gib(each.bytes), _ms(each.seconds),
                 _ms(each.exposed)) for each in p.collectives]  # fmt: skip
        yield from ("", *table(("~collectives", "~links", "number", "GiB", "ms", "exposed ms"), rows))
    exposed = [each for each in p.top if each.exposed > 0]
    if exposed:
        rows = [(each.name, LEVELS[each.level], _gib(each.bytes), _ms(each.seconds), _ms(each.exposed), each.limit)
                for each in exposed]  # fmt: skip
        yield from ("", *table(("~largest", "~links", "GiB", "ms", "exposed ms", "~limited by"), rows))
    for matrices in p.matrices:
        yield from ("", "matrices of Muon, behind the step above:", *matrices.lines())
    if p.alternatives:
        yield from ("", *_alternatives(p))
    origins = Counter(each.origin for each in p.constants)
    if origins:
        counted = ", ".join(f"{times} {origin}" for origin, times in origins.items())
        yield from ("", f"constants {counted}; the JSON lists them with their sources")


def _settings(predictions: Sequence[Prediction]) -> Iterator[str]:
    varied = [name for name in ("sequence", "strategy", "checkpointing", "precision", "hardware")
              if len({getattr(each.setting, name) for each in predictions}) > 1]  # fmt: skip
    heads = ("GPUs", "batch", "step ms", "tokens/s/GPU", "MFU", "exposed ms", "peak GiB", "memory", "~")
    yield from table(heads, [
        (f"{p.setting.world_size:,}", str(p.setting.batch), _ms(p.step), f"{p.tokens_per_second:,.0f}",
         f"{p.mfu:.1%}", _ms(p.exposed), _gib(p.memory.peak), FITS[p.fits],
         ", ".join(str(getattr(p.setting, name)) for name in varied))
        for p in predictions
    ])  # fmt: skip


def _alternatives(prediction: Prediction) -> Iterator[str]:
    best = prediction.best
    listed = [*prediction.alternatives, *([best] if best is not None and best not in prediction.alternatives else [])]
    yield from table(("~alternatives", "step ms", "difference", "tokens/s/GPU", "peak GiB", "memory"), [
        ("best: " * (each == best) + each.change, _ms(each.step), f"{1e3 * (each.step - prediction.step):+,.1f}",
         f"{each.tokens_per_second:,.0f}", _gib(each.peak), FITS[each.fits])
        for each in listed
    ])  # fmt: skip


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table. A column is text if its head begins with "~", otherwise numbers."""
    shown = [head.removeprefix("~") for head in heads]
    widths = [max(map(len, column)) for column in zip(shown, *rows, strict=True)]
    for row in (shown, *rows):
        cells = [f"{cell:<{width}}" if head.startswith("~") else f"{cell:>{width}}"
                 for head, cell, width in zip(heads, row, widths, strict=True)]  # fmt: skip
        yield "  ".join(cells).rstrip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.01 or seconds == 0 else f"{1e3 * seconds:,.3f}"


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f}" if gib >= 1 or size == 0 else f"{gib:.3f}"


def _count(value: int) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,}"


# --- text of a plan ---------------------------------------------------------------------------------------------------


def _plan(step: Scheduled) -> Iterator[str]:
    """Each collective, what hides it and what limits the rest; updates, blocks, totals."""
    workload = step.workload
    has_formats = any(each.format for each in step.collectives)
    heads = ("~collective", "bytes", *(("~format", "sent") if has_formats else ()), "ms", "hidden", "exposed",
             "~limited by")  # fmt: skip
    yield from table(heads, [
        (each.name, f"{each.bytes:,}", *((each.format or "full", f"{each.sent:,}") if has_formats else ()),
         *(f"{1e3 * seconds:.3f}" for seconds in (each.seconds, each.seconds - each.exposed, each.exposed)), each.limit)
        for each in step.collectives
    ])  # fmt: skip
    if has_formats:
        kinds = {kind: [each for each in step.collectives if each.kind == kind] for kind in get_args(CollectiveKind)}
        totals = {kind: [sum(getattr(each, name) for each in those) for name in ("bytes", "sent")]
                  for kind, those in kinds.items() if those}  # fmt: skip
        sums = [(kind, str(len(kinds[kind])), *(f"{size:,}" for size in sizes)) for kind, sizes in totals.items()]
        yield from ("", *table(("~collectives", "number", "bytes", "sent"), sums))
    seconds, computing = step.timeline.makespan, sum(task.seconds for task in workload.tasks)
    gap = max(0.0, seconds / step.bound - 1) if step.bound else 0.0
    rest = f"computing {1e3 * computing:.3f}, the rest {1e3 * (seconds - computing):.3f}"
    limit = "no limit" if step.budget is None else f"{step.budget:,} bytes"
    yield from ("", f"step      {1e3 * seconds:.3f} ms: {rest}")
    yield f"bound     {1e3 * step.bound:.3f} ms, a lower bound for all plans; this one takes {gap:.2%} more"
    yield f"memory    {step.timeline.peak:,} bytes at most, budget: {limit}"
    if step.update:
        yield f"update    {1e3 * step.update:.3f} ms behind these"
    rule = simulate(workload, order_of_blocks(workload))
    yield f"rule      {1e3 * rule.makespan:.3f} ms, {rule.peak:,} bytes: the order of blocks, without a search"
    yield from step.sources
    for costs in step.matrices:
        yield from ("", "matrices of Muon, behind the step above:", *costs.lines())
