"""Autograd functions that run units; test_stock_code.py has transforms of torch.func."""

from functools import partial
from typing import Any

import torch
from models import Case, Residual, Stack, squared_error, vectors
from torch import Tensor, nn

from .ranks import on_ranks
from .training import follow, reference_and_model


class _Twice(torch.autograd.Function):
    """Runs a unit without gradients, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: nn.Module) -> Tensor:
        output = unit(x)
        ctx.unit, ctx.input, ctx.output = unit, x.detach(), output.detach()  # views, which torch.compile has to allow
        return output


class _Recomputed(_Twice):
    """It runs with gradients then, as in a reversible network."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.input.detach().requires_grad_()
            ctx.unit(x).backward(grad * ctx.output)
        return x.grad, None


class _Scaled(_Twice):
    """It runs without gradients then too: its parameters have none."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.output + ctx.unit(ctx.input)), None


class _Net(Stack):
    def __init__(self, function: Any) -> None:
        super().__init__([Residual(11, 23) for _ in range(2)])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.function.apply(x, block)
        return self.head(x)


@on_ranks(2)
def test_autograd_functions_that_run_units() -> None:
    """Units in their forward and backward have the values and gradients of one process, eagerly and compiled."""
    for function in (_Recomputed, _Scaled):
        case = Case(partial(_Net, function), vectors, squared_error)
        reference, model = reference_and_model(case)
        in_graph = function is _Scaled  # torch breaks the graph at a call of `backward`
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=in_graph)):
            follow(run, reference, case)
