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
from torch import nn

from fsdp_compile import FSDPModule, checkpoint
from fsdp_compile.tools.check_modules import RECORDER, Step, first, watch
from fsdp_compile.tools.check_ranks import one_line
from fsdp_compile.tools.check_report import DIFFERS, EQUAL, LEFT_OUT, ROUNDING, Fault, Row
from fsdp_compile.tools.check_training import Absent, Pickled, Sharded, Subject, Training, Unsharded, Way
from fsdp_compile.tools.check_values import Allowed, Key, Values, deviation, differences, largest

NOT_SHOWN = ("output", "gradient")  # by compile_step
NOT_SEEN = "by its gradient or value: with hooks that look at its modules' outputs the difference is gone"


@dataclass(frozen=True)
class Task:
    """What a rank does, beside whether it is the reference or a way.

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

    @property
    def values(self) -> Path:
        """The folder for values of this rank."""
        made = Path(self.folder) / ("resumed" if self.resumes else "begun") / str(dist.get_rank())
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def where(self) -> torch.device:
        """This rank's device."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


def _write_values(value: Any, path: Path) -> None:
    torch.save(value, path)


def _read_values(path: Path) -> Any:
    return torch.load(path, weights_only=False)


# --- the unsharded model ----------------------------------------------------------------------------------------------


def reference(source: Subject | Pickled | Any, task: Task) -> dict[str, Any]:
    """Train unsharded and keep all values. Returns the "model"'s type and its number of "parameters"."""
    subject = source if isinstance(source, Subject) else source.subject()
    training = _start_unsharded(subject, task)
    for number, values in enumerate(_run_steps(training, task), 1):
        _write_values(values, task.values / str(number))
    _save_state(training, task, _name_of_unsharded())
    parameters = sum(each.numel() for each in training.model.parameters())
    return {"model": type(training.model).__name__, "parameters": parameters}


def _start_unsharded(
    subject: Subject, task: Task, backend: str | None = None, moved: bool = False,
    hook: Callable[[nn.Module], None] | None = None,
) -> Unsharded:  # fmt: skip
    """The unsharded model at the task's start, where what it has gathered of differences goes on."""
    own = Path(task.folder) / _name_of_unsharded(backend, moved)
    goes_on = task.resumes and own.exists()
    training = Unsharded(subject, task.where, backend, moved and not goes_on, hook)
    training.micro_batches = task.start
    if task.resumes:
        state = _read_values(own if goes_on else Path(task.folder) / _name_of_unsharded())
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
    return training


def _name_of_unsharded(backend: str | None = None, moved: bool = False) -> str:
    """The file of the unsharded model that is compiled or moved."""
    return backend or ("moved" if moved else "unsharded")


def _save_state(training: Unsharded, task: Task, name: str) -> None:
    if task.saves and dist.get_rank() == 0:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        _write_values(state, Path(task.folder) / name)


def _run_steps(training: Training, task: Task) -> Iterator[Values]:
    for count in task.counts:
        yield training.step(count)


def deviations(
    source: Subject | Pickled | Any, task: Task, backend: str | None = None, moved: bool = False
) -> list[dict[Key, float]]:
    """By how much the values of each step differ from those that were kept, if the model is compiled or moved.

    The first way that asks for them works them out. Absent if the backend cannot compile the model.
    """
    subject = source if isinstance(source, Subject) else source.subject()
    name = _name_of_unsharded(backend, moved)
    if (task.values / name).exists():
        known: list[dict[Key, float]] = _read_values(task.values / name)
        return known
    torch.compiler.reset()
    try:
        training = _start_unsharded(subject, task, backend, moved)
        steps = enumerate(_run_steps(training, task), 1)
        found = [deviation(values, _read_values(task.values / str(number))) for number, values in steps]
    except Exception as error:  # whatever the compiler or the model raises
        raise Absent(f"{name} cannot compile the unsharded model: {one_line(error)}") from error
    _write_values(found, task.values / name)
    _save_state(training, task, name)
    return found


# --- a way ------------------------------------------------------------------------------------------------------------


def compare_way(source: Subject | Pickled | Any, task: Task, way: Way) -> Row:
    """Train by a way, and compare all values with those of the unsharded model; the same row on all ranks."""
    begun = time.monotonic()
    subject = source if isinstance(source, Subject) else source.subject()
    row = Row(way.name, dist.get_world_size(), EQUAL, task.resumes, compiled=way.how != "eager")
    torch.compiler.reset()
    try:
        row = _compare_way(subject, task, way, row)
    except Absent as error:
        row = replace(row, verdict=LEFT_OUT, why=str(error))
    return replace(row, seconds=round(time.monotonic() - begun, 1))


def _compare_way(subject: Subject, task: Task, way: Way, row: Row) -> Row:
    training = _start_sharded(subject, task, way)
    if task.resumes:
        fault = _first_fault(
            0, Step({}, training.state()), Step({}, _read_values(_path_of_saved(task, way))), {}, training.model
        )
        if fault is not None:
            return replace(row, verdict=DIFFERS, fault=fault)
    unequal: list[int] = []
    for number, values in enumerate(_run_steps(training, task), 1):
        expected = _shown_values(_read_values(task.values / str(number)), way)
        if _any_rank(bool(differences(values, expected, {}))):
            _write_values(values, task.values / f"{number} of {way.how}")
            unequal.append(number)
    small: list[tuple[float, str]] = []
    all_allowed: list[dict[Key, float]] = []
    if unequal:
        rounding = [deviations(subject, task, moved=True)]
        rounding += [deviations(subject, task, way.backend)] if way.backend is not None else []
        all_allowed = [largest(each) for each in zip(*rounding, strict=True)]
    for number in unequal:
        values, allowed = _read_values(task.values / f"{number} of {way.how}"), all_allowed[number - 1]
        expected = _shown_values(_read_values(task.values / str(number)), way)
        apart = differences(values, expected, allowed)
        if _any_rank(any(each.is_fault for each in apart)):
            fault = _locate_fault(subject, task, way, number, Step({}, values), expected, allowed)
            return replace(row, verdict=DIFFERS, fault=fault)
        small += [(each.error / each.allowed, f"{each.key}, step {number}: {each.error:.1e}, rounding explains "
                   f"{each.allowed:.1e}") for each in apart]  # fmt: skip
    if task.saves:
        state = {"model": training.model, "optimizer": training.optimizer}
        checkpoint.save(state, Path(task.folder) / "checkpoints" / way.name.replace(":", "_"), len(task.counts))
        values = training.state()
        if dist.get_rank() == 0:
            _write_values(values, _path_of_saved(task, way))
    most = max((each for of_rank in _of_ranks(max(small, default=None)) if (each := of_rank)), default=None)
    return row if most is None else replace(row, verdict=ROUNDING, largest=f"most: {most[1]}")


def _path_of_saved(task: Task, way: Way) -> Path:
    """The file of all values beside the checkpoint."""
    return Path(task.folder) / f"saved_{way.name.replace(':', '_')}"


def _start_sharded(subject: Subject, task: Task, way: Way, hook: Callable[[nn.Module], None] | None = None) -> Sharded:
    """The sharded model at the task's start."""
    training = Sharded(subject, task.where, way, hook)
    training.micro_batches = task.start
    if task.resumes:
        state = {"model": training.model, "optimizer": training.optimizer}
        checkpoint.load(state, Path(task.folder) / "checkpoints" / way.name.replace(":", "_"))
    return training


def _shown_values(values: Values, way: Way) -> Values:
    """Those that the way shows."""
    return {key: value for key, value in values.items() if way.how != "step" or key.kind not in NOT_SHOWN}


def _any_rank(here: bool) -> bool:
    """Whether it is so on any rank."""
    return any(_of_ranks(here))


def _of_ranks(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# --- where it differs -------------------------------------------------------------------------------------------------


def _locate_fault(
    subject: Subject, task: Task, way: Way, number: int, seen: Step, wanted: Values, allowed: Allowed
) -> Fault | None:
    """Train again up to a step, and look at all modules in it.

    The hooks may make a fault go away. Then what was `seen` without them, beside the values `wanted` of the unsharded
    model, tells where it is.
    """
    steps = replace(task, counts=task.counts[:number], saves=False)
    expected = _watch_last_step(_start_unsharded(subject, steps, hook=watch), steps)
    moved = _watch_last_step(_start_unsharded(subject, steps, moved=True, hook=watch), steps)
    rounding = [deviation(moved.all, expected.all)]
    if way.backend is not None:
        torch.compiler.reset()
        with suppress(Exception):  # it is not needed where the compiler does not take the hooks
            again = _watch_last_step(_start_unsharded(subject, steps, way.backend, hook=watch), steps)
            rounding.append(deviation(again.all, expected.all))
    torch.compiler.reset()
    training = _start_sharded(subject, steps, way, hook=watch)
    found = _watch_last_step(training, steps)
    values = _shown_values(expected.values, way)
    located = _first_fault(number, found, Step(expected.events, values), largest(rounding), training.model)
    return located or _first_fault(number, seen, Step(expected.events, wanted), allowed, training.model)


def _watch_last_step(training: Training, task: Task) -> Step:
    """The last of the task's steps, with what its modules have seen."""
    for number, count in enumerate(task.counts, 1):
        if number == len(task.counts):
            RECORDER.begin()
        values = training.step(count)
    RECORDER.is_on = False
    return Step(RECORDER.events, values)


def _first_fault(number: int, found: Step, expected: Step, allowed: Any, model: nn.Module) -> Fault | None:
    """The first fault of any rank."""
    types = {name: type(each).__mro__ for name, each in model.named_modules()}
    firsts = [(each, rank) for rank, each in enumerate(_of_ranks(first(found, expected, allowed, [*types]))) if each]
    if not firsts:
        return None
    earliest, rank = min(firsts, key=lambda each: each[0].position)
    own = next(
        each for each in types[earliest.module] if not issubclass(each, FSDPModule) and not issubclass(FSDPModule, each)
    )
    note = "" if found.events else NOT_SEEN if expected.events else ""
    return Fault(number, rank, earliest.module, own.__name__, str(earliest.difference.key), earliest.difference, note)
