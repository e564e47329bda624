"""Processes of this machine that are the ranks of one process group, and run one function.

They fork from a server (server.py) in which nothing ran. Compile caches, settings, and the harm
that a failure leaves end with them.
"""

import io
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compile.tools.server import start_server

GRACE = 10.0  # seconds that the other ranks get when one has failed: they may wait for it in a collective
TIMEOUT = timedelta(minutes=10)  # of a collective, in which a rank may wait for another one that compiles


class Answer(NamedTuple):
    """What a rank returned, or what it raised: in one line, and as a traceback."""

    value: Any = None
    error: str = ""
    trace: str = ""


def run(world: int, device: str, function: Callable[..., Any], *args: Any) -> list[Answer]:
    """`function(*args)` on each of `world` ranks, in a process each.

    Args:
        world: how many.
        device: "cpu", or "cuda": rank n has GPU n, and talks by NCCL.
        function: of the top level of a module of the package.
        *args: that can be pickled.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = start_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = io.BytesIO()
    torch.save((function, args), call)
    processes, pipes = [], []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=_run_rank, args=(there, rank, world, device, store.port, call.getvalue()))
        process.daemon = True
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        return _collect_answers(pipes, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect_answers(pipes: list[Connection], processes: list[Any]) -> list[Answer]:
    """One of each rank. Of those that are silent for a while after another one has failed, that they were."""
    answers: dict[int, Answer] = {}
    deadline = float("inf")
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers], 1.0):
            assert isinstance(ready, Connection)
            rank = pipes.index(ready)
            try:
                answers[rank] = Answer(*ready.recv())
            except EOFError:
                processes[rank].join(1.0)
                answers[rank] = Answer(error=f"the process ended with exit code {processes[rank].exitcode}")
            if answers[rank].error:
                deadline = min(deadline, time.monotonic() + GRACE)
    silent = Answer(error="still waiting when another rank had failed")
    return [answers.get(rank, silent) for rank in range(len(pipes))]


def _run_rank(pipe: Connection, rank: int, world: int, device: str, port: int, call: bytes) -> None:
    """What a rank does."""
    warnings.simplefilter("ignore")  # of one rank, which shards nothing, and the like
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        function, args = torch.load(io.BytesIO(call), weights_only=False)
        answer = Answer(function(*args))
    except BaseException as error:  # whatever the user's code raises is an answer
        answer = Answer(error=one_line(error), trace=traceback.format_exc())
    pipe.send(tuple(answer))
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # until it is stopped: a rank that goes makes others fail, which may still communicate
    os._exit(0)  # without waiting for collectives that will never end


def one_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
