"""Optimizers of complete matrices step as on one process, while each rank computes what it owns."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import MODELS, Case, Routed, seeded, squared_error, vectors
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from fsdp_compile import compile_step
from fsdp_compile.optim import MatrixOptimizer, MatrixShard, flat_step, matrix_exchange
from fsdp_compile.optim.matrix_optimizers import takes_matrices
from fsdp_compile.optim.matrix_step import MatrixUpdates
from fsdp_compile.optim.owner_plan import OwnerPlan
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import Ranks, on_ranks
from ..same_bits import CASES as SAME
from ..same_bits import LowRank, of_ranks, trained
from ..training import build, local, mine, reference_and_model, shard
from .test_compile_step import Both, loss_of
from .test_update_in_backward import Normed

NIGHTLY = pytest.mark.nightly
STEPS = 20


class Wide(nn.Module):
    """Matrices wider than high, higher than wide, of one shape several times, beside vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 41), nn.Linear(41, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 19), nn.GELU(), nn.Linear(19, 7)) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Experts(nn.Module):
    """Weights of five experts in one parameter, all of which see everything, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)
        self.blocks = nn.ModuleList(nn.Linear(18, 18) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(5, 18, 7) / 5)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x[:, None]).flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.tanh(x @ self.experts).mean(0))


class Orthogonal(MatrixOptimizer):
    """Ten lines: momentum, three iterations of Newton-Schulz, batches of matrices, a count of steps."""

    dims = 2

    def before(self, shard: MatrixShard) -> Tensor:
        shard.state["step"] = shard.state.get("step", 0) + 1
        return shard.zeros("momentum").mul_(0.9).add_(shard.grad)

    def whole(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        x = matrix / (matrix.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.mT) @ x
        return x

    def after(self, shard: MatrixShard, update: Tensor) -> None:
        shard.param.add_(update, alpha=-shard.group["lr"] / shard.state["step"])


def declared(model: nn.Module) -> list[Optimizer]:
    """Each kind of parameter has its optimizer."""
    params = list(model.parameters())
    filters, rest = [p for p in params if p.dim() == 3 and p.shape[1] == 1], [p for p in params if p.dim() == 1]
    matrices = [p for p in params if p.dim() == 2 or (p.dim() == 3 and p.shape[-1] == 7)]
    return [Orthogonal(matrices, {"lr": 0.05}), Normed(filters, {}), AdamW(rest, lr=0.01, eps=1e-3)]


CASES: dict[str, Case] = {
    **MODELS,
    "wide": Case(Wide, vectors, squared_error),
    "experts": Case(Routed, partial(vectors, inputs=8, outputs=8), squared_error),
    "batches": Case(Experts, vectors, squared_error),
    "lora": Case(LowRank, vectors, squared_error),
}


def optimizers(model: nn.Module, **options: Any) -> list[Optimizer]:
    """As people write it: Muon for matrices, AdamW for the rest."""
    if hasattr(model, "experts") and isinstance(model.experts, Tensor):
        return declared(model)
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    made: list[Optimizer] = [Muon(matrices, lr=0.02, **options)] if matrices else []
    return made + ([AdamW(rest, lr=0.01, eps=1e-3)] if rest else [])


def plan_of(optimizer: Optimizer) -> OwnerPlan:
    """Who owns what, behind a step."""
    (plan,) = MatrixUpdates.of(optimizer).plans.values()
    return plan


def _train(rank: int, name: str, strategy: str = "FULL_SHARD", lr: Any = 0.02, **options: Any) -> None:
    """From the gradients of the sharded model, clipped, another one is trained on one process: the same bits."""
    case = CASES[name]
    reference, model = build(case), shard(case, strategy, **options)
    of_each = [optimizers(each) for each in (model, reference)]
    for step in range(STEPS):
        case.loss(model, mine(case, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.grad = None if param.grad is None else param.grad.full_tensor()
        for group in (group for some in of_each for each in some for group in each.param_groups):
            group["lr"] = lr / (1 + 0.1 * step)
        for each in (some[0] for some in of_each) if step == 10 else ():  # the last one gets a group of its own
            each.add_param_group({"params": [each.param_groups[0]["params"].pop()]})
        for each in (each for some in of_each for each in some):
            each.step()
            each.zero_grad()
        for (key, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            full = param.full_tensor()
            is_matrix = param.dim() == 2  # a batch of matrices has the bits of each alone; its product may not
            assert not is_matrix or torch.equal(full, other), (key, step, (full - other).abs().max())
            torch.testing.assert_close(full, other, rtol=0, atol=1e-6)
    for one in (each for each in of_each[0] if takes_matrices(each)):
        params = [param for group in one.param_groups for param in group["params"]]
        matrices = [matrix for plan in MatrixUpdates.of(one).plans.values() for matrix in plan.matrices]
        batches = [len(p) for p in params if len(p) == 5 and p.dim() == 3]
        assert len(matrices) == sum(batches) + len(params) - len(batches)
        assert sum("[" in matrix.name for matrix in matrices) == sum(batches)
        assert all(
            type(value) is ShardedTensor for p in params for value in one.state[p].values() if type(value) is not int
        )


@pytest.mark.parametrize(
    ("world", "name", "options"),
    [("two", "wide", {}), ("two", "wide", {"strategy": "NO_SHARD"}), ("two", "batches", {})]
    + [pytest.param("four", "wide", {"strategy": "HYBRID_SHARD", "devices_per_node": 2}, marks=NIGHTLY)]
    + [pytest.param("two", "wide", {"lr": torch.tensor(0.0200001)}, marks=NIGHTLY)]
    + [pytest.param("two", name, {}, marks=NIGHTLY) for name in CASES if name not in ("wide", "batches")],
)
def test_values(request: pytest.FixtureRequest, world: str, name: str, options: dict[str, Any]) -> None:
    """Matrix optimizers on several ranks have the bits of one process that is given the same gradients.

    So have replicas that each do the same work, and a learning rate of a tensor, which changes in its last digits.
    """
    request.getfixturevalue(world).run(partial(_train, name=name, **options))


# --- compile_step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "order"),
    [
        ("wide", {"clip_norm": 0.5}, "any"),
        ("gpt", {"update_in_backward": True}, "any"),
        pytest.param("gpt", {"clip_norm": 0.5}, "tree", marks=NIGHTLY),
        pytest.param("mlp", {"regional": True, "update_in_backward": True}, "tree", marks=NIGHTLY),
        pytest.param("experts", {"accumulate": 1}, "tree", marks=NIGHTLY),
    ],
)
@on_ranks(2)
def test_compile_step(name: str, options: dict[str, Any], order: str) -> None:
    """`compile_step` with Muon and AdamW has the bits of the eager loop, also where it updates in backward."""
    both = Both(CASES[name], optimizers, "aot_eager", partial(shard, reduction_order=order), **options)
    both.loop = both.loop_of(1, "eager")
    for number in range(4):
        for group in (group for some in both.optimizers for each in some for group in each.param_groups):
            group["lr"] = 0.02 / (1 + 0.1 * number)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            both.compare(number, what=name)


class Skipping(Wide):
    """Leaves one of its blocks out of a step, if it is told to."""

    skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else x + block(x)
        return self.head(x)


@contextmanager
def watching(sent: list[str]) -> Iterator[None]:
    """Note the exchanges of matrices that begin meanwhile."""
    start = matrix_exchange.start_all_to_all_of_parts

    def noted(*given: Any) -> Any:
        sent.append(given[-1])
        return start(*given)

    with patch.object(matrix_exchange, "start_all_to_all_of_parts", noted):
        yield


@on_ranks(2)
def test_update_in_backward() -> None:
    """Stages of several units are exchanged together in backward, also without a unit that a step leaves out."""
    sharded = partial(shard, auto_wrap_policy={nn.Sequential, nn.Linear})
    both = Both(Case(Skipping, vectors, squared_error), optimizers, build=sharded, update_in_backward=True)
    both.loop = both.loop_of(1, "eager")
    sent: list[str] = []
    for number, skipped in enumerate((-1, -1, 1, 1, -1)):
        for model in both.models:
            model.skipped = skipped  # type: ignore[assignment]  # not a parameter
        for each in (each for some in both.optimizers for each in some) if number == 3 else ():  # which will be joined
            each.load_state_dict(copy.deepcopy(each.state_dict()))

        def noted(inputs: Tensor, target: Tensor) -> Tensor:
            with watching(sent):
                return both.step(inputs, target=target)

        both.compare(number, noted)
        counted = len(sent), len(set(plan_of(both.optimizers[0][0]).stages))
        assert counted[0] in (2 * counted[1], 2 * counted[1] - 2), counted
        sent.clear()


@on_ranks(2)
def test_clipped() -> None:
    """Where gradients stay in flat shards, matrices are clipped to the norm of all, and hooks that come later run; what
    nobody clips shows no gradient. Complete state that is loaded in between counts, sharded."""
    model = shard(CASES["wide"])
    muon, adamw = optimizers(model)
    step = compile_step(torch.compile(model, backend="eager"), [muon, adamw], loss_of, clip_norm=0.05)
    called: list[Any] = []
    run, shown = step._update.run, list[bool]()
    step._update.run = lambda *given: (  # type: ignore[method-assign]  # to look before it
        shown.append(any(param.grad is not None for param in model.parameters())) or run(*given)
    )
    for number, norm in enumerate((0.05, None, 0.05)):
        step._clip_norm = norm
        before = {param: muon.state[param]["momentum_buffer"].clone() for param in muon.state}
        inputs, target = mine(CASES["wide"], number)
        loss_of(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm or torch.inf)
        expected = {param: param.grad.clone() for param in muon.param_groups[0]["params"]}
        model.zero_grad()
        step(inputs, target=target)
        for param, grad in expected.items():
            momentum = grad.mul(0.05) if number == 0 else before[param].lerp(grad, 1 - 0.95)
            torch.testing.assert_close(local(muon.state[param]["momentum_buffer"]), local(momentum))
        if number == 0:
            muon.load_state_dict(tree_map_only(ShardedTensor, ShardedTensor.full_tensor, muon.state_dict()))
        if number == 1:
            for each in (muon, adamw):
                each.register_step_pre_hook(lambda *given: called.append(given[0]))
    assert called == [muon, adamw] and shown == [True, False, True]


@NIGHTLY
@pytest.mark.parametrize("options", [{"clip_norm": 0.05}, {"update_in_backward": True}])
@on_ranks(2)
def test_with_inductor(options: dict[str, Any]) -> None:
    """Where Inductor compiles the model and the elementwise updates, results are those of the loop up to rounding."""
    both = Both(CASES["mlp"], optimizers, "fsdp_compile", **options)
    both.loop = both.loop_of(1, "eager")
    for number in range(3):
        both.train(number)
        for param, other in zip(*(model.parameters() for model in both.models), strict=True):
            torch.testing.assert_close(local(param), local(other), rtol=0, atol=1e-3)  # bfloat16 amplifies rounding


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how"),
    [("short", "eager"), pytest.param("gpt", "eager", marks=NIGHTLY), pytest.param("gpt", "aot_eager", marks=NIGHTLY)],
)
@on_ranks(4)
def test_same_bits(rank: int, name: str, how: str) -> None:
    """With "tree" one, two and four ranks end with the same parameters, losses and momentum, those of by_owner."""

    def run(group: Any) -> Any:
        parameters, seen, state = trained(SAME[name], group, how, "matrices", process_group=group)
        if how == "eager":
            assert (parameters, seen) == trained(SAME[name], group, how, "muon", process_group=group)[:2]
        return parameters, seen, state

    of_ranks(rank, run)


def _counted(rank: int) -> int:
    """Operations of this rank's step, which are those of the matrices that it owns."""
    case = CASES["wide"]
    model = shard(case)
    muon = optimizers(model)[0]
    case.loss(model, mine(case, 0)).backward()
    with FlopCounterMode(display=False) as counter:
        muon.step()
    plan = plan_of(muon)
    assert counter.get_total_flops() == plan.loads[rank] > 0
    assert str(plan).startswith("9 matrices on 2 ranks") and plan.balance < 1.3
    return counter.get_total_flops()


def test_each_matrix_is_computed_once(two: Ranks) -> None:
    """All ranks together execute the products of one process, each those of its own matrices."""
    case = CASES["wide"]
    model = case.build()
    muon = optimizers(model)[0]
    case.loss(model, case.batch(0, 4)).backward()
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert sum(two.run(_counted)) == counter.get_total_flops()


def distributed(full: Tensor, param: Any) -> Tensor:
    """`full`, sharded as `param` is."""
    return ShardedTensor(param.spec.local_of(full).clone(), param.spec)


@on_ranks(4)
def test_three_functions(rank: int) -> None:
    """An optimizer of ten lines has the bits of one process on one, two and four ranks, in a loop and in backward."""
    case = CASES["wide"]

    def run(group: Any) -> None:
        reference, model = build(case), shard(case, process_group=group)
        pairs = [
            (param, other)
            for param, other in zip(model.parameters(), reference.parameters(), strict=True)
            if param.dim() == 2
        ]
        mine, alone = (Orthogonal(list(each), {"lr": 0.05}) for each in zip(*pairs, strict=True))
        for step in range(3):
            for index, (param, other) in enumerate(pairs):
                other.data = other.data.t().contiguous().t()  # by columns
                other.grad = torch.randn(other.shape, generator=seeded(100 * step + index))
                param.grad = distributed(other.grad, param)  # type: ignore[assignment]  # a ShardedTensor
                if step == 1:  # as of an optimizer that was loaded before its model was sharded
                    mine.state[param]["momentum"] = mine.state[param]["momentum"].full_tensor()
            for each in (mine, alone):
                each.step()
        for param, other in pairs:
            assert torch.equal(param.full_tensor(), other)  # type: ignore[attr-defined]  # a ShardedTensor
            momentum, expected = mine.state[param]["momentum"], alone.state[other]["momentum"]
            assert torch.equal(momentum.full_tensor(), expected) and mine.state[param]["step"] == 3
        gone = weakref.ref(mine)
        del mine, each
        assert gone() is None, "what its updates need does not keep the optimizer"

    of_ranks(rank, run)


@on_ranks(2)
def test_refusals(rank: int) -> None:
    """Ranks that disagree are told, and so is who gives an optimizer what it does not take."""
    model = shard(CASES["wide"])
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with pytest.raises(RuntimeError, match=r"updates 9 matrices, and rank 0 9, or others; give .* same order"):
        Muon(matrices if rank else matrices[::-1]).step()
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        Muon(list(model.parameters()))
    with pytest.raises(ValueError, match=r"a parameter of shape \(41, 7\) is in two optimizers"):
        compile_step(model, [Muon(matrices), AdamW(list(model.parameters()))])
    with pytest.raises(ValueError, match="expected one or several, found none"):
        compile_step(model, [])
    with pytest.raises(TypeError, match="expected an Optimizer, or several, found int"):
        compile_step(model, [Muon(matrices), 3])  # type: ignore[list-item]  # which is the point
    with pytest.raises(ValueError, match=r"update_in_backward takes .* and Muon, .* not LBFGS"):
        compile_step(model, [Muon(matrices), torch.optim.LBFGS(model.head.parameters())][1:], update_in_backward=True)

    with pytest.raises(TypeError, match=r"Own.step: a MatrixOptimizer steps by before, whole and after"):
        type("Own", (MatrixOptimizer,), {"step": lambda self: None})
    wrong: list[tuple[str, Any, str]] = [
        ("before", lambda self, shard: shard.grad[:1].repeat(7), r"shape \(\d+,\), found one of shape \(7,\)"),
        ("whole", lambda self, matrix, group: matrix.T, r"shape \(41, 7\) and dtype torch.float32, found .* \(7, 41\)"),
        ("whole", lambda self, matrix, group: matrix.double(), r"found .* dtype torch.float64"),
    ]
    case = Case(lambda: nn.Sequential(nn.Linear(7, 41)), vectors, squared_error)
    for name, function, message in wrong:
        for model in [build(case)] + [shard(case)] * (name == "before"):  # `whole` fails on its owner alone
            weight = next(model.parameters())
            optimizer = type("Wrong", (Orthogonal,), {name: function})([weight], {"lr": 0.1})
            weight.grad = torch.ones_like(weight)
            with pytest.raises(TypeError, match=f"Wrong.{name}: expected a tensor of .*{message}"):
                optimizer.step()


@on_ranks(2)
def test_turned_off() -> None:
    """Where that is asked for, every rank computes each matrix, with the same values."""
    for make in (
        lambda params: flat_step(Orthogonal(params, {"lr": 0.1}), False),
        lambda params: flat_step(Muon(params, lr=0.1), False),
    ):
        reference, model = reference_and_model(CASES["wide"])
        params = [[p for p in each.parameters() if p.dim() == 2] for each in (reference, model)]
        both = [make(each) for each in params]
        for index, (other, param) in enumerate(zip(*params, strict=True)):
            other.grad = torch.randn(other.shape, generator=seeded(index))
            param.grad = distributed(other.grad, param)
        for each in both:
            each.step()
        for other, param in zip(*params, strict=True):
            torch.testing.assert_close(param.full_tensor(), other, rtol=0, atol=1e-3)  # type: ignore[attr-defined]  # a ShardedTensor
