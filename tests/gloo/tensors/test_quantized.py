"""Frozen quantized weights beside trained ones, as QLoRA has them: plain parameters, and tensor subclasses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import seeded
from tiers import both_ways
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from fsdp_compile import checkpoint, fully_shard, summon_full_params

from ..ranks import Ranks, on_ranks
from ..training import executor
from ..wire import wire

WIDTH, RANK, VOCABULARY = 24, 3, 17
F8 = torch.float8_e4m3fn
QUANTIZED = (torch.int8, torch.uint8, F8)


class Packed(Tensor):
    """What 4 or 8 bits an element and a scale of each row stand for, seen as one float32 matrix."""

    stored: Tensor
    scale: Tensor
    bits: int

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor, bits: int) -> "Packed":
        size = (len(stored), stored.shape[1] * 8 // bits)
        return Tensor._make_wrapper_subclass(cls, size, dtype=scale.dtype, device=stored.device)  # type: ignore[attr-defined]  # torch

    def __init__(self, stored: Tensor, scale: Tensor, bits: int) -> None:
        self.stored, self.scale, self.bits = stored, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["stored", "scale"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: dict[str, int], *_: Any) -> "Packed":
        return cls(inner["stored"], inner["scale"], context["bits"])

    def unpacked(self) -> Tensor:
        """As a plain tensor."""
        low_and_high = (self.stored & 15, self.stored >> 4)
        values = torch.cat(low_and_high, 1).to(torch.int8) - 8 if self.bits == 4 else self.stored
        return values.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].stored), function(args[0].scale), args[0].bits)
        return function(*tree_map_only(Packed, Packed.unpacked, args), **(kwargs or {}))


class Quantized(nn.Module):
    """A linear layer whose weight has 4 or 8 bits an element, and a trained addition of low rank."""

    def __init__(self, inputs: int, outputs: int, kind: str) -> None:
        super().__init__()
        kind, _, packed = kind.partition(" ")
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1, keepdim=True) / (7 if kind == "int4" else 127)
        stored = weight if kind == "float8" else (weight / scale).round()
        if kind == "int4":
            low, high = (stored + 8).to(torch.uint8).chunk(2, 1)
            stored = low | (high << 4)
        dtype = {"int4": torch.uint8, "int8": torch.int8, "float8": F8}[kind]
        self.kind = "packed" if packed else kind
        if packed:
            whole = Packed(stored.to(dtype), scale, 4 if kind == "int4" else 8)
            self.weight = nn.Parameter(whole, requires_grad=False)
        else:
            self.weight = nn.Parameter(stored.to(dtype), requires_grad=False)
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(RANK, inputs) / 6), nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.kind == "int4":
            weight = torch.cat((weight & 15, weight >> 4), 1).to(torch.int8) - 8
        if self.kind in ("int4", "int8"):
            weight = weight.to(x.dtype) * self.scale
        weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        return F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    """A gated MLP, all of whose matrices are quantized, behind a norm that is frozen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH).requires_grad_(False)
        self.gate, self.up = Quantized(WIDTH, 2 * WIDTH, kind), Quantized(WIDTH, 2 * WIDTH, kind)
        self.down = Quantized(2 * WIDTH, WIDTH, kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Blocks between a frozen embedding and a head that is trained."""

    def __init__(self, kind: str, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Block(kind) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _made(kind: str, blocks: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(kind, blocks)


def _tokens(step: int) -> Tensor:
    generator = seeded(step)
    return torch.randint(VOCABULARY, (2 * dist.get_world_size(), 9), generator=generator)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _step(model: nn.Module, run: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = run(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _plain(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of an unsharded model by name, with the inner tensors of subclasses in place of these."""
    plain: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        at = name.removesuffix("weight") + "_weight_"
        inner = {at + each: getattr(param, each) for each in ("stored", "scale")} if type(param) is Packed else None
        plain |= inner or {name: param}
    return plain


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


_KINDS = ("int8", "int4", "float8", "int8 packed", "int4 packed")
_DAILY = {*((kind, "eager") for kind in _KINDS), *((kind, "aot_eager") for kind in ("int4 packed",))}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=[] if (kind, how) in _DAILY else pytest.mark.nightly)
        for kind in _KINDS
        for how in ("eager", "aot_eager", "inductor")
    ],
)
@on_ranks(2)
def test_trains_as_unsharded(rank: int, kind: str, how: str) -> None:
    """Losses, trained and frozen parameters equal those of one process that sees all ranks' sequences."""
    reference, model = _made(kind, 2), fully_shard(_made(kind, 2), auto_wrap_policy={Block})
    dtypes = {name: param.dtype for name, param in _plain(reference).items()}
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    with wire() as sent:
        model(_tokens(0).chunk(dist.get_world_size())[rank])
    gathered = sum(each.nbytes for each in sent if each.kind == "gather" and each.dtype in QUANTIZED)
    stored = sum(each.numel() for each in _plain(reference).values() if each.dtype in QUANTIZED)
    assert stored <= gathered <= stored * 1.05  # padding; 1/4 of float32's bytes, 1/8 where two elements share a byte
    run = executor(model, how)
    both = [torch.optim.AdamW(_trained(each), lr=1e-2) for each in (model, reference)]
    for step in range(3):
        tokens = _tokens(step)
        mine = _step(model, run, both[0], tokens.chunk(dist.get_world_size())[rank])
        dist.all_reduce(mine)
        expected = _step(reference, reference, both[1], tokens)
        torch.testing.assert_close(mine / dist.get_world_size(), expected, rtol=1e-5, atol=1e-6)
    with summon_full_params(model):
        theirs_by_name = _plain(reference)
        for name, ours in model.named_parameters():
            theirs = theirs_by_name[name]
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
            if ours.requires_grad:
                # AdamW makes the rounding of a tiny gradient a part of lr: 0.2 % of the 0.03 that three steps move
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
            else:
                assert torch.equal(_bytes(ours), _bytes(theirs)), name


@on_ranks(2)
def test_mixed_precision_does_not_cast() -> None:
    """`param_dtype` leaves quantized weights as they are: their values mean something only with their scale."""
    model = fully_shard(_made("int8"), auto_wrap_policy={Block}, mixed_precision=MixedPrecision(torch.bfloat16))
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    layer = model.layers[1].up
    layer.register_forward_pre_hook(lambda module, args: seen.add((module.weight.dtype, module.down.dtype)))
    model(_tokens(0)).backward()
    assert seen == {(torch.int8, torch.bfloat16)}
    assert all(param.grad is not None for param in _trained(model)) and layer.weight.grad is None


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
@on_ranks(2)
def test_edits_of_full_parameters(kind: str, strategy: str) -> None:
    """What `summon_full_params` shows of quantized weights can be edited."""
    model = fully_shard(_made(kind), auto_wrap_policy={Block}, sharding_strategy=ShardingStrategy[strategy])
    expected = {name: _bytes(param).clone() for name, param in _made(kind).named_parameters()}
    with summon_full_params(model), torch.no_grad():
        model.layers[1].up.weight[3] = model.layers[2].up.weight[5]
    expected["layers.1.up.weight"][3] = expected["layers.2.up.weight"][5]
    seen = _full(model)
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def _save(rank: int, kind: str, root: Path) -> dict[str, Tensor]:
    model = fully_shard(_made(kind), auto_wrap_policy={Block})
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
    model = fully_shard(Net(kind), auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(_trained(model), lr=1e-2)
    checkpoint.load({"model": model, "optimizer": optimizer}, root)
    loaded = _full(model)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    _step(model, model, optimizer, _tokens(1))


@pytest.mark.parametrize(
    "kind", ["int4 packed", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("float8", "int4", "int8"))]
)
def test_checkpoints_of_another_world_size(two: Ranks, three: Ranks, tmp_path: Path, kind: str) -> None:
    """What two ranks save, three load: the same bytes; full state dicts have them too, in their own dtypes."""
    three.run(_load, kind, tmp_path, two.run(_save, kind, tmp_path)[0])


# --- subclasses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_look_up_puts_subclasses_together(strategy: str) -> None:
    """Module code finds the subclass, of unsharded tensors in a forward and of sharded ones outside; none is cast."""
    options = {"mixed_precision": MixedPrecision(torch.bfloat16), "sharding_strategy": ShardingStrategy[strategy]}
    expected, model = _made("int8 packed"), fully_shard(_made("int8 packed"), auto_wrap_policy={Block}, **options)
    layer, unsharded = model.layers[1].up, expected.layers[1].up.weight
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append((module.weight, module.down.dtype)))
    model(_tokens(0)).backward()
    ((within, dtype),) = seen
    assert type(within) is Packed and dtype == torch.bfloat16
    assert (within.stored.dtype, within.scale.dtype) == (torch.int8, torch.float32)  # not cast
    assert type(layer.weight) is Packed and layer.weight.shape == unsharded.shape and not layer.weight.requires_grad
    assert "weight" not in dict(layer.named_parameters(recurse=False))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with summon_full_params(each):
            assert torch.equal(each.layers[1].up.weight.unpacked(), unsharded.unpacked())
    with pytest.raises(RuntimeError, match=r"parameter .*_weight_scale: expected torch.float32 on cpu to stay, as it"):
        model.to(torch.bfloat16)
    with pytest.raises(KeyError, match="already exists"):
        layer.weight = nn.Parameter(torch.zeros(2))


@on_ranks(2)
def test_another_context_is_refused() -> None:
    """A state dict whose subclass means something else is refused; what fits is loaded: test_state_protocol.py."""
    model, wrong = fully_shard(_made("int4 packed"), auto_wrap_policy={Block}), _made("int4 packed").state_dict()
    wrong["layers.0.up.weight"] = Packed(wrong["layers.0.up.weight"].stored, wrong["layers.0.up.weight"].scale, 8)
    with pytest.raises(RuntimeError, match=r"layers.0.up.weight: expected a Packed of {'bits': 4}, found one of"):
        model.load_state_dict(wrong)


@pytest.mark.nightly
@on_ranks(2)
def test_equal_blocks_share_a_graph() -> None:
    """Equal blocks with subclasses are compiled once."""
    model = _made("int8 packed")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert list(dict(model.named_parameters())) == list(_plain(_made("int8 packed")))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    model(_tokens(0)).backward()
    assert counter.frame_count <= 2, counter.frame_count  # the first has an input that does not train


class Scaled(nn.Parameter):
    """A parameter of a class of its own, as bitsandbytes has them: an attribute tells what its integers mean."""

    scale: float | Tensor

    def __new__(cls, stored: Tensor, scale: float | Tensor) -> "Scaled":
        made: Scaled = Tensor._make_subclass(cls, stored, False)  # type: ignore[attr-defined]  # torch
        made.scale = scale
        return made


class _ScaledLinear(nn.Module):
    def __init__(self, scale: float | Tensor) -> None:
        super().__init__()
        self.weight = Scaled(torch.arange(63).view(7, 9).to(torch.int8), scale)
        self.bias = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.weight.scale, self.bias)


class _HalvesLinear(nn.Linear):
    """Its weight is of a class around two tensors that must begin at one offset."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        values = self.weight.detach()
        self.weight = nn.Parameter(TwoTensor(values, values.clone()), requires_grad=False)


@both_ways
@on_ranks(2)
def test_attributes_of_parameters(how: str) -> None:
    """A frozen parameter of a class with attributes keeps them in look-up.

    One that holds its data twice, is on meta, or cannot lie in a flat parameter is refused by name.
    """
    expected, model = _ScaledLinear(0.5), fully_shard(_ScaledLinear(0.5))
    x = torch.ones(2, 9)
    found, whole = executor(model, how)(x), expected(x)
    assert torch.equal(found, whole)
    found.sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((7,), 2.0))
    assert list(dict(model.named_parameters())) == ["_weight_data", "bias"]
    with summon_full_params(model):
        assert torch.equal(model.get_parameter("_weight_data").to(torch.int8), expected.weight.detach())
    with pytest.raises(ValueError, match=r"parameter weight: scale of its Scaled has shape \(7, 9\), as large as the"):
        fully_shard(_ScaledLinear(torch.ones(7, 9)))
    with pytest.raises(ValueError, match=r"parameter weight: scale of its Scaled is on the meta device"):
        fully_shard(_ScaledLinear(torch.ones(1, device="meta")))
    with torch.device("meta"):
        absent = _ScaledLinear(0.5)
    with pytest.raises(ValueError, match=r"parameter weight: data of its Scaled is on the meta device"):
        fully_shard(absent)
    with pytest.raises(ValueError, match=r"parameter 0\.weight: a TwoTensor is to be put together of views.*offset"):
        fully_shard(nn.Sequential(_HalvesLinear()))
