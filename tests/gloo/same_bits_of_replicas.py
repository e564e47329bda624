"""A replica is killed and another one joins, with `reduction_order="tree"`: the bits of one process all along.

    python same_bits_of_replicas.py SHARDS LOGS HOW [OPTIMIZER]

SHARDS: ranks of a replica; LOGS: a folder to make; HOW: "eager" or a backend; OPTIMIZER: "adamw", or "muon" for Muon on
the matrices beside AdamW on the rest.

A step has MICROBATCHES of them, which the ranks that are there share; it is example replicas.py with another `train`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import replicas as example
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard, mean_over_ranks, microbatch_seed
from fsdp_compile.replicas import Replicas

MICROBATCHES, STEPS = 4, 60


def build(how: str, **options: Any) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
    """A sharded model, what runs it, and its optimizers."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    model = fully_shard(nn.Sequential(*blocks), auto_wrap_policy={nn.Linear}, reduction_order="tree", **options)
    run = model if how == "eager" else torch.compile(model, backend=how)
    matrices = [param for param in model.parameters() if param.dim() == 2] if sys.argv[4:] == ["muon"] else []
    rest = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    muon = [torch.optim.Muon(matrices, lr=0.01)] if matrices else []
    return model, run, [*muon, torch.optim.AdamW(rest, lr=0.01)]


def update(optimizers: list[torch.optim.Optimizer]) -> None:
    """The end of a step."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def backward(model: Any, run: Any, step: int, first: int, mine: int, fault: Callable[[], None]) -> str:
    """Gradients of `mine` microbatches of a step, from number `first` on; the mean loss of all ranks."""
    losses = []
    for k in range(mine):
        number = step * MICROBATCHES + first + k
        microbatch_seed(number)
        with nullcontext() if k == mine - 1 else model.no_sync():
            output = run(torch.randn(8, 64, generator=torch.Generator().manual_seed(number)))
            output.register_hook(lambda _: fault())
            losses.append(output.square().mean())
            (losses[-1] / mine).backward()
    model.clip_grad_norm_(1.0)
    return mean_over_ranks(torch.stack(losses)).item().hex()


def train(port: int, name: str, shard: int, folder: Path, fault: Any, batch_of: Any, timeout: float) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    there = Replicas(store, name=name, shard=shard, shards=example.SHARDS, timeout=timeout)
    model, run, optimizers = build(sys.argv[3], mesh=there.mesh)
    there.join({"model": model, **{str(index): each for index, each in enumerate(optimizers)}}, at_least=2)

    def attempt() -> str:
        mine = MICROBATCHES // (there.count * example.SHARDS)
        first = (there.index * example.SHARDS + shard) * mine
        return backward(model, run, there.step, first, mine, lambda: fault(name, shard, there.step))

    with open(folder / f"{name}{shard}", "w", buffering=1) as log:
        while there.step < STEPS:
            loss = there.run(attempt)
            update(optimizers)
            print(json.dumps([there.step, loss, there.count]), file=log)
            time.sleep(0.02)
        print(json.dumps(["end", model.fingerprint(), there.count]), file=log)


def kill(name: str, shard: int, step: int) -> None:
    """End the last rank of replica b, in the middle of a step."""
    if (name, shard, step) == ("b", example.SHARDS - 1, 5):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Lose a replica and take in another one; then one process takes the same steps."""
    example.SHARDS, example.train = int(sys.argv[1]), train
    logs = example.launch(Path(sys.argv[2]), kill, lambda step, index: index)
    assert any(line[2] == 1 for line in logs["a0"]) and logs["c0"][-1][2] == 2, logs["a0"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    model, run, optimizers = build(sys.argv[3])
    expected: list[list[Any]] = []
    for step in range(STEPS):
        expected.append([step + 1, backward(model, run, step, 0, MICROBATCHES, lambda: None)])
        update(optimizers)
    expected.append(["end", model.fingerprint()])
    for rank in (f"{name}{shard}" for name in "ac" for shard in range(example.SHARDS)):
        seen = [line[:2] for line in logs[rank]]
        assert seen == expected[-len(seen) :], (rank, seen, expected)
    print("the same bits")


if __name__ == "__main__":
    main()
