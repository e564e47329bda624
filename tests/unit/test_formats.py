"""Formats of messages against a reference in NumPy: bounds of errors, values that are no numbers, sums."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp_compile.comm.formats import BLOCK, FORMATS, SENDABLE, add_up, add_up_at_once, decode, encode, ratio
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.hops import Wire, hops_of

SIZES = (1, 2, 127, 128, 129, 1000, 10_003)
formats = pytest.mark.parametrize("format", FORMATS)


def _values(seed: int, rows: int, numel: int) -> Tensor:
    """Random numbers, heavy-tailed ones, tiny ones, or the largest that there are."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, numel, generator=generator)
    kind = seed % 4
    if kind == 1:
        values *= torch.exp(8 * torch.randn(rows, numel, generator=generator)).clamp(max=1e30)
    elif kind == 2:
        values *= 10.0 ** (-38 - seed % 7)
    elif kind == 3:
        values = values.sign() * torch.finfo(torch.float32).max * torch.rand(rows, numel, generator=generator)
    return values


def _blocks(values: np.ndarray) -> np.ndarray:
    rows, numel = values.shape
    padded = np.zeros((rows, -(-numel // BLOCK) * BLOCK), np.float64)
    padded[:, :numel] = values
    return padded.reshape(rows, -1, BLOCK)


def _float8_numbers() -> np.ndarray:
    """All finite numbers of float8_e4m3fn that are not negative, but for 448."""
    mantissas, exponents = np.arange(8) / 8, np.arange(1, 16)
    normal = ((1 + mantissas)[None] * 2.0 ** (exponents - 7)[:, None]).ravel()
    return np.concatenate([mantissas * 2.0**-6, normal])[:-2]


def _to_even(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest of `numbers`, which ascend; between two of them the one with the even index."""
    above = np.searchsorted(numbers, values).clip(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    is_low = (values - low < high - values) | ((values - low == high - values) & ((above - 1) % 2 == 0))
    return np.where(is_low, low, high)


def _reference(values: Tensor, format: str) -> np.ndarray:
    """What finite float32 `values`, `[rows, n]`, become, in float32."""
    given = values.numpy().astype(np.float64)
    largest = float(np.finfo(np.float32).max)
    if format == "bf16":
        bits = values.numpy().view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = bits.astype(np.uint32).view(np.float32)
        top = np.float32(torch.finfo(torch.bfloat16).max)
        return np.where(np.isinf(rounded), np.copysign(top, values.numpy()), rounded)
    blocks = _blocks(given)
    most = np.abs(blocks).max(2, keepdims=True)
    if format == "fp8":
        exponents = np.where(most >= 2.0**-126, np.frexp(most)[1] - 1, -127)
        scales = 2.0 ** np.maximum(exponents - 7, -126)
        decoded = np.copysign(_to_even(np.abs(blocks) / scales, _float8_numbers()), blocks) * scales
    else:
        quotient = (most.astype(np.float32) / np.float32(126)).view(np.uint32).astype(np.uint64)
        bits = ((quotient + 0xFFFF) >> 16).clip(0x80, 0x7F7F) << 16
        scales = bits.astype(np.uint32).view(np.float32)
        decoded = np.rint(blocks.astype(np.float32) / scales).clip(-126, 126).astype(np.float64) * scales
    return decoded.clip(-largest, largest).reshape(len(given), -1)[:, : given.shape[1]].astype(np.float32)


def _bound(values: Tensor, format: str) -> np.ndarray:
    """What the file's docstring says that an error is at most."""
    own = np.abs(values.numpy().astype(np.float64))
    blocks = _blocks(own)
    most = np.broadcast_to(blocks.max(2, keepdims=True), blocks.shape).reshape(len(own), -1)[:, : own.shape[1]]
    relative = {"bf16": own / 256, "fp8": np.maximum(own / 16, most / 2**17), "int8": most / 250}[format]
    return relative + 2.0**-127


@formats
def test_reference(format: str) -> None:
    """200 random cases become what they become in NumPy, within the bound that the format states."""
    for seed in range(200):
        values = _values(seed, 1 + seed % 3, SIZES[seed % len(SIZES)] if seed % 100 else 1_000_000)
        messages = encode(values, format)
        long = -(-values.shape[1] // BLOCK) * BLOCK if format != "bf16" else values.shape[1]
        assert messages.nbytes == len(values) * long * 4 * ratio(format, torch.float32)
        found = decode(messages, values.shape[1], format, torch.float32).numpy()
        expected = _reference(values, format)
        assert np.array_equal(found, expected), (seed, np.abs(found - expected).max())
        error = np.abs(values.numpy().astype(np.float64) - found)
        assert (error <= _bound(values, format)).all(), seed


@formats
@pytest.mark.parametrize("dtype", SENDABLE)
def test_special_values(format: str, dtype: torch.dtype) -> None:
    """NaN and infinities arrive as such, zeros as zeros, and what is finite stays finite up to the end of its range."""
    largest = torch.finfo(dtype).max
    values = torch.zeros(6, 300, dtype=dtype)
    values[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    values[1] = largest
    values[2] = -largest
    values[3, ::2] = largest
    values[4, 0], values[4, 1], values[4, 2] = math.inf, 1.0, -1.0
    found = decode(encode(values, format), 300, format, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), values.isnan()) and torch.equal(found.isinf(), values.isinf())
    assert torch.equal(found[values.isinf()], values[values.isinf()])
    assert not found[5].any() and not found[0, 3:].any()
    torch.testing.assert_close(found[1:4].float(), values[1:4].float(), rtol=0.07, atol=0)
    assert found[4, 1:3].tolist() == pytest.approx([1.0, -1.0], rel=0.07)


@formats
def test_sums(format: str) -> None:
    """A sum is that of the decoded rows in float32, one after the other; the loop of compiled graphs is within rounding
    of it.
    """
    for rows in (2, 3, 8):
        values = _values(4 * rows, rows, 1000)
        messages = encode(values, format)
        expected = np.zeros(1000, np.float32)
        for row in decode(messages, 1000, format, torch.float32).numpy():
            expected = expected + row
        assert np.array_equal(add_up(messages, 1000, format, "sum", torch.float32).numpy(), expected)
        found = add_up(messages, 1000, format, "avg", torch.float32)
        assert np.array_equal(found.numpy(), expected / np.float32(rows))
        torch.testing.assert_close(add_up_at_once(messages, 1000, format, "avg", torch.float32), found)


def test_bytes() -> None:
    """A long message has so many bytes for each byte of float32 and of bfloat16."""
    assert [ratio(each, torch.float32) for each in FORMATS] == [0.5, 129 / 512, 130 / 512]
    assert [ratio(each, torch.bfloat16) for each in FORMATS] == [1.0, 129 / 256, 130 / 256]
    assert ratio("", torch.float32) == 1


def test_which_hops_have_formats() -> None:
    """All, or those that cross nodes: the first stage of two, and replicas; never a group of one rank."""
    far, near, copies, alone = (NamedGroup(name, size) for name, size in (("f", 2), ("n", 4), ("r", 2), ("o", 1)))
    wire = Wire("fp8", "bf16")

    def formats_of(hops: tuple[NamedGroup, ...], replicas: NamedGroup | None) -> list[tuple[str, str]]:
        return [(each.gather, each.reduce) for each in (*hops, *filter(None, [replicas]))]

    sent, full = ("fp8", "bf16"), ("", "")
    assert formats_of(*hops_of(wire, (far, near), copies)) == [sent, sent, sent]
    assert formats_of(*hops_of(Wire("fp8", "bf16", True), (far, near), copies)) == [sent, full, sent]
    assert formats_of(*hops_of(Wire("fp8", "bf16", True), (near,), copies)) == [full, sent]
    assert formats_of(*hops_of(wire, (alone,), None)) == [full]


@pytest.mark.parametrize("format", FORMATS)
def test_no_elements(format: str) -> None:
    """What has no elements is sent as nothing, and arrives as nothing."""
    message = encode(torch.zeros(2, 0), format)
    assert message.numel() == 0
    assert decode(message, 0, format, torch.float32).shape == (2, 0)
    assert add_up(message, 0, format, "avg", torch.float32).shape == (0,)
