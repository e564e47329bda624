"""`python -m fsdp_compile.compare.worker`: one rank of a system, which answers each line that it reads by a line.

The first line is a `Spec`. A rank that fails answers `{"failed": why}`, and stays until it is stopped, so that others
do not fail for its being gone.
"""

import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile.compare.systems import Spec, Task, Training
from fsdp_compile.tools.files import load_factory

JOINING = timedelta(seconds=300)


def _join_group(spec: Spec, device: torch.device) -> None:
    store = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=JOINING)
    backend, on = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, on = "nccl", device
    met = dist.PrefixStore(spec.meeting, store)
    dist.init_process_group(backend, store=met, rank=spec.rank, world_size=spec.world, device_id=on)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints is no answer

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    warnings.simplefilter("ignore")  # of one rank, which shards nothing, and the like
    told = json.loads(sys.stdin.readline())
    spec = Spec(**{**told, "task": Task(**told["task"])})
    device = torch.device(spec.task.device)
    try:
        _join_group(spec, device)
        training = Training(spec.system, *load_factory(spec.factory), spec.task)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        answer({"device": name, "memory": memory, "model": training.name})
        for line in sys.stdin:
            answer(asdict(training.turn(**json.loads(line))))
    except Exception as error:  # whatever the user's model raises is an answer
        traceback.print_exc()
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        answer({"failed": f"{type(error).__name__}: {said}"})
        sys.stdin.read()
        os._exit(1)  # without waiting for collectives that will never end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
