"""The calls of compiled graphs, counted: which is recorded, which plan each follows, what is tried, kept, taken back.

Note [How ranks change plans together]
Ranks that follow different plans communicate different things. So everything that changes a plan happens at a call of
a number that all ranks know: the n-th call of any graph of one structure (`Learning.calls`). Graphs that differ only in
the sizes of their batches have one structure and follow one plan.

    calls 5 to 7       are recorded
    call 10            ranks meet: each leaves medians of what it recorded, and a copy of the first one plans again
    every 4 calls      ranks meet, until the first one has planned; if that is worth it, a copy of each rank compiles
                       the graphs with the new plan, and ranks meet until all have, or one cannot: then nothing changes
    16 calls or more   from the call after that meeting on: four with the new plan, four with the old one, and so on,
                       for some seconds; then ranks meet, and all of them keep the faster plan, or go on for as long
    30 calls later     the next three are recorded; 5 later where a plan has changed

A rank that calls a graph for which it lacks the plan of that call compiles it there and then. Values do not change:
order moves no sum.
"""

import contextvars
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from fsdp_compile.comm.collectives import is_first
from fsdp_compile.config import CompileConfig
from fsdp_compile.learning._torch import Surroundings, caches_graphs, copied
from fsdp_compile.learning.child import Child
from fsdp_compile.learning.meeting import PATIENCE, Meeting
from fsdp_compile.learning.prices import Called, Record, Unlike, median_of, of_all_ranks, records_of
from fsdp_compile.learning.recorder import DIRECTIONS, StepClock
from fsdp_compile.learning.replan import Graph, replanned
from fsdp_compile.learning.trial import Comparison, Trial, of_ranks
from fsdp_compile.passes import agreement
from fsdp_compile.passes._torch import cache_folder, compiling_backward_at_once
from fsdp_compile.passes.graph.nodes import is_product
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

log = logging.getLogger("fsdp_compile")

Compile = Callable[[fx.GraphModule, Sequence[Any], CompileConfig, Callable[[GraphContext], None]], Callable[..., Any]]
Run = Callable[..., Any]
_Act = Callable[["LearnedGraph"], StepClock | None]


@dataclass
class Schedule:
    """At which calls what happens (Note [How ranks change plans together]).

    Attributes:
        first: the first call that is recorded.
        records: how many calls are recorded, one after the other.
        meet: how many calls after the last recorded one ranks meet.
        poll: calls between meetings while ranks compile.
        block: calls of one plan in a row while two are compared; the first of them does not count.
        trial: seconds after which they are compared.
        every: calls after which a settled plan is looked at again.
        alone: whether there are no other ranks, though the process group has some: on an emulated link.
    """

    first: int = 5
    records: int = 3
    meet: int = 3
    poll: int = 4
    block: int = 4
    trial: float = 10.0
    every: int = 30
    alone: bool = False


schedule = Schedule()
_BLOCKS = 4, 24  # new, old, new, old, ...: at least, and at most
_CHANGED = 1.2  # times as long as before a step or a link has to take for a plan to be looked for
_LINES = 100  # of a history
_AS_BEFORE = "as before: the plan stays"
_WHY = "why not"  # in a rank's message, instead of a record
_SOON = 3  # changes of plan after which the next record is not hurried


# --- what graphs are --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noted:
    """What passes knew of a graph in one direction: what it computes, its plan, which tasks begin with a product."""

    workload: Workload
    plan: Plan
    products: tuple[bool, ...]

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({"workload": asdict(self.workload), "plan": str(self.plan), "products": self.products})

    @classmethod
    def from_text(cls, text: str) -> "Noted":
        """Read what `to_text` gave. ValueError, TypeError or KeyError if it is something else."""
        table = json.loads(text)
        step = table["workload"]
        tasks = tuple(Task(**{name: _as_tuple(each) for name, each in task.items()}) for task in step.pop("tasks"))
        units = tuple(UnitCost(**unit) for unit in step.pop("units"))
        products = tuple(map(bool, table["products"]))
        if len(products) != len(tasks):
            raise ValueError(f"products: expected {len(tasks)}, found {len(products)}")
        return cls(Workload(tasks=tasks, units=units, **step), Plan.parse(table["plan"]), products)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def note_of(context: GraphContext) -> Noted:
    """What the passes know of a graph, once its plan is chosen."""
    return Noted(context.workload, context.plan, tuple(is_product(nodes[0]) for nodes in context.info.tasks))


class LearnedGraph:
    """A compiled graph whose plan may change between two calls; it is called as what Inductor has compiled.

    Args:
        learning: what graphs of its structure share.
        key: equal for graphs that compute the same on tensors of the same sizes.
        traced: the graph, of which nothing else keeps a reference.
        inputs: fake tensors like its inputs.
        compile: makes it run with a configuration, and calls what it is given with what the passes know.
    """

    def __init__(
        self, learning: "Learning", key: str, traced: fx.GraphModule, inputs: Sequence[Any], compile: Compile
    ) -> None:
        self.learning, self._key, self._traced, self._inputs, self._compile = learning, key, traced, inputs, compile
        self._around = Surroundings()
        self._context = contextvars.copy_context()  # torch's configuration, from 2.12 on
        self._notes: dict[tuple[str, str], Noted] = {}  # by plan and direction
        self._runs: dict[str, Run] = {}  # by plan

    def start(self, traced: fx.GraphModule, inputs: Sequence[Any]) -> "LearnedGraph":
        """Compile it with the plan in force where it is traced."""
        plan = self.learning.in_force
        if plan:  # as it was compiled when it was learned, so that the caches have it
            self.compile(plan)
        else:
            self._runs[plan] = self._compile(traced, inputs, self.learning.config, self._note_pass(plan))
        self.learning.graphs.add(self)
        return self

    def __call__(self, *args: Any) -> Any:
        """Run it, by the plan of this call."""
        plan, clock = self.learning.begin_call(self)
        run = self._runs.get(plan)
        if run is None:
            run = self.compile(plan)
        return run(*args) if clock is None else clock.run(run, args)

    def compile(self, plan: str) -> Run:
        """Compile it with a plan, unless it was."""
        if plan not in self._runs:
            self._runs[plan] = self._context.copy().run(self._compile_again, plan)
        return self._runs[plan]

    def _compile_again(self, plan: str) -> Run:
        with self._around.restored(), compiling_backward_at_once():
            return self._compile(
                copied(self._traced), self._inputs, self.learning.config_with(plan), self._note_pass(plan)
            )

    def _note_pass(self, plan: str) -> Callable[[GraphContext], None]:
        def note(context: GraphContext) -> None:
            noted = self._notes[plan, context.direction] = note_of(context)
            agreement.keep(self._key_of_note(plan, context.direction), noted.to_text())

        return note

    def noted(self, plan: str) -> dict[str, Noted] | None:
        """What the passes knew of its forward and backward, now or when they ran last; None if that is not known."""
        for direction in DIRECTIONS:
            if (plan, direction) not in self._notes:  # the graph was found in the compiler's caches
                try:
                    text = agreement.kept(self._key_of_note(plan, direction)) or ""
                    self._notes[plan, direction] = Noted.from_text(text)
                except (ValueError, TypeError, KeyError, AttributeError):
                    return None
        return {direction: self._notes[plan, direction] for direction in DIRECTIONS}

    def _key_of_note(self, plan: str, direction: str) -> str:
        return f"learning/noted/{self._key}/{direction}/{hashlib.sha256(plan.encode()).hexdigest()}"


# --- what is learned --------------------------------------------------------------------------------------------------


class Learning:
    """What graphs of one structure share: their plan, their calls, and what was learned.

    Plans are texts, forward and backward, as files of plans have them; the empty one stands for what the passes choose.

    Args:
        key: names the structure, equal on all ranks.
        config: of the graphs, without a plan.
        device: that computes.
        number: how often this process has begun to learn with that key: what ranks said before does not count.

    Attributes:
        in_force: the plan that graphs follow.
        calls: how many calls have begun.
        graphs: those of this structure that were compiled.
        history: what was done and why, a line each.
        under_way: what is being done, or what comes next.
    """

    def __init__(self, key: str, config: CompileConfig, device: torch.device, number: int) -> None:
        self.key, self.config, self.device, self._number = key, config, device, number
        self.in_force, self.calls = "", 0
        self.graphs: WeakSet[LearnedGraph] = WeakSet()
        self.history: list[str] = []
        self.under_way = _calls_to_record(schedule.first)
        self.rejected: list[str] = []
        self._meeting: Meeting | None = None
        self._next: tuple[int, _Act] = schedule.first, self._record_call  # what is done at which call
        self._round, self._changes = 0, 0
        self._recorded: list[tuple[LearnedGraph, StepClock]] = []
        self._priced: dict[str, Any] = {}  # by which the plan was looked at last
        self._new, self._words, self._saves, self._step = "", "", False, 0.0
        self._child: Child | None = None
        self._trial: Trial | None = None

    def config_with(self, plan: str) -> CompileConfig:
        """The configuration that graphs are compiled with to follow `plan`."""
        return replace(self.config, plan=_file_of(plan)) if plan else self.config

    def begin_call(self, graph: LearnedGraph) -> tuple[str, StepClock | None]:
        """The plan that this call follows on all ranks, and what times it, if anything does."""
        self.calls += 1
        at, do = self._next
        clock = None
        if self.calls >= at:
            clock = do(graph)
        if self._trial is not None:
            return self._trial.begin_call(self.calls, self.device)
        return self.in_force, clock

    def _record_call(self, graph: LearnedGraph) -> StepClock:
        clock = StepClock(self.device)
        self._recorded.append((graph, clock))
        if len(self._recorded) < schedule.records:
            self._next = self.calls + 1, self._record_call
        else:
            self._go_on(schedule.meet, self._compare_records, "recorded, ranks compare what it took")
        return clock

    def _compare_records(self, _graph: LearnedGraph) -> None:
        records, (graph, _) = self._median_records(), self._recorded[-1]
        self._recorded.clear()
        merged = self._meet_ranks("records", json.dumps(records), _merged_records)
        if merged is None:
            return self._end_learning()
        prices = json.loads(merged)
        if _WHY in prices:
            return self._end_round(f"nothing is learned, as a rank has not recorded a step: {prices[_WHY]}")
        noted = graph.noted(self.in_force)
        assert noted is not None  # else this rank has left no record
        self._step = sum(each["step"] for each in prices.values())
        if _are_alike(prices, self._priced):
            return self._end_round(f"recorded {self._step * 1e3:.1f} ms, {_AS_BEFORE}")
        self._priced = prices
        if is_first(None):
            self._child = _start_child(lambda: json.dumps(self._plan_by_records(noted, prices)))
        self._go_on(schedule.poll, self._take_plan, f"recorded {self._step * 1e3:.1f} ms, another plan is searched")
        return None

    def _median_records(self) -> dict[str, Any]:
        """Medians of what this rank has recorded, by direction; or, under `_WHY`, why nothing was."""
        latest, _ = self._recorded[-1]
        noted = latest.noted(self.in_force)
        clocks = [clock for graph, clock in self._recorded if graph is latest]
        if noted is None or any(clock.spans.keys() != set(DIRECTIONS) for clock in clocks):
            return {_WHY: "its forward or backward was not compiled here, or has not ended"}
        try:
            steps = [
                records_of({name: Called(each.workload, each.plan, each.products, clock.marks(name))
                            for name, each in noted.items()})
                for clock in clocks
            ]  # fmt: skip
            return {name: median_of([records[name] for records in steps]).to_json() for name in noted}
        except Unlike as reason:
            return {_WHY: str(reason)}

    def _plan_by_records(self, noted: Mapping[str, Noted], prices: Mapping[str, Any]) -> dict[str, Any]:
        """The plan by recorded prices, empty if none is worth it, what to say about it, and if it saves memory."""
        records = {name: Record.from_json(prices[name], len(each.products)) for name, each in noted.items()}
        graphs = {name: Graph(each.workload, each.plan) for name, each in noted.items()}
        found = replanned(graphs, records, self.config.budget, agreement.is_lean(self.config))
        (before, after), (most, least) = found.seconds, found.peaks
        links = ", ".join(f"{record.link:.2f}" for record in records.values())
        exposed = sum(record.exposed for record in records.values())
        words = (
            f"recorded {sum(record.step for record in records.values()) * 1e3:.1f} ms, {exposed * 1e3:.1f} of them "
            f"exposed, link {links} times as long as priced; {before * 1e3:.1f} ms predicted and {most / 1e6:.1f} MB; "
            f"with {' and '.join(found.names.values())} {after * 1e3:.1f} ms and {least / 1e6:.1f} MB"
        )
        text = plan_text(found.plans)
        if text in self.rejected:
            return {"plan": "", "words": f"{words}; that was tried before", "saves": False}
        if not found.pays or text == self.in_force:
            return {"plan": "", "words": f"{words}: nothing to gain, the plan stays", "saves": False}
        return {"plan": text, "words": words, "saves": least < most}

    def _take_plan(self, _graph: LearnedGraph) -> None:
        child, mine = self._child, "null"
        if child is None or child.status != "compiling":
            failed = {"plan": "", "words": "not planned: the first rank's process could not be copied", "saves": False}
            mine = (child.result if child is not None else "") or json.dumps(failed)
        answer = self._meet_ranks("planned", mine, lambda messages: messages[0])
        if answer is None:
            return self._end_learning()
        outcome = json.loads(answer)
        if outcome is None:
            self._next = self.calls + schedule.poll, self._take_plan
            return None
        self._new, self._words, self._saves = outcome["plan"], outcome["words"], outcome["saves"]
        if not self._new:
            return self._end_round(self._words)
        if self.device.type == "cpu" and caches_graphs():  # what it compiles is found here, in the caches
            self._child = _start_child(self._compile_all)
        self._go_on(schedule.poll, self._wait_for_children, f"{self._words}: compiled beside the training")
        return None

    def _compile_all(self) -> str:
        for graph in self.graphs:
            graph.compile(self._new)
        return "compiled"

    def _wait_for_children(self, _graph: LearnedGraph) -> None:
        status = "ready" if self._child is None else self._child.status
        outcome = self._meet_ranks("ready", status, _least_ready)
        if outcome == "compiling":
            self._next = self.calls + schedule.poll, self._wait_for_children
            return None
        if outcome == "ready":
            outcome = self._meet_ranks("compiled", self._compile_here(), _least_ready, self.config.check_ranks_timeout)
        if outcome is None:
            return self._end_learning()
        if outcome != "ready":
            self.rejected.append(self._new)
            return self._end_round(f"{self._words}; a rank could not compile it")
        begin = self.calls + 1  # this call has loaded the code, and is slow
        self._trial = Trial(begin, self._new, self.in_force, schedule.block)
        self._go_on(1 + self._calls_of_trial(), self._judge_trial, f"{self._words}; takes turns with the old plan")
        return None

    def _calls_of_trial(self) -> int:
        """For how many calls plans take turns before they are compared, or are compared again."""
        pairs = ceil(schedule.trial / (2 * schedule.block * self._step or 1.0))
        least, most = _BLOCKS
        return min(max(least, 2 * pairs), most) * schedule.block

    def _compile_here(self) -> str:
        begin = time.monotonic()
        try:
            self._compile_all()
        except Exception as error:
            log.warning("learn: the plan stays as it is, as this rank could not compile another one: %s", error)
            return "failed"
        self._words += f"; compiled in {time.monotonic() - begin:.2g} s"
        return "ready"

    def _judge_trial(self, _graph: LearnedGraph) -> None:
        trial = self._trial
        assert trial is not None
        answer = self._meet_ranks("tried", json.dumps(trial.compared()), _comparison_of_ranks)
        figures = json.loads(answer) if answer is not None else None
        turns = self.calls - trial.begin
        if figures is not None:
            found = Comparison(*figures)
            if not found.is_sure(self._saves) and turns < _BLOCKS[1] * schedule.block:
                said = f"{self._words}; {found}, which may be chance"
                return self._go_on(self._calls_of_trial(), self._judge_trial, said)
        self._trial = None
        if answer is None:
            return self._end_learning()
        if figures is None:
            return self._end_round(f"{self._words}; not compared, as nothing was timed")
        is_kept = found.pays(self._saves)
        if is_kept:
            self.in_force, self._changes, self._priced = trial.new, self._changes + 1, {}
        else:
            self.rejected.append(trial.new)
        came = f"{found} came in {turns} calls, {'kept' if is_kept else 'taken back'}"
        self._end_round(f"{self._words}; {came}", soon=is_kept and self._changes < _SOON)
        return self._keep_result()

    def _go_on(self, calls: int, do: _Act, what: str) -> None:
        """Say what is under way, and `do` the next thing so many calls later."""
        self.under_way = f"since call {self.calls}: {what}"
        log.info("learn: call %d of a graph of %d units: %s", self.calls, self.key.count("\n"), what)
        self._next = self.calls + calls, do

    def _end_round(self, what: str, soon: bool = False) -> None:
        """Note what has come of a record, and look again later."""
        if self.history and what.endswith(_AS_BEFORE) and self.history[-1].endswith(_AS_BEFORE):
            self.history.pop()
        self.history = [*self.history[1 - _LINES :], f"call {self.calls}: {what}"]
        log.info("learn: call %d of a graph of %d units: %s", self.calls, self.key.count("\n"), what)
        if self._child is not None:
            self._child.stop()
        self._child = None
        self._recorded.clear()
        self._round += 1
        self._next = self.calls + (schedule.first if soon else schedule.every), self._record_call
        self.under_way = _calls_to_record(self._next[0])

    def _end_learning(self) -> None:
        """Learn nothing any more: ranks do not call graphs alike, or one has ended or takes its time. All give up."""
        self._end_round(f"ends, as a rank has not come within {PATIENCE:g} s")
        self._next, self.under_way = (sys.maxsize, self._record_call), "nothing more is learned"

    def _meet_ranks(
        self, what: str, message: str, answer: Callable[[Sequence[str]], str], patience: float | None = None
    ) -> str | None:
        if self._meeting is None:
            self._meeting = Meeting(f"{self._number}/{hashlib.sha256(self.key.encode()).hexdigest()}", schedule.alone)
        limit = PATIENCE if patience is None else patience
        return self._meeting.meet(f"{self._round}/{self.calls}/{what}", message, answer, limit)

    # --- kept for later runs ---

    def _keep_result(self) -> None:
        table = {"plan": self.in_force, "link": self.config.link, "device": self.config.device,
                 "rejected": self.rejected, "history": self.history}  # fmt: skip
        agreement.keep(f"learning/{self.key}", json.dumps(table))

    def begin_with(self, table: Mapping[str, Any]) -> None:
        """Go on from what an earlier run has learned. TypeError or KeyError if that is something else."""
        texts = [table["plan"], *table["rejected"], *table["history"]]
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("expected texts of plans")
        self.in_force, self.rejected = table["plan"], list(table["rejected"])
        self.history = [*table["history"], "kept for this run"]
        self._next, self.under_way = (schedule.every, self._record_call), _calls_to_record(schedule.every)


def _calls_to_record(call: int) -> str:
    return f"calls {call} to {call + schedule.records - 1} will be recorded"


def _start_child(work: Callable[[], str]) -> Child | None:
    """A copy of this process that does `work`; None where there can be none."""
    try:
        return Child(work)
    except (OSError, AttributeError):  # no memory, or a system without copies
        return None


def plan_text(plans: Mapping[str, Plan]) -> str:
    """Plans by direction as one text, as `CompileConfig.plan` reads it from a file."""
    return "".join(f"{direction}:\n{plans[direction]}" for direction in sorted(plans, reverse=True))


def _file_of(plan: str) -> str:
    """A file with the text of a plan, in the folder of the compiler's caches, or where temporary files are."""
    name = f"{hashlib.sha256(plan.encode()).hexdigest()[:32]}.plan"
    path = cache_folder() / "fsdp_compile" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        agreement.replace_text(path, plan)
    except OSError:
        agreement.replace_text(path := Path(tempfile.gettempdir()) / name, plan)
    return str(path)


def _merged_records(messages: Sequence[str]) -> str:
    tables = [json.loads(each) for each in messages]
    for table in tables:
        if _WHY in table:
            return json.dumps({_WHY: str(table[_WHY])})
    counts = {name: len(each["seconds"]) for name, each in tables[0].items()}
    if any(len(table[name]["seconds"]) != count for table in tables for name, count in counts.items()):
        return json.dumps({_WHY: "graphs of ranks have other numbers of tasks"})
    records = {name: [Record.from_json(table[name], count) for table in tables] for name, count in counts.items()}
    return json.dumps({name: of_all_ranks(each).to_json() for name, each in records.items()})


def _are_alike(prices: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether what steps take has hardly changed since a plan was looked for."""
    pairs = [(prices[name], before[name]) for name in prices if name in before]
    figures = [(one[name], other[name]) for one, other in pairs for name in ("step", "link")]
    return bool(pairs) and all(max(pair) <= _CHANGED * min(pair) for pair in figures)


def _least_ready(messages: Sequence[str]) -> str:
    return next((each for each in ("failed", "compiling") if each in messages), "ready")


def _comparison_of_ranks(messages: Sequence[str]) -> str:
    timed = [Comparison(*figures) for each in messages if (figures := json.loads(each)) is not None]
    return json.dumps(of_ranks(timed) if timed else None)
