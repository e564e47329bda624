"""Modules whose forward computes something from weights alone, and modules that only look as if they did."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 32
F8, HIGHEST = torch.float8_e4m3fn, 448.0


class Float8Product(torch.autograd.Function):
    """x @ w.T with `w` rounded to float8 with one scale; backward uses the rounded one, and is exact otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = HIGHEST / weight.abs().amax().clamp(min=1e-12)
        quantised = (weight * scale).clamp(-HIGHEST, HIGHEST).to(F8)
        ctx.save_for_backward(x, quantised, scale)
        return x @ (quantised.to(x.dtype) / scale).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, quantised, scale = ctx.saved_tensors
        return grad @ (quantised.to(x.dtype) / scale), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Float8RowsProduct(torch.autograd.Function):
    """The same with one scale for each row of `w`; `w` is permuted first, as libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.t()
        scale = HIGHEST / weight.abs().amax(0).float().clamp(min=1e-12)
        quantised = (weight * scale).clamp(-HIGHEST, HIGHEST).to(F8)
        ctx.save_for_backward(x, quantised, scale)
        return x @ (quantised.to(x.dtype) / scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, quantised, scale = ctx.saved_tensors
        return grad @ (quantised.to(x.dtype) / scale).t(), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class ScaledProduct(Float8Product):
    """The same, `x` rounded too, by the product of float8 matrices that GPUs have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scales = [HIGHEST / each.abs().amax().clamp(min=1e-12) for each in (x, weight)]
        rounded, quantised = (
            (each * scale).clamp(-HIGHEST, HIGHEST).to(F8) for each, scale in zip((x, weight), scales, strict=True)
        )
        ctx.save_for_backward(x, quantised, scales[1])
        inverse = [scale.reciprocal() for scale in scales]
        product: Tensor = torch._scaled_mm(rounded, quantised.t(), *inverse, out_dtype=torch.bfloat16)
        return product.to(x.dtype)


class ByProduct(nn.Linear):
    """A linear layer that multiplies in its own way, as libraries for float8 training have it."""

    product: type[torch.autograd.Function]

    def forward(self, x: Tensor) -> Tensor:
        return self.product.apply(x, self.weight) + (0 if self.bias is None else self.bias)


class Block(nn.Module):
    """Two linear layers and a norm."""

    product: type[torch.autograd.Function] | None = None

    def __init__(self, norm: bool = True, width: int = D, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        linear = nn.Linear if self.product is None else ByProduct
        self.up, self.down = linear(width, 3 * width, bias), linear(3 * width, width, bias)
        self.up.product = self.down.product = self.product

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Float8Block(Block):
    """The same block in float8."""

    product = Float8Product


class ScaledBlock(Block):
    """And with `torch._scaled_mm`, without biases."""

    product = ScaledProduct

    def __init__(self) -> None:
        super().__init__(bias=False)


class Float8RowsBlock(Block):
    """And with a scale for each row."""

    product = Float8RowsProduct


class OneWeight(nn.Module):
    """A matrix, and a function of it that the input is multiplied with."""

    def __init__(self, of: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 6)
        self.of = of

    def compute(self, weight: Tensor) -> Tensor:
        return weight if self.of is None else self.of(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.compute(self.weight)


def two_levels(weight: Tensor) -> Tensor:
    """A smallest and a largest element, then a maximum of what follows from both, in uint8."""
    w = weight.detach()
    low, high = w.min(), w.amax()
    unit = (w - low) / (high - low)
    top = (unit * unit).amax((0, 1), keepdim=True)
    quantised = (unit / top * 255).round().clamp(0, 255).to(torch.uint8)
    return quantised.float() / 255 * (high - low) + low + 0.5 * weight.bfloat16().float()


def halves(weight: Tensor) -> Tensor:
    """Rounded with a scale for each of two halves, then of eight blocks, and what is large: in three dtypes."""
    two, eight = weight.view(2, -1), weight.view(4, 2, -1)
    low = (two / two.detach().abs().amax(1, keepdim=True)).to(F8).float().view(D, D)
    lower = (eight / eight.detach().abs().amax(2, keepdim=True)).to(torch.float8_e5m2).float().view(D, D)
    return low + lower + (weight > 0.5 * weight.detach().max()).float()


def negative(weight: Tensor) -> Tensor:
    """All elements are negative, and padding is not: the largest must be a parameter's."""
    below = -weight.detach().abs() - 1
    return (weight / below.amax()).bfloat16().float()


class Microscaled(OneWeight):
    """A scale that is a power of two for each block of 16 elements of a row, as in the MX formats."""

    def compute(self, weight: Tensor) -> Tensor:
        blocks = weight.detach().view(D, D // 16, 16)
        largest = blocks.abs().amax(-1)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 8)
        quantised = (blocks / scale.unsqueeze(-1)).clamp(-HIGHEST, HIGHEST).to(F8)
        return (quantised.float() * scale[..., None]).view(D, D) + 0.5 * weight.to(F8).float()


class SpecialBlocks(Microscaled):
    """The same with a NaN, an infinity and a block of zeros that are negative."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight[-1, 3], self.weight[0, 5], self.weight[1, :16] = torch.nan, -torch.inf, -0.0


class Special(OneWeight):
    """A scale by the largest magnitude, which one element decides: `value`, in the last row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight[-1, -3] = value

    def compute(self, weight: Tensor) -> Tensor:
        largest = weight.detach().amax()
        largest = torch.where(largest.isnan(), 3.0, largest)
        largest = torch.where(largest.isinf(), 5.0, largest)
        return torch.nan_to_num((weight / largest).bfloat16().float(), posinf=2.0, neginf=-2.0)


# --- what has to stay -------------------------------------------------------------------------------------------------


class Buffered(OneWeight):
    """Scaled by a buffer, which may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))

    def compute(self, weight: Tensor) -> Tensor:
        return (weight * self.scale).bfloat16().float()


class OfTwo(OneWeight):
    """A function of two parameters."""

    def __init__(self, pair: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.other, self.pair = nn.Parameter(torch.randn(D, D) / 6), pair

    def compute(self, weight: Tensor) -> Tensor:
        return self.pair(weight, self.other)


UNMOVED: tuple[Callable[[], nn.Module], ...] = (
    Buffered,
    *(partial(OfTwo, pair) for pair in (
        lambda w, v: (w @ v).bfloat16().float() + (w * v).bfloat16().float(),
        lambda w, v: (w / v.detach().abs().amax(1, keepdim=True)).bfloat16().float(),
        lambda w, v: w.bfloat16().float() @ v,  # segments of `v` beside the smaller gather would be more bytes
    )),
    *(partial(OneWeight, of) for of in (
        lambda w: (w * torch.rand(())).bfloat16().float(),
        lambda w: (w / (1 + w.detach().abs().amax(1, keepdim=True).bernoulli(0.5))).bfloat16().float(),
        lambda w: (w / w.detach().abs().amax(1, keepdim=True).cumsum(0)).bfloat16().float(),
        lambda w: (w / w.detach().abs().amax().double()).bfloat16().float(),  # in float64 if it has a dimension
        lambda w: (w / w.detach().abs().amax().expand(D, D)).bfloat16().float(),  # a scale of as many elements
        lambda w: w.flatten().softmax(0).view(D, D).bfloat16().float() * 30,
        lambda w: F.dropout(w, 0.3).bfloat16().float(),
        lambda w: (w + w.detach().tanh()).bfloat16().float(),  # a CPU computes the last elements otherwise
        lambda w: w.bfloat16().float() + w.sum(),  # read twice: gathering both would be more
        # maxima of 16 B each; without them the pass would gather one byte, and two, of four
        lambda w: (w.view(-1, 4) / w.detach().view(-1, 4).half().amax(1, True).float()).to(F8).float().view(D, D),
        lambda w: torch.cat([half.bfloat16().float() for half in w.chunk(2)]),  # views that do not cover the parameter
        lambda w: (w / w.detach().abs().amax().view(1, 1, 1)).bfloat16().float()[0],  # gets a dimension more
        lambda w: w.t().contiguous().bfloat16().view(-1).float().view(D, D),  # lies otherwise than the parameter
    )),
)  # fmt: skip
