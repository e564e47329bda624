"""One rank of a system, in a process that is told what to do, and answers.

A rank that fails answers with the reason, and stays until it is stopped, so that others do not fail for its being gone.
"""

import os
import sys
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_compile.compare.systems import Spec, Training
from fsdp_compile.tools.files import load_factory

JOINING = timedelta(seconds=300)


class Failed(Exception):
    """A system that cannot run; why."""


def _join_group(spec: Spec, device: torch.device) -> None:
    store = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=JOINING)
    backend, on = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, on = "nccl", device
    met = dist.PrefixStore(spec.meeting, store)
    dist.init_process_group(backend, store=met, rank=spec.rank, world_size=spec.world, device_id=on)


def serve(spec: Spec, pipe: Connection, folder: str) -> None:
    """Train as the pipe tells, until it closes. `folder` holds the compile cache and a file of what the rank prints."""
    printed = os.open(Path(folder) / f"{spec.rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "cache")
    warnings.simplefilter("ignore")  # of one rank, which shards nothing, and the like
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device(spec.task.device)
    try:
        _join_group(spec, device)
        training = Training(spec.system, *load_factory(spec.factory), spec.task)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        pipe.send({"device": name, "memory": memory, "model": training.name})
        with suppress(EOFError):
            while True:
                pipe.send(training.turn(**pipe.recv()))
    except Exception as error:  # whatever the user's model raises is an answer
        traceback.print_exc()
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        pipe.send(Failed(f"{type(error).__name__}: {said}"))
        with suppress(EOFError):
            pipe.recv()
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives that will never end
    dist.destroy_process_group()
