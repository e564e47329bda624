"""`fsdp-compile selfcheck`: whether the package works on this machine, with the ranks that it is started with.

Each row is one check, made on all ranks; a row holds if it holds on all of them.

values         a small GPT trains for three steps, sharded and unsharded, and all values are compared (tools/check.py)
a steady step  its collectives, the bytes that are alive, and the host's waits, by profilers (steady.py)
side by side   its speed and losses by this package and by FSDP2 (compare/), beside the prediction
"""

import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import __version__, steady
from fsdp_compile.api import explain_plan, fully_shard
from fsdp_compile.comm.waits import state_of
from fsdp_compile.compare.case import Batch, Case, default_loss
from fsdp_compile.compare.memory import alive, resident
from fsdp_compile.compare.report import Comparison, Row
from fsdp_compile.compare.rounds import predict
from fsdp_compile.compare.systems import WARM, Task, Turn, take_turn
from fsdp_compile.compare.training import Training, Way
from fsdp_compile.compare.verdicts import EQUAL, ROUNDING
from fsdp_compile.explain.calibrate import Block
from fsdp_compile.passes.graph.prices import hardware_at
from fsdp_compile.tools.check import check

STEPS, TOKENS, WIDTH, LENGTH = 3, 32, 32, 16
MANY = 64  # sequences of a batch of which activations are most of the memory
OURS = ("eager", "compiled", "step")
SPEED = ("fsdp2", "fsdp2-compiled", *OURS)
ROUNDS = 3
WAYS = ("eager", "aot_eager", "inductor")


@dataclass
class Check:
    """One check: whether it holds on all ranks, what it found on this one, and how long it took."""

    name: str
    holds: bool
    found: str
    seconds: float = 0.0


@dataclass
class Report:
    """All rows, where they were made, and systems side by side."""

    where: dict[str, Any]
    rows: list[Check]
    speed: Comparison | None = None

    @property
    def holds(self) -> bool:
        """Whether all rows hold."""
        return all(row.holds for row in self.rows)

    def to_json(self) -> str:
        """The report, to be sent with a bug report."""
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=1) + "\n"

    def __str__(self) -> str:
        rows = [f"{'ok  ' if r.holds else 'FAIL'}  {r.name:10} {r.seconds:5.1f} s  {r.found}" for r in self.rows]
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return "\n".join([where, *rows, "all hold" if self.holds else "some fail"])


def selfcheck(device: torch.device) -> Report:
    """Make all checks on `device`, on each rank of the default process group.

    A rank that fails alone makes the others wait for the time that `FSDP_COMPILE_CHECK_RANKS_TIMEOUT` and the group's
    timeout allow.
    """
    where = {
        "fsdp_compile": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "device": _device_name(device), "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
    }  # fmt: skip
    rows = [_row_of_check(way, partial(_trains_as_unsharded, way), device) for way in WAYS]
    for name, look in LOOKS.items():
        rows.append(_row_of_check(name, partial(look, device), device))
    compared: list[Comparison] = []

    def speed() -> str:
        compared.append(side_by_side(device))
        return _compared_speeds(compared[0])

    rows.append(_row_of_check("speed", speed, device))
    if compared:
        rows.append(_row_of_check("predicted", partial(_predicted_steps, compared[0]), device))
    return Report(where, rows, *compared)


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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _row_of_check(name: str, check: Callable[[], str], device: torch.device) -> Check:
    """A row that holds if `check` raises nothing on any rank."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        print(f"\r\x1b[K{name} ...\r", end="", file=sys.stderr, flush=True)
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
    return Check(name, bool(everywhere), found, round(time.monotonic() - begun, 1))


# --- values -----------------------------------------------------------------------------------------------------------


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, tokens)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batch(number: int) -> Batch:
    tokens = torch.randint(TOKENS, (2, LENGTH))
    return Batch((tokens,), target=tokens)


def _loss(output: Tensor, tokens: Tensor) -> Tensor:  # (batch, length, tokens), (batch, length)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _trains_as_unsharded(way: str) -> str:
    """Compare all values of a few steps; raise AssertionError with the first that differs."""
    [row] = check(_GPT, _batch, loss=_loss, optimizer=_sgd, ways=[way], steps=STEPS, accumulate=1, resume_on=0).rows
    if row.verdict not in (EQUAL, ROUNDING):
        raise AssertionError(f"beside the unsharded model:{str(row).partition(' s ')[2]}")
    how = "bit for bit" if row.verdict == EQUAL else f"within rounding; {row.largest}"
    return f"all values of {STEPS} steps are those of the unsharded model, {how}"


def _case(device: torch.device) -> Case:
    return Case(_GPT, _batch, _loss, _sgd, lambda model: fully_shard(model.to(device)))


# --- what a steady step does ------------------------------------------------------------------------------------------


def _order_is_the_plan(device: torch.device) -> str:
    """Compare the collectives that a profile of a compiled step shows with those of the graphs, which follow plans."""
    if dist.get_world_size() == 1:
        return "no collectives on one rank"
    world = dist.group.WORLD
    assert world is not None
    compared = state_of(world).agreed
    compared.clear()  # so that ranks compare the graphs of this check again, on all ranks
    training = Training(_case(device), Way("compiled", "whole", "inductor"), device)
    training.step(training.next_batches())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        training.step(training.next_batches())
    graphs = sorted(compared, key=lambda text: "reduce" in text)  # forward, backward
    planned = [collective for text in graphs for collective in steady.planned(text)]
    steady.compare_order(planned, [*steady.ran(profiler.events())])
    return f"{len(planned)} collectives of forward and backward ran as planned"


class _WithLoss(nn.Module):
    """The loss is part of the graph, whose bytes are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _GPT()

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> ()
        return _loss(self.model(tokens), tokens)


def _check_memory(device: torch.device) -> str:
    """A steady step leaves nothing behind, and has no more bytes alive than planned; on one rank than unsharded.

    Activations are most of them, so that what a GPU's allocator rounds up, 512 bytes a tensor, is within 5 %. A plan is
    an upper bound. Recomputing cheap values, which it does not count, saves about a fifth of it here.
    """
    case = replace(_case(device), make=_WithLoss, batches=lambda number: torch.randint(TOKENS, (MANY, LENGTH)),
                   loss=default_loss)  # fmt: skip
    alone = dist.get_world_size() == 1
    # A named link: what is gathered early, and is alive longer, depends on it. Its seconds do not matter here.
    planned: dict[str, Any] = {"link": "h100-nvlink", "device": "h100" if device.type == "cuda" else "cpu"}
    compiled = Way("", "whole", "fsdp_compile")
    found = []
    for way in (Way("", "unsharded"), Way("", "eager")) if alone else (compiled,):
        training = Training(case, way, device, options=planned)
        batches = training.next_batches()
        for _ in range(2):
            training.step(batches)
        found.append(alive(partial(training.step, batches), device, resident(training.trained)))
    peak, left = found[-1]
    if left:
        raise AssertionError(f"a step leaves {left:,} bytes behind")
    if alone:
        most, words = int(1.05 * found[0].peak), "5 % above unsharded"
    else:
        plan = explain_plan(training.model, batches[0].args, **planned)
        most, words = plan.timeline.peak + steady.workspace(device), "planned"
    if not most / 2 <= peak <= most:
        raise AssertionError(f"{peak:,} bytes are alive at most, expected {most // 2:,} to {most:,}, {words}")
    rest = "what a step leaves behind is not seen with gloo" if left is None else "a step leaves none behind"
    return f"{peak:,} bytes alive at most, {words} {most:,}; {rest}"


def _check_streams(device: torch.device) -> str:
    """The host issues a whole steady step, however it runs, without waiting for the device."""
    if device.type != "cuda":
        return "not looked at on a CPU, where collectives hold up the host"
    for system in OURS:
        training = _small_task(device).training(_case(device), system, device)
        for _ in range(WARM):
            training.step(training.next_batches())
        waits = steady.host_waits(partial(training.step, training.next_batches()))
        if waits is None:
            return "not seen: the profiler shows no calls of CUDA here"
        if waits:
            raise AssertionError(f"{system}: the host waits for the device within a step: {', '.join(waits)}")
    return f"no wait of the host for the device in a step of {', '.join(OURS)}"


LOOKS = {"order": _order_is_the_plan, "memory": _check_memory, "streams": _check_streams}


# --- systems side by side ---------------------------------------------------------------------------------------------


def _small_task(device: torch.device) -> Task:
    return Task(2, LENGTH, False, str(device))


def side_by_side(device: torch.device) -> Comparison:
    """Train the GPT by each system, in turns. Only another package's failure is a row, ours raises."""
    turns: dict[str, list[Turn]] = {}
    failed: dict[str, str] = {}
    trainings: dict[str, Training] = {}
    for number in range(ROUNDS):
        for system in SPEED:
            try:
                if number == 0:
                    trainings[system] = _small_task(device).training(_case(device), system, device)
                if system not in failed:
                    turns.setdefault(system, []).append(take_turn(trainings[system], 2, STEPS, looks=False))
            except Exception as error:
                if system in OURS:
                    raise
                failed[system] = f"{type(error).__name__}: {error}"
    ran = [system for system in SPEED if system in turns]
    found, note = predict(_GPT, None, _small_task(device), dist.get_world_size(), ran, partial(hardware_at, device))
    predicted = {name: each.step for name, each in found.items()}
    rows = tuple(Row.of(name, turns.get(name, []), failed.get(name), predicted.get(name), False) for name in SPEED)
    return Comparison({"model": "GPT", "ranks": dist.get_world_size(), "precision": "fp32"}, rows, note)


def _compared_speeds(compared: Comparison) -> str:
    """Losses of all systems agree; how fast they are is information."""
    differences = [*compared.differences()]
    if differences:
        raise AssertionError("; ".join(differences))
    speeds = [f"{row.system} {row.speed:,.0f}" for row in compared.ran]
    failed = [f"{row.system} failed: {row.failed}" for row in compared.rows if row.failed is not None]
    return "; ".join([f"tokens/s: {', '.join(speeds)}", *failed])


def _predicted_steps(compared: Comparison) -> str:
    """Information: what the prediction knows of this machine is no fault of an installation."""
    pairs = [f"{row.system} {1e3 * row.step:,.1f} ({1e3 * row.predicted:,.1f})"
             for row in compared.ran if row.predicted is not None]  # fmt: skip
    if not pairs:
        return compared.note
    return f"ms a step ({compared.note}): {', '.join(pairs)}; so small a model takes what the host does"
