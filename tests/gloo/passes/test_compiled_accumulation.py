"""Compiled models accumulate and call communication hooks as eager ones do: two sharded models side by side.

`aot_eager` runs the same operators as eager, so equality is bit for bit; Inductor rounds elsewhere.
"""

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, MODULES, Case, mlp, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from ..ranks import NIGHTLY, on_ranks
from ..training import (
    OPTIMIZERS,
    assert_bitwise,
    assert_same_gradients,
    backward,
    executor,
    local,
    mine,
    reference_and_model,
    shard,
    units,
    whole,
)
from ..wire import wire

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
            if ours.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(local(theirs.grad), local(ours.grad), rtol=1e-4, atol=1e-6, msg=when)


# --- equal to eager ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@on_ranks(2)
def test_inductor() -> None:
    """Generated code does not write into gradients that a hook has not reduced yet (E-HOOK-2)."""
    both = _Both(SMALL, "inductor")
    both.accumulate("snns")
    with no_recompile:
        both.accumulate("nsns", 10)
        for model in both.models:
            model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
        both.accumulate("nss", 20)


KINDS: list[tuple[Case, dict[str, Any]]] = [
    (MODULES["tied_ends"], {}),
    (MODELS["frozen"], {}),
    (SMALL, {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}),
    (SMALL, {"strategy": "NO_SHARD", "mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}),
    (SMALL, {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)}),
]


@pytest.mark.parametrize("kind", [1, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (0, 2, 3, 4))])
@on_ranks(2)
def test_kinds_of_parameters(kind: int) -> None:
    """So it is with tied and frozen parameters and where gradients are reduced in another dtype (E-MP-20)."""
    case, options = KINDS[kind]
    both = _Both(case, "aot_eager", **options)
    both.accumulate("nns")
    with no_recompile:
        both.accumulate("nss", 10)


@pytest.mark.nightly
@on_ranks(4)
def test_hybrid() -> None:
    """So it is where shards are averaged over copies, by ourselves and after a hook (E-HOOK-7)."""
    mesh = init_device_mesh("cpu", (2, 2))
    both = _Both(SMALL, "aot_eager", "HYBRID_SHARD", mesh=mesh)
    both.accumulate("nsns")
    for model in both.models:
        model.register_comm_hook(DefaultState(mesh.get_group(1)), reduce_scatter_hook)
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
    with wire() as calls:
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
    reference, model = reference_and_model(HEADS)
    run = executor(model, "aot_eager")
    for net, (x, _) in ((torch.compile(reference, backend="aot_eager"), whole(HEADS, 1)), (run, mine(HEADS, 1))):
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


# --- communication hooks ----------------------------------------------------------------------------------------------


def _sum(calls: list[int], gradients: Tensor, output: Tensor | None = None) -> None:
    calls.append(gradients.numel())
    dist.all_reduce(gradients)
    if output is not None:
        output.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.nightly
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
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
