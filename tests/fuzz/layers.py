"""The modules without children of random models: each maps `[batch, width]` to the same shape."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Linear(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=size % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x.to(self.linear.weight.dtype))).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))).to(x.dtype)


class Scale(nn.Module):
    """A parameter without dimensions, and one without elements, which is never used."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, size))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(self.scale).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.norm.weight.dtype)).to(x.dtype) + 0.5 * x


class InPlace(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(self.linear.weight.dtype))
        y.mul_(0.5).add_(self.linear.bias).clamp_(-1, 1)
        return x + y.to(x.dtype)


class Recurrent(nn.Module):
    """A GRU or LSTM over the batch, as if it were time."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.rnn = (nn.GRU if size % 2 else nn.LSTM)(width, width, num_layers=1 + size % 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x.to(self.rnn.weight_ih_l0.dtype))[0].to(x.dtype)


class Experts(nn.Module):
    """Each row goes to one of three experts; in eager mode the others do not run."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ParameterList(torch.randn(width, width) / width for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.router.weight.dtype)
        chances = self.router(y).softmax(-1)
        chosen, out = chances.argmax(-1), torch.zeros_like(y)
        for index, weight in enumerate(self.experts):
            rows = chosen == index
            if torch.compiler.is_compiling():
                out = out + torch.tanh(y @ weight) * (chances[:, index] * rows)[:, None]
            elif rows.any():
                out[rows] = (torch.tanh(y[rows] @ weight) * chances[rows, index, None]).to(out.dtype)
        return x + out.to(x.dtype)


class Attention(nn.Module):
    """Reads the parameters of its own child."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x[None].to(self.attention.in_proj_weight.dtype)
        return x + self.attention(y, y, y, need_weights=False)[0][0].to(x.dtype)


class Conv(nn.Module):
    """With a larger `size` its weight is parametrized while it runs, as by peft's `target_parameters`."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv, self.change = nn.Conv1d(1, 2, 3, padding=1, bias=False), nn.Linear(1, 6) if size > 5 else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.conv.weight.dtype)[:, None]
        if self.change is not None:
            parametrize.register_parametrization(self.conv, "weight", _Plus(self.change.weight))
        try:
            return x + torch.tanh(self.conv(y).sum(1)).to(x.dtype)
        finally:
            if self.change is not None:
                parametrize.remove_parametrizations(self.conv, "weight", leave_parametrized=False)


class _Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change.view(weight.shape)


class Stored(nn.Module):
    """State dicts have its weights transposed, one by hooks and one by methods of its own."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*shape) / 3) for shape in ((size, width), (width, size)))
        self.register_state_dict_post_hook(lambda _, state, prefix, *rest: _turn(state, prefix + "up"))
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: _turn(state, prefix + "up"))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.tanh(x.to(self.up.dtype) @ self.up.t()) @ self.down.t()).to(x.dtype)

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        _turn(state, prefix + "down")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _turn(state, prefix + "down")
        super()._load_from_state_dict(state, prefix, *rest)


def _turn(state: dict[str, Any], name: str) -> None:
    state[name] = state[name].t()


class Table(nn.Module):
    """An embedding, and a buffer."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=0 if size > 5 else None)
        self.register_buffer("offset", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        indices = (x[:, 0] > 0).long() * (self.table.num_embeddings - 1)
        return x + self.table(indices).to(x.dtype) * self.offset.to(x.dtype)


class Listed(nn.Module):
    """Weights in a list, views of them, and a child whose forward is never called."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, 2 * width) / (2 * width) for _ in range(2))
        self.read = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.read.weight.dtype), self.read.weight.t(), self.read.bias)
        for weight in self.weights:
            left, right = weight.chunk(2, 1)
            y = y + torch.tanh(y @ left) @ right
        return x + y.to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)  # under autocast the product has another dtype than its factors
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    """An operator of the user's own, which saves a parameter."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(_Product.apply(x.to(self.weight.dtype), self.weight)).to(x.dtype)


class Quantized(nn.Module):
    """A frozen weight of one byte an element with a frozen scale, and an addition of rank 1 that trains: QLoRA."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        dtype = {1: torch.int8, 5: torch.uint8, 7: torch.float8_e4m3fn, 16: torch.int8}[size]
        weight = torch.randn(width, width) / width
        scale = weight.abs().amax(1, keepdim=True) / (127 if size != 7 else 1)
        self.zero = 128 if dtype is torch.uint8 else 0
        stored = weight / scale if size == 7 else (weight / scale).round() + self.zero
        self.weight = nn.Parameter(stored.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(1, width)), nn.Parameter(torch.randn(width, 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.down.dtype)
        weight = (self.weight.to(y.dtype) - self.zero) * self.scale
        return x + torch.tanh(F.linear(y, weight) + F.linear(F.linear(y, self.down), self.up)).to(x.dtype)


HIGHEST = 448.0  # of float8_e4m3fn


class _Float8Product(torch.autograd.Function):
    """`x @ weight.t()` with the weight rounded to float8 by one scale; backward reads the rounded weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = HIGHEST / weight.abs().amax().clamp(min=1e-6)
        rounded = (weight * scale).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, rounded, scale)
        return x @ (rounded.to(x.dtype) / scale).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, rounded, scale = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ (rounded.to(x.dtype) / scale), grad.t() @ x


class Computed(nn.Module):
    """Computes its weights from a parameter alone, with maxima of it, before it multiplies with them. `size` says how.

    1: in float8, with a backward of its own. 5: in bfloat16, by a scale that is a constant. 7: in 8 bits between the
    smallest and the largest element. 16: in bfloat16, by a scale that has a gradient, and once more as it is.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight, self.gain = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x.to(self.gain.dtype), self.weight
        if self.size == 1:
            return x + torch.tanh(_Float8Product.apply(y, weight) * self.gain).to(x.dtype)
        if self.size == 7:
            low, high = weight.detach().min(), weight.detach().amax()
            unit = (high - low).clamp(min=1e-6) / 255
            stored = ((weight.detach() - low) / unit).round().clamp(0, 255).to(torch.uint8)
            computed = stored.to(y.dtype) * unit + low + 0.5 * weight.bfloat16().to(y.dtype)
        else:
            largest = weight.abs().amax().clamp(min=1e-6)
            computed = (weight / (largest.detach() if self.size == 5 else largest)).bfloat16().to(y.dtype)
            computed = computed + weight if self.size == 16 else computed
        return x + torch.tanh(y @ computed * self.gain / computed.shape[0]).to(x.dtype)


class Bits(nn.Module):
    """Computes with the bits of a weight, or of whole numbers that several small ones are packed into. `size` says how.

    1: without the lowest bits, as weights are rounded. 5: the sign is turned. 7: `q & 15` and `q >> 4` of int32, which
    does not train. 16: the same of int64.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.randn(width))
        self.packed = None
        if size in (7, 16):
            whole = torch.randint(256, (width, width), dtype=torch.int32 if size == 7 else torch.int64)
            self.packed = nn.Parameter(whole, requires_grad=False)
        self.turns = size == 5

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x.to(self.gain.dtype), self.weight
        if self.packed is not None:
            low, high = self.packed & 15, self.packed >> 4
            computed = weight * (low.to(y.dtype) - 7.5) + high.to(y.dtype) / 16
        else:
            whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.dtype.itemsize]
            bits, sign = weight.detach().view(whole), -1.0 if self.turns else 1.0
            bits = bits ^ torch.iinfo(whole).min if self.turns else bits & (-1 << (weight.dtype.itemsize - 1))
            computed = bits.view(weight.dtype) + sign * (weight - weight.detach())
        return x + torch.tanh(y @ computed.to(y.dtype) * self.gain / computed.shape[0]).to(x.dtype)


_MODULES = (Linear, MLP, Scale, Norm, InPlace, Recurrent, Experts, Attention, Conv, Table, Listed, Custom, Quantized,
            Computed, Bits, Stored)  # fmt: skip
KINDS: dict[str, Callable[[int, int], nn.Module]] = {kind.__name__.lower(): kind for kind in _MODULES}
