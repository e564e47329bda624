"""Formats in which ranks send values: bfloat16, and one byte an element with a scale for each block of 128.

    encode(values, format)                     [rows, n]        ->  messages [rows, m], one for each row
    decode(messages, n, format, dtype)         messages         ->  values [rows, n] in `dtype`
    add_up(messages, n, format, op, dtype)     messages         ->  [n], the sum or mean of the rows in float32

What a finite value x of a block whose largest finite magnitude is b may become, beside the rounding to `dtype`:

    format   bytes an element   error at most                      message of n elements
    bf16     2                  |x| / 256                          n of bfloat16
    fp8      1 + 1/128          the larger of |x| / 16, b / 2^17   bytes of float8_e4m3fn; a byte for each block: the
                                                                   exponent of its scale, a power of two
    int8     1 + 2/128          b / 250                            bytes; for each block two of its scale, a bfloat16

and below 2^-126 an absolute error of 2^-127. Infinities and NaN arrive as such, and leave other elements of the block
as they are. A finite value stays finite: what rounding takes beyond the largest number of `dtype` becomes that number.
A block of zeros arrives as zeros. Blocks begin with each row, and are filled up with zeros.

The functions are made of operators that Inductor fuses: eager code calls them, and graph passes trace them.
"""

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Format = Literal["bf16", "fp8", "int8"]
BLOCK = 128
FORMATS = ("bf16", "fp8", "int8")
SENDABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of values that can be sent in a format."""

_SCALE_BYTES = {"fp8": 1, "int8": 2}  # of a block
_INFINITY = 448.0  # the largest number of float8_e4m3fn, which has no infinity: no finite value is brought beyond 256
_EXPONENT = 23  # where that of a float32 begins
_TOP, _NAN = 126, -128  # of int8: the largest finite value is 126, and 127 stands for infinity


def encode(values: Tensor, format: str, join: Callable[..., Tensor] = torch.cat) -> Tensor:
    """A message for each row of `values`, `[rows, n]` of a floating dtype: see this file's first lines.
    `join`: what concatenates the bytes of elements and scales.
    """
    values = values.float()
    if format == "bf16":
        largest = torch.finfo(torch.bfloat16).max
        return torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(torch.bfloat16)
    rows, numel = values.shape
    missing = -numel % BLOCK
    blocks = (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(rows, -1, BLOCK)
    magnitudes = blocks.abs()
    most = torch.where(magnitudes < torch.inf, magnitudes, 0.0).amax(2, keepdim=True)  # [rows, blocks, 1]
    elements, scales = (_float8 if format == "fp8" else _int8)(blocks, most)
    return join([elements.view(rows, -1), *(each.to(torch.uint8).view(rows, -1) for each in scales)], 1)


def _float8(blocks: Tensor, largest: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The largest element of each block comes into [128, 256), by a division that rounds nothing."""
    exponent = ((largest.view(torch.int32) >> _EXPONENT) - 7).clamp(1, 254)
    inverse = ((254 - exponent) << _EXPONENT).view(torch.float32)
    return (blocks * inverse).clamp(-_INFINITY, _INFINITY).to(torch.float8_e4m3fn).view(torch.uint8), [exponent]


def _int8(blocks: Tensor, largest: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Scales are rounded up, so that no finite element comes beyond 126."""
    bits = (((largest / _TOP).view(torch.int32) + 0xFFFF) >> 16).clamp(1 << 7, 0x7F7F)
    scaled = (blocks / (bits << 16).view(torch.float32)).round().clamp(-_TOP, _TOP)
    scaled = torch.where(blocks.isinf(), blocks.clamp(-_TOP - 1, _TOP + 1), scaled)
    return torch.where(blocks.isnan(), float(_NAN), scaled).to(torch.int8).view(torch.uint8), [bits >> 8, bits & 0xFF]


def decode(messages: Tensor, numel: int, format: str, dtype: torch.dtype) -> Tensor:
    """What `messages`, `[rows, m]`, stand for: `[rows, numel]` in `dtype`."""
    if format == "bf16":
        return _clamp_to_dtype(messages.float(), messages.isinf(), dtype)
    rows, blocks = len(messages), -(-numel // BLOCK)
    if not blocks:  # parameters without elements
        return messages.narrow(1, 0, 0).to(dtype)
    elements = messages.narrow(1, 0, blocks * BLOCK).reshape(rows, blocks, BLOCK)  # not by `[]`: it asks for the device
    scale_bytes = messages.narrow(1, blocks * BLOCK, blocks * _SCALE_BYTES[format])
    first, *second = scale_bytes.int().split(blocks, 1)
    if format == "fp8":
        values, scales = elements.view(torch.float8_e4m3fn).float(), first << _EXPONENT
        is_infinite = values.abs() == _INFINITY
    else:
        values, scales = elements.view(torch.int8).float(), ((first << 8) | second[0]) << 16
        is_infinite = values.abs() == _TOP + 1
        values = torch.where(values == _NAN, torch.nan, values)
    values = torch.where(is_infinite, values * torch.inf, values * scales.view(torch.float32).unsqueeze(2))
    return _clamp_to_dtype(values, is_infinite, dtype).view(rows, -1).narrow(1, 0, numel)


def _clamp_to_dtype(values: Tensor, is_infinite: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite values stay finite in `dtype`."""
    largest = torch.finfo(dtype).max
    return torch.where(is_infinite, values, values.clamp(-largest, largest)).to(dtype)


def add_up(messages: Tensor, numel: int, format: str, op: str, dtype: torch.dtype) -> Tensor:
    """The sum, or with `op` "avg" the mean, of what the rows stand for: `[numel]` in `dtype`.
    Additions are in float32, in the order of the rows.
    """
    total = decode(messages[:1], numel, format, torch.float32)[0].clone()
    for row in messages[1:].split(1):
        total.add_(decode(row, numel, format, torch.float32)[0])
    return (total.div_(len(messages)) if op == "avg" else total).to(dtype)


def add_up_at_once(messages: Tensor, numel: int, format: str, op: str, dtype: torch.dtype) -> Tensor:
    """As `add_up`, in one loop over all rows: for graphs that Inductor compiles."""
    values = decode(messages, numel, format, torch.float32)
    return (values.mean(0) if op == "avg" else values.sum(0)).to(dtype)


@cache
def ratio(format: str, dtype: torch.dtype) -> float:
    """Bytes of a long message, relative to those of its values in `dtype`; 1 without a format."""
    if not format:
        return 1.0
    return (2.0 if format == "bf16" else 1 + _SCALE_BYTES[format] / BLOCK) / dtype.itemsize
