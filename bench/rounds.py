"""Systems side by side: a process for each rank of each, which take turns."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.worker import Spec
from fsdp_compile.compare.rounds import rotated


class Failed(Exception):
    """A system that cannot run; what it said."""


class Running:
    """All ranks of a system, a process each."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        ranks = spec.world if spec.mode in ("gloo", "nccl") else 1
        meeting = str(folder / "meeting")
        self.ranks = [Rank(replace(spec, rank=rank, rendezvous=meeting), folder) for rank in range(ranks)]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Let every rank do something; what rank 0 answers."""
        for rank in self.ranks:
            rank.tell(do, **arguments)
        answers = [rank.answer() for rank in self.ranks]
        return answers[0]


class Rank:
    """One process."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.errors = spec, folder / f"{spec.rank}.err"
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "bench.worker", str(writing), json.dumps(asdict(spec))]
        environment = {  # one thread a rank, and compile caches of the system's own, empty at first
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
        }
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, pass_fds=[writing], env=environment
            )
        os.close(writing)
        self.answers = os.fdopen(reading)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise Failed(f"{self.spec.system}, rank {self.spec.rank}: {self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def stop(self) -> None:
        """Close its input, at which it ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


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
            running = Running(spec, folder)
            self.first[spec.system] = running.ask("first")
            self.running[spec.system] = running
        except (Failed, BrokenPipeError) as error:
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
            for rank in running.ranks:
                rank.stop()
        self.folder.cleanup()
