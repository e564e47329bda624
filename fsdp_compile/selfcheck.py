"""`fsdp-compile selfcheck`: whether the package works on this machine, with the ranks that it is started with.

Each row is one check, made on all ranks; a row holds if it holds on all of them. What is compared is a small GPT that
trains for three steps: sharded, on a part of the batch for each rank, and whole, on all of it.
"""

import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fsdp_compile.api import fully_shard
from fsdp_compile.comm.waits import names_of, state_of
from fsdp_compile.eager.summon import summon_full_params
from fsdp_compile.torch_names import check_all, is_untested

STEPS, TOKENS, WIDTH, LENGTH = 3, 32, 32, 16
WAYS = {"eager": None, "aot_eager": "aot_eager", "inductor": "inductor"}


@dataclass
class Row:
    """One check: whether it holds on all ranks, what it found on this one, and how long it took."""

    name: str
    holds: bool
    found: str
    seconds: float = 0.0


@dataclass
class Report:
    """All rows, and where they were made."""

    where: dict[str, Any]
    rows: list[Row]

    @property
    def holds(self) -> bool:
        """Whether all rows hold."""
        return all(row.holds for row in self.rows)

    def to_json(self) -> str:
        """The report, to be sent with a bug report."""
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=1) + "\n"

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in self.where.items()]
        rows = [f"{'ok  ' if r.holds else 'FAIL'}  {r.name:10} {r.seconds:5.1f} s  {r.found}" for r in self.rows]
        return "\n".join([", ".join(where), *rows, "all hold" if self.holds else "some fail"])


def selfcheck(device: torch.device) -> Report:
    """Make all checks on `device`, on each rank of the default process group.

    A rank that fails alone makes the others wait for the time that `FSDP_COMPILE_CHECK_RANKS_TIMEOUT` and the group's
    timeout allow.
    """
    where = {
        "fsdp_compile": version("fsdp_compile"), "torch": torch.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "device": _name(device), "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
    }  # fmt: skip
    rows = [_row("names", _names, device)]
    for way, backend in WAYS.items():
        rows.append(_row(way, partial(_trains_as_one_process, backend, device), device))
    rows.append(_row("order", partial(_order_is_the_plan, device), device))
    return Report(where, rows)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The default process group: that which exists, that of `torchrun`, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()} if "RANK" not in os.environ else {}
    dist.init_process_group(backend, **alone)  # type: ignore[arg-type]  # of three types
    try:
        yield
    finally:
        dist.destroy_process_group()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _row(name: str, check: Callable[[], str], device: torch.device) -> Row:
    """A row that holds if `check` raises nothing on any rank."""
    torch.compiler.reset()
    begun = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank shards nothing, aot_eager runs no passes: both are meant here
            found, holds = check(), True
    except Exception as error:  # whatever it is, the other checks follow, and the report says so
        found, holds = f"{type(error).__name__}: {error}"[:2000], False
    everywhere = torch.tensor(int(holds), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if holds and not everywhere:
        found = "another rank failed"
    return Row(name, bool(everywhere), found, round(time.monotonic() - begun, 1))


def _names() -> str:
    checked = check_all()
    faults = [f"{file}, {fault}" for file, names in checked.items() for fault in names.faults]
    if faults:
        raise RuntimeError("; ".join(faults))
    count = sum(len(names.names) for names in checked.values())
    untested = "; this torch is newer than all that were tested" if is_untested(torch.__version__) else ""
    return f"{count} private names of torch{untested}"


# --- values -----------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wider, self.narrower = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        parts = self.attention(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrower(F.gelu(self.wider(self.norms[1](x))))


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, tokens)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _make(device: torch.device) -> tuple[nn.Module, Tensor]:
    """The model, and the batches of all ranks, `(steps, ranks, 2, length)`; the same on all ranks."""
    torch.manual_seed(0)
    model = _GPT().to(device)
    return model, torch.randint(TOKENS, (STEPS, dist.get_world_size(), 2, LENGTH)).to(device)


def _loss(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:  # (batch, length)
    return F.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _train(run: Callable[[Tensor], Tensor], model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for tokens in batches:
        _loss(run, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def _trains_as_one_process(backend: str | None, device: torch.device) -> str:
    """Compare all parameters after a few steps; raise AssertionError with the first that differs."""
    whole, batches = _make(device)
    _train(whole, whole, [each.flatten(0, 1) for each in batches])
    model, _ = _make(device)
    sharded: Any = fully_shard(model)
    run = sharded if backend is None else torch.compile(sharded, backend=backend)
    _train(run, sharded, [each[dist.get_rank()] for each in batches])
    most = 0.0
    with summon_full_params(sharded, writeback=False):
        for (name, mine), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            difference = float((mine - expected).detach().abs().max())
            if not difference <= 1e-5 + 1e-4 * float(expected.detach().abs().max()):  # also if it is NaN
                raise AssertionError(f"{name} differs from that of one process by {difference:.1e}")
            most = max(most, difference)
    return f"parameters after {STEPS} steps as of one process, by {most:.1e} at most"


# --- order ------------------------------------------------------------------------------------------------------------


def _order_is_the_plan(device: torch.device) -> str:
    """Compare the collectives that a profile of a compiled step shows with those of the graphs, which follow plans."""
    if dist.get_world_size() == 1:
        return "no collectives on one rank"
    if device.type != "cpu":
        return "not looked at: generated code calls torch's operators here"
    world = dist.group.WORLD
    assert world is not None
    compared = state_of(world).agreed
    compared.clear()  # so that ranks compare the graphs of this check again, on all ranks
    model, batches = _make(device)
    run = torch.compile(fully_shard(model))
    _loss(run, batches[0, dist.get_rank()]).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _loss(run, batches[0, dist.get_rank()]).backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = (re.fullmatch(r"fsdp_compile\.\w+\.(all_gather|reduce) (.*)", event.name) for event in events)
    graphs = sorted(compared, key=lambda text: "reduce" in text)  # forward, backward
    planned = [collective for text in graphs for collective in _collectives(text)]
    compare_order(planned, [(match[1], match[2]) for match in names if match])
    return f"{len(planned)} collectives of forward and backward ran as planned"


def _collectives(sequence: str) -> Iterator[tuple[str, str]]:
    """What a graph's text for comparisons lists, in the words of profiles."""
    for line in sequence.splitlines():
        kind, sizes, dtype = re.match(r"(\w+) .*?, ([\d +]+) bytes of (\w+)", line).groups()  # type: ignore[union-attr]
        numel = sum(map(int, sizes.split("+"))) // getattr(torch, dtype).itemsize
        if kind == "gather":
            yield "all_gather", names_of(numel * dist.get_world_size())
        elif kind == "reduce":
            yield "reduce", names_of(numel)


def compare_order(planned: list[tuple[str, str]], ran: list[tuple[str, str]]) -> None:
    """Raise AssertionError with the first collective that was not the planned one."""
    for number, (expected, found) in enumerate(zip_longest(planned, ran)):
        if expected != found:
            raise AssertionError(f"collective {number}: expected {expected}, found {found}")
