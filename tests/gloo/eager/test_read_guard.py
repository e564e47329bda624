"""No garbage: where backward reads parameters before they are gathered again, autograd raises (I13).

All hooks but those on outputs are switched off here, so that backward reaches units by ways that nothing sees.
"""

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from joint import JointPasses
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from fsdp_compile.eager.unsharded import Exits, UnshardedUnit

from ..ranks import on_ranks
from ..training import assert_same_gradients
from .test_outputs import FREED

_hook_outputs = UnshardedUnit._hook_outputs


def _hook_outputs_alone(gathered: UnshardedUnit, given: list[Tensor], output: Any, kept: Any) -> Exits:
    return _hook_outputs(gathered, [], output, ())._replace(is_left=False)


def _without_hooks(how: str) -> Any:
    replacement = (lambda *_: Exits(None, is_left=False)) if how == "compiled, no hooks" else _hook_outputs_alone
    return patch.object(UnshardedUnit, "_hook_outputs", replacement)


class _Block(nn.Module):
    """Computes a loss after its output and leaves it in `aside`, where no hook of ours sees it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.gate = how, nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        if how == "frozen":
            self.gate.requires_grad_(False)

    def forward(self, x: Tensor, aside: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(x))
        gate: Callable[..., Any] = self.gate
        if self.how == "checkpoint":
            gate = lambda h: checkpoint(self.gate, h, use_reentrant=False)  # noqa: E731
        y = x + hidden
        # Of what autograd saves, one is a parameter itself and one a view of a parameter.
        aside.append((gate(hidden) * self.scale).square().mean())
        return y


class _Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(how) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        asides: list[Tensor] = []
        for block in self.blocks:
            x = block(x, asides)
        return self.out(x).square().mean() + torch.stack(asides).sum()


def _sharded(how: str, reference: nn.Module) -> nn.Module:
    model = copy.deepcopy(reference)
    mesh = None
    if how == "tensor parallel":
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        mesh = grid["dp"]
        for block in model.blocks:
            parallelize_module(block, grid["tp"], {"gate": ColwiseParallel(use_local_output=True)})
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=how != "kept")
    model = fully_shard(model, mesh=mesh)
    if how.startswith("compiled"):
        for block in model.blocks:
            block.compile(backend=JointPasses() if how.endswith("hooks") else "aot_eager")
    return model


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        *((how, "refused") for how in ("plain", "frozen", "checkpoint", "retained", "tensor parallel")),
        ("compiled", "right"),  # one node computes the loss and the output
        ("compiled, no hooks", "refused"),
        ("kept", "right"),
    ],
)
@on_ranks(2)
def test_reads_of_freed_parameters_are_refused(how: str, expected: str) -> None:
    """Gradients are those of one process or autograd raises, never anything else, twice; the model trains on."""
    torch.manual_seed(0)
    reference = _Net(how)
    model = _sharded(how, reference)
    seen = []
    with _without_hooks(how):
        for step in range(2):
            x = torch.linspace(-1, 1, 16).view(2, 8) + step
            for each in (reference, model):
                each.zero_grad()
            reference(x).backward()
            try:
                loss = model(x)
                if how == "retained":
                    loss.backward(retain_graph=True)
                    model.zero_grad()
                loss.backward()
            except RuntimeError as error:
                assert re.search(FREED, str(error)), error
                seen.append("refused")
                continue
            assert_same_gradients(model, reference)
            seen.append("right")
    # What failed leaves a model that trains: with the hooks, the same backward is right.
    for each in (reference, model):
        each.zero_grad()
        each(torch.ones(2, 8)).backward()
    assert_same_gradients(model, reference)
    assert seen == [expected] * 2


@on_ranks(2)
def test_nothing_is_refused_where_nothing_is_freed(rank: int) -> None:
    """Forwards without gradients, transforms and unsharded units read their parameters as before."""
    torch.manual_seed(0)
    reference = _Net("plain")
    model = _sharded("plain", reference)
    x = torch.ones(2, 8)
    with _without_hooks("plain"):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(model(x), reference(x))
        whole = fully_shard(copy.deepcopy(reference), reshard_after_forward=False)
        assert torch.equal(torch.func.vmap(whole)(x.expand(2, 2, 8)), torch.func.vmap(reference)(x.expand(2, 2, 8)))
        lonely = copy.deepcopy(reference)  # NO_SHARD: nothing is ever freed
        group = [dist.new_group([member]) for member in range(2)][rank]
        for block in lonely.blocks:
            fully_shard(block, process_group=group)
        fully_shard(lonely, process_group=group)
        for each in (reference, lonely):
            each.zero_grad()
            each(x).backward()
        assert_same_gradients(lonely, reference)
