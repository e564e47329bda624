"""What a training script may do with a sharded model: each thing alone, then clean steps with the right numbers."""

import copy
import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from fuzz.cases import Case as Way
from fuzz.cases import Node, Step
from fuzz.run import compare
from joint import JointPasses
from models import MLP, MODELS, MODULES, Case, mlp, squared_error, vectors
from tiers import LATE, all_strategies, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from .ranks import NIGHTLY, Ranks, on_ranks
from .training import assert_same_gradients, backward, build, executor, follow, mine, reference_and_model, units, whole

ONE = Case(lambda: mlp(1), vectors, squared_error)


# --- as one process that plays all ranks ------------------------------------------------------------------------------

BLOCK, LAYER = Node("mlp", unit=True), Node()
PARAMETRIZED = Node("conv", size=7)  # while it runs
CHECKPOINTS = ("reentrant", "non-reentrant")
OUTPUTS = ("tuple", "dict", "dataclass", "view")
BETWEEN = ("eval", "abandon", "failed forward", "failed backward", "deepcopy", "data", "summon", "functional call",
           "state", "full state", "optimizer state", "roll back", "new parameter", "remove")  # fmt: skip


def _nest(*children: Node, **how: Any) -> Node:
    return Node("nest", children, unit=True, **how)


def _twice(node: Node, how: str) -> Node:
    return Node("nest", (replace(node, checkpoint=how),), checkpoint=how)


def _elsewhere(frozen: str) -> tuple[Node, ...]:
    """Units that leave a loss where no hook finds it, between what they return."""
    leaves = [{"out": out, "aside": "elsewhere"} for out in OUTPUTS]
    inner = replace(LAYER, checkpoint="non-reentrant")
    return tuple(
        node for how in leaves for node in (_nest(BLOCK, frozen=frozen, **how), _nest(_nest(inner, **how), **how))
    )


WAYS: dict[str, Way] = {
    "between and within steps": Way(
        (BLOCK, BLOCK),
        steps=(
            *(Step(syncs) for syncs in ((True,), (True, True), (True, False, False, True))),
            *(Step(forwards=forwards) for forwards in ("two", "apart", "crossed", "eval")),
            *(Step(before=what) for what in BETWEEN),
        ),
    ),
    "frozen": Way(
        (replace(BLOCK, frozen="all"), replace(BLOCK, frozen="first"), BLOCK),
        steps=tuple(Step(before=what) for what in ("", "freeze", "freeze", "thaw")),
    ),
    "run twice, without gradients, of odd shapes": Way(
        (
            replace(BLOCK, times=2),
            replace(BLOCK, gate="no_grad"),
            Node("scale", unit=True),
            Node("scale"),
            LAYER,
            Node("recurrent", unit=True),
        ),
        forward_prefetch=True,
        steps=(Step((False, True)), Step(before="deepcopy"), Step()),
    ),
    "outputs": Way(tuple(replace(BLOCK, out=out) for out in OUTPUTS), out="dataclass", steps=(Step(), Step())),
    "views changed in place": Way(
        tuple(_nest(replace(LAYER, checkpoint=how), out="view", then="in place") for how in ("", *CHECKPOINTS)),
    ),
    **{
        f"losses elsewhere, frozen {frozen or 'none'}": Way(
            _elsewhere(frozen), backward_prefetch=prefetch, steps=(Step((False, True)), Step())
        )
        for frozen, prefetch in (("first", "None"), ("all", "BACKWARD_PRE"), ("", "BACKWARD_POST"))
    },
    **{
        f"checkpoints of units, prefetch {prefetch}": Way(
            tuple(
                _nest(replace(BLOCK, checkpoint=inner, times=2), _twice(PARAMETRIZED, inner), checkpoint=outer)
                for outer, inner in product(CHECKPOINTS, repeat=2)
            ),
            backward_prefetch=prefetch,
            steps=(Step(), Step(forwards="crossed"), Step(forwards="apart")),
        )
        for prefetch in ("BACKWARD_PRE", "BACKWARD_POST", "None")
    },
    "checkpoints in units": Way(
        tuple(
            _nest(*parts, checkpoint=around)
            for around, how in product(("", "reentrant"), CHECKPOINTS)
            for part in (replace(LAYER, checkpoint=how),)
            for parts in ((LAYER, part, part), (part, LAYER), (Node("nest", (LAYER, part), checkpoint=how), LAYER))
        ),
        steps=(Step(), Step((False, True))),
    ),
}


def _compare(rank: int, ways: dict[str, Way], how: str) -> list[str]:
    found = {name: compare(rank, way, how) for name, way in ways.items()}
    return [f"{name}: {mismatch}" for name, mismatch in found.items() if mismatch is not None]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("FULL_SHARD", "eager"), ("NO_SHARD", "eager")]
    + [pytest.param(*each, marks=LATE) for each in (("SHARD_GRAD_OP", "eager"), ("FULL_SHARD", "aot_eager"))],
)
def test_ways(two: Ranks, strategy: str, how: str) -> None:
    """Losses, gradients and parameters are those of one process that plays all ranks, and in the end nothing is
    gathered, whatever units return, leave elsewhere or recompute, and whatever happens between and within steps.

    E-AC-3, E-ACC-4, E-BWD-1, 2, 5, 7, E-FIN-3, E-FLAT-11, 12, E-FWD-9, E-NONE-5, E-RED-1, E-STRAT-10, E-VIEW-3.
    """
    names = list(WAYS) if how == "eager" else ["between and within steps", "frozen", "outputs"]
    if strategy != "FULL_SHARD":  # backward gathers nothing: prefetching is of no account
        names = [name for name in names if not name.endswith(("prefetch BACKWARD_POST", "prefetch None"))]
    assert two.run(_compare, {name: replace(WAYS[name], strategy=strategy) for name in names}, how) == [[], []]


# --- parameters -------------------------------------------------------------------------------------------------------


def _train(rank: int, case: Case, how: str) -> None:
    reference, model = build(case), fully_shard(build(case), reduction_order="any" if how == "eager" else "tree")
    follow(executor(model, how), reference, case)


COMPILED = ("reads_child", "tied_blocks")  # every day


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "eager") for name in MODULES),
        *(pytest.param(name, "aot_eager", marks=() if name in COMPILED else LATE) for name in MODULES),
    ],
)
@on_ranks(2)
def test_modules(rank: int, name: str, how: str) -> None:
    """Parameters are found wherever module code looks for them; tied ones get the sum of gradients, trees the mean."""
    _train(rank, MODULES[name], how)


# --- forwards and backwards -------------------------------------------------------------------------------------------


@torch.no_grad()
def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def _halve_one(model: nn.Module) -> None:
    model.blocks[0].up.bias.mul_(0.5)


@torch.no_grad()
def _halve_what_is_stored(model: nn.Module) -> None:
    for param in model.parameters():
        (param.to_local() if isinstance(param, ShardedTensor) else param).mul_(0.5)


CHANGED = (
    r"parameter .*was changed in place between forward and backward",
    "modified by an inplace operation",  # autograd's own, of what a graph has saved
)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_parameters_changed_between_forward_and_backward(strategy: str) -> None:
    """As in plain autograd, that is an error and not a wrong gradient; the model stays usable.

    The check is made in an autograd hook: what it says arrives (E-LIM-6, E-GEN-4).
    """
    for change in (_halve, _halve_one, _halve_what_is_stored):
        reference, model = reference_and_model(MLP, strategy)
        loss = MLP.loss(model, mine(MLP, 7))
        for each in (model, reference):
            change(each)
        with pytest.raises(RuntimeError, match="|".join(CHANGED)):
            loss.backward()
        model.zero_grad()
        follow(model, reference, MLP)


def _gradient_of_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x)[0]


READ_AGAIN = (  # by day the first six
    ("FULL_SHARD", False, _halve, "inputs"),
    ("FULL_SHARD", False, _halve_one, "second"),
    ("FULL_SHARD", True, _halve_what_is_stored, "first"),
    ("SHARD_GRAD_OP", True, _halve, "first"),
    ("NO_SHARD", True, _halve_one, "only"),
    ("NO_SHARD", False, _halve_one, "eager between"),
    ("FULL_SHARD", False, _halve, "first"),
    ("FULL_SHARD", True, _halve, "first"),
    ("FULL_SHARD", True, _halve_what_is_stored, "only"),
    ("NO_SHARD", True, _halve, "first"),
    ("NO_SHARD", False, _halve, "first"),
    ("NO_SHARD", False, _halve, "inputs"),
)


@on_ranks(2)
def test_each_backward_compares_what_its_forward_has_read() -> None:
    """Of compiled forwards between which parameters changed in place, frozen or not, each backward has the gradients of
    the values that its own forward had, or raises."""
    for strategy, frozen, change, order in READ_AGAIN if NIGHTLY else READ_AGAIN[:6]:
        what = f"{strategy}, frozen {frozen}, {change.__name__}, {order}"
        model, before = build(ONE), build(ONE)
        model.requires_grad_(not frozen)
        for block in model.blocks:
            fully_shard(block, sharding_strategy=ShardingStrategy[strategy])
        fully_shard(model, sharding_strategy=ShardingStrategy[strategy])
        torch._dynamo.reset()
        run = torch.compile(model, backend=JointPasses())
        batches = [whole(MLP, seed)[0].requires_grad_() for seed in (7, 8)]
        first = run(batches[0]).sum()
        after = copy.deepcopy(before)
        if order == "eager between":
            model(batches[1])
        change(model)
        change(after)
        second = run(batches[1]).sum() if order in ("first", "second") else None
        try:
            if order == "inputs":
                batches[0].grad = torch.autograd.grad(first, batches[0])[0]
            else:
                (second if order == "second" and second is not None else first).backward()
        except RuntimeError as error:
            assert order != "second" and re.search("|".join(CHANGED), str(error)), f"{what}: {error}"
            assert frozen or re.search(r"parameters? (stem|blocks\.\d)\.\w+", str(error)), f"{what}: {error}"
            continue
        assert order == "second" or strategy == "SHARD_GRAD_OP", f"{what}: nothing was said"
        x, values = (batches[1], after) if order == "second" else (batches[0], before)
        torch.testing.assert_close(x.grad, _gradient_of_input(values, x), msg=what)


def _one_block(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    block = getattr(model, "_orig_mod", model)
    return block(inputs[0]).square().mean()


@all_strategies
@compiled_late
@on_ranks(2)
def test_block_alone(how: str, strategy: str) -> None:
    """A block may be run outside of its root, and the root afterwards."""
    reference, model = reference_and_model(MLP, strategy)
    alone = Case(MLP.build, partial(vectors, inputs=11), _one_block)
    backward(reference.blocks[1], alone, whole(alone, 3))
    backward(executor(model.blocks[1], how), alone, mine(alone, 3))
    for each in (reference, model):
        assert all(param.grad is None for param in each.blocks[0].parameters()), "another block has a gradient"
    assert_same_gradients(model.blocks[1], reference.blocks[1])
    follow(executor(model, how), reference, MLP)


@on_ranks(2)
def test_compiled_regions() -> None:
    """Modules inside units may be compiled while the rest stays eager; steps then compile nothing again."""
    reference, model = reference_and_model(MODELS["gpt"])
    for block in model.blocks:
        block.up.compile(backend="aot_eager", fullgraph=True)
    follow(model, reference, MODELS["gpt"], steps=3)


# --- exceptions -------------------------------------------------------------------------------------------------------


class _Expected(Exception):
    """Raised by a hook below."""


def _raise(*_: Any) -> None:
    raise _Expected


@pytest.mark.parametrize("failure", ["shape", "hook"])
@on_ranks(2)
def test_exceptions_compiled(failure: str) -> None:
    """A compiled model survives an exception while it is traced and one after its backward."""
    reference, model = reference_and_model(MLP)
    run = executor(model, "aot_eager")
    follow(run, reference, MLP)
    if failure == "shape":  # while tracing again
        with pytest.raises(Exception, match="size"):
            run(torch.randn(3, 8))
    else:  # after the compiled backward, in the join of a unit
        hook = units(model.blocks[1])[0].flats[0].autograd_shard.register_hook(_raise)
        with pytest.raises(_Expected):
            backward(run, MLP, mine(MLP, 5))
        hook.remove()
    follow(run, reference, MLP)
    follow(model, reference, MLP)


@on_ranks(2)
def test_operators_return_no_aliases(rank: int) -> None:
    """`aot_eager` runs where torch refuses operators whose results share memory: its default when `$CI` is set."""
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):
        _train(rank, MLP, "aot_eager")
