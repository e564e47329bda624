"""Builds the random model of a case: nests of small modules, each of which maps `[batch, width]` to the same shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cases import Case, Node, nodes_of
from .layers import KINDS


@dataclass
class Record:
    """An output of a class of the user's."""

    first: Tensor
    second: Tensor


def structured(kind: str, x: Tensor) -> Any:
    """`x`, and what a caller may leave unused, in the structure of this name."""
    other = 2 * x
    structures: dict[str, Any] = {"": x, "tuple": (x, other), "dict": {"first": x, "deep": [other, None]}}
    return x[None][0] if kind == "view" else Record(x, other) if kind == "dataclass" else structures[kind]


def first_of(output: Any) -> Tensor:
    """The first tensor in the output of a module."""
    if isinstance(output, Record):
        return output.first
    return output["first"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda param: param.mul_(0.9),
    "data": lambda param: param.data.mul_(0.9),
    "row": lambda param: param[:1].fill_(0.5) if param.dim() else param.fill_(0.5),
    "foreach": lambda param: torch._foreach_mul_([param], 0.9),
}


class _Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a backward of the user's fails")


class _RunsAgain(torch.autograd.Function):
    """Runs a module without gradients, and again in its own backward: there with gradients if it `trains`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, trains: bool) -> Tensor:
        ctx.x, ctx.module, ctx.trains = x.detach().clone(), module, trains
        return first_of(module(x)).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.set_grad_enabled(ctx.trains):
            y = first_of(ctx.module(ctx.x.requires_grad_(ctx.trains)))
        if not ctx.trains:
            return grad * torch.cos(y), None, None
        y.backward(grad)
        return ctx.x.grad, None, None


class _Elsewhere:
    """Holds a tensor, and is neither a module nor a container."""

    tensor: Tensor | None = None


class Nest(nn.Module):
    """Runs its children one after the other, each as its node says; has a parameter of its own."""

    def __init__(self, node: Node, width: int, made: list[tuple[Node, nn.Module]]) -> None:
        super().__init__()
        nodes, self.aside, self.kept, self.elsewhere = node.children, node.aside, None, _Elsewhere()
        self.nodes, self.gates, self.syncs, self.rank, self.fails = nodes, True, True, 0, ""
        self.gain = nn.Parameter(torch.randn(width))
        self.inner = nn.ModuleList(build_node(node, width, made) for node in nodes)
        self.changed = [_first_parameter(node, module) for node, module in zip(nodes, self.inner, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        given = x
        x = torch.tanh(x) + torch.sin(self.gain).to(x.dtype)
        for node, module, path in zip(self.nodes, self.inner, self.changed, strict=True):
            if path:
                _change(node, module, path)
            for _ in range(node.times):
                x = self._run(node, module, x)
            if node.then == "in place":
                x.mul_(0.9)
        if self.fails == "forward":
            raise ArithmeticError("a forward of the user's fails")
        x = _Fails.apply(x) if self.fails else x
        if self.aside:
            aside = torch.cos(given * self.gain.to(x.dtype)).mean()
            self.kept = {"attribute": aside, "list": [aside]}.get(self.aside)
            self.elsewhere.tensor = aside if self.aside == "elsewhere" else None
        return x

    def take_aside(self) -> Tensor | None:
        """What the last forward has left aside, once."""
        found = (
            self.kept[0] if isinstance(self.kept, list) else self.elsewhere.tensor if self.kept is None else self.kept
        )
        self.kept = self.elsewhere.tensor = None
        return found

    def _run(self, node: Node, module: nn.Module, x: Tensor) -> Tensor:
        if (node.gate == "step" and not self.gates) or (node.gate == "accumulating" and self.syncs):
            return x
        if node.gate == "rank" and self.rank % 2:
            return x.clone()  # a unit that returned the very output of a unit within it would gather after that one
        if node.gate == "no_grad":
            with torch.no_grad():
                features = first_of(module(x))
            return x + features
        if node.gate in ("reversible", "rerun"):
            return _RunsAgain.apply(x, module, node.gate == "reversible")
        if node.gate == "backward":
            y = first_of(module(x.detach()))
            if y.requires_grad:
                y.square().mean().backward()
            return x + y.detach()
        if node.checkpoint:
            # Of what a reentrant checkpoint returns in a dict, torch drops the gradient in eager mode and keeps it in
            # compiled graphs: so the checkpoint returns a tensor, of whatever the module in it returns.
            return checkpoint(lambda x: first_of(module(x)), x, use_reentrant=node.checkpoint == "reentrant")
        return first_of(module(x))


def _first_parameter(node: Node, module: nn.Module) -> list[str]:
    """The path to the first parameter of a module that changes."""
    return next(name for name, _ in module.named_parameters()).split(".") if node.changes else []


def _change(node: Node, module: nn.Module, path: list[str]) -> None:
    for name in path[:-1]:
        module = getattr(module, name)
    with torch.no_grad():
        CHANGES[node.changes](getattr(module, path[-1]))


class Returning(nn.Module):
    """Gives the output of another module a structure."""

    def __init__(self, inner: nn.Module, out: str) -> None:
        super().__init__()
        self.inner, self.out = inner, out

    def forward(self, x: Tensor) -> Any:
        return structured(self.out, self.inner(x))


class Caller(nn.Module):
    """A module of the user's around the sharded model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class Model(nn.Module):
    """What is sharded at last: linear layers around a nest."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.out, made = case.out, []
        self.stem = nn.Linear(4, case.width)
        self.nest = Nest(Node(children=case.nodes), case.width, made)
        self.head = nn.Linear(case.width, 3)
        self.nests = [module for module in self.nest.modules() if isinstance(module, Nest) and module.aside]
        # Shared modules occur as often as there are nodes for them: those that are units, each once, inner ones first.
        self.to_shard = list({id(module): module for node, module in made if node.unit}.values())[::-1]

    def forward(self, x: Tensor) -> Any:  # [batch, 4] -> [batch, 3]
        for nest in self.nests:
            nest.take_aside()
        x = self.head(self.nest(self.stem(x)))
        for nest in self.nests:
            aside = nest.take_aside()
            x = x if aside is None else x + aside.to(x.dtype)
        return structured(self.out, x)


def build_node(node: Node, width: int, made: list[tuple[Node, nn.Module]]) -> nn.Module:
    """The module of a node; `made` are those before it, in the order of `nodes_of`."""
    if 0 <= node.same < len(made):
        made.append((node, made[node.same][1]))
        made += [(Node(), nn.Identity()) for _ in nodes_of(node.children)]
        return made[-1 - len(nodes_of(node.children))][1]
    place = len(made)
    made.append((node, nn.Identity()))
    module = Nest(node, width, made) if node.kind == "nest" else KINDS[node.kind](width, node.size)
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
    """A mean over the first tensor that the model returns, in fp64, with bounded gradients."""
    return (torch.tanh(first_of(output).double()) - 0.3).square().mean()


def play_rank(model: nn.Module, rank: int) -> None:
    """Let nodes with the gate "rank" run as on this rank."""
    for module in model.modules():
        if isinstance(module, Nest):
            module.rank = rank
