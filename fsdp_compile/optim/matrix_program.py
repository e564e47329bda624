"""What an optimizer of complete matrices does to one parameter: recorded from its own `step` (matrix_recorder.py), and
cut in four.

    before    on the elements that each rank stores    Muon: momentum, Nesterov's average, the cast to bfloat16
    whole     on the complete matrix, on its owner     Muon: Newton-Schulz
    beside    on the elements that each rank stores    Muon: weight decay
    after     likewise                                 Muon: the update

The operators are those that `step` has called, with their numbers, and the same kernels run. So nothing of an optimizer
is written a second time, and what an option changes is seen in the next recording. Newton-Schulz is not compiled: on a
CPU products of matrices take nearly all of its time, and fusions round otherwise, by percents of an update
(`python -m bench muon --newton-schulz`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_compile.optim._torch import of_lists

State = dict[str, Any]

ELEMENTWISE = {
    *("abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "clone", "copy", "div", "exp", "lerp"),
    *("log", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "sign", "sqrt"),
    *("sub", "tanh", "where", "_to_copy"),
}
"""Operators whose result has at each index what the operands have there, by their names without `_`."""


class NotRecordable(Exception):
    """The optimizer does something that no program expresses."""


class Value(NamedTuple):
    """A tensor: 0 is the parameter, 1 its gradient, then come its state and the results in order."""

    position: int


class Operation(NamedTuple):
    """One operator; its result is `Value(result)`, which is one of its operands if it works in place."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload, and without the `_` of one that works in place."""
        return operator_name(self.function)


@dataclass(frozen=True, eq=False)
class MatrixProgram:
    """The operators of one step. Values: 0 is the parameter, 1 its gradient, then come its state and results.

    Attributes:
        before: what comes before the exchange.
        whole: what the owner computes.
        beside: what changes parameters or state without results of `whole`, and may run at any time after `before`.
        after: what needs these results.
        state: names of the state that has the parameter's shape, with its positions; zeros if the step makes it.
        scalars: state without dimensions, and plain numbers, as the step leaves them.
        sent: what the owner needs of each rank.
        returned: what each rank needs of the owner.
        kept: what `beside` and `after` read beside that.
        dtypes: of state, and of what is sent and returned.
        flops: of the matrix products in `whole`.
    """

    shape: tuple[int, ...]
    before: tuple[Operation, ...]
    whole: tuple[Operation, ...]
    beside: tuple[Operation, ...]
    after: tuple[Operation, ...]
    state: Mapping[str, int]
    scalars: State
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    kept: tuple[int, ...]
    dtypes: Mapping[int, torch.dtype]
    flops: int
    batches: bool

    @property
    def bytes_sent(self) -> int:
        """Of each element, to the owner; as many return if dtypes are equal."""
        return sum(self.dtypes[position].itemsize for position in self.sent)

    def exchanges_as(self, other: "MatrixProgram") -> bool:
        """Whether it has the state of `other`, and sends and returns the same."""
        mine, its = ((each.state, each.sent, each.returned, each.dtypes, each.scalars) for each in (self, other))
        return mine == its

    def run_whole(self, values: dict[int, Tensor], one_by_one: bool) -> dict[int, Sequence[Tensor]]:
        """What is returned of matrices of this program: for each position one `[*shape]` for each of them.

        Args:
            values: by position what was sent, `[n, *shape]`; overwritten.
            one_by_one: whether each matrix is computed by itself, so that its bits do not depend on the others.
        """
        if self.batches and not one_by_one:
            run(self.whole, values, _batched)
            return {position: values[position].unbind() for position in self.returned}
        found: list[dict[int, Tensor]] = []
        for index in range(len(next(iter(values.values())))):
            own = {position: value[index] for position, value in values.items()}
            run(self.whole, own)
            found.append(own)
        return {position: [own[position] for own in found] for position in self.returned}


def run(
    operations: Iterable[Operation], values: dict[int, Tensor], call: Callable[..., Tensor] | None = None
) -> dict[int, Tensor]:
    """Run `operations` on `values`, by position, to which results are added."""
    for function, args, kwargs, result in operations:
        given = [values[each.position] if type(each) is Value else each for each in args]
        if kwargs:
            named = {key: values[each.position] if type(each) is Value else each for key, each in kwargs.items()}
        else:
            named = kwargs
        values[result] = function(*given, **named) if call is None else call(function, *given, **named)
    return values


# Note [One call for several tensors]
# What is computed from the elements that a rank stores is the same for all parameters of one shape and group, but for
# memory. So each operator is called once, with a list. On the CPU, and where dtypes differ, torch calls the operator's
# own kernel for each tensor then; on an accelerator a kernel for all, which might round otherwise, so not where bits
# count. An operator without such a form is called for each tensor.

_OF_LISTS = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "neg", "abs", "sqrt"}
"""Operators that torch also has as `_foreach_*`, with operands in the same order."""
_SCALED = {"mul", "mul_", "div", "div_"}
"""Those of them whose number may be a tensor on the CPU."""
_EXACT_SCALARS = {torch.float32, torch.float64}
"""Dtypes to which their kernels round a number; those of shorter ones compute with it in float32."""


def run_on_each(operations: Iterable[Operation], values: dict[int, list[Tensor]], one_by_one: bool) -> None:
    """Run `operations` on several tensors at once: `values` has a list of them for each position, all of one length.

    Args:
        values: results are added.
        one_by_one: whether each tensor has the bits of the operator's own kernel, also on an accelerator.
    """
    for function, args, kwargs, result in operations:
        given = [values[each.position] if type(each) is Value else each for each in args]
        name = _plain_name(function)
        at_once = None if one_by_one and not given[0][0].is_cpu else _at_once(name, given, kwargs)
        if at_once is None:
            values[result] = [function(*each, **dict(named)) for each, named in _for_each(given, kwargs, values)]
            continue
        if name in _SCALED and type(given[1]) is float and given[0][0].dtype in _EXACT_SCALARS:
            given[1] = torch.tensor(given[1], dtype=given[0][0].dtype)  # else torch makes one for each of the list
        found = at_once(*given, **kwargs)
        values[result] = given[0] if name.endswith("_") else list(found)


def _at_once(name: str, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What runs an operator on lists; None: there is no such form for these operands."""
    if name == "_to_copy" and kwargs.keys() == {"dtype"}:
        return _cast
    has_factor = kwargs.keys() <= {"alpha", "value"} and not any(type(each) is Value for each in kwargs.values())
    if name.rstrip("_") not in _OF_LISTS or not has_factor or type(given[0]) is not list:
        return None
    return None if kwargs and type(given[-1]) is not list else of_lists(name)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of `tensors`, 1-D, in `dtype`: views of one new tensor."""
    sizes = [tensor.numel() for tensor in tensors]
    found = list(tensors[0].new_empty(sum(sizes), dtype=dtype).split(sizes))
    of_lists("copy_")(found, list(tensors))
    return found


def _for_each(
    given: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[int, Sequence[Tensor]]
) -> Iterator[tuple[list[Any], list[tuple[str, Any]]]]:
    """The operands of each of several calls of one operator."""
    named = {key: values[each.position] if type(each) is Value else each for key, each in kwargs.items()}
    for index in range(len(given[0])):
        own = [(key, each[index] if type(each) is list else each) for key, each in named.items()]
        yield [each[index] if type(each) is list else each for each in given], own


@cache
def _plain_name(function: Any) -> str:
    """The name of an operator of torch, without namespace and overload."""
    name: str = function.name()
    return name.partition("::")[2].partition(".")[0]


def operator_name(function: Any) -> str:
    """The name of an operator of torch, without namespace, overload and `_`."""
    return _plain_name(function).rstrip("_")


# Note [One kernel for several matrices]
# Matrices of one shape are stacked, `[n, rows, columns]`; a number of each is `[n, 1, 1]`. Products become batched
# ones, norms are taken over the last two dimensions, and all else is elementwise. That saves launches on an
# accelerator. A batched product may round otherwise: on the CPU one of 2,000 small matrices differed in one element of
# bfloat16. So each matrix is computed alone on the CPU, where a launch costs little, and where bits count
# (`reduction_order="tree"`).


def _norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True, dtype=dtype)


OF_BATCHES: dict[str, Callable[..., Tensor]] = {
    "mm": torch.bmm,
    "addmm": torch.baddbmm,
    "t": lambda x: x.transpose(-2, -1),
    "transpose": lambda x, *_: x.transpose(-2, -1),
    "permute": lambda x, *_: x.transpose(-2, -1),
    "linalg_vector_norm": _norm,
}


def _batched(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    of_batches = OF_BATCHES.get(operator_name(function))
    return (of_batches or function)(*args, **kwargs)
