"""All values of a training step, and by how much two of them differ.

Values are compared with those of the unsharded model: bit for bit first, then by the largest difference of an element.
How much rounding explains is measured: by how much the unsharded model itself differs when it is compiled, and when
each of its parameters is moved by one unit in the last place.

A gradient may be zero but for rounding, as that of a bias whose sum cancels: then its elements are random, and so is by
how much they differ. What cancels is as large as gradients of other parameters, so those give the unit.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

TIMES = 16.0  # the differences of the unsharded model that count as rounding
UNITS = 32.0  # in the last place of a tensor's largest element, likewise
OF_GRADIENTS = ("gradient", "state", "gradient of the output", "gradient of the input")  # kinds that may cancel
SHOWN = 6  # digits of a value


class Key(NamedTuple):
    """A value of a step.

    Attributes:
        kind: "output", "loss", "gradient", "buffer", "parameter" or "state", in the order of a step; or an event of a
            module, as in modules.py.
        name: of the parameter or buffer; where in the output; of states, as in "exp_avg of weight".
    """

    kind: str
    name: str

    def __str__(self) -> str:
        text = {"parameter": "parameter {} after the update", "state": "{} in the optimizer", "loss": "the loss"}
        return text.get(self.kind, f"{self.kind} {{}}" if self.kind == "buffer" else f"{self.kind} of {{}}").format(
            self.name
        )

    @property
    def scale(self) -> str:
        """Names the values that add up numbers as large as this one does, such as all "exp_avg"; "" if none do."""
        entry = self.name.partition(" of ")[0] if self.kind == "state" else ""
        return f"{self.kind} {entry}" if self.kind in OF_GRADIENTS else ""


Values = dict[Key, Tensor]
Allowed = Mapping[Key, float]  # by how much the unsharded model differs from itself


@dataclass(frozen=True)
class Difference:
    """Two values of one name that are not the same bits.

    Attributes:
        key: which.
        error: the largest difference of an element; infinite if shapes, dtypes, NaNs or their being there differ.
        allowed: what rounding explains.
        expected: the unsharded model's value, at the element that differs most.
        found: the sharded model's.
        at: where that element is.
        count: how many elements differ by more than `allowed`, of how many.
    """

    key: Key
    error: float
    allowed: float
    expected: str
    found: str
    at: tuple[int, ...] = ()
    count: tuple[int, int] = (1, 1)

    @property
    def is_fault(self) -> bool:
        """Whether it is more than rounding explains."""
        return not self.error <= self.allowed

    def __str__(self) -> str:
        where = f" at {list(self.at)}" if self.at else ""
        text = f"expected {self.expected}, found {self.found}{where}"
        if self.count[1] > 1:
            text += f"; {self.count[0]:,} of {self.count[1]:,} elements differ"
        return text + (f", rounding explains {self.allowed:.1e}" if self.error < float("inf") else "")


def kept(tensor: Tensor) -> Tensor:
    """A copy of all elements in host memory. Of a sharded tensor all ranks must call this."""
    full = tensor.detach()
    if hasattr(full, "full_tensor"):
        full = full.full_tensor()
    return full.to("cpu", copy=True).contiguous()


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists, dicts and dataclasses, by where they are."""
    if isinstance(value, Tensor):
        yield path or "the model", value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for at, each in enumerate(value):
            yield from tensors_in(each, f"{path}[{at}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal bits."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def distances(one: Tensor, other: Tensor) -> Tensor:
    """How far apart the elements are, float64; infinite where just one is NaN, or infinite."""
    kind = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(kind), other.to(kind)
    apart = (first - second).abs()
    alike = (first == second) | (first.isnan() & second.isnan())
    return apart.nan_to_num(nan=float("inf")).masked_fill(alike, 0.0)


def deviation(found: Mapping[Key, Tensor], expected: Mapping[Key, Tensor]) -> dict[Key, float]:
    """The largest distance of each value that both have."""
    both = {key: (value, expected[key]) for key, value in found.items() if key in expected}
    return {
        key: distances(*pair).max().item() if pair[0].numel() else 0.0
        for key, pair in both.items()
        if pair[0].shape == pair[1].shape
    }


def largest(deviations: Iterable[Allowed]) -> dict[Key, float]:
    """Of each value the largest of several deviations. One that is not finite says nothing, and does not count."""
    found: dict[Key, float] = {}
    for each in deviations:
        for key, value in each.items():
            found[key] = max(found.get(key, 0.0), value if value < float("inf") else 0.0)
    return found


def differences(found: Mapping[Key, Tensor], expected: Mapping[Key, Tensor], allowed: Allowed) -> list[Difference]:
    """All values that are not the same bits, in the order of `expected`.

    Args:
        found: of the sharded model; what it cannot show is not in `expected` either.
        expected: of the unsharded model.
        allowed: by how much the unsharded model differs from itself.
    """
    scales: dict[tuple[str, torch.dtype], float] = {}
    for key, value in expected.items():
        if key.scale:
            scale = key.scale, value.dtype
            scales[scale] = max(scales.get(scale, 0.0), _last_place(value))
    made = (difference(key, found.get(key), value, allowed.get(key, 0.0), scales.get((key.scale, value.dtype), 0.0))
            for key, value in expected.items())  # fmt: skip
    new = (difference(key, value, None, 0.0) for key, value in found.items() if key not in expected)
    return [each for each in (*made, *new) if each is not None]


def _last_place(tensor: Tensor) -> float:
    """A unit in the last place of the largest finite element; 0 for integers."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    sizes = tensor.abs().double().nan_to_num(nan=0.0, posinf=0.0)
    return torch.finfo(tensor.dtype).eps * sizes.max().item()


def difference(
    key: Key, found: Tensor | None, expected: Tensor | None, deviates: float, of_all: float = 0.0
) -> Difference | None:
    """How a value differs, if it does; `of_all`: a unit in the last place of what others of its scale have."""
    if found is None or expected is None:
        texts = ["none" if each is None else f"a tensor of shape {tuple(each.shape)}" for each in (expected, found)]
        return Difference(key, float("inf"), 0.0, texts[0], texts[1])
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        texts = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (expected, found)]
        return Difference(key, float("inf"), 0.0, texts[0], texts[1])
    if same_bits(found, expected):
        return None
    apart = distances(found, expected)
    allowed = TIMES * deviates + UNITS * _last_place(expected) + of_all
    worst = int(apart.argmax())
    at = tuple(int(each) for each in torch.unravel_index(torch.tensor(worst), apart.shape))
    count = int((apart > allowed).sum()) or int((apart > 0).sum())
    texts = [f"{each.reshape(-1)[worst].item():.{SHOWN}g}" for each in (expected, found)]
    return Difference(key, apart.max().item(), allowed, texts[0], texts[1], at, (count, apart.numel()))
