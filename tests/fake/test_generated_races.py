"""No two operations in the code that Inductor generates for CUDA race, and no memory is used again too early.

tests/replaying.py reads the code without a GPU. Seeded faults, edits of its text, show that it finds what is wrong.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from cuda_code import as_for_cuda
from features import HYBRID
from generated import programs
from models import mlp, squared_error
from replaying import replayed
from test_cuda_code import compiled
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard

HYBRID_SHARD = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **HYBRID}
LOW = MixedPrecision(torch.bfloat16)
LATE = pytest.mark.nightly
CASES = [
    ("slow", {}, False), ("no_sync", {}, True),
    pytest.param("hybrid", HYBRID_SHARD, False, marks=LATE),
    pytest.param("far", {}, False, marks=LATE),
    pytest.param("kept", {"reshard_after_forward": False}, False, marks=LATE),
    pytest.param("two stages", {"reshard_after_forward": 2}, False, marks=LATE),
    pytest.param("hybrid, no_sync", HYBRID_SHARD, True, marks=LATE),
    pytest.param("bfloat16", {"mixed_precision": LOW}, False, marks=LATE),
    pytest.param("bfloat16, hybrid, no_sync", {"mixed_precision": LOW, **HYBRID_SHARD}, True, marks=LATE),
]  # fmt: skip


@cache
def _codes(name: str) -> list[str]:
    """The modules of forward and backward: of accumulation those under no_sync, then those after it."""
    if name in ("rule", "slow", "far"):
        return [program.code for program in compiled(name)[1]]
    options, accumulates = next((o, a) for case in CASES for n, o, a in [getattr(case, "values", case)] if n == name)
    torch.manual_seed(0)
    model = fully_shard(mlp(blocks=2), **options)
    run: Any = torch.compile(model, fullgraph=True)
    inputs = (torch.rand(8, 7), torch.rand(8, 5))
    codes = []
    for syncs in (False, True) if accumulates else (True,):
        with nullcontext() if syncs else model.no_sync(), as_for_cuda():
            codes += [program.code for program in programs(lambda: squared_error(run, inputs))]
    return codes


@pytest.mark.parametrize(("name", "options", "accumulates"), CASES)
def test_generated_code_does_not_race(name: str, options: dict[str, Any], accumulates: bool) -> None:
    """Kernels, collectives, waits, and buffers that are freed or used again: all are ordered."""
    records = [replayed(code) for code in _codes(name)]
    assert [record.races for record in records] == [[]] * (4 if accumulates else 2)
    assert all(record.operations > 15 for record in records)


def test_code_that_is_not_known_is_an_error() -> None:
    """Nothing is passed over: a race would be missed."""
    (forward, _) = _codes("rule")
    with pytest.raises(AssertionError, match="a call that is known, found: something_new"):
        replayed(forward.replace("fsdp_collectives.wait", "something_new"))


# --- seeded faults ----------------------------------------------------------------------------------------------------

GATHER, REDUCE = r"fsdp_collectives\.(?:at_start\.)?all_gather\(", r"reduce_scatter_tensor\.default\("
WAIT, WAIT_REDUCE = r"fsdp_collectives\.wait\((\w+)", r"wait_tensor\.default\((\w+)"
KERNEL = r"extern_kernels\.|\.run\("
Lines = list[str]


def _at(lines: Lines, pattern: str, which: int = 0) -> int:
    """The line where `pattern` is found for the `which`-th time."""
    return [index for index, line in enumerate(lines) if re.search(pattern, line) and "#" not in line[:20]][which]


def _found(lines: Lines, pattern: str, which: int = 0) -> str:
    return re.search(pattern, lines[_at(lines, pattern, which)])[1]  # type: ignore[index]  # _at has found it


def _drop(pattern: str, which: int) -> Callable[[Lines], None]:
    return lambda lines: lines.__delitem__(_at(lines, pattern, which))


def _drop_all(lines: Lines) -> None:
    """The waits for all units of the first coalesced launch: each of them waits for the launch as a whole."""
    units = _found(lines, r"all_gather_into_tensor_coalesced\.default\(\[(.+?)\]").split(",")
    for _ in units:
        del lines[_at(lines, WAIT_REDUCE)]


def _late(pattern: str, which: int) -> Callable[[Lines], None]:
    """Behind the next kernel."""

    def edit(lines: Lines) -> None:
        place = _at(lines, pattern, which)
        after = next(i for i in range(place + 1, len(lines)) if re.search(KERNEL, lines[i]))
        lines.insert(after, lines.pop(place))

    return edit


def _early(pattern: str, which: int, before: str) -> Callable[[Lines], None]:
    """In front of the last `before` in front of it."""

    def edit(lines: Lines) -> None:
        place = _at(lines, pattern, which)
        target = max(i for i in range(place) if re.search(before, lines[i]))
        lines.insert(target, lines.pop(place))

    return edit


def _wait_for_another(lines: Lines) -> None:
    place, other = _at(lines, WAIT_REDUCE, 1), _found(lines, WAIT_REDUCE, 0)
    lines[place] = re.sub(r"\(\w+\)", f"({other})", lines[place])


def _in_memory_of(buffer: str, which: int, other: str, which_other: int) -> Callable[[Lines], None]:
    """The buffer that a call names gets the memory of another one."""

    def edit(lines: Lines) -> None:
        name, instead = _found(lines, buffer, which), _found(lines, other, which_other)
        lines[:] = [line for line in lines if line.strip() != f"del {instead}"]
        place = _at(lines, rf"^\s*{name} = ")
        lines[place] = re.sub(rf"{name} = [^;]+", f"{name} = {instead}", lines[place])

    return edit


def _gather_into_read(lines: Lines) -> None:
    """The third gather fills the buffer of the second, which was waited for and is about to be read."""
    _in_memory_of(GATHER + r".*out=(\w+)", 2, GATHER + r".*out=(\w+)", 1)(lines)
    _early(WAIT, 1, GATHER)(lines)


def _freed_early(lines: Lines) -> None:
    """When the reduce has started, and not when it is waited for."""
    packed = [found[1] for line in lines if (found := re.search(REDUCE + r"(\w+)", line))]
    freed = next(f"del {name}" for name in packed if any(line.strip() == f"del {name}" for line in lines))
    place = next(index for index, line in enumerate(lines) if line.strip() == freed)
    lines.insert(_at(lines, REDUCE + freed.removeprefix("del ")) + 1, lines.pop(place))


def _in_another_stream(lines: Lines) -> None:
    place = _at(lines, r"\.run\(.*stream=")
    lines[place] = re.sub(r"stream=\w+", "stream=side", lines[place])


FORWARD, BACKWARD, AFTER = 0, 1, 3
ACCUMULATED = r"add_accumulated_\.default\((\w+)"
FAULTS: list[tuple[str, str, int, Callable[[Lines], None], tuple[str, str]]] = [
    ("a gather is not waited for", "rule", FORWARD, _drop(WAIT, 1), ("mm (", "all_gather")),
    ("a gather is waited for one kernel late", "rule", FORWARD, _late(WAIT, 2), ("mm (", "all_gather")),
    ("a reduce is not waited for", "rule", BACKWARD, _drop(WAIT_REDUCE, -1), ("the caller", "reduce_scatter")),
    ("a coalesced launch is not waited for", "far", BACKWARD, _drop_all, ("mm (", "all_gather")),
    ("replicas are averaged without that wait", "hybrid", BACKWARD, _drop(WAIT_REDUCE, 0),
     ("triton", "reduce_scatter")),
    ("replicas are not waited for", "hybrid", BACKWARD, _drop(WAIT_REDUCE, -1), ("the caller", "all_reduce_")),
    ("a wait for another reduce", "hybrid", BACKWARD, _wait_for_another, ("reduce_scatter", "triton")),
    ("a reduce before its last gradient", "rule", BACKWARD, _early(REDUCE, 0, r"extern_kernels\.mm\(reint"),
     ("mm (", "reduce_scatter")),
    ("an all-reduce before its input", "hybrid", BACKWARD, _early(r"all_reduce_\.default", 0, r"triton_poi\w+\.run"),
     ("triton", "all_reduce_")),
    ("gradients in the memory of a reduce in flight", "no_sync", AFTER,
     _in_memory_of(ACCUMULATED, 1, ACCUMULATED, 0), ("mm (", "reduce_scatter")),
    ("gradients in memory that a deferred reduce still reads", "no_sync", BACKWARD,
     _in_memory_of(r"defer_reduce\.default\((\w+)", 1, r"defer_reduce\.default\((\w+)", 0), ("eager runtime", "mm (")),
    ("a gather into memory that is still read", "rule", BACKWARD, _gather_into_read, ("mm (", "all_gather")),
    ("gradients are freed before the wait", "rule", BACKWARD, _freed_early, ("given to", "reduce_scatter")),
    ("a kernel in another stream", "rule", FORWARD, _in_another_stream, ("triton", "mm (")),
]  # fmt: skip


@pytest.mark.parametrize("names", [("rule", "no_sync"), pytest.param(("far", "hybrid"), marks=LATE)], ids=str)
def test_seeded_faults_are_found(names: tuple[str, ...]) -> None:
    """Each is reported with both operations; by day those of code that another test generates too."""
    missed = {}
    for what, name, which, edit, words in (fault for fault in FAULTS if fault[1] in names):
        lines = _codes(name)[which].splitlines()
        edit(lines)
        races = replayed("\n".join(lines)).races
        if not any(all(word in race for word in words) and race.count("(operation") == 2 for race in races):
            missed[what] = races[:3]
    assert missed == {}
