"""Sums of floating-point numbers that do not depend on how ranks share the elements.

Ranks cut flat parameters only between cells of 64 elements, with which parameters begin (`lay_out`). So a cell is added
up by itself, in float64, alike on whichever rank it is. Sums of cells are then added up exactly: additions of float64
are exact, in any order, while all addends are multiples of one number and the sum stays below 2^53 times it. So each is
split into parts that are multiples of given powers of two, and each part is summed by itself, by any kernel, over any
ranks. (J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Transactions on Computers 64(7), 2015.) With
m, the largest magnitude on all ranks, below 2^e:

    part 1   multiples of 2^(e-22), up to 2^e            2^31 of them add up to at most 2^53 multiples
    part 2   multiples of 2^(e-45), up to 2^(e-23)       of what part 1 leaves
    part 3   multiples of 2^(e-68), up to 2^(e-46)

What three parts leave is below 2^-69 m, so the sum of 2^31 cells is right to 2^-38 of m.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import add_in_pairs

_CELL = 64  # elements
_BITS = 22  # of a part, beside its sign
_PARTS = 3
_PIECE = 2**16  # elements that a CPU adds up at once, in its cache
_PIECE_ON_DEVICE = 2**24


def exact_sums(
    values: Sequence[Sequence[Tensor]],
    addend: Callable[[Tensor], Tensor],
    device: torch.device,
    all_reduce: Callable[..., Tensor],
) -> Tensor:
    """The sums of several sets of numbers over all ranks, float64 `[len(values)]`, alike for any number of ranks.

    An infinity or NaN among the addends has the effect that it has in any sum. Takes two all-reduces.

    Args:
        values: of each set what this rank has of it: floating tensors of any shape, which begin with a cell.
        addend: given values in float64, 1-D, which it may overwrite, returns what to add up; of zeros, zeros.
        device: of the tensors.
        all_reduce: given a plain tensor and "max" or "sum", reduces it over the ranks.
    """
    counts = [sum(-(-each.numel() // _CELL) for each in own) for own in values]
    rest = _sums_of_cells([each for own in values for each in own], sum(counts), addend, device)
    is_one = len(values) == 1
    set_of = torch.zeros(()) if is_one else torch.arange(len(values)).repeat_interleave(torch.tensor(counts)).to(device)
    largest = rest.new_zeros(len(values))
    if rest.numel():
        largest = rest.abs().amax(0, True) if is_one else largest.scatter_reduce_(0, set_of, rest.abs(), "amax")
    most = all_reduce(largest, "max")
    is_finite = most.isfinite()
    _, exponent = torch.frexp(most.where(is_finite, 0.0))
    sums = rest.new_zeros(_PARTS, len(values))
    for part in range(_PARTS):
        # 1.5 times 2^52 times a power of two: a sum with it is rounded to multiples of that power.
        power = exponent.long().clamp(min=-800) - _BITS - (_BITS + 1) * part
        rounder = ((power + 52 + 1023) << 52).view(torch.float64) * 1.5
        rounder = rounder if is_one else rounder[set_of]
        rounded = (rest + rounder).sub_(rounder)
        rest.sub_(rounded)
        sums[part] = rounded.sum() if is_one else sums[part].index_add(0, set_of, rounded)
    first, second, third = all_reduce(sums, "sum")
    return torch.where(is_finite, third + second + first, first)


def powers_of_norm(x: Tensor, order: float) -> Tensor:
    """What is added up for a norm of `order`, 0 or more, of `x`, which may be overwritten."""
    if order == 2:
        return x.mul_(x)
    return x.abs_().pow_(order) if order else (x != 0).double()


def _sums_of_cells(
    tensors: Sequence[Tensor], cells: int, addend: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """The sum of each of the `cells`, float64; the last cell of a tensor is filled up with zeros."""
    sums = torch.empty(cells, dtype=torch.float64, device=device)
    piece = _PIECE if device.type == "cpu" else _PIECE_ON_DEVICE
    buffer = sums.new_empty(min(piece, cells * _CELL))
    zeros, begin = torch.zeros(_CELL, dtype=tensors[0].dtype if tensors else None, device=device), 0
    batch: list[Tensor] = []
    waiting = 0  # elements of the batch

    def add_up() -> None:
        nonlocal begin, waiting
        joined = torch.cat(batch) if len(batch) > 1 else batch[0]
        rows = addend(buffer[:waiting].copy_(joined)).view(-1, _CELL)
        out = sums[begin : begin + len(rows)]
        if device.type == "cpu":
            torch.sum(rows, 1, out=out)
        else:  # a GPU's kernel adds up a row in an order that depends on how many there are
            add_in_pairs(rows.t(), out=out)
        begin, waiting = begin + len(rows), 0
        batch.clear()

    for each in tensors:
        stored = each.reshape(-1)
        for part in (stored,) if each.numel() <= piece else stored.split(piece):
            numel = part.numel()
            padding = -numel % _CELL
            if waiting + numel + padding > piece:
                add_up()
            batch += [part, zeros[:padding]] if padding else [part]
            waiting += numel + padding
    if waiting:
        add_up()
    return sums
