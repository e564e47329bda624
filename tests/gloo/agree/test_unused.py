"""Parameters that no rank uses, in units that are used: trained as unsharded, `.grad` None where it has None."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import LATE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import compile_step, fully_shard

from ..ranks import Ranks, on_ranks
from ..training import assert_same_gradients, assert_same_parameters, executor
from ..wire import wire

late = lambda *values: [pytest.param(value, marks=LATE) for value in values]  # noqa: E731
STEPS = 4
Uses = Callable[[int, int], bool]  # whether a rank uses the layer in a backward pass


class _Block(nn.Module):
    """A unit with a layer that forward uses or leaves out; its first and last parameters are always used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra, self.down = nn.Linear(6, 9), nn.Linear(6, 6), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.ones(7))  # part of it on each rank; nothing uses it

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.extra(x) if uses else x


class _Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(3, 3)
        if kind == "all used":  # unless forward leaves out its layer
            del self.spare
            for block in self.blocks:
                del block.scale
        if kind == "tied":
            self.blocks[1].extra.weight = self.blocks[0].extra.weight
            self.spare.bias = self.head.bias
        if kind == "frozen":
            self.blocks[0].up.requires_grad_(False)
            self.blocks[1].extra.bias.requires_grad_(False)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, uses)
        return self.head(x)


NEVER: Uses = lambda rank, number: False  # noqa: E731
PATTERNS: dict[str, Uses] = {
    "no rank": NEVER,
    "one rank": lambda rank, number: rank == 1,
    "by turns": lambda rank, number: number % dist.get_world_size() == rank,
    "at times": lambda rank, number: number % 2 == 1,
    "all but one rank": lambda rank, number: rank != 1,
}


def _loss(model: Any, seed: int, rank: int, uses: bool) -> Tensor:
    torch.manual_seed(10 * seed + rank)
    loss: Tensor = model(torch.randn(4, 6), uses).square().mean()
    return loss


def _models(kind: str = "", **options: Any) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_Model(kind))
    fully_shard(models[1], auto_wrap_policy={_Block}, **options)
    adamw = [torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5) for model in models]
    return *models, adamw


def _run(model: Any, how: str) -> Any:
    """The model as it is run: by "eager", by a backend, or each block by a backend."""
    if not how.startswith("block "):
        return executor(model, how)
    for block in model.blocks:
        block.compile(backend=how.removeprefix("block "))
    return model


def _train(rank: int, pattern: str, how: str, kind: str, microbatches: int, options: dict[str, Any]) -> None:
    uses = PATTERNS[pattern]
    if options.get("mesh") == "hybrid":
        options = {**options, "mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))}
    reference, model, optimizers = _models(kind, **options)
    run, ranks, number = _run(model, how), range(dist.get_world_size()), 0
    for step in range(STEPS):
        for micro in range(microbatches):
            last = micro == microbatches - 1
            with nullcontext() if last else model.no_sync():
                (_loss(run, number, rank, uses(rank, number)) / microbatches).backward()
            for each in ranks:
                (_loss(reference, number, each, uses(each, number)) / microbatches / len(ranks)).backward()
            number += 1
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)  # zeros stay where nothing is used
    assert_same_parameters(model, reference)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("", {}),
    "tied": ("tied", {}),
    "frozen": ("frozen", {}),
    "tree": ("", {"reduction_order": "tree"}),
    "offload": ("", {"cpu_offload": CPUOffload(offload_params=True)}),
    "replicated": ("", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "asked for": ("", {"find_unused_parameters": True}),
    "hybrid": ("", {"mesh": "hybrid", "sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
}
COMPILED = ("aot_eager", "block aot_eager", "inductor", "block inductor")
DAILY = [  # pattern, how it is run, kind, microbatches
    *((pattern, "eager", "", 2) for pattern in PATTERNS),
    *((pattern, "eager", kind, 2 if kind == "tree" else 1)
      for kind in KINDS if kind not in ("", "hybrid") for pattern in ("no rank", "by turns")),
    ("by turns", "eager", "hybrid", 1),  # ranks of both replicas report the parameters that they used
    ("at times", "aot_eager", "", 2),  # a graph records which parameters it uses
    ("no rank", "block aot_eager", "", 1),
    ("by turns", "aot_eager", "", 1),  # the graphs of the two ranks use different parameters
]  # fmt: skip
NIGHTLY = [
    *((pattern, "eager", "", microbatches) for pattern in PATTERNS for microbatches in (1, 3)),
    *((pattern, "eager", "hybrid", 1) for pattern in ("no rank", "one rank")),
    *(("no rank", "aot_eager", kind, 2 if kind == "tree" else 1) for kind in KINDS if kind not in ("", "hybrid")),
    *((pattern, how, "", micro) for how in COMPILED for pattern in ("no rank", "at times") for micro in (1, 2)),
    *(("by turns", how, "", 1) for how in ("block aot_eager", "inductor")),
]


@pytest.mark.parametrize(
    ("pattern", "how", "kind", "microbatches"),
    [*DAILY, *(pytest.param(*row, marks=LATE) for row in NIGHTLY if row not in DAILY)],
)
def test_trained(two: Ranks, four: Ranks, pattern: str, how: str, kind: str, microbatches: int) -> None:
    """A parameter's `.grad` is None if no rank has used it in any microbatch of the step: eager and compiled, with tied
    and frozen parameters, exact sums, shards in host memory, and replicas."""
    (four if kind == "hybrid" else two).run(_train, pattern, how, KINDS[kind][0], microbatches, KINDS[kind][1])


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("how", ["eager", "aot_eager", *late("inductor")])
@on_ranks(2)
def test_update_in_backward(rank: int, how: str) -> None:
    """A unit of which something may have no gradient is updated when backward has ended; others within it."""
    for all_used in (False, True):
        reference, model, (adamw, ours) = _models("all used" if all_used else "")
        if how == "eager":
            model.compile(disable=True)
        backend = "aot_eager" if how == "eager" else how
        step = compile_step(model, ours, _mean_square, backend=backend, update_in_backward=True)
        for number in range(STEPS):
            uses = number % 2 == 1
            for each in range(dist.get_world_size()):
                (_loss(reference, number, each, uses) / dist.get_world_size()).backward()
            torch.manual_seed(10 * number + rank)
            step(torch.randn(4, 6), uses)
            adamw.step()
            adamw.zero_grad()
            assert_same_parameters(model, reference)
        for one, other in zip(reference.parameters(), model.parameters(), strict=True):
            assert bool(adamw.state[one]) == bool(ours.state[other])


def _sharded(model: nn.Module, **options: Any) -> Any:
    fully_shard(model, auto_wrap_policy={_Block}, **options)
    return model


@pytest.mark.parametrize("how", ["eager", *late("aot_eager", "block aot_eager")])
@on_ranks(2)
def test_collectives(rank: int, how: str) -> None:
    """One more for the root in the first two backward passes; none behind them where all is used."""
    asked = {}
    for finds in (None, False, True):
        model = _sharded(_Model("all used"), find_unused_parameters=finds)
        run = _run(model, how)
        for number in range(4):
            with wire() as calls:
                _loss(run, number, rank, uses=True).backward()
            asked[finds, number] = [call.kind for call in calls].count("all_reduce")
    assert [asked[None, number] for number in range(4)] == [1, 1, 0, 0]
    assert [asked[False, number] for number in range(4)] == [0, 0, 0, 0]
    assert [asked[True, number] for number in range(4)] == [1, 1, 1, 1]


@on_ranks(2)
def test_staying_on(rank: int) -> None:
    """Where one rank has left something out in the second pass, all ranks go on to say what they use."""
    model = _sharded(_Model("all used"))
    for number in range(6):
        with wire() as calls:
            _loss(model, number, rank, uses=rank != 1 or number != 1).backward()
        assert [call.kind for call in calls].count("all_reduce") == 1, number
    unused = _loss(model, 6, rank, uses=False)
    model.zero_grad()
    unused.backward()
    assert model.blocks[0].extra.weight.grad is None


@on_ranks(2)
def test_a_rank_that_leaves_something_out_late(rank: int) -> None:
    """It warns once, with the parameter's name and the option; with the option there is nothing to warn of."""
    for finds in (None, True, False):
        model = _sharded(_Model("all used"), find_unused_parameters=finds)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(6):
                model.zero_grad()
                _loss(model, number, rank, uses=number < 3 or rank == 0).backward()
            model.zero_grad()
            _loss(model, 7, rank, uses=False).backward()
        grads = [block.extra.weight.grad for block in model.blocks]
        assert all(grad is None if finds else not grad.any() for grad in grads)
        found = [str(each.message) for each in caught if "find_unused_parameters" in str(each.message)]
        assert len(found) == (finds is None), found
        assert finds is not None or "blocks.1.extra.weight" in found[0]


@on_ranks(2)
def test_within_no_sync(rank: int) -> None:
    """What nothing has used shows no gradient there either; cleared gradients count as unused; reduced ones stay."""
    model = _models()[1]
    extra, down = model.blocks[0].extra.weight, model.blocks[0].down.weight
    with model.no_sync():
        _loss(model, 0, rank, uses=False).backward()
        assert extra.grad is None
        assert down.grad is not None
        _loss(model, 1, rank, uses=True).backward()
        assert extra.grad is not None
        model.zero_grad()
        _loss(model, 2, rank, uses=False).backward()
        assert extra.grad is None
    _loss(model, 3, rank, uses=False).backward()
    assert extra.grad is None
    assert down.grad is not None
    before = down.grad.full_tensor()
    _loss(model, 3, rank, uses=True).backward()
    gained = extra.grad.full_tensor()
    _loss(model, 4, rank, uses=False).backward()
    assert torch.equal(extra.grad.full_tensor(), gained), "what was there stays"
    assert not torch.equal(down.grad.full_tensor(), before)
    with model.no_sync():
        _loss(model, 5, rank, uses=False).backward()
        assert torch.equal(extra.grad.full_tensor(), gained)
    _loss(model, 6, rank, uses=False).backward()
    assert torch.equal(extra.grad.full_tensor(), gained)


@on_ranks(2)
def test_what_comes_between_microbatches(rank: int) -> None:
    """Gradients that autograd returns end no window, and one that a user assigns counts as one that was computed."""
    model = _models()[1]
    extra = model.blocks[0].extra.weight
    with model.no_sync():
        _loss(model, 0, rank, uses=True).backward()
        torch.autograd.grad(_loss(model, 1, rank, uses=False), [model.head.weight])
        assert extra.grad is not None
    _loss(model, 2, rank, uses=False).backward()
    used = extra.grad.full_tensor()
    assert used.any()
    with model.no_sync():
        model.zero_grad()
        _loss(model, 3, rank, uses=False).backward()
        extra.grad = torch.ones_like(extra.grad) if extra.grad is not None else torch.ones(6, 6)
    _loss(model, 4, rank, uses=False).backward()
    assert torch.equal(extra.grad.full_tensor(), torch.ones(6, 6))


@on_ranks(2)
def test_hooks(rank: int) -> None:
    """Autograd calls hooks on parameters of a shard that has a gradient: they find one, of zeros where it is unused."""
    reference, model, _ = _models()
    called: list[list[str]] = [[], []]
    for each, names in zip((reference, model), called, strict=True):
        for name, param in each.named_parameters():
            if not name.startswith("spare"):
                param.register_post_accumulate_grad_hook(lambda _, name=name, names=names: names.append(name))
    for each in (reference, model):
        _loss(each, 0, rank, uses=False).backward()
    names = [name for name, _ in model.named_parameters() if not name.startswith("spare")]
    assert sorted(called[1]) == sorted(names)
    for name in names:
        expected = reference.get_parameter(name).grad
        assert bool(model.get_parameter(name).grad.full_tensor().any()) == (expected is not None), name
    assert model.spare.weight.grad is None


@on_ranks(2)
def test_for_some_parameters(rank: int) -> None:
    """`backward(inputs=...)` gives none to those that no rank has used; torch.autograd.grad returns zeros."""
    for uses in (NEVER, PATTERNS["one rank"]):
        reference, model, _ = _models()
        for number in range(3):
            chosen = [[each.blocks[0].extra.weight, each.blocks[0].up.weight] for each in (reference, model)]
            _loss(model, number, rank, uses(rank, number)).backward(inputs=chosen[1])
            for each in range(dist.get_world_size()):
                loss = _loss(reference, number, each, uses(each, number)) / dist.get_world_size()
                used = chosen[0] if uses(each, number) else chosen[0][1:]
                loss.backward(inputs=used)
            assert_same_gradients(model, reference)
        (grad,) = torch.autograd.grad(_loss(model, 3, rank, uses=False), [model.blocks[1].extra.weight])
        assert not grad.full_tensor().any()


class _Recomputed(nn.Module):
    """A unit that runs twice, each time in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), nn.Linear(6, 6)])

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        for second in (False, True):
            x = checkpoint(self.blocks[0], x, uses and second, use_reentrant=True) + self.blocks[1](x)
        return x


@on_ranks(2)
def test_backward_passes_within_a_backward_pass(rank: int) -> None:
    """A reentrant checkpoint runs one: what each of them has used adds up."""
    for pattern in ("no rank", "one rank", "at times"):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(_Recomputed())
        reference, model = models
        fully_shard(model, auto_wrap_policy={_Block})
        for number in range(4):
            for each in models:
                each.zero_grad()
            torch.manual_seed(number)
            batches = torch.randn(dist.get_world_size(), 4, 6, requires_grad=True)
            model(batches[rank], PATTERNS[pattern](rank, number)).square().mean().backward()
            for each in range(dist.get_world_size()):
                loss = reference(batches[each], PATTERNS[pattern](each, number)).square().mean()
                (loss / dist.get_world_size()).backward()
            assert_same_gradients(model, reference)


@pytest.mark.parametrize("how", ["eager", "aot_eager", *late("block aot_eager")])
@on_ranks(2)
def test_two_forwards_in_a_backward(rank: int, how: str) -> None:
    """A parameter that one of two forwards has used has a gradient."""
    reference, model, _ = _models()
    run = _run(model, how)
    for number in range(3):
        for second in (False, True):
            for each in (reference, model):
                each.zero_grad()
            (_loss(run, number, rank, uses=False) + _loss(run, number + 1, rank, uses=second)).backward()
            for each in range(dist.get_world_size()):
                losses = _loss(reference, number, each, uses=False) + _loss(reference, number + 1, each, uses=second)
                (losses / dist.get_world_size()).backward()
            assert_same_gradients(model, reference)
