"""Let systems take turns, each in processes of its own, and gather what they say.

A process for each rank of each system keeps compile caches, memory and settings apart. On the CPU processes wait while
others have their turns. On GPUs they end with their turn, because the memory is for one system: there each turn begins
with fresh weights, and finds what it compiles in its system's cache.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import fsdp_compile
from fsdp_compile.compare.case import Load
from fsdp_compile.compare.comparison_report import Comparison, Row
from fsdp_compile.compare.pool import Launch, Pool
from fsdp_compile.compare.systems import OURS, SYSTEMS, Task, Turn, begin, train
from fsdp_compile.explain.batch import Inputs
from fsdp_compile.explain.predict import predict_step
from fsdp_compile.explain.prediction import Prediction, Setting
from fsdp_compile.passes.cost.hardware import Hardware, reported_device


class Failed(Exception):
    """A system that cannot run; why."""


class Running:
    """The ranks of one system that this process has started.

    Raises:
        Failed: a rank has failed, here or elsewhere; also from `turn`.
    """

    def __init__(self, system: str, turn: int, load: Load, task: Task, launched: Launch, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._samples = task.batch
        self.pool = Pool(launched, task.device, f"{system}/{turn}", folder)
        try:
            self.about: dict[str, Any] = self._answer(begin, load, task, system)
        except BaseException:
            self.pool.stop(kills=True)
            raise

    def turn(self, steps: int, looks: bool) -> Turn:
        """Let all ranks train; what the first of them says."""
        answer: Turn = self._answer(train, self._samples, steps, looks)
        return answer

    def _answer(self, function: Callable[..., Any], *args: Any) -> Any:
        answers = self.pool.ask(function, *args)
        if failure := self.pool.failure:
            raise Failed(failure)
        return answers[0].value


def rotated(names: Sequence[str], index: int) -> list[str]:
    """`names` begun at another one each time; after each whole turn the other way round: neighbours change places."""
    turns, at = divmod(index, len(names) or 1)
    turned = [*names[at:], *names[:at]]
    return turned[::-1] if turns % 2 else turned


class Side:
    """Systems side by side; those that fail are left out from then on, with the reason.

    Args:
        systems: their names.
        name: of what they train, for an error.
        load: gives it.
        task: what all do; its device is "cpu" or "cuda".
        launched: which ranks this process starts.
    """

    def __init__(self, systems: Sequence[str], name: str, load: Load, task: Task, launched: Launch) -> None:
        self.turns: dict[str, list[Turn]] = {name: [] for name in systems}
        self.failed: dict[str, str] = {}
        self.about: dict[str, Any] = {}
        self._name, self._running = name, dict[str, Running]()
        self._given = load, task, launched
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp_compile_compare_")
        self._begin = time.monotonic()

    def run(self, steps: int, rounds: int) -> None:
        """Let each system train for `steps` steps that count, in `rounds` turns, in changing order.

        Raises:
            ValueError: the first systems all failed, and in the same way.
        """
        rounds = min(rounds, steps)
        names = list(self.turns)
        for index in range(rounds):
            for tried, name in enumerate(rotated(names, index), 1):
                if name not in self.failed:
                    self._say(f"{name}, round {index + 1} of {rounds}")
                    self._turn(name, index, steps // rounds + (index < steps % rounds), index == rounds - 1)
                reasons = set(self.failed.values())
                if index == 0 and len(self.failed) == tried >= min(2, len(names)) and len(reasons) == 1:
                    raise ValueError(f"{self._name}: no system can train it: {reasons.pop()}")
            if index == 0 and rounds > 1:
                medians = [statistics.median(turns[0].seconds) for turns in self.turns.values() if turns]
                more = sum(medians) * (steps - steps // rounds + rounds)
                took = time.monotonic() - self._begin
                self._show(f"round 1 of {rounds} took {took:.0f} s; the others will take about {more:.0f} s\n")

    def _turn(self, name: str, index: int, steps: int, is_last: bool) -> None:
        ends = is_last or self._given[1].device == "cuda"
        try:
            if name not in self._running:
                self._running[name] = Running(name, index, *self._given, Path(self._folder.name) / name)
                self.about = self._running[name].about
            turn = self._running[name].turn(steps, looks=ends)
        except Failed as error:
            self.failed[name], ends = str(error), True
            self._show(f"{name}: {error}\n")
        else:
            self.turns[name].append(turn)
            first = f", first step {turn.first:,.1f} s" if turn.first is not None else ""
            self._show(f"{name}: {turn.number / statistics.median(turn.seconds):,.0f} {turn.unit}/s{first}\n")
        if ends and name in self._running:
            self._running.pop(name).pool.stop()

    def _say(self, text: str) -> None:
        if sys.stderr.isatty():
            self._show(f"{time.monotonic() - self._begin:4.0f} s  {text} ...")

    def _show(self, text: str) -> None:
        """Write over what stands in the last line."""
        if self._given[2].speaks:
            start = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(f"{start}{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.pool.stop(kills=True)
        self._folder.cleanup()


def compare(
    name: str,
    load: Load,
    predicted: tuple[Callable[[], Any], Inputs | None],
    task: Task,
    ranks: int,
    *,
    systems: Sequence[str],
    steps: int,
    rounds: int,
    hardware: Hardware | None,
) -> Comparison:
    """Train a model by each of `systems`, and say what came out beside what is predicted.

    Args:
        name: of what is trained, for errors.
        load: gives it.
        predicted: what makes the model, and `example_inputs`, as in `explain`.
        task: what all do; its device is "cpu" or "cuda".
        ranks: how many to start here; those of `torchrun` count where it has started this process.
        systems: names in `SYSTEMS`.
        steps: that count, of each system.
        rounds: turns of each system.
        hardware: what predictions are made for; None: what the device says that it is.

    Who stops it with Ctrl-C gets what it has.

    Raises:
        ValueError: no system can train the model.
    """
    launched = Launch.of_torchrun() if "RANK" in os.environ else Launch.here(ranks)
    found, note = dict[str, Prediction](), ""
    with Side(systems, name, load, task, launched) as side:
        try:
            side.run(steps, rounds)
        except KeyboardInterrupt:
            note = "it was stopped before all turns were done"
    if launched.speaks and not note:
        reported = side.about.get("device", ""), side.about.get("memory", 0)
        found, note = predict(*predicted, task, launched.world, systems,
                              lambda: hardware or reported_device(*reported))  # fmt: skip
    predictions = {name: each.step for name, each in found.items()}
    rows = tuple(
        Row.of(name, side.turns[name], side.failed.get(name), predictions.get(name), again=task.device == "cuda")
        for name in systems
    )
    wires = {"parameters in": task.wire_gather, "gradients in": task.wire_reduce}
    where = {
        "model": side.about.get("model", ""), "ranks": launched.world, "device": side.about.get("device", task.device),
        "backend": "nccl" if task.device == "cuda" else "gloo", "precision": "bf16" if task.bf16 else "fp32",
        "batch": task.batch, "sequence": task.sequence, "steps": steps, "rounds": min(rounds, steps),
        **{name: format for name, format in wires.items() if format is not None},
        "torch": torch.__version__, "fsdp_compile": fsdp_compile.__version__, "date": f"{date.today()}",
    }  # fmt: skip
    return Comparison(where, rows, note)


def predict(
    make: Callable[[], Any], example_inputs: Inputs | None, task: Task, world: int, systems: Sequence[str],
    hardware: Callable[[], Hardware],
) -> tuple[dict[str, Prediction], str]:  # fmt: skip
    """What `explain` says of the same step by each system, and for which hardware; nothing, and why, if it cannot."""
    try:
        here = hardware()
        alike = {"world_size": world, "batch": task.batch, "sequence": task.sequence, "clip": False,
                 "precision": "bf16" if task.bf16 else "fp32", "hardware": here.name}  # fmt: skip
        wires = {"wire_gather": task.wire_gather, "wire_reduce": task.wire_reduce}
        settings = [
            Setting(**{**alike, **(wires if name in OURS else {}), **SYSTEMS[name].setting}) for name in systems
        ]
        found = predict_step(make, settings, example_inputs, hardware=here, alternatives=False)
    except ValueError as error:
        return {}, f"nothing is predicted: {error}"
    return dict(zip(systems, found, strict=True)), f"predicted for {here.name}"
