"""Compiled models accumulate and call communication hooks as eager ones do: two sharded models side by side.

`aot_eager` runs the same operators as eager, so equality is bit for bit; Inductor rounds elsewhere.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODULES, Case, mlp, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..comm.test_communication import _spied
from ..comm.test_reduce import _two_by_two
from ..ranks import NIGHTLY, on_ranks
from ..training import (
    OPTIMIZERS,
    assert_bitwise,
    assert_same_gradients,
    backward,
    executor,
    mine,
    reference_and_model,
    relative_difference,
    shard,
    units,
    whole,
)

SMALL = Case(lambda: mlp(2 if NIGHTLY else 1), vectors, squared_error)
no_recompile = torch._dynamo.config.patch(error_on_recompile=True)


class _Both:
    """Two models that are sharded alike and have equal values: `models[0]` runs eagerly, `models[1]` compiled."""

    def __init__(self, case: Case, how: str, strategy: str = "FULL_SHARD", **options: Any) -> None:
        self.case, self.how = case, how
        self.models = [shard(case, strategy, **options) for _ in range(2)]
        self.runs = [self.models[0], executor(self.models[1], how)]
        self.optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in self.models]

    def backward(self, seed: int, sync: bool = True) -> None:
        for model, run in zip(self.models, self.runs, strict=True):
            with nullcontext() if sync else model.no_sync():
                backward(run, self.case, mine(self.case, seed))
        self.compare(f"microbatch {seed}")

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(self, pattern: str, first_seed: int = 0) -> None:
        """Microbatches with (s) and without (n) synchronisation, then a step."""
        for seed, letter in enumerate(pattern, first_seed):
            self.backward(seed, sync=letter == "s")
        self.step()
        self.compare(f"step after {pattern}")

    def compare(self, when: str, bitwise: bool = True) -> None:
        if self.how == "aot_eager" and bitwise:
            assert_bitwise(self.models[0], self.models[1], when)
            return
        for ours, theirs in zip(*(model.parameters() for model in self.models), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), when
            if ours.grad is not None and theirs.grad is not None and ours.grad.any():
                assert relative_difference(_plain(theirs.grad), _plain(ours.grad)) <= 1e-5, when


def _plain(grad: Tensor) -> Tensor:
    """All elements of a gradient: of all ranks, or under no_sync of this one."""
    return grad.full_tensor() if isinstance(grad, ShardedTensor) else grad


# --- equal to eager ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    ["FULL_SHARD", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("NO_SHARD", "SHARD_GRAD_OP"))],
)
@on_ranks(2)
def test_patterns(strategy: str) -> None:
    """With and without synchronisation in any order: equal gradients after every backward, also those shown under
    no_sync; k microbatches, one reduce; what was compiled once is not compiled again.

    E-ACC-1..4, E-COMP-8.
    """
    both = _Both(SMALL, "aot_eager", strategy)
    both.accumulate("snns")
    with no_recompile:
        both.accumulate("nsnss", 10)
        both.accumulate("ss", 20)
        with _spied() as calls:
            both.accumulate("nns", 30)
    reduces = [call for call in calls if call.kind != "gather" and call.numel > 1]
    assert len(reduces) == 2 * len(units(both.models[0])), reduces  # one for each model and unit


class _Twice(nn.Module):
    """Its blocks run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for block in (*self.net.blocks, *self.net.blocks):
            x = block(x)
        return self.net.head(x)


TWICE = Case(_Twice, vectors, squared_error)


@pytest.mark.nightly
@on_ranks(2)
def test_inductor() -> None:
    """Generated code does not write into gradients that a hook has not reduced yet (E-HOOK-2).

    Units that are called twice are reduced once, as the sum.
    """
    both = _Both(TWICE, "inductor")
    both.accumulate("snns")
    with no_recompile:
        both.accumulate("nsns", 10)
        for model in both.models:
            model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
        both.accumulate("nss", 20)


def _frozen() -> nn.Module:
    """A frozen block, and a frozen layer in the other one."""
    model = mlp(2)
    for module in (model.stem, model.blocks[0], model.blocks[1].up):
        module.requires_grad_(False)
    return model


KINDS: list[tuple[Case, dict[str, Any]]] = [
    (MODULES["tied_ends"], {}),
    (Case(_frozen, vectors, squared_error), {}),
    (SMALL, {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}),
    (SMALL, {"strategy": "NO_SHARD", "mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}),
    (SMALL, {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)}),
]


@pytest.mark.parametrize(
    "which", [slice(1, 2), *(pytest.param(slice(*each), marks=pytest.mark.nightly) for each in ((3, 4), (0, 5, 2)))]
)
@on_ranks(2)
def test_kinds_of_parameters(which: slice) -> None:
    """So it is with tied and frozen parameters and where gradients are reduced in another dtype (E-MP-20)."""
    for case, options in KINDS[which]:
        torch._dynamo.reset()
        both = _Both(case, "aot_eager", **options)
        both.accumulate("nns")
        with no_recompile:
            both.accumulate("nss", 10)


@pytest.mark.nightly
@on_ranks(4)
def test_hybrid() -> None:
    """So it is where shards are averaged over copies, by ourselves and after a hook (E-HOOK-7)."""
    with _two_by_two() as groups:
        both = _Both(SMALL, "aot_eager", "HYBRID_SHARD", process_group=groups)
        both.accumulate("nsns")
        for model in both.models:
            model.register_comm_hook(DefaultState(groups[0]), reduce_scatter_hook)
        both.accumulate("nss", 10)


@on_ranks(2)
def test_eager_and_compiled_share_what_is_kept() -> None:
    """Microbatches of one step may run eagerly and compiled, in any order."""
    both = _Both(SMALL, "aot_eager")
    compiled = both.runs[1]
    for seed, (letter, how) in enumerate(["ne", "sc", "nc", "ne", "nc", "se", "nc", "ne", "sc"]):
        both.runs[1] = compiled if how == "c" else both.models[1]
        both.backward(seed, sync=letter == "s")
        if letter == "s":
            both.step()


@on_ranks(2)
def test_edits_of_local_gradients_count() -> None:
    """What users do to gradients under no_sync counts up to the reduce, between forward and backward too (E-GRAD-6)."""
    both = _Both(SMALL, "aot_eager")

    def half(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    def clear(param: nn.Parameter) -> None:
        param.grad = None

    def zero(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.zero_()

    edits: list[Callable[[nn.Parameter], None]] = [half, clear, zero]
    for seed, edit in enumerate(edits):
        both.backward(10 * seed)  # hidden meanwhile
        both.backward(10 * seed + 1, sync=False)
        losses = [both.case.loss(run, mine(both.case, 10 * seed + 2)) for run in both.runs]
        for model, loss in zip(both.models, losses, strict=True):
            for param in list(model.parameters())[::2]:
                edit(param)
            loss.backward()
        both.compare(edit.__name__)
        both.step()


# --- forwards and backwards in other orders ---------------------------------------------------------------------------


@on_ranks(2)
def test_orders() -> None:
    """Several forwards before their backwards, one backward for several, forwards without any (E-FIN-7)."""
    both = _Both(SMALL, "aot_eager")

    def forward(seed: int, sync: bool = True) -> list[Tensor]:
        with ExitStack() as stack:
            for model in both.models if not sync else ():
                stack.enter_context(model.no_sync())
            return [both.case.loss(run, mine(both.case, seed)) for run in both.runs]

    def finish(*losses: list[Tensor]) -> None:
        for each in zip(*losses, strict=True):
            sum(each[1:], each[0]).backward()
        both.compare("gradients", bitwise=len(losses) == 1)  # else sums come in another order

    finish(forward(3, sync=False))  # backward decides
    both.step()
    first, second = forward(4), forward(5)  # in between, what the second forward found kept is reduced
    both.backward(6, sync=False)
    finish(second)
    both.backward(7, sync=False)
    finish(first)
    both.step()
    with torch.no_grad():
        forward(11, sync=False)
    forward(12, sync=False)  # no backward
    for model in both.models:
        model.eval()
    forward(13, sync=False)
    for model in both.models:
        model.train()
    both.accumulate("ns", 14)
    finish(forward(8), forward(9, sync=False), forward(10))  # one backward for all
    both.step()
    finish(forward(16, sync=False), forward(17, sync=False))  # both graphs leave their reduces to one backward
    both.step()
    for model in both.models:
        model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    finish(forward(18), forward(19), forward(20, sync=False))


@on_ranks(2)
def test_the_forward_decides_to_reduce() -> None:
    """A backward under no_sync of a compiled forward that was outside reduces: earlier than asked, with equal sums."""
    reference, model = reference_and_model(SMALL)
    run = executor(model, "aot_eager")
    losses = [SMALL.loss(run, mine(SMALL, 1))]
    with model.no_sync():
        losses.append(SMALL.loss(model, mine(SMALL, 2)))
        losses.pop().backward()
        losses.pop().backward()  # reduced by its graph, with what was kept
    for seed in (1, 2):
        backward(reference, SMALL, whole(SMALL, seed))
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("forward", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_a_rank_may_leave_out_a_backward(rank: int, forward: str, early: bool) -> None:
    """Ranks that kept nothing and ranks that did reduce alike: no hang, and the mean of what there is (E-ACC-2).

    Also if the synchronised forward was traced before no_sync was ever in force.
    """
    reference, model = reference_and_model(SMALL, "SHARD_GRAD_OP")
    run = executor(model, "aot_eager")
    before = SMALL.loss(run, mine(SMALL, 3)) if early else None
    with model.no_sync():
        local = SMALL.loss(model if forward == "eager" else run, mine(SMALL, 1))
        if rank == 0:
            local.backward()
    with _spied() as calls:
        (SMALL.loss(run, mine(SMALL, 3)) if before is None else before).backward()
    reduces = [call for call in calls if call.kind == "reduce"]
    assert early or len(reduces) == len(units(model))
    of_rank_0 = SMALL.batch(1, whole(SMALL, 1)[0].shape[0])
    part = [each[: each.shape[0] // dist.get_world_size()] for each in of_rank_0]
    (SMALL.loss(reference, tuple(part)) / dist.get_world_size()).backward()  # the other rank adds nothing to the mean
    backward(reference, SMALL, whole(SMALL, 3))
    assert_same_gradients(model, reference)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.left(x), self.right(x)


HEADS = Case(_Heads, vectors, lambda model, inputs: sum(out.square().mean() for out in model(inputs[0])))


@on_ranks(2)
def test_several_losses() -> None:
    """Two backward passes of one compiled forward, both synchronised or one of them (E-FIN-7)."""
    how = "aot_eager"
    reference, model = reference_and_model(HEADS)
    run = executor(model, how)
    for net, (x, _) in ((torch.compile(reference, backend=how), whole(HEADS, 1)), (run, mine(HEADS, 1))):
        left, right = (out.square().mean() for out in net(x))
        left.backward(retain_graph=True)
        right.backward()
    assert_same_gradients(model, reference)
    with model.no_sync():
        left, right = (out.square().mean() for out in run(mine(HEADS, 2)[0]))
        left.backward(retain_graph=True)
    right.backward()  # of the same forward: synchronised
    backward(reference, HEADS, whole(HEADS, 2))
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_second_order_is_refused() -> None:
    """A compiled backward that is to be differentiated raises; the model stays usable (E-ERR-11)."""
    both = _Both(SMALL, "aot_eager")
    for sync in (True, False):
        with nullcontext() if sync else both.models[1].no_sync():
            loss = both.case.loss(both.runs[1], mine(both.case, 1))
            with pytest.raises(RuntimeError, match=r"parameter \S+: derivatives of second order.*create_graph"):
                loss.backward(create_graph=True)
        del loss
        both.models[1].zero_grad()
    torch._dynamo.reset()  # what was compiled for create_graph stays so
    both.accumulate("ns")


# --- communication hooks ----------------------------------------------------------------------------------------------


def _sum(calls: list[int], gradients: Tensor, output: Tensor | None = None) -> None:
    calls.append(gradients.numel())
    dist.all_reduce(gradients)
    if output is not None:
        output.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        pytest.param("FULL_SHARD", True, marks=pytest.mark.nightly),
        pytest.param("NO_SHARD", False, marks=pytest.mark.nightly),
        pytest.param("FULL_SHARD", False, marks=pytest.mark.nightly),
        pytest.param("NO_SHARD", True, marks=pytest.mark.nightly),
    ],
)
@on_ranks(2)
def test_hooks(strategy: str, late: bool) -> None:
    """A user's hook, torch's and its compressing one, registered before or after compiling, get what eager gives them.

    E-HOOK-1, E-HOOK-2, E-HOOK-3, E-HOOK-6.
    """
    compress = (LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    stock = (DefaultState(dist.group.WORLD), allreduce_hook if strategy == "NO_SHARD" else reduce_scatter_hook)
    for state, hook in ([], _sum), stock, compress:
        torch._dynamo.reset()
        both = _Both(SMALL, "aot_eager", strategy, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
        if late:
            both.accumulate("s")
        calls: list[list[int]] = [[], []]
        for model, of_model in zip(both.models, calls, strict=True):
            model.register_comm_hook(of_model if hook is _sum else state, hook)
        both.accumulate("nss", 10)
        with no_recompile:
            both.accumulate("sns", 20)
        assert calls[0] == calls[1] and len(calls[0]) == (4 * len(units(model)) if hook is _sum else 0), calls
