"""Which operators passes may take for views that keep their argument's values."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fsdp_compile.passes.graph.nodes import is_view, keeps_values

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool, torch.complex64)
ARGUMENTS: dict[str, list[Any]] = {
    "int": [0, 1],
    "SymInt": [0, 2],
    "Optional[int]": [0],
    "Optional[SymInt]": [0],
    "List[int]": [[1, 0], [24], [4, 6], [0]],
    "List[SymInt]": [[24], [6, 4], [4, 6], [1, 1]],
    "Optional[List[SymInt]]": [None],
    "number": [2],
    "dtype": [torch.int16, torch.int32, torch.float32, torch.uint8],
    "bool": [False],
}
"""What is tried for arguments of each type, of a tensor of shape `[4, 6]`."""


def _views() -> Iterator[OpOverload]:
    """All operators of torch that return a view of their first argument, by their schema."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            first = operator._schema.arguments[0] if operator._schema.arguments else None
            if first is not None and str(first.type) == "Tensor" and first.alias_info and not first.alias_info.is_write:
                yield operator


def _calls(operator: OpOverload, value: Tensor) -> Iterator[fx.Node]:
    """Nodes that call `operator` on `value`, as far as the arguments tried fit."""
    required = [each for each in operator._schema.arguments[1:] if not each.has_default_value()]
    for given in itertools.product(*(ARGUMENTS.get(str(each.type), []) for each in required)):
        graph = fx.Graph()
        source = graph.placeholder("source")
        source.meta["val"] = value
        try:
            result = operator(value, *given)
            _bits(result)  # what cannot be read, as a negative boolean, is in no graph
        except (RuntimeError, IndexError, NotImplementedError, AttributeError):
            continue
        if isinstance(result, Tensor) and _lies_within(result):
            node = graph.call_function(operator, (source, *given))
            node.meta["val"] = result
            yield node


def _lies_within(view: Tensor) -> bool:
    """Whether all elements lie in the storage, which `_reshape_alias` does not check."""
    last = view.storage_offset() + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size() <= view.untyped_storage().nbytes()


def _values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(4, 6, dtype=dtype, generator=generator)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (4, 6), generator=generator).to(dtype)


def _bits(value: Tensor) -> Tensor:
    """The bits of each element that is read, as an integer; two for complex numbers are folded into one."""
    plain = value.resolve_conj().contiguous() if value.is_complex() else value.contiguous()
    plain = plain.resolve_neg().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(torch.uint8).view(-1, plain.element_size()).contiguous().view(widths[plain.element_size()])


def test_views_keep_the_values_of_their_argument() -> None:
    """Each element of what `keeps_values` accepts is an element of the argument, for all views of torch, by dtype."""
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for operator, dtype in itertools.product(_views(), DTYPES):
        value = _values(dtype)
        for node in _calls(operator, value):
            assert is_view(node), operator
            keeps = keeps_values(node)
            seen[keeps].add(str(operator))
            result = node.meta["val"]
            is_part = result.dtype == dtype and bool(torch.isin(_bits(result), _bits(value)).all())
            assert is_part or not keeps, f"{operator} of {dtype} has other values than its argument"
    assert {"aten.view.default", "aten.t.default", "aten.slice.Tensor", "aten.select.int"} <= seen[True]
    assert {"aten.view.dtype", "aten._conj.default", "aten._neg_view.default"} <= seen[False]
    assert len(seen[True]) >= 25, sorted(seen[True])
