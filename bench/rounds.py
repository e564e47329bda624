"""Systems side by side: a process for each rank of each, which take turns."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.worker import Spec, do
from fsdp_compile.compare.pool import Launch, Pool
from fsdp_compile.compare.rounds import rotated


class Failed(Exception):
    """A system that cannot run; what it said."""


class Running:
    """All ranks of a system, a process each; on the emulated link one process."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.folder, are_real = spec, folder, spec.mode in ("gloo", "nccl")
        self.pool = Pool(Launch.here(spec.world if are_real else 1), spec.device, "bench", folder, joins=are_real)

    def ask(self, what: str, **arguments: Any) -> Any:
        """Let every rank do something; what rank 0 answers."""
        answers = self.pool.ask(do, self.spec, what, arguments)
        if self.pool.failure:
            said = "\n".join(each.read_text()[-3000:] for each in sorted(self.folder.glob("*.err")))
            raise Failed(f"{self.spec.system}: {self.pool.failure}\n{said}")
        return answers[0].value


class Side:
    """Systems that run side by side; those that fail are left out, with the reason."""

    def __init__(self, title: str, specs: Sequence[Spec], steps: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.running: dict[str, Running] = {}
        self.failed: dict[str, str] = {}
        self.first: dict[str, dict[str, float]] = {}
        self.title, self.total, self.done = title, len(specs) + steps, 0
        for spec in specs:
            self._start(spec)

    def say(self, text: str) -> None:
        """Print to standard error what begins now, and how far the part has come."""
        line = f"{self.title} [{self.done} of {self.total}] {text}"
        self.done += 1
        print(f"{line:80}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def _start(self, spec: Spec) -> None:
        self.say(f"{spec.system}: first step")
        folder = Path(self.folder.name) / spec.system.replace(":", "_")
        folder.mkdir()
        try:
            running = self.running[spec.system] = Running(spec, folder)
            self.first[spec.system] = running.ask("first")
        except Failed as error:
            self.running.pop(spec.system).pool.stop()
            self.failed[spec.system] = str(error)
            print(f"\n{error}", file=sys.stderr)
            if spec.system.startswith("ours"):
                raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One after the other; answers by system."""
        return {name: running.ask(do, **arguments) for name, running in self.running.items()}

    def rounds(self, number: int, steps: int) -> dict[str, list[list[dict[str, float]]]]:
        """Each system has a turn of `steps` steps in every round, in changing order; answers by system and round."""
        found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in self.running}
        names = list(self.running)
        for index in range(number):
            self.say(f"round {index + 1} of {number}")
            for name in rotated(names, index):
                found[name].append(self.running[name].ask("train", steps=steps))
        return found

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: Any) -> None:
        for running in self.running.values():
            running.pool.stop()
        self.folder.cleanup()
