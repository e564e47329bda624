"""Sharded checkpoints with torch.distributed.checkpoint, ours against FSDP2's: `python -m bench.checkpoint`.

speed     two gloo ranks save and load the same model with Adam's state, either system in turns: wall and CPU
          seconds of `get_state_dict` and `dcp.save`, and of `dcp.load` and `set_state_dict`, of the slower rank
memory    four ranks save and load a model of 1 GiB: what a rank needs at most beside its shard, by the process's
          resident memory and by the storages of tensors that are alive
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.report import machine, today, versions
from bench.systems import Setup, fsdp2, ours
from fsdp_compile import fully_shard

MIB = 2**20
SYSTEMS: dict[str, Any] = {"ours": ours, "fsdp2": fsdp2}
WIDTH, LAYERS, RANKS = 1024, 12, 2  # 48 MiB of parameters, three times that with Adam's state
BIG_WIDTH, BIG_LAYERS, BIG_RANKS = 2048, 64, 4  # 1 GiB
LIMIT = 64  # MiB beside the shard


def build(width: int, layers: int) -> nn.Sequential:
    """Linear layers, of which each is a unit."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def join_group(rank: int, folder: str, world_size: int) -> None:
    """Be one of the gloo ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)


# --- speed ------------------------------------------------------------------------------------------------------------


def trained(system: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model whose optimizer has state."""
    torch.manual_seed(0)
    model = build(WIDTH, LAYERS)
    SYSTEMS[system].prepare(model, list(model), Setup(torch.device("cpu"), init_device_mesh("cpu", (RANKS,))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Write both."""
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Read both."""
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def timed(call: Callable[..., None], *args: Any) -> tuple[float, float]:
    """Wall and CPU seconds of a call on this rank."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call(*args)
    return time.perf_counter() - wall, time.process_time() - cpu


def time_on_rank(rank: int, folder: str, rounds: int) -> None:
    """One of the ranks: both systems in turns; it leaves its figures in `folder`."""
    join_group(rank, folder, RANKS)
    systems = {system: trained(system) for system in SYSTEMS}
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {s: {"save": [], "load": []} for s in systems}
    for number in range(rounds + 1):
        for system in list(systems)[:: 1 if number % 2 else -1]:
            for what, call in (("save", save), ("load", load)):
                found = timed(call, *systems[system], f"{folder}/{system}")
                seconds[system][what] += [found] if number else []  # the first is a warm-up
    Path(folder, f"seconds_{rank}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure_speed(rounds: int) -> dict[str, Any]:
    """Median seconds, and how many times as fast ours is."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_on_rank, (folder, rounds), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"seconds_{rank}.json").read_text()) for rank in range(RANKS)]
    figures: dict[str, Any] = {}
    for what in ("save", "load"):
        for index, clock in enumerate(("wall", "CPU")):
            median = {}
            for system in SYSTEMS:
                turns = zip(*(seconds[system][what] for seconds in ranks), strict=True)
                median[system] = statistics.median(max(found[index] for found in turn) for turn in turns)
            figures[f"{what}, {clock} s"] = {**median, "ratio": median["fsdp2"] / median["ours"]}
    return figures


# --- memory -----------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The most bytes that tensors made inside had at one time, other than views of the given shards."""

    def __init__(self, shards: list[Tensor]) -> None:
        super().__init__()
        self.ranges = [(shard.data_ptr(), shard.data_ptr() + shard.nbytes) for shard in shards]
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if type(each) is Tensor:
                storage, at = each.untyped_storage(), each.untyped_storage().data_ptr()
                if not any(low <= at < high for low, high in self.ranges):
                    self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.known.values()))
        return made


def resident(which: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def needed(call: Callable[[], Any], shards: list[Tensor]) -> dict[str, float]:
    """MiB that `call` needs at most beside what there was before: resident, and in storages."""
    call()  # what is loaded or allocated once, whatever the size of the model
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with Alive(shards) as alive:
        call()
    return {"resident": resident("VmHWM") - before, "storages": alive.most / MIB}


def measure_on_rank(rank: int, folder: str) -> None:
    """One of the ranks: save and load the big model; leave the figures in `folder`."""
    join_group(rank, folder, BIG_RANKS)
    with torch.device("meta"):
        model = build(BIG_WIDTH, BIG_LAYERS)
    fully_shard(model, device_id=torch.device("cpu"), param_init_fn=materialize)
    shards = [param.detach().to_local() for param in model.parameters()]
    figures: dict[str, Any] = {"shard": sum(shard.nbytes for shard in shards) / MIB}
    checkpoint = f"{folder}/checkpoint"
    figures["save"] = needed(lambda: dcp.save({"model": model}, checkpoint_id=checkpoint), shards)
    figures["load"] = needed(lambda: dcp.load({"model": model}, checkpoint_id=checkpoint), shards)
    Path(folder, f"memory_{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def materialize(module: nn.Module) -> None:
    """Give a linear layer memory; its values do not matter, as long as they take pages."""
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.5)


def measure_memory() -> dict[str, Any]:
    """MiB, the most of any rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure_on_rank, (folder,), nprocs=BIG_RANKS)
        ranks = [json.loads(Path(folder, f"memory_{rank}.json").read_text()) for rank in range(BIG_RANKS)]
    figures: dict[str, Any] = {"shard": max(each["shard"] for each in ranks)}
    for what in ("save", "load"):
        figures[what] = {how: max(each[what][how] for each in ranks) for how in ("resident", "storages")}
    return figures


def main() -> None:
    """Measure, print the tables, write `bench/results/checkpoint.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "memory"), help="one of the measurements; nothing is written")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each system (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="3 rounds; nothing is written")
    args = parser.parse_args()
    report: dict[str, Any] = {"date": today(), "machine": machine(), "versions": versions()}
    if args.only != "memory":
        report["speed"] = measure_speed(3 if args.quick else args.rounds)
        print(f"{'':16}{'ours':>10}{'fsdp2':>10}{'ratio':>8}")
        for name, each in report["speed"].items():
            print(f"{name:16}{each['ours']:10.3f}{each['fsdp2']:10.3f}{each['ratio']:8.2f}")
    if args.only != "speed":
        report["memory"] = memory = measure_memory()
        print(f"shard {memory['shard']:.0f} MiB; beside it at most, allowed {LIMIT} MiB:")
        for name in ("save", "load"):
            print(f"{name:6}resident {memory[name]['resident']:6.1f} MiB, storages {memory[name]['storages']:6.1f} MiB")
    if not args.only and not args.quick:
        target = Path(__file__).parent / "results" / "checkpoint.json"
        target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
