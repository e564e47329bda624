"""A pool of gloo ranks that outlives a test: torch is imported once, and a rank that fails or hangs says where.

    @on_ranks(2)
    def test_name(rank, ...):        the test runs on each of two ranks, with the parameters and fixtures that it names

    ranks = Ranks(2, folder)
    ranks.run(function, *args)       [function(0, *args), function(1, *args)], one call in each of two processes

With FSDP_COMPILE_RANKS_ON=cuda the ranks talk by NCCL and make their tensors on GPUs. They share the GPUs that there
are: NCCL refuses two ranks of one host on one GPU, so each rank that has to share says that it is a host of its own.

Functions, arguments and results travel pickled: functions from the top level of a module, results by value. This module
imports no torch: a worker sets its environment first.
"""

import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tiers import NIGHTLY

ON = os.environ.get("FSDP_COMPILE_RANKS_ON", "cpu")
# Seconds that one call may take.
LIMIT = 1200.0 if NIGHTLY else float(os.environ.get("LIMIT", 240))
# By day ranks fork from a process that has imported torch and nothing else, but for rank 0 of the two that most tests
# run on. At night each of them imports it, as users' ranks do, and hashes strings as no other does.
# "fork" where torch is imported already and nothing ran a backward: tools/mutate.py saves the seconds of the imports.
START = os.environ.get("FSDP_COMPILE_RANKS", "spawn" if NIGHTLY or ON == "cuda" else "forkserver")
IMPORTED = ["torch.distributed.fsdp", "torch._inductor.compile_fx", "fsdp_compile.passes.inductor"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # the compiler knows the machine's vectors: ten seconds of trials less
}
GRACE = 10.0  # seconds that the other ranks get when one has failed: they may wait for it in a collective


class RanksFailed(AssertionError):
    """What went wrong, rank by rank."""


class Worker(NamedTuple):
    """One rank, seen from the test's process."""

    process: BaseProcess
    pipe: Connection
    stacks: Path  # where the process writes its threads' stacks when it gets SIGUSR1


class Answer(NamedTuple):
    """What one rank returned, or the text of what it raised."""

    value: Any
    error: str | None


class Ranks:
    """`world_size` worker processes in one gloo group, started at the first call and again after a failure.

    Args:
        world_size: how many.
        folder: for files of the ranks: rendezvous, stacks, and Inductor's caches, which all pools share.
        limit: seconds that one call may take.
        start: how processes start, as multiprocessing calls it.
        differs: whether rank 0 imports torch itself where others fork.
    """

    def __init__(
        self, world_size: int, folder: Path, limit: float = LIMIT, start: str = START, differs: bool = False
    ) -> None:
        self.world_size, self.folder, self.limit, self.start = world_size, folder, limit, start
        self.differs, self.workers = differs, list[Worker]()
        self.starts = 0
        self.guard: subprocess.Popen[bytes] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on every rank, each after the barrier that all of them reach; results by rank.

        Raises:
            RanksFailed: a rank raised or died, or the time was up. The pool is stopped; the next call starts a new one.
        """
        __tracebackhide__ = True
        if not self.workers or not all(worker.process.is_alive() for worker in self.workers):
            self.stop()
            self._start()
        call = pickle.dumps((function, args))
        self._signal(signal.SIGCONT, range(self.world_size))
        for worker in self.workers:
            worker.pipe.send_bytes(call)
        answers = self._collect()
        if len(answers) < self.world_size or any(answer.error for answer in answers.values()):
            report = self._report(function.__name__, answers)
            self.stop()
            raise RanksFailed(report)
        self._signal(signal.SIGSTOP, range(self.world_size))  # gloo's threads, hundreds of them, would look each 10 ms
        return [answers[rank].value for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes."""
        if self.guard is not None:
            with self.guard:
                self.guard.kill()
            self.guard = None
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers = []

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            os.kill(self.workers[rank].process.pid or 0, number)

    def _start(self) -> None:
        self.starts += 1
        if self.start == "forkserver":
            os.environ |= ENVIRONMENT
            multiprocessing.set_forkserver_preload(IMPORTED)
        rendezvous = self.folder / f"rendezvous_{self.world_size}_{id(self)}_{self.starts}"
        for rank in range(self.world_size):
            # Rank 0 with hashes of strings and addresses of its own: where the order of a set differs, ranks differ.
            context = multiprocessing.get_context("spawn" if rank == 0 and self.differs else self.start)
            here, there = context.Pipe()
            stacks = Path(f"{rendezvous}_stacks_{rank}")
            settings = (rank, self.world_size, str(rendezvous), str(self.folder / "inductor"), str(stacks))
            process = context.Process(target=_serve, args=(there, *settings), daemon=True)
            process.start()
            there.close()
            self.workers.append(Worker(process, here, stacks))
        pids = [str(worker.process.pid) for worker in self.workers]
        # When this process is gone, however it ended: ranks that are stopped would not see that.
        self.guard = subprocess.Popen(["sh", "-c", 'read _; kill -KILL "$@"', "sh", *pids], stdin=subprocess.PIPE)

    def _collect(self) -> dict[int, Answer]:
        """The answers that arrive in time, by rank."""
        pending = {worker.pipe: rank for rank, worker in enumerate(self.workers)}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + self.limit
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                answers[rank] = self._receive(rank)
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _receive(self, rank: int) -> Answer:
        process, pipe, _ = self.workers[rank]
        try:
            return Answer(*pickle.loads(pipe.recv_bytes()))
        except EOFError:
            process.join(1.0)
            return Answer(None, f"the process died with exit code {process.exitcode}\n")

    def _report(self, name: str, answers: dict[int, Answer]) -> str:
        failed = [rank for rank, answer in answers.items() if answer.error]
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        said = [f"rank {rank} in {name}:\n{answers[rank].error}" for rank in failed]
        said += [f"rank {rank} in {name} was still here:\n{stacks}" for rank, stacks in self._ask_stacks(silent)]
        returned = {rank: answer.value for rank, answer in answers.items() if not answer.error}
        said += [f"rank {rank} in {name} returned: {value}" for rank, value in sorted(returned.items())]
        return "\n".join([f"{name} failed on ranks {failed}, did not finish on {silent}", *said])

    def _ask_stacks(self, ranks: list[int]) -> Iterable[tuple[int, str]]:
        self._signal(signal.SIGUSR1, ranks)
        time.sleep(0.5 if ranks else 0)
        return [(rank, self.workers[rank].stacks.read_text()) for rank in ranks]


POOLS = {1: "one", 2: "two", 3: "three", 4: "four"}  # fixtures, by the number of ranks


def on_ranks(count: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator: a test runs on each of `count` ranks, and fails if it fails on one. It may ask for its `rank`."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters
        asked = [each for name, each in parameters.items() if name != "rank"]

        @wraps(test)
        def on_all_ranks(**fixtures: Any) -> None:
            __tracebackhide__ = True
            fixtures.pop(POOLS[count]).run(on_all_ranks, fixtures)

        def on_rank(rank: int, fixtures: dict[str, Any]) -> None:
            test(**fixtures, **({"rank": rank} if "rank" in parameters else {}))

        pool = inspect.Parameter(POOLS[count], inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(on_all_ranks).update(__signature__=inspect.Signature([pool, *asked]), on_rank=on_rank)
        return on_all_ranks

    return decorate


def _serve(pipe: Connection, rank: int, world_size: int, rendezvous: str, inductor: str, stacks: str) -> None:
    """What a worker does: join the group, then answer calls until the pipe closes."""
    if not NIGHTLY:
        gc.set_threshold(50_000, *gc.get_threshold()[1:])  # compilers make many objects, few of them garbage
    file = open(stacks, "w")  # noqa: SIM115  (the signal handler's, for the life of the process)
    faulthandler.register(signal.SIGUSR1, file)
    warnings.resetwarnings()  # pytest's, in a fork
    os.environ |= ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": inductor}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if ON == "cuda":
        if torch.cuda.device_count() < world_size:
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl" if ON == "cuda" else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            torch._dynamo.reset()
            gc.collect()
            gc.freeze()  # later collections look only at what this call makes: half a second becomes nothing
            dist.barrier()
            function, args = pickle.loads(call)
            run = getattr(function, "on_rank", function)  # of a test that `on_ranks` has wrapped
            answer = Answer(run(rank, *args), None)
        except BaseException:
            answer = Answer(None, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(tuple(answer)))
