"""What one rank does for a check: it trains the unsharded model, or the sharded one by a way beside it.

The values of the unsharded model are kept in files, a folder for each rank: not all steps are in memory at once.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile import checkpoint
from fsdp_compile.compare.case import Case, Load
from fsdp_compile.compare.modules import RECORDER, Step, first, watch
from fsdp_compile.compare.pool import device_here, one_line
from fsdp_compile.compare.training import Absent, Hook, Training, Way
from fsdp_compile.compare.values import Allowed, Difference, Key, Values, deviation, differences, kept, largest
from fsdp_compile.compare.verdicts import DIFFERS, EQUAL, LEFT_OUT, ROUNDING, Fault, Row

NOT_SHOWN = ("output", "gradient")  # by compile_step
NOT_SEEN = "with hooks that look at the outputs of modules the difference is gone"
REFERENCE, MOVED = Way("unsharded", "unsharded"), Way("moved", "unsharded")
"""The unsharded model; and with each parameter moved by one unit in the last place before the first step."""


@dataclass(frozen=True)
class Task:
    """What a rank does, beside by which way.

    Attributes:
        device: "cpu" or "cuda".
        counts: the micro-batches of each step.
        start: the number of this rank's first micro-batch.
        folder: for values and checkpoints.
        resumes: whether training begins with what an earlier task has saved.
        saves: whether it saves at its end.
    """

    device: str
    counts: tuple[int, ...]
    start: int
    folder: str
    resumes: bool
    saves: bool

    def of_rank(self, name: object) -> Path:
        """A file of this rank."""
        made = Path(self.folder) / ("resumed" if self.resumes else "begun") / str(dist.get_rank())
        made.mkdir(parents=True, exist_ok=True)
        return made / str(name)

    def saved(self, kind: str, way: Way) -> Path:
        """The "checkpoint" of a way, its "values" beside that, or the "state" of an unsharded model."""
        return Path(self.folder) / f"{kind} {way.name.replace(':', '_')}"


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def reference(load: Load, task: Task) -> dict[str, Any]:
    """Train unsharded and keep all values. Returns the "model"'s type and its number of "parameters"."""
    training = _start(load(), task, REFERENCE)
    for number, values in enumerate(_steps(training, task), 1):
        torch.save(values, task.of_rank(number))
    _save(training, task)
    return {"model": training.name, "parameters": sum(each.numel() for each in training.model.parameters())}


def _start(case: Case, task: Task, way: Way, hook: Hook = lambda model: None) -> Training:
    """The model at the task's start; an unsharded one goes on with what it has gathered of differences."""
    torch.compiler.reset()
    device = device_here(task.device)
    own = replace(case, shard=lambda model: case.shard(model.to(device)))
    unsharded = way.how == "unsharded"
    options = {"fallback_random": True} if way.backend == "inductor" else None  # draws the numbers of eager mode
    training = Training(own, way, device, options=options, averages=unsharded, turned=way != REFERENCE, hook=hook)
    training.forwards = task.start
    goes_on = task.resumes and task.saved("state", way).exists()
    if way == MOVED and not goes_on:
        training.move()
    if task.resumes and unsharded:
        state = _read(task.saved("state", way if goes_on else REFERENCE))
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
    elif task.resumes:
        checkpoint.load({"model": training.model, "optimizer": training.optimizer}, task.saved("checkpoint", way))
    return training


def _steps(training: Training, task: Task, last: Callable[[], None] = lambda: None) -> Iterator[Values]:
    """All values of each step; `last` is called before the last one."""
    for number, count in enumerate(task.counts, 1):
        if number == len(task.counts):
            last()
        batches, values = training.next_batches(count), Values()
        torch.manual_seed(training.forwards)
        values[Key("loss", "")] = kept(training.step(batches, values))
        yield values | training.state()


def _save(training: Training, task: Task) -> None:
    """What the way goes on with: of an unsharded model a file, of a sharded one a checkpoint and its values."""
    if not task.saves:
        return
    way, model, optimizer = training.way, training.model, training.optimizer
    if way.how == "unsharded":
        kind = "state"
        state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    else:
        checkpoint.save({"model": model, "optimizer": optimizer}, task.saved("checkpoint", way), len(task.counts))
        kind, state = "values", training.state()
    if dist.get_rank() == 0:
        torch.save(state, task.saved(kind, way))


def deviations(load: Load, task: Task, way: Way) -> list[dict[Key, float]]:
    """By how much the values of each step differ from those that were kept, if the model is compiled or moved.

    The first way that asks for them works them out. Absent if the backend cannot compile the model.
    """
    kept = task.of_rank(way.name)
    if kept.exists():
        known: list[dict[Key, float]] = _read(kept)
        return known
    try:
        training = _start(load(), task, way)
        steps = enumerate(_steps(training, task), 1)
        found = [deviation(values, _read(task.of_rank(number))) for number, values in steps]
    except Exception as error:  # whatever the compiler or the model raises
        raise Absent(f"{way.name} cannot compile the unsharded model: {one_line(error)}") from error
    torch.save(found, kept)
    _save(training, task)
    return found


# --- a way ------------------------------------------------------------------------------------------------------------


def alone(way: Way) -> list[Way]:
    """The unsharded model, moved and compiled as by `way`: by how much it differs is rounding."""
    return [MOVED, *([] if way.backend is None else [Way(way.backend, "unsharded", way.backend)])]


def compare_way(load: Load, task: Task, way: Way) -> Row:
    """Train by a way, and compare all values with those of the unsharded model; the same row on all ranks."""
    begun = time.monotonic()
    row = Row(way.name, dist.get_world_size(), EQUAL, task.resumes, compiled=way.how != "eager")
    try:
        row = _compare_way(load, task, way, row)
    except Absent as error:
        row = replace(row, verdict=LEFT_OUT, why=str(error))
    return replace(row, seconds=round(time.monotonic() - begun, 1))


def _compare_way(load: Load, task: Task, way: Way, row: Row) -> Row:
    training = _start(load(), task, way)
    if task.resumes:
        loaded, saved = Step({}, training.state()), Step({}, _read(task.saved("values", way)))
        fault = _first_fault(0, loaded, saved, {})
        if fault is not None:
            return replace(row, verdict=DIFFERS, fault=fault)
    unequal: list[int] = []
    for number, values in enumerate(_steps(training, task), 1):
        expected = _shown_values(_read(task.of_rank(number)), way)
        if any(_of_ranks(bool(differences(values, expected, {})))):
            torch.save(values, task.of_rank(f"{number} of {way.how}"))
            unequal.append(number)
    rounding: list[list[dict[Key, float]]] = []

    def apart(number: int) -> tuple[list[Difference], Values, Values, Allowed]:
        """How a step differs, what it was, what it should be, and by how much it may differ."""
        values, allowed = _read(task.of_rank(f"{number} of {way.how}")), largest(each[number - 1] for each in rounding)
        expected = _shown_values(_read(task.of_rank(number)), way)
        return differences(values, expected, allowed), values, expected, allowed

    faults: list[int] = []
    for other in alone(way) if unequal else ():
        rounding.append(deviations(load, task, other))
        faults = [at for at in unequal if any(_of_ranks(any(each.is_fault for each in apart(at)[0])))]
        if not faults and not task.saves and not task.resumes:  # what goes on needs the rounding of all steps
            break
    if faults:
        _, values, expected, allowed = apart(faults[0])
        fault = _locate_fault(load, task, way, faults[0])
        if fault is None:
            fault = _first_fault(faults[0], Step({}, values), Step({}, expected), allowed)
            fault = fault and replace(fault, note=NOT_SEEN)
        return replace(row, verdict=DIFFERS, fault=fault)
    small = [(each.error / each.allowed, f"{each.key}, step {number}: {each.error:.1e}, rounding explains "
              f"{each.allowed:.1e}") for number in unequal for each in apart(number)[0]]  # fmt: skip
    _save(training, task)
    most = max((each for of_rank in _of_ranks(max(small, default=None)) if (each := of_rank)), default=None)
    return row if most is None else replace(row, verdict=ROUNDING, largest=f"most: {most[1]}")


def _shown_values(values: Values, way: Way) -> Values:
    """Those that the way shows."""
    return {key: value for key, value in values.items() if way.how != "step" or key.kind not in NOT_SHOWN}


def _of_ranks(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# --- where it differs -------------------------------------------------------------------------------------------------


def _locate_fault(load: Load, task: Task, way: Way, number: int) -> Fault | None:
    """Train again up to a step, and look at all modules in it; None if the hooks make the fault go away."""
    steps = replace(task, counts=task.counts[:number], saves=False)

    def watched(each: Way) -> Step:
        """The last step, with what its modules have seen."""
        training = _start(load(), steps, each, watch)
        *_, values = _steps(training, steps, RECORDER.begin)
        RECORDER.is_on = False
        return Step(RECORDER.events, _shown_values(values, way))

    expected = watched(REFERENCE)
    rounding = []
    for each in alone(way):
        with suppress(Exception):  # it is not needed where the compiler does not take the hooks
            rounding.append(deviation(watched(each).all, expected.all))
    return _first_fault(number, watched(way), expected, largest(rounding))


def _first_fault(number: int, found: Step, expected: Step, allowed: Allowed) -> Fault | None:
    """The first fault of any rank."""
    firsts = [(each, rank) for rank, each in enumerate(_of_ranks(first(found, expected, allowed))) if each]
    (_, difference), rank = min(firsts, key=lambda each: each[0][0], default=((0, None), 0))
    return None if difference is None else Fault(number, rank, difference)
