"""Frozen weights of integer and one-byte dtypes beside trained ones: QLoRA with plain parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import checkpoint, fully_shard, summon_full_params

from .ranks import Ranks
from .training import executor
from .wire import wire

WIDTH, RANK, VOCABULARY = 24, 3, 17
F8 = torch.float8_e4m3fn
QUANTIZED = (torch.int8, torch.uint8, F8)


class Quantized(nn.Module):
    """A linear layer whose weight has 4 or 8 bits an element, and a trained addition of low rank."""

    def __init__(self, inputs: int, outputs: int, kind: str) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1, keepdim=True) / (7 if kind == "int4" else 127)
        stored = weight if kind == "float8" else (weight / scale).round()
        if kind == "int4":
            low, high = (stored + 8).to(torch.uint8).chunk(2, 1)
            stored = low | (high << 4)
        dtype = {"int4": torch.uint8, "int8": torch.int8, "float8": F8}[kind]
        self.kind = kind
        self.weight = nn.Parameter(stored.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(RANK, inputs) / 6), nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.kind == "int4":
            weight = torch.cat((weight & 15, weight >> 4), 1).to(torch.int8) - 8
        weight = weight.to(x.dtype) if self.kind == "float8" else weight.to(x.dtype) * self.scale
        return F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, all of whose matrices are quantized; norms are frozen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2)).requires_grad_(False)
        self.qkv, self.out = Quantized(WIDTH, 3 * WIDTH, kind), Quantized(WIDTH, WIDTH, kind)
        self.gate, self.up = Quantized(WIDTH, 2 * WIDTH, kind), Quantized(WIDTH, 2 * WIDTH, kind)
        self.down = Quantized(2 * WIDTH, WIDTH, kind)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Four blocks between a frozen embedding and a head that is trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(LlamaBlock(kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _made(kind: str) -> Llama:
    torch.manual_seed(0)
    return Llama(kind)


def _tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2 * dist.get_world_size(), 9), generator=generator)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _step(model: nn.Module, run: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = run(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _follow(rank: int, kind: str, how: str, options: dict[str, Any]) -> None:
    """Train beside an unsharded model that sees all ranks' sequences."""
    reference, model = _made(kind), fully_shard(_made(kind), auto_wrap_policy={LlamaBlock}, **options)
    dtypes = {name: param.dtype for name, param in reference.named_parameters()}
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    with wire() as sent:
        model(_tokens(0).chunk(dist.get_world_size())[rank])
    gathered = sum(each.nbytes for each in sent if each.kind == "gather" and each.dtype in QUANTIZED)
    elements = sum(
        each.numel() * (2 if kind == "int4" else 1) for each in reference.parameters() if each.dtype in QUANTIZED
    )
    assert gathered <= elements * (0.5 if kind == "int4" else 1) * 1.05  # padding; float32 would be four bytes each
    run = executor(model, how)
    both = [torch.optim.AdamW(_trained(each), lr=1e-2) for each in (model, reference)]
    for step in range(3):
        tokens = _tokens(step)
        mine = _step(model, run, both[0], tokens.chunk(dist.get_world_size())[rank])
        dist.all_reduce(mine)
        expected = _step(reference, reference, both[1], tokens)
        torch.testing.assert_close(mine / dist.get_world_size(), expected, rtol=1e-5, atol=1e-6)
    with summon_full_params(model):
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
            if ours.requires_grad:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(_bytes(ours), _bytes(theirs)), name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("how", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_trains_as_unsharded(two: Ranks, kind: str, how: str) -> None:
    """Losses, trained and frozen parameters equal those of one process."""
    two.run(_follow, kind, how, {})


def _mixed(rank: int) -> None:
    """Only what is not quantized is cast."""
    model = fully_shard(_made("int8"), auto_wrap_policy={LlamaBlock}, mixed_precision=MixedPrecision(torch.bfloat16))
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    layer = model.layers[1].qkv
    layer.register_forward_pre_hook(lambda module, args: seen.add((module.weight.dtype, module.down.dtype)))
    model(_tokens(0)).backward()
    assert seen == {(torch.int8, torch.bfloat16)}
    assert all(param.grad is not None for param in _trained(model)) and layer.weight.grad is None


def test_mixed_precision_does_not_cast(two: Ranks) -> None:
    """`param_dtype` leaves quantized weights as they are: their values mean something only with their scale."""
    two.run(_mixed)


def _edited(rank: int, kind: str, strategy: str) -> None:
    """One row of a quantized weight is replaced; the rest stays, byte for byte."""
    model = fully_shard(_made(kind), auto_wrap_policy={LlamaBlock}, sharding_strategy=ShardingStrategy[strategy])
    expected = {name: _bytes(param).clone() for name, param in _made(kind).named_parameters()}
    with summon_full_params(model), torch.no_grad():
        model.layers[1].qkv.weight[3] = model.layers[2].qkv.weight[5]
    expected["layers.1.qkv.weight"][3] = expected["layers.2.qkv.weight"][5]
    seen = _full(model)
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_edits_of_full_parameters(two: Ranks, kind: str, strategy: str) -> None:
    """What `summon_full_params` shows of quantized weights can be edited."""
    two.run(_edited, kind, strategy)


def _save(rank: int, kind: str, root: Path) -> dict[str, Tensor]:
    model = fully_shard(_made(kind), auto_wrap_policy={LlamaBlock})
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-2)
    _step(model, model, optimizer, _tokens(0))
    checkpoint.save({"model": model, "optimizer": optimizer}, root, 1)
    return _full(model)


def _full(model: nn.Module) -> dict[str, Tensor]:
    """All values as bytes, on every rank."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with summon_full_params(model):
        values = {name: _bytes(param).clone() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        assert {name: value.dtype for name, value in whole.items()} == {n: p.dtype for n, p in model.named_parameters()}
        assert all(torch.equal(_bytes(whole[name]), values[name]) for name in values)
    return values


def _load(rank: int, kind: str, root: Path, expected: dict[str, Tensor]) -> None:
    torch.manual_seed(7)
    model = fully_shard(Llama(kind), auto_wrap_policy={LlamaBlock})
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-2)
    checkpoint.load({"model": model, "optimizer": optimizer}, root)
    loaded = _full(model)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    _step(model, model, optimizer, _tokens(1))


@pytest.mark.parametrize("kind", ["int4", "float8", pytest.param("int8", marks=pytest.mark.nightly)])
def test_checkpoints_of_another_world_size(two: Ranks, three: Ranks, tmp_path: Path, kind: str) -> None:
    """What two ranks save, three load: the same bytes; full state dicts have them too, in their own dtypes."""
    three.run(_load, kind, tmp_path, two.run(_save, kind, tmp_path)[0])
