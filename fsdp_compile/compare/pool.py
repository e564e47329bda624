"""Processes that are ranks of one process group, and do what they are asked to.

They fork from a server (tools/server.py) in which nothing ran. Compile caches, settings, and the harm that a failure
leaves end with them. Under `torchrun` each of its processes starts one rank, in the same order; otherwise one process
starts all ranks of this machine. A rank that fails answers with the reason, and stays until it is stopped, so that
others do not fail for its being gone.
"""

import io
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compile.tools.server import start_server

GRACE = 10.0  # seconds that the other ranks get when one has failed: they may wait for it in a collective
TIMEOUT = timedelta(minutes=10)  # of a collective, in which a rank may wait for another one that compiles
ENDING = 10.0  # seconds in which processes end by themselves
POLL = 0.5  # seconds between two looks for a failure elsewhere


class Answer(NamedTuple):
    """What a rank returned, or what it raised, in one line."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Launch:
    """The ranks that this process starts, of how many, and the store where they meet."""

    ranks: tuple[int, ...]
    world: int
    host: str
    store: dist.Store
    port: int

    @classmethod
    def here(cls, world: int) -> "Launch":
        """All ranks on this machine."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return cls(tuple(range(world)), world, "127.0.0.1", store, store.port)

    @classmethod
    def of_torchrun(cls) -> "Launch":
        """One rank, as `torchrun` has started this process."""
        rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=serves, wait_for_workers=False)
        return cls((rank,), world, os.environ["MASTER_ADDR"], store, port)

    @property
    def speaks(self) -> bool:
        """Whether this process has rank 0, which says what comes out."""
        return 0 in self.ranks


class Rank(NamedTuple):
    """What a process is: of how many, where they meet, on which device, and where it keeps files of its own."""

    rank: int
    world: int
    host: str
    port: int
    meeting: str
    device: str
    folder: str | None
    joins: bool


class Pool:
    """Ranks, a process each.

    Args:
        launched: which of them this process starts.
        device: "cpu", or "cuda": rank n has GPU n, and talks by NCCL.
        meeting: names the group; of those who meet in one store no two have the same.
        folder: for a compile cache of their own and for what they print; None: they print and cache where this does.
        joins: whether they form a process group.
    """

    def __init__(
        self, launched: Launch, device: str, meeting: str = "ranks", folder: Path | None = None, joins: bool = True
    ) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self.launched, self._folder = launched, folder
        self._failure = f"fsdp_compile/{meeting}/failed"  # what a rank says that fails, for the other launchers
        self._processes, self._pipes = [], list[Connection]()
        context = start_server()
        for rank in launched.ranks:
            local = int(os.environ.get("LOCAL_RANK", rank)) if "RANK" in os.environ else rank
            own = f"cuda:{local}" if device == "cuda" else device
            files = None if folder is None else str(folder)
            given = Rank(rank, launched.world, launched.host, launched.port, f"fsdp_compile/{meeting}", own, files,
                         joins)  # fmt: skip
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, given), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Answer]:
        """`function(*args)` in each process; what each answers, or that it was silent after another one had failed.

        Args:
            function: of the top level of a module.
            *args: that can be pickled.
        """
        call = io.BytesIO()
        torch.save((function, args), call)
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, which its answer says
                pipe.send_bytes(call.getvalue())
        store, deadline = self.launched.store, float("inf")
        waiting = {pipe: at for at, pipe in enumerate(self._pipes)}
        answers: dict[int, Answer] = {}
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), POLL):
                assert isinstance(ready, Connection)
                at = waiting.pop(ready)
                try:
                    answers[at] = Answer(*ready.recv())
                except EOFError:
                    answers[at] = Answer(error=self._last_words(at))
                if answers[at].error:
                    store.compare_set(self._failure, "", answers[at].error)
            if waiting and deadline == float("inf") and store.check([self._failure]):
                deadline = time.monotonic() + GRACE
        silent = Answer(error="still waiting when another rank had failed")
        return [answers.get(at, silent) for at in range(len(self._pipes))]

    @property
    def failure(self) -> str:
        """What the first rank has raised that failed, of all launchers; empty if none has."""
        store = self.launched.store
        return store.get(self._failure).decode() if store.check([self._failure]) else ""

    def _last_words(self, at: int) -> str:
        process, rank = self._processes[at], self.launched.ranks[at]
        process.join(1.0)
        said = f"rank {rank} ended with exit status {process.exitcode}"
        if self._folder is None:
            return said
        lines = _printed(self._folder, rank).read_text(errors="replace").split("\n")
        return f"{said}: {next((line for line in reversed(lines) if line.strip()), 'it said nothing')[:300]}"

    def stop(self, kills: bool = False) -> None:
        """End the processes: by the end of their input, or at once, also if one has failed: others may wait for it."""
        for pipe in self._pipes:
            pipe.close()
        ends = time.monotonic() + (0.0 if kills or self.failure else ENDING)
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            process.kill()
            process.join()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.stop(kills=error is not None)


def run(world: int, device: str, function: Callable[..., Any], *args: Any) -> list[Answer]:
    """`function(*args)` on each of `world` ranks of this machine, in processes of their own."""
    with Pool(Launch.here(world), device) as pool:
        return pool.ask(function, *args)


def _printed(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"{rank}.err"


def _serve(pipe: Connection, own: Rank) -> None:
    """What a process does."""
    if own.folder is not None:
        printed = os.open(_printed(own.folder, own.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(own.folder) / "cache")
    warnings.simplefilter("ignore")  # of one rank, which shards nothing, and the like
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with suppress(EOFError, OSError):
        while call := pipe.recv_bytes():
            try:
                if own.joins and not dist.is_initialized():
                    _join_group(own)
                function, args = torch.load(io.BytesIO(call), weights_only=False)
                answer = Answer(function(*args))
            except BaseException as error:  # whatever the user's code raises is an answer
                if own.folder is not None:
                    traceback.print_exc()
                answer = Answer(error=one_line(error))
            pipe.send(tuple(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(own: Rank) -> None:
    device = torch.device(own.device)
    store = dist.TCPStore(own.host, own.port, is_master=False, timeout=TIMEOUT)
    backend, on = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, on = "nccl", device
    met = dist.PrefixStore(own.meeting, store)
    dist.init_process_group(backend, store=met, rank=own.rank, world_size=own.world, timeout=TIMEOUT, device_id=on)


def device_here(kind: str) -> torch.device:
    """The CPU, or the GPU that is this rank's."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def one_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
