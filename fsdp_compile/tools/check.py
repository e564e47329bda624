"""`check`: whether a model trains sharded as it does unsharded, by each way of running it.

    report = check(Net, batches, loss=mse_loss, ranks=2)
    print(report)

The unsharded model trains on all ranks' data: each rank runs its own batches, and plain torch averages the gradients.
Beside it the sharded model trains by each way, and all outputs, losses, gradients, buffers, parameters and states of
the optimizer are compared in each step.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import __version__, fully_shard
from fsdp_compile.compare.alike import Task, alone, compare_way, deviations, reference
from fsdp_compile.compare.case import Batch, Load, check_pickles, default_loss, default_optimizer, given_case
from fsdp_compile.compare.pool import Answer, one_line, run
from fsdp_compile.compare.training import Way
from fsdp_compile.compare.verdicts import FAILED, LEFT_OUT, Report, Row

WAYS = ("eager", "blocks", "aot_eager", "inductor", "step")
RESUMED_STEPS = 2

__all__ = ["Batch", "Report", "assert_trains_alike", "check"]


def check(
    model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Any] | Callable[[int], Any],
    *,
    loss: Callable[..., Tensor] = default_loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = default_optimizer,
    shard: Callable[[nn.Module], nn.Module] = fully_shard,
    ways: Sequence[str] = WAYS,
    ranks: int = 2,
    steps: int = 3,
    accumulate: int = 2,
    resume_on: int | None = None,
    device: str = "cpu",
) -> Report:
    """Compare training sharded, by several ways, with training unsharded on all ranks' data.

    Where a process group exists, all of its ranks call this, and it has no other ranks. Otherwise it starts processes
    of this machine, for which what it is given is pickled.

    Args:
        model: unsharded; or a function that makes it, and makes the same one after the same `torch.manual_seed`.
        batches: what ranks train on, one after the other: rank r of R has batch `k * R + r` in its forward number k.
            They begin again at their end. Each is a `Batch`, a tensor, a tuple of arguments, a dict of arguments by
            name, or a pair of both. Or a function that is given such a number, after a seed of its own.
        loss: called with the output, and the batch's target if it has one; returns the mean loss, shape `()`. By
            default the output's own loss, else a weighted mean of its elements.
        optimizer: called with the parameters that train. By default AdamW.
        shard: shards the model and returns it, such as a function that calls `fully_shard` with arguments.
        ways: "eager"; "blocks", each unit below the model compiled; "aot_eager", "inductor" or another backend of
            `torch.compile`, which compiles the model; "step", `compile_step`. "blocks:BACKEND" and "step:BACKEND"
            compile by another backend than aot_eager.
        ranks: how many.
        steps: of the optimizer.
        accumulate: micro-batches of the second step, under `no_sync`.
        resume_on: after the last step a checkpoint is saved, and loaded on so many ranks, which go on; 0: it is not.
            None: on one rank more; where a process group exists, on as many as it has.
        device: "cpu", or "cuda" with a GPU for each rank.

    Returns:
        What came out: the same on all ranks.

    Raises:
        TypeError: a batch has another type.
        ValueError: an argument cannot be what it is, or the unsharded model cannot be trained.
    """
    for name, value in {"ranks": ranks, "steps": steps, "accumulate": accumulate}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, found {value!r}")
    if not callable(batches) and not len(batches):
        raise ValueError("batches: expected at least one, found none")
    parts = {"loss": loss, "optimizer": optimizer, "shard": shard}
    load = partial(given_case, model, batches, **parts)
    options: dict[str, Any] = {"steps": steps, "accumulate": accumulate, "resume_on": resume_on}
    if dist.is_initialized():
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return _check_ways(load, ways, _run_here, dist.get_world_size(), kind, **options)
    check_pickles(model, batches, **parts)
    return _check_ways(load, ways, run, ranks, device, **options)


def assert_trains_alike(
    model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Any] | Callable[[int], Any],
    *,
    ways: Sequence[str] = ("eager", "aot_eager"),
    **options: Any,
) -> Report:
    """As `check`, for tests: AssertionError with the report unless all ways hold."""
    __tracebackhide__ = True
    report = check(model, batches, ways=ways, **options)
    assert report.holds, f"\n{report}"
    return report


def check_loaded(load: Load, ways: Sequence[str], ranks: int, device: str, **options: Any) -> Report:
    """As `check`, of what `load` gives; by the ranks of `torchrun` where it has started this process.

    It calls `found`, one of the options, with each row as soon as it is known.
    """
    if "RANK" not in os.environ:
        return _check_ways(load, ways, run, ranks, device, **options)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        return _check_ways(load, ways, _run_here, dist.get_world_size(), device, **options)
    finally:
        dist.destroy_process_group()


Run = Callable[..., list[Answer]]  # given how many ranks, the device, a function and its arguments


def _run_here(count: int, device: str, function: Callable[..., Any], *args: Any) -> list[Answer]:
    """What the function returns or raises, on all ranks of the process group that exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in processes of their own: aot_eager runs no passes, and the like
        try:
            answer = Answer(function(*args))
        except Exception as error:  # whatever the user's code raises is an answer
            answer = Answer(error=one_line(error))
    found: list[Any] = [None] * count
    dist.all_gather_object(found, answer)
    return found


def _check_ways(
    load: Load, names: Sequence[str], run: Run, ranks: int, device: str, *, steps: int, accumulate: int,
    resume_on: int | None, found: Callable[[Row], None] = lambda row: None,
) -> Report:  # fmt: skip
    """Run the reference and each way, from the start and behind a load; tell each row as soon as it is known."""
    ways, are_here = [Way.of(each) for each in names], run is _run_here
    counts = tuple(accumulate if step == 1 else 1 for step in range(steps))
    another = ranks + (not are_here) if resume_on is None else resume_on
    if are_here and another not in (0, ranks):
        raise ValueError(f"resume_on: a process group of {ranks} ranks exists, expected 0 or as many, found "
                         f"{another}; call check without a process group")  # fmt: skip
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fsdp_compile_check_") as own:
        folder = [own]
        if are_here:  # that of rank 0
            dist.broadcast_object_list(folder)
        task = Task(device, counts, 0, folder[0], resumes=False, saves=another > 0)
        about = _compare_ways(load, task, ways, run, ranks, rows, found)
        right = [way for way, row in zip(ways, rows, strict=True) if not row.is_fault and row.verdict != LEFT_OUT]
        if another and right:
            later = replace(task, counts=(1,) * RESUMED_STEPS, start=sum(counts), resumes=True, saves=False)
            _compare_ways(load, later, right, run, another, rows, found)
        if are_here:
            dist.barrier()
    where = {
        "model": about["model"], "parameters": f"{about['parameters']:,}", "ranks": ranks, "steps": steps,
        "micro-batches": list(counts), "loaded on": another or "none", "device": device, "torch": torch.__version__,
        "fsdp_compile": __version__,
    }  # fmt: skip
    return Report(where, tuple(rows))


def _compare_ways(
    load: Load, task: Task, ways: Sequence[Way], run: Run, ranks: int, rows: list[Row], found: Callable[[Row], None]
) -> dict[str, Any]:  # fmt: skip
    """The reference, and each way beside it, whose rows are added; what is said of the model."""
    answers = run(ranks, task.device, reference, load, task)
    if any(each.error for each in answers):
        raise ValueError(f"the unsharded model cannot be trained: {_failures_text(answers)}")
    about: dict[str, Any] = answers[0].value
    for way in ways:
        begun = time.monotonic()
        answers = run(ranks, task.device, compare_way, load, task, way)
        row, why = answers[0].value, _failures_text(answers)
        if why:  # it is left out if its backend cannot compile the unsharded model either
            seconds = round(time.monotonic() - begun, 1)
            absent = [_failures_text(run(ranks, task.device, deviations, load, task, each))
                      for each in alone(way) if each.backend]  # fmt: skip
            verdict = LEFT_OUT if any(absent) else FAILED
            row = Row(way.name, ranks, verdict, task.resumes, why="".join(absent) or why, seconds=seconds,
                      compiled=way.how != "eager")  # fmt: skip
        rows.append(row)
        found(row)
    return about


def _failures_text(answers: Sequence[Answer]) -> str:
    """What the ranks that failed have raised, each text once."""
    texts: dict[str, list[int]] = {}
    for rank, each in enumerate(answers):
        if each.error:
            texts.setdefault(each.error, []).append(rank)
    return "\n".join(f"rank {', '.join(map(str, found))}: {text}" for text, found in texts.items())
