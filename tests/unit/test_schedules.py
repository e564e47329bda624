"""A schedule of Muon's options needs no new recording, and its numbers are those of one, to the last bit."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import Muon

from fsdp_compile.optim.matrix_program import MatrixProgram
from fsdp_compile.optim.matrix_recorder import MatrixRecorder
from fsdp_compile.optim.traced_numbers import Trace, options_of

SHAPE = (6, 4)


def recorder() -> MatrixRecorder:
    return MatrixRecorder(SHAPE, SHAPE, torch.float32, {"momentum_buffer": torch.empty(SHAPE)})


def program(by: MatrixRecorder, optimizer: Muon) -> MatrixProgram:
    (group,) = optimizer.param_groups
    return by.program(optimizer, group, options_of(group), {"momentum_buffer": torch.empty(SHAPE)})


def operations(of: MatrixProgram) -> list[Any]:
    return [[tuple(each) for each in part] for part in (of.before, of.whole, of.beside, of.after)]


@pytest.mark.parametrize("changes", [("lr",), ("lr", "momentum", "weight_decay"), ("eps", "lr")])
def test_schedule(changes: tuple[str, ...]) -> None:
    """Whatever floats change, the step is recorded twice; each program is what a new recorder records."""
    optimizer, kept = Muon([nn.Parameter(torch.empty(SHAPE))], lr=0.02), recorder()
    draw = torch.Generator().manual_seed(0)
    with patch.object(kept, "_record", wraps=kept._record) as recorded:
        for _ in range(12):
            assert operations(program(kept, optimizer)) == operations(program(recorder(), optimizer))
            for name in changes:
                optimizer.param_groups[0][name] = torch.rand((), generator=draw, dtype=torch.float64).item()
        assert recorded.call_count == 2
        optimizer.param_groups[0].update(nesterov=False, lr=0.5)
        assert operations(program(kept, optimizer)) == operations(program(recorder(), optimizer))
        assert recorded.call_count == 3


def test_parts() -> None:
    """Weight decay needs no result of an owner, so it is not behind the exchange."""
    found = program(recorder(), Muon([nn.Parameter(torch.empty(SHAPE))]))
    assert [[each.name for each in part] for part in (found.before, found.beside, found.after)] == [
        ["lerp", "lerp", "_to_copy"],
        ["mul"],
        ["add"],
    ]


def test_numbers_that_look_constant() -> None:
    """A weight decay so small that 1 - lr * weight_decay is 1 in two recordings is no constant of later ones."""
    optimizer, kept = Muon([nn.Parameter(torch.empty(SHAPE))], lr=1e-18), recorder()
    for lr in (1e-18, 2e-18, 0.1, 0.2, 0.0, 0.3, 0.03):
        optimizer.param_groups[0]["lr"] = lr
        assert operations(program(kept, optimizer)) == operations(program(recorder(), optimizer)), lr


def test_traced_numbers() -> None:
    """Arithmetic is remembered in any order of operands; a look at a number is noted."""
    trace = Trace()
    given = trace.options({"a": 3.0, "b": 0.7, "c": 2, "name": "x"})
    a, b = given["a"], given["b"]
    assert given.keys() == {"a", "b"} and not trace.fixed
    for made in (1 - a * b, -((b / 3) ** 2), abs(2**-a), 5 / a - 1 + b, +(a - b) * 0.1):
        assert made.of({"a": 3.0, "b": 0.7}) == float.__pos__(made)
    number = 1 - a * b
    assert number.of({"a": 0.3, "b": 0.1}) == 1 - 0.3 * 0.1 and number.names == {"a", "b"}
    assert (b * torch.ones(2)).tolist() == (0.7 * torch.ones(2)).tolist() and not trace.fixed
    assert b < 1 and trace.fixed == {"b"}
    assert max(1.0, a) == 3.0 and trace.fixed == {"a", "b"}
