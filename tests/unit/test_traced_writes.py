"""What Dynamo's nodes write to."""

import operator
from typing import Any

import pytest
import torch
from torch import fx

from fsdp_compile.core.traced_writes import _written_arguments


@pytest.mark.parametrize(
    ("target", "writes"),
    [
        *((getattr(operator, name), False) for name in ("and_", "or_", "not_", "xor", "add", "neg", "rshift")),
        *((getattr(operator, name), True) for name in ("iand", "ior", "ixor", "iadd", "imul", "setitem")),
        (torch.bitwise_and, False),
        (torch._foreach_add_, True),
        (torch.nn.init.zeros_, True),
        (torch.ops.aten.add_.Tensor, True),
        (torch.ops.aten.add.Tensor, False),
    ],
)
def test_operators_that_write(target: Any, writes: bool) -> None:
    """Python's `and_` and `or_` write nothing, though their names end as those of functions that write in place."""
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    node = graph.call_function(target, (first, second))
    assert list(_written_arguments(node)) == [first] * writes
