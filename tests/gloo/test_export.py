"""Full weights for engines: unit by unit, cast on the shard, the next gather under way; and what interrupts that."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, THIRD_PARTY
from models import GPT, MODELS, Case, cross_entropy, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import FullyShardedDataParallel, ShardingStrategy, export, fully_shard, metadata, summon_full_params
from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import clean_name

from .ranks import on_ranks
from .tensors import test_tensor_parallel as tensor_parallel
from .tensors.test_quantized import Block, Net
from .training import OPTIMIZERS, assert_bitwise, backward, build, executor, mine, shard, units
from .wire import wire

BF16 = torch.bfloat16


class Adapted(nn.Module):
    """A linear layer with what `export` reads of peft's `lora.Linear` (0.21), which it stands for."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})
        self.scaling, self.active_adapters, self.lora_bias = {"default": 2.0}, ["default"], {"default": False}
        self.lora_variant: dict[str, Any] = {}
        self.disable_adapters = self.merged = False

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def get_delta_weight(self, adapter: str) -> Tensor:
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight * self.scaling[adapter]

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


def adapted() -> nn.Module:
    """A frozen GPT with adapters in its blocks."""
    model = GPT().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
    return model


def quantized_tokens(seed: int, size: int) -> tuple[Tensor]:
    return (text(seed, size)[0] % 17,)


LORA = Case(adapted, text, cross_entropy)
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "tied": (MODELS["tied"], {}),  # "gpt" and more
    "llama": (THIRD_PARTY["llama"], {}),
    "experts": (FAMILIES["deepseek_v3"], {}),
    "lora": (LORA, {}),
    "quantized": (
        Case(partial(Net, "int8 packed"), quantized_tokens, lambda model, inputs: model(*inputs)),
        {"auto_wrap_policy": {Block}},
    ),
    "copied": (MODELS["gpt"], {"strategy": "NO_SHARD"}),
}


def taken(exported: Iterator[Any]) -> dict[str, Tensor]:
    """Copies of all that is exported; every unit agrees with its metadata and its bucket."""
    found: dict[str, Tensor] = {}
    for unit in exported:
        for (name, tensor), info in zip(unit.items(), unit.metadata(), strict=True):
            assert (name, tuple(tensor.shape), tensor.dtype) == info[:3] and name not in found
            there = unit.bucket[info.offset :][: tensor.nbytes]
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), there) and tensor.is_contiguous()
            found[name] = tensor.clone()
    return found


def gathered(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What `full_tensor()` of each tensor of the state dict gives, tied ones once, in `dtype` where that is a cast."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        full = value.full_tensor() if isinstance(value, nn.Parameter) else value
        inner = any(part in name for part in ("_stored", "_scale"))
        casts = isinstance(value, nn.Parameter) and full.dtype == torch.float32 and not inner
        found.setdefault(id(value), (clean_name(name), full.detach().to(dtype) if dtype and casts else full.detach()))
    return dict(found.values())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


RUNS = [*((name, "eager") for name in CASES), ("lora", "aot_eager")]


@pytest.mark.parametrize(("name", "how"), RUNS)
@on_ranks(2)
def test_values(rank: int, name: str, how: str) -> None:
    """Exported values are those of `full_tensor()`, cast, bit for bit, before and after steps, under the names of the
    state dict: one gather for each flat parameter, in bytes of `dtype`, and one number at the end. `metadata` has their
    names in order and sends nothing. Training goes on as without.
    """
    case, options = CASES[name]
    model, reference = shard(case, **options), shard(case, **options)
    run = executor(model, how), executor(reference, how)
    both = [OPTIMIZERS["adamw"](p for p in each.parameters() if p.requires_grad) for each in (model, reference)]
    for step in range(2):
        for dtype in (None, BF16):
            expected = gathered(model, dtype)
            with wire() as sent:
                planned = metadata(run[0], dtype)
            assert not sent
            with wire() as sent:
                assert_same(taken(export(run[0], dtype)), expected)
            assert [info.name for info in planned] == list(taken(export(model, dtype)))
            flats = [(unit, flat) for unit in units(model) for flat in unit.flats if unit.is_sharded]
            sizes = [
                flat.layout.numel * unit.compute_dtype(flat, dtype is None, dtype).itemsize for unit, flat in flats
            ]
            gathers = [each.nbytes for each in sent if each.kind == "gather"]
            assert sorted(gathers) == sorted(sizes) and len(sent) == len(sizes) + bool(sizes)
        for each, optimizer in zip(run, both, strict=True):
            backward(each, case, mine(case, step))
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise(model, reference, f"step {step}")


@on_ranks(2)
def test_two_units_are_alive() -> None:
    """While a unit is read the next gather is under way, and beside the shards there are two units at most, whatever
    the consumer holds: what it holds is empty then.
    """
    model = shard(MODELS["mlp"])
    sizes = sorted(sum(flat.layout.numel * 4 for flat in unit.flats) for unit in units(model))
    buckets: list[StorageWeakRef] = []
    start = collectives.start_all_gather

    def alive() -> int:
        found = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in buckets)
        return sum(each.nbytes() for each in found if each is not None)

    def noting(full: Tensor, *rest: Any) -> Any:
        buckets.append(StorageWeakRef(full.untyped_storage()))  # units of this model have one flat parameter each
        deadline = time.monotonic() + 1.0  # gloo's threads drop tensors shortly after a collective has ended
        while alive() > sum(sizes[-2:]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive() <= sum(sizes[-2:])
        return start(full, *rest)

    held = []
    with mock.patch.object(collectives, "start_all_gather", noting):
        for index, unit in enumerate(export(model), 1):
            assert len(buckets) == min(index + 1, len(sizes))
            held += [*unit.values(), unit]  # as one who forgets that they are valid until the next
    assert len(buckets) == len(sizes) and all(each.numel() == 0 for each in held if isinstance(each, Tensor))


def _interrupt(how: str, rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    exported, found, expected = export(model), dict[str, Tensor](), gathered(model)
    for index, unit in enumerate(exported):
        found |= {name: tensor.clone() for name, tensor in unit.items()}
        match how:
            case "the consumer raises" if index == 1:
                raise KeyError
            case "the consumer of one raises" if rank == 0:
                raise KeyError
            case "all stop early":
                return
            case "one stops alone" if rank == 0:
                exported.close()
            case "a step in between":
                step()
            case "forwards in between":
                with torch.no_grad():
                    model(mine(MODELS["gpt"], 0)[0])
    assert_same(found, expected)


STOPPED = (RuntimeError, "some ranks stopped before its end")
CHANGED = (RuntimeError, "changed before they were sent")
INTERRUPTIONS: dict[str, list[Any]] = {  # what each of two ranks raises
    "the consumer raises": [(KeyError, ""), (KeyError, "")],
    "all stop early": [None, None],
    "one stops alone": [STOPPED, STOPPED],
    "the consumer of one raises": [(KeyError, ""), STOPPED],
    "a step in between": [CHANGED, CHANGED],
    "forwards in between": [None, None],
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
@on_ranks(2)
def test_interrupted(rank: int, name: str) -> None:
    """An interrupted export is an error, or as if it had not been: no rank waits for ever, the next steps are those of
    a model that was not exported, and the next export has their values.
    """
    case, raised = MODELS["gpt"], INTERRUPTIONS[name][rank]
    model, reference = shard(case), shard(case)
    both = [(each, OPTIMIZERS["adamw"](each.parameters())) for each in (model, reference)]

    def step(seed: int, of: Any) -> None:
        for each, optimizer in of:
            backward(each, case, mine(case, seed))
            optimizer.step()
            optimizer.zero_grad()

    step(0, both)
    with pytest.raises(raised[0], match=raised[1]) if raised else nullcontext():
        _interrupt(name, rank, model, partial(step, 1, both))
    gc.collect()
    step(2, both)
    assert_bitwise(model, reference, name)
    assert_same(taken(export(model)), gathered(model))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": 2},
    {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "devices_per_node": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(4)
def test_to_some_ranks(rank: int, options: dict[str, Any]) -> None:
    """Some ranks get the weights and the others only send: also through two groups, and where two ranks hold a copy."""
    model = fully_shard(build(MODELS["gpt"]), **options)
    expected = gathered(model, BF16)
    for to in ([0], [dist.get_world_size() - 1, 1], []):
        assert_same(taken(export(model, BF16)), expected)
        shown = [unit.metadata() for unit in export(model, BF16, to=to)]
        found = [dict(unit.items()) for unit in export(model, BF16, to=to) if unit]
        assert [info for unit in shown for info in unit] == metadata(model, BF16) and bool(found) == (rank in to)
        copies = {n: t.clone() for unit in export(model, BF16, to=to) for n, t in unit.items()}
        assert_same(copies, expected if rank in to else {})


@on_ranks(4)
def test_what_belongs_to_no_unit_alone(rank: int) -> None:
    """Parameters under tensor parallelism come complete; ignored ones and buffers come as copies, each by itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = tensor_parallel.Llama()
    whole.register_buffer("steps", torch.arange(3))
    model = copy.deepcopy(whole)
    tensor_parallel.parallelize(model, mesh["tp"])
    scale = model.norm.extra = nn.Parameter(torch.ones(3))
    whole.norm.extra = nn.Parameter(torch.ones(3))
    fully_shard(model, mesh=mesh["dp"], ignored_params={scale})
    expected = {n: v.to(BF16) if v.is_floating_point() else v for n, v in whole.state_dict().items()}
    assert_same(taken(export(model, BF16)), expected)
    infos = {info.name: info for info in metadata(model, BF16)}
    assert {name: info.shape for name, info in infos.items()} == {n: tuple(v.shape) for n, v in expected.items()}
    assert scale.numel() == 3 and model.steps.numel() == 3  # what was exported were copies
    found = {name: tensor.clone() for unit in export(model, BF16, to=[2]) for name, tensor in unit.items()}
    assert_same(found, expected if rank == 2 else {})


@on_ranks(2)
def test_adapters() -> None:
    """Adapters are merged, before the cast, as an unsharded model merges them, or are exported alone: then frozen
    weights are not gathered. The model stays. A layer that adds more than a product is refused by name.
    """
    model = shard(LORA)
    expected = {}
    for name, value in gathered(model).items():
        if "lora_" not in name:
            expected[name.replace(".base_layer", "")] = value
    for path, layer in build(LORA).named_modules():
        if isinstance(layer, Adapted):
            expected[f"{path}.weight"] = expected[f"{path}.weight"] + layer.get_delta_weight("default").detach()
    before = gathered(model)
    for dtype in (None, BF16):
        merged = {name: value.to(dtype or value.dtype) for name, value in expected.items()}
        assert_same(taken(export(model, dtype, adapters="merge")), merged)
        assert {info.name for info in metadata(model, dtype, adapters="merge")} == merged.keys()
    only = {n.replace(".default", ""): value for n, value in before.items() if "lora_" in n}
    with wire() as sent:
        assert_same(taken(export(model, adapters="only")), only)
    assert len([each for each in sent if each.kind == "gather"]) == len(model.blocks)
    assert_same(gathered(model), before)
    model.blocks[1].up.lora_variant["default"] = object()
    with pytest.raises(NotImplementedError, match=r"blocks.1.up is merged with its adapter by more"):
        export(model, adapters="merge")


@on_ranks(2)
def test_names_and_what_is_refused() -> None:
    """What `names` maps to None stays, with units that have nothing else; wrong calls say what is wrong."""
    model = shard(MODELS["tied"])
    with pytest.raises(ValueError, match="adapters must be"):
        export(model, adapters="all")
    with pytest.raises(ValueError, match=r"tokens.weight and another tensor get the name x"):
        export(model, names=lambda name: "x")
    with summon_full_params(model), pytest.raises(ValueError, match="inside summon_full_params"):
        metadata(model)

    def within(*_: Any) -> None:
        with pytest.raises(ValueError, match="in its forward or backward"):
            export(model)

    hook = model.head.register_forward_hook(within)
    model(mine(MODELS["tied"], 0)[0])
    hook.remove()
    with torch.device("meta"):
        empty = fully_shard(GPT())
    with pytest.raises(ValueError, match="is on the meta device"):
        export(empty)
    names = {"head.weight": "lm_head", "blocks.0.up.bias": "up"}
    expected = gathered(model)
    with wire() as sent:
        found = taken(export(model, names=names.get))
    assert_same(found, {"lm_head": expected["tokens.weight"], "up": expected["blocks.0.up.bias"]})
    assert sum(each.kind == "gather" for each in sent) == 2  # of the units that have one of them
    wrapped = FullyShardedDataParallel(build(MODELS["gpt"]))
    assert_same(taken(export(wrapped)), gathered(wrapped))
