"""Two replicas of two ranks each: one loses a rank by SIGKILL, the other goes on, and a new one joins it.

    python examples/replicas.py

Then the same steps are run without a failure, both replicas on the survivor's batches while one was away: that gives
the same bits, also of the replica that has joined.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.replicas import Replicas, mark_replica_lost

SHARDS, STEPS, FAILS_AT = 2, 60, 5
fork = get_context("fork")  # torch is imported once


Fault = Callable[[str, int, int], None]  # is called in each backward with the replica, the shard and the step
BatchOf = Callable[[int, int], int]  # which batch of a step the replica with an index takes


def kill(name: str, shard: int, step: int) -> None:
    """End one rank of replica b, in the middle of a step."""
    if (name, shard, step) == ("b", 1, FAILS_AT):
        os.kill(os.getpid(), signal.SIGKILL)


def train(port: int, name: str, shard: int, folder: Path, fault: Fault, batch_of: BatchOf, timeout: float) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    replicas = Replicas(store, name=name, shard=shard, shards=SHARDS, timeout=timeout)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(4)])
    model = fully_shard(
        model,
        mesh=replicas.mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy={nn.Linear},
    )
    run = torch.compile(model, backend="aot_eager") if "--compile" in sys.argv else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)
    replicas.join({"model": model, "optimizer": optimizer, "schedule": schedule}, at_least=2)

    def backward() -> Tensor:
        batch = batch_of(replicas.step, replicas.index)
        generator = torch.Generator().manual_seed(1000 * replicas.step + 10 * batch + shard)
        output = run(torch.randn(8, 64, generator=generator))
        output.register_hook(lambda _: fault(name, shard, replicas.step))
        loss = output.square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        return loss.detach()

    with open(folder / f"{name}{shard}", "w", buffering=1) as log:
        while replicas.step < STEPS:
            loss = replicas.run(backward)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            line = [replicas.step, loss.item().hex(), replicas.index, replicas.count, round(time.monotonic(), 2)]
            print(json.dumps(line), file=log)
            time.sleep(0.02)
        values = [param.full_tensor().sum().item().hex() for param in model.parameters()]
        print(json.dumps(["end", values, replicas.index, replicas.count, round(time.monotonic(), 2)]), file=log)


def serve(port: Connection) -> None:
    """Keep the store that outlives all replicas.

    In a process of its own: the launcher forks, and a fork must not happen while a thread of the store holds a lock.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def launch(folder: Path, fault: Fault, batch_of: BatchOf, timeout: float = 20.0) -> dict[str, list[list[Any]]]:
    """Start two replicas, and another one for each that is lost; what their ranks have logged, by rank."""
    folder.mkdir()
    ours, theirs = fork.Pipe()
    server = fork.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False)
    names, running = iter("abcdef"), {}

    def start() -> None:
        name = next(names)
        arguments = [(store.port, name, shard, folder, fault, batch_of, timeout) for shard in range(SHARDS)]
        running[name] = [fork.Process(target=train, args=each) for each in arguments]
        for process in running[name]:
            process.start()

    start()
    start()
    while running:
        for name, processes in list(running.items()):
            if all(process.exitcode == 0 for process in processes):
                del running[name]
            elif any(process.exitcode for process in processes):  # killed, or raised
                print(f"replica {name} is lost")
                mark_replica_lost(store, name)
                for process in running.pop(name):
                    process.kill()
                time.sleep(0.5)  # until another machine is there
                start()
        time.sleep(0.05)
    server.kill()
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def main() -> None:
    """Run with a failure and without, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        logs = launch(Path(folder, "lost"), kill, lambda step, index: index)
        alone = {line[0] - 1 for line in logs["a0"] if line[3] == 1}
        joined = logs["c0"][0][0]
        times = [line[4] for line in logs["a0"]]
        away = times[FAILS_AT] - times[FAILS_AT - 1]
        print(f"replica a went on after {away:.2f} s and took {len(alone)} steps alone; replica c joined at {joined}")
        assert FAILS_AT in alone and joined < STEPS, "the new replica came too late"
        same = launch(Path(folder, "kept"), lambda *_: None, lambda step, index: 0 if step in alone else index)
        for rank, other in (("a0", "a0"), ("a1", "a1"), ("c0", "b0"), ("c1", "b1")):
            mine = [line[:2] for line in logs[rank]]
            theirs = [line[:2] for line in same[other]][-len(mine) :]
            assert mine == theirs, (rank, next(pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1]))
        print(f"all losses and parameters are equal to those of {STEPS} steps without a failure, bit for bit")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
