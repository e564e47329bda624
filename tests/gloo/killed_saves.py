"""Ranks that save without a pause and are killed at random moments, again and again: `test_killed_saves.py` runs this.

    python killed_saves.py FOLDER ROUNDS SEED

Each round two ranks start, load the newest checkpoint, check it, and save one after the other until they are killed,
one a little before the other. Prints a line of JSON for each round. This process never makes a process group, so its
forks can, and torch is imported once.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import checkpoint, fully_shard
from fsdp_compile.checkpoint.directory import committed, step_of

RANKS = 2


def live(rank: int, root: Path, rendezvous: Path, told: int) -> None:
    """A rank's life: go on from what is there, then save for ever."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="passed over")  # no checkpoint that can be seen is damaged
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    model = fully_shard(nn.Sequential(*[nn.Linear(255, 255) for _ in range(8)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 255)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(found["momentum_buffer"] for found in optimizer.state.values())]
    state = {"model": model, "optimizer": optimizer, "step": 0}
    step = checkpoint.load(state, root) if committed(root) else 0
    if step:
        assert state["step"] == step, f"expected step {step}, found {state['step']}"
        for tensor in tensors:
            here = tensor.to_local()
            assert (here == step).all(), f"expected {step} in all tensors, found {here.unique()}"
    os.write(told, f"{step}\n".encode())
    while True:
        step += 1
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(step)
        checkpoint.save(state | {"step": step}, root, step, keep=2)


def start(rank: int, root: Path, rendezvous: Path, told: int) -> int:
    """A rank in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    try:
        live(rank, root, rendezvous, told)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def newest_step(root: Path) -> int:
    """The step of the newest checkpoint that can be seen."""
    return max((step_of(path) for path in committed(root)), default=0)


def wait_until(done: Callable[[], bool], limit: float = 60.0) -> None:
    """Look every millisecond. TimeoutError after `limit` seconds."""
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the ranks did not save")
        time.sleep(0.001)


def kill_at_random(root: Path, rendezvous: Path, chance: random.Random) -> dict[str, Any]:
    """One round; what happened."""
    before = newest_step(root)
    reader, told = os.pipe()
    ranks = [start(rank, root, rendezvous, told) for rank in range(RANKS)]
    os.close(told)
    with open(reader) as lines:
        resumed = [int(lines.readline() or -1) for _ in ranks]
        if -1 not in resumed:
            wait_until(lambda: newest_step(root) > before)
            begun = time.monotonic()
            wait_until(lambda: newest_step(root) > before + 1)
            time.sleep(chance.uniform(0, 2 * (time.monotonic() - begun)))  # somewhere in the next two saves
        seen = newest_step(root)
        for child in chance.sample(ranks, len(ranks)):
            os.kill(child, signal.SIGKILL)
            time.sleep(chance.choice((0, 0.002, 0.02)))
        for child in ranks:
            os.waitpid(child, 0)
    hidden = sum(path.name.startswith(".") for path in root.iterdir())
    return {"before": before, "resumed": resumed, "seen": seen, "after": newest_step(root), "hidden": hidden}


def main() -> None:
    """All rounds, and a last one that only goes on."""
    folder, rounds, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    root = folder / "checkpoints"
    root.mkdir()
    for number in range(rounds + 1):
        print(json.dumps(kill_at_random(root, folder / f"rendezvous{number}", chance)), flush=True)


if __name__ == "__main__":
    main()
