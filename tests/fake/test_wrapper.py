"""`FullyShardedDataParallel`, the class that scripts written for torch's wrapper import."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Residual, Stack, mlp
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    compile_step,
    fully_shard,
)
from fsdp_compile.core.sharding import WRAPPED, clean_name


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def test_parameters_keep_identity_and_carry_the_prefix() -> None:
    """Parameters are the original objects; names have one prefix for each nesting level (E-MOD-4, E-VIEW-6)."""
    model = mlp()
    originals, plain = list(model.parameters()), names(model)
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    wrapped = FullyShardedDataParallel(model)
    assert all(one is other for one, other in zip(wrapped.parameters(), originals, strict=True))
    inner = [name.replace("blocks.0.", f"blocks.0.{WRAPPED}.") for name in plain]
    assert names(wrapped) == [f"{WRAPPED}.{name}" for name in inner]


def test_the_wrapped_module_shows_through() -> None:
    """`module` is the wrapped module; its attributes, items, length and iteration are reachable (E-MOD-5, 6)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.note = "seen"
    wrapped = FullyShardedDataParallel(model)
    assert wrapped.module is model and isinstance(wrapped.module, FSDPModule)
    assert wrapped.note == "seen" and wrapped[1] is model[1]
    assert len(wrapped) == 2 and list(wrapped) == list(model)
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapped.absent
    model.__class__.__len__ = lambda self: 0
    try:
        assert bool(wrapped) and bool(FullyShardedDataParallel(nn.Linear(2, 2)))  # not whether something has a length
    finally:
        del model.__class__.__len__


def test_wrappers_are_listed() -> None:
    """All wrappers of a tree, those that policies make among them, or its roots only; each knows which it is (E-MOD-7).

    Loops over `modules()` that look for the class find them, and `module` is what each of them shards.
    """
    model = mlp()
    blocks = list(model.blocks)
    inner = model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
    outer = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Residual}))
    tree = nn.ModuleDict({"one": outer, "other": FullyShardedDataParallel(nn.Linear(2, 2))})
    assert model.blocks[0] is inner
    assert FullyShardedDataParallel.fsdp_modules(tree) == [outer, *model.blocks, tree["other"]]
    assert [each for each in outer.modules() if isinstance(each, FullyShardedDataParallel)] == [outer, *model.blocks]
    assert FullyShardedDataParallel.fsdp_modules(tree, root_only=True) == [outer, tree["other"]]
    assert [child.module for child in model.blocks] == blocks
    assert outer.check_is_root() and not any(child.check_is_root() for child in model.blocks)


def test_a_module_that_is_used_twice_has_one_wrapper() -> None:
    """Wherever a chosen module is registered its wrapper takes its place, also within activation checkpointing."""
    model = mlp()
    model.again = model.blocks[1]
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    outer = FullyShardedDataParallel(model, auto_wrap_policy={Residual})
    assert model.again is model.blocks[1] and isinstance(model.again, FullyShardedDataParallel)
    assert len(FullyShardedDataParallel.fsdp_modules(outer)) == 4
    wrapper, block = model.blocks[2], model.blocks[2].module
    apply_activation_checkpointing(outer, check_fn=lambda module: module is block)
    assert wrapper.module is block and isinstance(wrapper._fsdp_wrapped_module, CheckpointWrapper)
    torch.compile(outer, fullgraph=True, backend="aot_eager")(torch.randn(4, 7)).sum().backward()
    outer(torch.randn(4, 7)).sum().backward()
    assert all(param.grad is not None for param in outer.parameters())


@dataclass
class Batch:
    """Tensors in a dataclass."""

    inputs: Tensor
    scale: list[Tensor]


class Scaled(nn.Linear):
    """A layer that takes a dataclass."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch.inputs) * batch.scale[0]


def test_tensors_in_a_dataclass_are_cast_in_the_graph() -> None:
    """A compiled forward in mixed precision takes dataclasses as an eager one does, in one graph."""
    wrapped = FullyShardedDataParallel(Scaled(7, 3), mixed_precision=MixedPrecision(torch.bfloat16))
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    for run in (wrapped, compiled):
        assert run(Batch(torch.randn(4, 7), [torch.ones(1)])).dtype == torch.bfloat16


@torch._dynamo.config.patch(recompile_limit=4)
@pytest.mark.parametrize(
    ("count", "shard"),
    [
        (2, FullyShardedDataParallel),
        pytest.param(10, fully_shard, marks=pytest.mark.nightly),
    ],
)
def test_models_of_one_class_are_compiled_in_one_process(shard: Callable[[nn.Module], Any], count: int) -> None:
    """Models share no code object, so none reaches Dynamo's limit of recompilations because of the others.

    As many models of one class, each in train, in eval and under no_sync: a graph for each, and no other afterwards.
    No option has to be set for that, as `use_orig_params` has in torch (E-COMP-5).
    """
    for width in range(10, 10 + count):
        model = shard(nn.Sequential(nn.Linear(width, 3), nn.ReLU(), nn.Dropout(0.5)))
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter)
        inputs = torch.randn(2, width)
        for _ in range(2):
            compiled(inputs).sum().backward()
            with model.no_sync():
                compiled(inputs).sum().backward()
            compiled.eval()(inputs)
            compiled.train()
        assert counter.frame_count == 4, width  # the fourth reduces what no_sync accumulated


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Residual})])
def test_around_activation_checkpointing(policy: ModuleWrapPolicy | None) -> None:
    """`FullyShardedDataParallel(checkpoint_wrapper(model))`, as many scripts write it, has all of its methods."""
    wrapped = FullyShardedDataParallel(checkpoint_wrapper(mlp()), auto_wrap_policy=policy)
    assert isinstance(wrapped.module, Stack)
    assert [clean_name(name) for name, _ in wrapped.named_parameters()] == [
        name for name, _ in mlp().named_parameters()
    ]
    assert wrapped.check_is_root() and wrapped.sharding_strategy is ShardingStrategy.FULL_SHARD
    with wrapped.no_sync():
        wrapped(torch.randn(2, 7)).sum().backward()
    wrapped(torch.randn(2, 7)).sum().backward()
    assert wrapped.clip_grad_norm_(1.0).shape == ()  # no values: the other ranks do not exist
    assert set(wrapped.state_dict()) == set(mlp().state_dict())
    compile_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
