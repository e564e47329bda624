"""Builds the random model of a case: small modules that map `[batch, width]` to the same shape, and nests of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cases import Case, Node, nodes_of


@dataclass
class Record:
    """An output of a class of the user's."""

    first: Tensor
    second: Tensor


def structured(kind: str, x: Tensor) -> Any:
    """`x`, and what a caller may leave unused, in the structure of this name."""
    other = 2 * x
    return {"": x, "tuple": (x, other), "dict": {"first": x, "deep": [other, None]}, "dataclass": Record(x, other)}[
        kind
    ]


def first_of(output: Any) -> Tensor:
    """The first tensor in the output of a module."""
    if isinstance(output, Record):
        return output.first
    return output["first"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


# --- modules without children -----------------------------------------------------------------------------------------


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


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": Linear,
    "mlp": MLP,
    "scale": Scale,
    "norm": Norm,
    "inplace": InPlace,
}

# --- modules with children --------------------------------------------------------------------------------------------


class Nest(nn.Module):
    """Runs its children one after the other, each as its node says; has a parameter of its own."""

    def __init__(self, nodes: tuple[Node, ...], width: int, made: list[tuple[Node, nn.Module]]) -> None:
        super().__init__()
        self.nodes, self.gates, self.rank = nodes, True, 0
        self.gain = nn.Parameter(torch.randn(width))
        self.inner = nn.ModuleList(build_node(node, width, made) for node in nodes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(self.gain).to(x.dtype)
        for node, module in zip(self.nodes, self.inner, strict=True):
            for _ in range(node.times):
                x = self._run(node, module, x)
        return x

    def _run(self, node: Node, module: nn.Module, x: Tensor) -> Tensor:
        if (node.gate == "step" and not self.gates) or (node.gate == "rank" and self.rank % 2):
            return x
        if node.gate == "no_grad":
            with torch.no_grad():
                return first_of(module(x))
        if node.checkpoint:
            return first_of(checkpoint(module, x, use_reentrant=node.checkpoint == "reentrant"))
        return first_of(module(x))


class Returning(nn.Module):
    """Gives the output of another module a structure."""

    def __init__(self, inner: nn.Module, out: str) -> None:
        super().__init__()
        self.inner, self.out = inner, out

    def forward(self, x: Tensor) -> Any:
        return structured(self.out, self.inner(x))


class Model(nn.Module):
    """What is sharded at last: linear layers around a nest."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.out, made = case.out, []
        self.stem = nn.Linear(4, case.width)
        self.nest = Nest(case.nodes, case.width, made)
        self.head = nn.Linear(case.width, 3)
        # Shared modules occur as often as there are nodes for them: those that are units, each once, inner ones first.
        self.to_shard = list({id(module): module for node, module in reversed(made) if node.unit}.values())

    def forward(self, x: Tensor) -> Any:  # [batch, 4] -> [batch, 3]
        return structured(self.out, self.head(self.nest(self.stem(x))))


def build_node(node: Node, width: int, made: list[tuple[Node, nn.Module]]) -> nn.Module:
    """The module of a node; `made` are those before it, in the order of `nodes_of`."""
    if 0 <= node.same < len(made):
        made.append((node, made[node.same][1]))
        made += [(Node(), nn.Identity()) for _ in nodes_of(node.children)]
        return made[-1 - len(nodes_of(node.children))][1]
    place = len(made)
    made.append((node, nn.Identity()))
    module = Nest(node.children, width, made) if node.kind == "nest" else KINDS[node.kind](width, node.size)
    if 0 <= node.tie < place:
        _tie(node, module, *made[node.tie])
    if node.dtype:
        module.to(getattr(torch, node.dtype))
    for index, param in enumerate(module.parameters(recurse=True)):
        if node.frozen == "all" or (node.frozen == "first" and index == 0):
            param.requires_grad_(False)
    module = Returning(module, node.out) if node.out else module
    made[place] = (node, module)
    return module


def _tie(node: Node, module: nn.Module, other: Node, theirs: nn.Module) -> None:
    alike = node.kind != "nest" and (node.kind, node.size, node.dtype) == (other.kind, other.size, other.dtype)
    if not alike or other.out:
        return
    (name, param), *_ = theirs.named_parameters()
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, param)


def build(case: Case) -> Model:
    """The unsharded model, the same on every rank."""
    torch.manual_seed(case.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        return Model(case)
    finally:
        torch.set_default_dtype(default)


def loss_of(output: Any) -> Tensor:
    """Mean over what the model returns, in fp64."""
    return F.mse_loss(first_of(output).double(), torch.full((), 0.3, dtype=torch.float64).expand_as(first_of(output)))
