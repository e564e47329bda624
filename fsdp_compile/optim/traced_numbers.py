"""Options of an optimizer that remember what arithmetic makes of them: a schedule needs no new recording of a step.

    trace = Trace()
    step({**group, **trace.options(group)})    floats that a step computes with as with any others
    trace.made                                 all that it has computed from them, in order
    trace.made[5].of({"lr": 0.01, ...})        what that is, to the last bit, if the step has other options

What a step compares, rounds or converts is in `trace.fixed`: the operators that it calls may depend on that.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Options = Mapping[str, Any]


class Number(float):
    """An option, or what was computed from some.

    Attributes:
        names: of these options.
        of: computes it from other ones.
    """

    __slots__ = ("_trace", "names", "of")

    _trace: "Trace"
    names: frozenset[str]
    of: Callable[[Options], float]


class Trace:
    """The numbers of one step."""

    def __init__(self) -> None:
        self.made: list[Number] = []
        self.fixed: frozenset[str] = frozenset()

    def options(self, group: Options) -> dict[str, Number]:
        """Those of the options that are floats."""
        names = [name for name, value in group.items() if type(value) is float]
        return {name: self.number(group[name], frozenset((name,)), operator.itemgetter(name)) for name in names}

    def number(self, value: float, names: frozenset[str], of: Callable[[Options], float]) -> Number:
        """One that `of` computes from the options of these names."""
        found = Number(value)
        found._trace, found.names, found.of = self, names, of
        self.made.append(found)
        return found


def made_from(one: Trace, other: Trace, names: frozenset[str]) -> dict[tuple[float, float], list[Number]] | None:
    """By the values that they have in two traces of one step, the numbers that were made of options of these names.
    None if the step may call other operators when these change.
    """
    if names & (one.fixed | other.fixed) or len(one.made) != len(other.made):
        return None
    known: dict[tuple[float, float], list[Number]] = {}
    for number, its in zip(one.made, other.made, strict=True):
        if number.names & names:
            known.setdefault((float.__pos__(number), float.__pos__(its)), []).append(number)
    return known


def options_of(group: Options) -> list[tuple[str, Any]]:
    """What is equal where the options of two groups are."""
    return [(name, exact(value)) for name, value in group.items() if name not in ("params", "param_names")]


def exact(value: Any) -> Any:
    """What is equal where values are: numbers of tensors too, of which `repr` shows the first digits."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return [(name, exact(each)) for name, each in value.items()]
    return [exact(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def _names(operands: tuple[Any, ...]) -> frozenset[str]:
    return frozenset().union(*(each.names for each in operands if isinstance(each, Number)))


def _arithmetic(name: str) -> Callable[..., Any]:
    """The method of floats, with a result that remembers its operands."""
    compute = getattr(float, name)

    def method(*operands: Any) -> Any:
        result = compute(*operands)
        if type(result) is not float:  # the other one is a tensor
            return result

        def of(options: Options) -> float:
            value: float = compute(*(each.of(options) if isinstance(each, Number) else each for each in operands))
            return value

        return operands[0]._trace.number(result, _names(operands), of)

    return method


def _look(name: str) -> Callable[..., Any]:
    """The method of floats, which notes that what follows may depend on the operands."""
    compute = getattr(float, name)

    def method(*operands: Any) -> Any:
        operands[0]._trace.fixed |= _names(operands)
        return compute(*operands)

    return method


_ARITHMETIC = ("neg", "pos", "abs", "add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "rpow")
_LOOKS = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "float", "int", "trunc", "round", "floor", "ceil", "repr")
for _method, _kinds in ((_arithmetic, _ARITHMETIC), (_look, _LOOKS)):
    for _kind in _kinds:
        setattr(Number, f"__{_kind}__", _method(f"__{_kind}__"))
