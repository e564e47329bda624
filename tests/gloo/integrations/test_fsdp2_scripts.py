"""Training scripts written for torch's FSDP2 train alike on this package: only where names are imported from differs.

Each script is a function of `fsdp`, which is `torch.distributed.fsdp` or `fsdp_compile`, and returns its losses.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.nn.functional as F
from models import GPT, seeded, text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import fully_shard

from ..ranks import on_ranks

STEPS = 4


def run(model: nn.Module, how: str) -> nn.Module:
    """The model as the script runs it."""
    return model if how == "eager" else torch.compile(model, backend=how)


def batch(seed: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch."""
    return text(1000 * dist.get_rank() + seed, size)


def mean(loss: Tensor) -> float:
    """The mean of a loss over ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- block by block: clipping, mixed precision, autocast, accumulation ------------------------------------------------


def block_by_block(fsdp: Any, how: str, _folder: Path) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=fsdp.MixedPrecisionPolicy(**dtypes))
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
    assert isinstance(model, fsdp.FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    step = run(model, how)
    losses = []
    for index in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model.set_is_last_backward(micro == 1)
            tokens, targets = batch(10 * index + micro)
            with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 1):
                logits = step(tokens)
            assert logits.dtype == torch.float32
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        losses += [mean(loss), norm.item()]
    return losses


# --- on the meta device, checkpoints of torch.distributed.checkpoint --------------------------------------------------


class Scale(nn.Module):
    """A normalization without `reset_parameters`, as Hugging Face's are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Scale(13), nn.Linear(13, 13), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, Scale):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.2)
                nn.init.constant_(module.bias, -0.1)


def from_meta(fsdp: Any, how: str, folder: Path) -> list[float]:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Net()
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        model.to_empty(device=torch.get_default_device())
        model.init_weights()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    losses = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        step = run(model, how)
        for index in range(first, first + STEPS // 2):
            x = torch.randn(4, 13, generator=seeded(10 * index + dist.get_rank()))
            loss = (step(x) - x[:, :3]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mean(loss))

    model, optimizer = built()
    train(model, optimizer, 0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint = folder / fsdp.__name__
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint, ignore_errors=True)
    dist.barrier()
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    model, optimizer = built()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(model, optimizer, STEPS // 2)
    return losses


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "tolerance"), [(from_meta, 1e-5), pytest.param(block_by_block, 1e-2, marks=pytest.mark.nightly)]
)
@on_ranks(2)
def test_scripts(script: Callable[..., list[float]], tolerance: float, tmp_path: Path) -> None:
    """Equal losses: on the meta device, with a norm that has no `reset_parameters`, and resumed; block by block in
    bfloat16 with float32 outputs, autocast, accumulation and clipping."""
    theirs = script(torch.distributed.fsdp, "eager", tmp_path)
    for how in ("eager", "aot_eager"):
        ours = script(fsdp_compile, how, tmp_path)
        assert ours == pytest.approx(theirs, rel=tolerance), f"{how}: {ours} against {theirs}"


class _Product(nn.Module):
    """Has no `reset_parameters`, so that on the meta device it waits for values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(5, 5)), nn.Parameter(torch.empty(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.scale


def _tied_products() -> nn.Module:
    model = nn.Sequential(_Product(), _Product(), _Product())
    model[2].weight = model[0].weight
    return model


@on_ranks(2)
def test_values_assigned_on_meta() -> None:
    """Parameters on meta get values by `load_state_dict(assign=True)`, at once or in pieces, or by plain parameters in
    their place (E-META-7). A DTensor in a parameter's place, and as its `.data`, is read in full."""
    plain, generator = _tied_products(), seeded(0)
    with torch.no_grad():
        for param in plain.parameters():
            param.normal_(generator=generator)
    x = torch.ones(2, 5)
    plain(x).sum().backward()
    for how in ("at once", "in pieces", "assigned", "in the first place alone"):
        with torch.device("meta"):
            model = _tied_products()
        fully_shard(model[1])
        fully_shard(model)
        trained = {name: param.requires_grad for name, param in model.named_parameters()}
        state = {
            n: distribute_tensor(v, model[0].weight.device_mesh, [Shard(0)]) for n, v in plain.state_dict().items()
        }
        if how == "at once":
            model.load_state_dict(state, assign=True)
        elif how == "in pieces":
            model.load_state_dict({"0.scale": state.pop("0.scale"), "1.weight": state["1.weight"]}, False, True)
            with pytest.raises(ValueError, match=r"parameter 0.weight is still on the meta device"):
                model(x)
            model.load_state_dict(state, strict=False, assign=True)
        else:
            for name, param in plain.named_parameters():
                owner, _, own = name.rpartition(".")
                values = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
                setattr(model.get_submodule(owner), own, values)
            if how == "assigned":
                model[2].weight = model[0].weight
        model(x).sum().backward()
        assert model[2].weight is model[0].weight
        assert trained == {name: param.requires_grad for name, param in model.named_parameters()}
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), wanted), (how, name)
            assert (param.grad is None) == (wanted.grad is None), (how, name)
            if wanted.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)
    model[1].weight.data = state["0.weight"]  # a DTensor
    assert torch.equal(model[1].weight.full_tensor(), plain[0].weight)
    model[1].weight = nn.Parameter(state["1.weight"])
    model(x).sum().backward()
    assert torch.equal(model[1].weight.full_tensor(), plain[1].weight)
