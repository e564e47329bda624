"""`compile_step(..., update_in_backward=True)` trains as the loop, and a gradient lives until its unit is updated."""

import copy
import weakref
from typing import Any

import pytest
import torch
from models import MODELS, Case, Residual, Stack
from tiers import LATE, compiled_late
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from fsdp_compile.optim import MatrixOptimizer, MatrixShard

from ..ranks import Ranks, on_ranks
from ..training import local, shard
from .test_compile_step import Both, adamw, batch, loss_of

BLOCKS = Case(lambda: Stack([Residual(11, 13) for _ in range(4)], width=11), MODELS["mlp"].batch, MODELS["mlp"].loss)
HYBRID = {"strategy": "HYBRID_SHARD"}
BF16 = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}


def _both(how: str, case: Case = BLOCKS, make: Any = adamw, **sharding: Any) -> Both:
    """`how`: a backend, or "eager": the eager runtime, as behind graph breaks."""

    def build(case: Case) -> nn.Module:
        model = shard(case, **sharding)
        if how == "eager":
            model.compile(disable=True)
        return model

    return Both(case, make, how, build, update_in_backward=True, **({"backend": "aot_eager"} if how == "eager" else {}))


def _follow(rank: int, name: str, how: str, steps: int, options: dict[str, Any]) -> float:
    if "strategy" in options:
        options = {**options, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))}
    both, worst = _both(how, MODELS.get(name, BLOCKS), **options), 0.0
    for group in both.optimizers[1].param_groups if how == "inductor" else ():
        group["fused"] = True  # the kernel that compile_step takes where bits are Inductor's anyway
    params = list(both.models[0].parameters())
    for number in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            (both.train if how == "inductor" else both.compare)(number)
        updated = {param for flat in both.step._update.updated for param in flat.params}
        assert updated == {param for param in params if param.requires_grad}
        assert all(param.grad is None for param in params)
        worst = max(worst, both.difference())
    return worst


@pytest.mark.parametrize(
    ("name", "how", "options"),
    [
        ("blocks", "aot_eager", {}),
        ("blocks", "eager", {}),
        *(pytest.param("blocks", how, HYBRID, marks=LATE) for how in ("eager", "aot_eager", "inductor")),
        pytest.param("gpt", "aot_eager", BF16, marks=LATE),
        pytest.param("tied", "eager", BF16, marks=LATE),
        pytest.param("frozen", "aot_eager", {}, marks=LATE),
        pytest.param("frozen", "eager", {}, marks=LATE),
        pytest.param("blocks", "eager", {"cpu_offload": CPUOffload(offload_params=True)}, marks=LATE),
    ],
)
def test_as_the_stock_loop(two: Ranks, four: Ranks, name: str, how: str, options: dict[str, Any]) -> None:
    """Five steps of AdamW have the loss, the parameters and the state of the stock loop, bit for bit.

    Under hybrid sharding too, where Inductor rounds otherwise.
    """
    found = (four if options == HYBRID else two).run(_follow, name, how, 5, options)
    assert max(found) <= (1e-6 if how == "inductor" else 0.0)


# --- how long gradients live ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_do_not_live_together() -> None:
    """When a unit is updated, the gradients of those before it are gone, also in the step that makes the state."""
    both, living, alive = _both("eager"), list[weakref.ref[Any]](), list[int]()
    joint: Any = both.step._update
    update = joint.update

    def noted(flat: Any, grad: Tensor) -> None:
        alive.append(sum(each() is not None for each in living))
        living.append(weakref.ref(grad.untyped_storage()))
        update(flat, grad)

    joint.update = noted
    for number in range(3):
        if number == 2:  # the states of a unit are no longer one
            both.optimizers[0].state[both.models[0].blocks[3].up.weight]["step"] = torch.tensor(9.0)
        both.train(number)
    assert alive == [0] * 15


# --- what is updated after backward -----------------------------------------------------------------------------------


@compiled_late
@on_ranks(2)
def test_what_others_read(how: str) -> None:
    """Units whose gradients are added to, or read by hooks, are updated after backward; ordinary steps go between."""
    both = _both(how)
    seen: list[list[Tensor]] = [[], []]
    updated: list[int] = []
    for number in range(7):
        inputs, target = batch(BLOCKS, number)
        if number == 1:  # a gradient is there before
            for model in both.models:
                loss_of(model(inputs), target).backward()
                for param in list(model.parameters())[:-1]:
                    param.grad = None
        if number == 2:  # somebody else reads a gradient
            for model, grads in zip(both.models, seen, strict=True):
                param = next(model.parameters())
                param.register_post_accumulate_grad_hook(lambda p, grads=grads: grads.append(local(p.grad).clone()))
        if number == 4:  # gradients were accumulated
            for model in both.models:
                with model.no_sync():
                    loss_of(model(inputs), target).backward()
        if number == 6:  # an ordinary step of the same graphs
            loss = loss_of(both.step._run(inputs), target)
            loss.backward()
            both.optimizers[0].step()
            both.optimizers[0].zero_grad()
            assert torch.equal(loss, both.loop(inputs, target))
            both.assert_equal(number)
        else:
            both.compare(number)
            updated.append(len(both.step._update.updated))
    assert len(seen[0]) == len(seen[1]) > 3 and all(map(torch.equal, *seen))
    after_no_sync = 0 if how == "aot_eager" else 4  # graphs ask for accumulated gradients from then on
    assert updated == [5, 4, 4, 4, 0, after_no_sync]


@pytest.mark.parametrize("kind", ["lacking", "frozen", "low precision"])
@on_ranks(2)
def test_units_with_other_parameters(kind: str) -> None:
    """A unit with a parameter that the optimizer lacks, or that is frozen, is updated after backward, and so are all
    with gradients in low precision: values and the gradient that stays are the loop's."""
    low = kind == "low precision"
    narrow = MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=True)

    def make(model: Any) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if kind != "lacking" or p is not model.blocks[1].up.weight]
        return (torch.optim.SGD if low else torch.optim.AdamW)(params, lr=0.01)  # AdamW takes no other dtype

    both = _both("eager", make=make, **({"mixed_precision": narrow} if low else {}))
    apart = [model.blocks[1].up.weight for model in both.models]
    for param in apart if kind == "frozen" else ():
        param.requires_grad_(False)
    for number in range(3):
        both.compare(number)
        assert len(both.step._update.updated) == (0 if low else 4)
        grads = [None if param.grad is None else local(param.grad) for param in apart]
        assert [grad is None for grad in grads] == [kind != "lacking"] * 2
        assert kind != "lacking" or torch.equal(*grads)


# --- failures ---------------------------------------------------------------------------------------------------------


def _raise(*_: Any) -> Any:
    raise ValueError("it fails")


class Normed(MatrixOptimizer):
    """All of a parameter belongs together."""

    def before(self, shard: MatrixShard) -> Tensor:
        return shard.zeros("momentum").mul_(0.5).add_(shard.grad)

    def whole(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        return matrix / (matrix.norm() + 1)

    def after(self, shard: MatrixShard, update: Tensor) -> None:
        shard.param.add_(update, alpha=-0.1)


@pytest.mark.parametrize("matrices", [False, True])
@on_ranks(2)
def test_failures(matrices: bool) -> None:
    """After a failure in the middle of backward the error, and each further step, says so until a checkpoint is
    loaded; steps go on from there as if nothing had been."""
    both = _both("eager", make=(lambda model: Normed(model.parameters(), {})) if matrices else adamw)
    models, optimizers, step = both.models, both.optimizers, both.step
    for number in range(2):
        both.compare(number)
    inputs, target = batch(BLOCKS, 1)
    saved = copy.deepcopy((models[0].state_dict(), optimizers[0].state_dict()))
    hook = models[0].blocks[0].register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)
    for _ in range(2):
        message = "step: .* call failed while parameters were updated; load a checkpoint of model and optimizer"
        with pytest.raises(RuntimeError, match=message) as caught:
            step(inputs, target=target)
        hook.remove()
        assert all(param.grad is None for param in models[0].parameters())
    assert caught.match("step: an earlier call failed")
    with torch.no_grad():
        models[0](inputs)  # evaluation does not mind
    models[0].load_state_dict(saved[0])
    optimizers[0].load_state_dict(saved[1])
    for number in range(2, 4):
        both.compare(number)
    with pytest.raises(ValueError, match="it fails"):  # before any update: an ordinary step follows
        step._loss_fn = _raise
        step(inputs, target=target)
    step._loss_fn = loss_of
    both.compare(4)
