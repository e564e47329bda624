"""What a sharded model can do, one row a feature: docs/features.md. tests/gloo/test_feature_table.py runs each row."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import MODELS, Case, Inputs, Residual, Stack, checkpointed, mlp, squared_error, vectors
from torch import Tensor, nn
from torch.distributed import ReduceOp, reduce_scatter_tensor
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import CustomPolicy, FullyShardedDataParallel, ModuleWrapPolicy, fully_shard
from fsdp_compile import size_based_auto_wrap_policy as by_size

BF16, FP32 = torch.bfloat16, torch.float32
EXACT, LOW = 1e-5, 2e-2  # relative differences: fp32, and where anything is rounded to bf16
MANY = (256,)  # examples: the mean of a few numbers of 8 bits is no loss whose curve could be compared


@dataclass(frozen=True)
class Row:
    """A feature, on the smallest model that shows it.

    Attributes:
        name: what the table calls it.
        case: the model, its data and its loss.
        shard: takes what `case.build` returned, and `mixed_precision` where the row has it; returns the sharded model.
        precision: mixed precision, which the reference emulates.
        tolerance: on relative differences of Inductor from eager.
        apart: that of eager from one process that emulates all ranks: 0, as a sum of two ranks, or of two pairs of
            them, has one order.
        ranks: on how many it runs.
        sizes: how many examples a rank gets at each step, in turns; more than one: compiled for dynamic shapes.
        syncs: for each backward pass of a step whether it reduces gradients.
        clip: the norm to which gradients are clipped, if at all.
        evaluates: whether the model is evaluated after each step.
        switches: whether steps run compiled and eagerly in turns.
        replaces: whether parameters get new data, somewhat smaller, after each step.
        regions: whether the blocks are compiled, each by itself, in a model that runs eagerly.
        muon: whether Muon updates the matrices.
    """

    name: str
    case: Case
    shard: Callable[..., nn.Module] = fully_shard
    precision: MixedPrecision | None = None
    tolerance: float = EXACT
    apart: float = 0.0
    ranks: int = 2
    sizes: tuple[int, ...] = (3,)
    syncs: tuple[bool, ...] = (True,)
    clip: float | None = None
    evaluates: bool = False
    switches: bool = False
    replaces: bool = False
    regions: bool = False
    muon: bool = False


# --- models -----------------------------------------------------------------------------------------------------------

MLP = Case(partial(mlp, blocks=2), vectors, squared_error)


class _Buffered(Residual):
    """Scales by a floating buffer."""

    def __init__(self) -> None:
        super().__init__(11, 23)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 11))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.to(x.dtype))


class _Adapted(nn.Module):
    """A frozen linear layer and a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(11, 11).requires_grad_(False)
        self.down, self.up = nn.Linear(11, 3, bias=False), nn.Linear(3, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class _TwoDtypes(nn.Module):
    """One layer in bf16 and one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(11, 23, dtype=BF16), nn.Linear(23, 11)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x.to(BF16))).float())


class _Keywords(Residual):
    """Takes keyword arguments and returns a dict of nested containers."""

    def forward(self, x: Tensor, *, shift: dict[str, list[Tensor]], halve: bool = False) -> dict[str, Any]:
        y = super().forward(x + shift["by"][0])
        return {"y": (y / 2 if halve else y,), "aside": [y.square().mean(), None, "text"]}


class _Nested(Stack):
    """Returns a dict as well, from keyword arguments alone."""

    def __init__(self) -> None:
        super().__init__([_Keywords(11, 23) for _ in range(2)])

    def forward(self, *, x: Tensor) -> dict[str, Any]:
        y, asides = self.stem(x), []
        for halve, block in enumerate(self.blocks):
            found = block(y, shift={"by": [y.sin()]}, halve=bool(halve))
            y, asides = found["y"][0], [*asides, found["aside"][0]]
        return {"out": {"y": self.head(y)}, "asides": tuple(asides)}


class _Twice(Stack):
    """Calls its first block again."""

    def __init__(self) -> None:
        super().__init__([Residual(11, 23) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](self.blocks[1](self.blocks[0](self.stem(x))))
        return self.head(y)


def _nested_error(model: nn.Module, inputs: Inputs) -> Tensor:
    found = model(x=inputs[0])
    return F.mse_loss(found["out"]["y"], inputs[1]) + 0.1 * sum(found["asides"])


def _fill(module: nn.Module) -> None:
    """Give a module's own parameters values that depend on nothing but their shapes."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            param.copy_(torch.linspace(-1, 1, param.numel()).sin().view(param.shape) / 3)


def _filled() -> nn.Module:
    return MLP.build().apply(_fill)


# --- how they are sharded ---------------------------------------------------------------------------------------------


def _from_meta(model: nn.Module, **options: Any) -> nn.Module:
    """Shard a model of the same kind that never had values."""
    with torch.device("meta"):
        model = MLP.build()
    return fully_shard(
        model,
        param_init_fn=lambda module: _fill(module.to_empty(device=torch.get_default_device(), recurse=False)),
        **options,
    )


def _nest(model: nn.Module, **options: Any) -> nn.Module:
    """Units in units, by calls from the inside out."""
    for block in model.blocks:
        fully_shard(block.up, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _ignore(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, ignored_states=[model.head.weight, model.blocks[0].up.bias], **options)


def _copy(model: nn.Module, **options: Any) -> nn.Module:
    return copy.deepcopy(fully_shard(model, **options))


def _hook(model: nn.Module, **options: Any) -> nn.Module:
    """Reduce by a hook of the user's that does what happens without."""
    model = fully_shard(model, **options)
    model.register_comm_hook(None, lambda _, full, part: reduce_scatter_tensor(part, full, ReduceOp.AVG))
    return model


def _choose(module: nn.Module) -> bool | dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Residual) else False


def _as(strategy: ShardingStrategy) -> Callable[..., nn.Module]:
    return partial(fully_shard, sharding_strategy=strategy)


def _by(policy: Any) -> Callable[..., nn.Module]:
    return partial(fully_shard, auto_wrap_policy=policy)


# --- the table --------------------------------------------------------------------------------------------------------

HYBRID = {"devices_per_node": 2}

ROWS: tuple[Row, ...] = (
    Row("`FULL_SHARD`", MLP),
    Row("`SHARD_GRAD_OP`", MLP, _as(ShardingStrategy.SHARD_GRAD_OP)),
    Row("`NO_SHARD`", MLP, _as(ShardingStrategy.NO_SHARD)),
    Row("`HYBRID_SHARD`, 4 ranks", MLP, partial(_as(ShardingStrategy.HYBRID_SHARD), **HYBRID), ranks=4),
    Row("`_HYBRID_SHARD_ZERO2`, 4 ranks", MLP, partial(_as(ShardingStrategy._HYBRID_SHARD_ZERO2), **HYBRID), ranks=4),
    Row("compute in bf16, reduce in fp32", MLP, precision=MixedPrecision(BF16, FP32), tolerance=LOW, sizes=MANY),
    Row("compute and reduce in bf16", MLP, precision=MixedPrecision(BF16), tolerance=LOW, sizes=MANY),
    Row("buffers in bf16", Case(lambda: Stack([_Buffered() for _ in range(2)]), vectors, squared_error),
        precision=MixedPrecision(BF16, FP32, BF16), tolerance=LOW, sizes=MANY),
    Row("frozen layers and blocks", MODELS["frozen"]),
    Row("LoRA", Case(lambda: Stack([_Adapted() for _ in range(2)]), vectors, squared_error)),
    Row("tied weights", MODELS["tied"]),
    # An update in bfloat16 rounds otherwise in the last elements, which vector instructions leave over.
    Row("several dtypes in a unit", Case(lambda: Stack([_TwoDtypes() for _ in range(2)]), vectors, squared_error),
        tolerance=LOW, apart=1e-4, sizes=MANY),
    Row("one unit", MLP, _by(None)),
    Row("nested units", MLP, _nest),
    Row("`ModuleWrapPolicy`", MLP, _by(ModuleWrapPolicy({Residual, nn.LayerNorm}))),
    Row("`size_based_auto_wrap_policy`", MLP, _by(partial(by_size, min_num_params=300))),
    Row("`CustomPolicy` with a strategy of its own", MLP, _by(CustomPolicy(_choose))),
    Row("`FullyShardedDataParallel`", MLP, partial(FullyShardedDataParallel, auto_wrap_policy={Residual})),
    Row("CPU offload", MLP, partial(fully_shard, cpu_offload=CPUOffload(True))),
    Row("checkpoint inside units", Case(lambda: checkpointed("inside"), vectors, squared_error)),
    Row("checkpoint around units", Case(lambda: checkpointed("around"), vectors, squared_error)),
    Row("batches of changing size", MLP, sizes=(3, 5, 4)),
    Row("evaluation without gradients in between", MLP, evaluates=True),
    Row("keyword arguments, nested inputs and outputs", Case(_Nested, vectors, _nested_error)),
    Row("accumulation, every backward reduces", MLP, syncs=(True, True)),
    Row("accumulation under `no_sync`", MLP, syncs=(False, False, True)),
    Row("`register_comm_hook`", MLP, _hook),
    Row("`wire=\"bf16\"`", MLP, partial(fully_shard, wire="bf16"), tolerance=LOW, apart=LOW, sizes=MANY),
    Row("`reshard_after_forward=False`", MLP, partial(fully_shard, reshard_after_forward=False)),
    Row("`reshard_after_forward=2`, 4 ranks", MLP, partial(fully_shard, reshard_after_forward=2), ranks=4),
    # Each call is reduced by itself: a sum of means, where one process has the mean of sums.
    Row("a block that is called twice", Case(_Twice, vectors, squared_error), apart=EXACT),
    Row("`clip_grad_norm_`", MLP, clip=0.1, apart=1e-6),  # a norm of two parts: its last bit is that of the CPU
    Row("ignored parameters", MLP, _ignore),
    Row("start on the meta device", Case(_filled, vectors, squared_error), _from_meta),
    Row("`deepcopy`", MLP, _copy),
    Row("eager and compiled steps alternate", MLP, switches=True),
    Row("`block.compile()` in an eager model", MLP, regions=True),
    Row("data replaced between steps", MLP, replaces=True),
    Row("`torch.optim.Muon`", MLP, muon=True, tolerance=LOW, sizes=MANY),  # it amplifies what Inductor rounds
    Row("`shards=\"rows\"`", MLP, partial(fully_shard, shards="rows")),
)  # fmt: skip
