"""Let systems take turns, each in processes of its own, and gather what they say.

A process for each rank of each system keeps compile caches, memory and settings apart. Under `torchrun` each of its
processes starts one rank of each system, in the same order; otherwise one process starts all ranks. On the CPU
processes wait while others have their turns. On GPUs they end with their turn, because the memory is for one system:
there each turn begins with fresh weights, and finds what it compiles in its system's cache.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_compile
from fsdp_compile.compare.report import Comparison, Row
from fsdp_compile.compare.systems import LOOKS, OURS, SYSTEMS, Spec, Task, Turn
from fsdp_compile.compare.worker import Failed, serve
from fsdp_compile.explain.batch import Inputs
from fsdp_compile.explain.predict import predict_step
from fsdp_compile.explain.prediction import Prediction, Setting
from fsdp_compile.passes.cost.hardware import Hardware, reported_device
from fsdp_compile.tools.server import start_server

POLL = 0.5  # seconds between two looks for a failure elsewhere


@dataclass(frozen=True)
class Launch:
    """The ranks that this process starts, of how many, and the store where they meet."""

    ranks: tuple[int, ...]
    world: int
    host: str
    store: dist.Store
    port: int

    @property
    def speaks(self) -> bool:
        """Whether this process has rank 0, which says what comes out."""
        return 0 in self.ranks


def launch(ranks: int | None) -> Launch:
    """Those of `torchrun`, or `ranks` of this machine."""
    if "RANK" not in os.environ:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = ranks or 1
        return Launch(tuple(range(world)), world, "127.0.0.1", store, store.port)
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=serves, wait_for_workers=False)
    return Launch((rank,), world, os.environ["MASTER_ADDR"], store, port)


class Running:
    """The ranks of one system that this process has started, a process each."""

    def __init__(self, system: str, turn: int, factory: str, task: Task, launched: Launch, folder: Path) -> None:
        self.launched, self._folder = launched, folder
        self._key = f"fsdp_compile/compare/{system}/failed"  # what a rank says that fails, for the other launchers
        folder.mkdir(exist_ok=True)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context = start_server(factory)
        for rank in launched.ranks:
            local = int(os.environ.get("LOCAL_RANK", rank)) if "RANK" in os.environ else rank
            own = replace(task, device=f"cuda:{local}") if task.device == "cuda" else task
            meeting = f"fsdp_compile/compare/{system}/{turn}"
            spec = Spec(system, factory, own, rank, launched.world, launched.host, launched.port, meeting)
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(spec, there, str(folder)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        try:
            self.about = self._answers()
        except BaseException:
            self.stop(kills=True)
            raise

    def turn(self, steps: int, looks: bool) -> Turn:
        """Let all ranks train; what the first of them says."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, which its answer says
                pipe.send({"steps": steps, "looks": looks})
        answer: Turn = self._answers()
        return answer

    def _answers(self) -> Any:
        """What each rank says; the answer of the first. Failed, as soon as any rank of any launcher has failed."""
        waiting = dict(zip(self._pipes, self.launched.ranks, strict=True))
        answers: dict[int, Any] = {}
        while waiting:
            for pipe in wait(list(waiting), POLL):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = Failed(self._last_words(rank))
                if isinstance(answers[rank], Failed):
                    self.launched.store.compare_set(self._key, "", str(answers[rank]))
            if self.launched.store.check([self._key]):
                raise Failed(self.launched.store.get(self._key).decode())
        return answers[self.launched.ranks[0]]

    def _last_words(self, rank: int) -> str:
        process = self._processes[self.launched.ranks.index(rank)]
        process.join()
        lines = (self._folder / f"{rank}.err").read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"rank {rank} ended with exit status {process.exitcode}: {last[:300]}"

    def stop(self, kills: bool = False) -> None:
        """End the processes: by the end of their input, or at once."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0 if kills else 20)
            process.kill()
            process.join()


def rotated(names: Sequence[str], index: int) -> list[str]:
    """`names` begun at another one each time; after each whole turn the other way round: neighbours change places."""
    turns, at = divmod(index, len(names) or 1)
    turned = [*names[at:], *names[:at]]
    return turned[::-1] if turns % 2 else turned


class Side:
    """Systems side by side; those that fail are left out from then on, with the reason.

    Args:
        systems: their names.
        factory: `FILE.py:FUNCTION`.
        task: what all do; its device is "cpu" or "cuda".
        launched: which ranks this process starts.
    """

    def __init__(self, systems: Sequence[str], factory: str, task: Task, launched: Launch) -> None:
        self.turns: dict[str, list[Turn]] = {name: [] for name in systems}
        self.failed: dict[str, str] = {}
        self.about: dict[str, Any] = {}
        self._running: dict[str, Running] = {}
        self._given = factory, task, launched
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
                    raise ValueError(f"{self._given[0]}: no system can train it: {reasons.pop()}")
            if index == 0 and rounds > 1:
                medians = [statistics.median(turns[0].seconds) for turns in self.turns.values() if turns]
                more = sum(medians) * (steps - steps // rounds + rounds + 2 * LOOKS)
                took = time.monotonic() - self._begin
                self._show(f"round 1 of {rounds} took {took:.0f} s; the others will take about {more:.0f} s\n")

    def _turn(self, name: str, index: int, steps: int, is_last: bool) -> None:
        factory, task, launched = self._given
        on_gpus = task.device == "cuda"
        try:
            if name not in self._running:
                folder = Path(self._folder.name) / name
                self._running[name] = Running(name, index, factory, task, launched, folder)
                self.about = self._running[name].about
            self.turns[name].append(self._running[name].turn(steps, looks=on_gpus or is_last))
        except Failed as error:
            self.failed[name] = str(error)
            self._show(f"{name}: {error}\n")
            self._stop(name, kills=True)
        else:
            turn = self.turns[name][-1]
            first = f", first step {turn.first:,.1f} s" if turn.first is not None else ""
            self._show(f"{name}: {turn.number / statistics.median(turn.seconds):,.0f} {turn.unit}/s{first}\n")
            if on_gpus or is_last:
                self._stop(name)

    def _stop(self, name: str, kills: bool = False) -> None:
        if name in self._running:
            self._running.pop(name).stop(kills)

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
        for name in list(self._running):
            self._stop(name, kills=True)
        self._folder.cleanup()


def compare(
    factory: str,
    make: Callable[[], Any],
    example_inputs: Inputs | None,
    task: Task,
    launched: Launch,
    *,
    systems: Sequence[str],
    steps: int,
    rounds: int,
    hardware: Hardware | None,
) -> Comparison:
    """Train a model by each of `systems`, and say what came out beside what is predicted.

    Args:
        factory: `FILE.py:FUNCTION`, which gives `make` and `example_inputs`.
        make: makes the model.
        example_inputs: as in `explain`.
        task: what all do; its device is "cpu" or "cuda".
        launched: which ranks this process starts.
        systems: names in `SYSTEMS`.
        steps: that count, of each system.
        rounds: turns of each system.
        hardware: what predictions are made for; None: what the device says that it is.

    Who stops it with Ctrl-C gets what it has.

    Raises:
        ValueError: no system can train the model.
    """
    found, note = dict[str, Prediction](), ""
    with Side(systems, factory, task, launched) as side:
        try:
            side.run(steps, rounds)
        except KeyboardInterrupt:
            note = "it was stopped before all turns were done"
    if launched.speaks and not note:
        reported = side.about.get("device", ""), side.about.get("memory", 0)
        found, note = predict(make, example_inputs, task, launched.world, systems,
                              lambda: hardware or reported_device(*reported))  # fmt: skip
    predicted = {name: each.step for name, each in found.items()}
    rows = tuple(
        Row.of(name, side.turns[name], side.failed.get(name), predicted.get(name), again=task.device == "cuda")
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
