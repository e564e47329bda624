"""What a unit is doing at each moment, what is left of full parameters then, and calls that come at a wrong time."""

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from interruptions import Interruption, interrupted
from models import Residual, mlp
from recording import recorded, unlike_blocks
from refusing import local, units
from tiers import all_strategies
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload
from torch.utils.checkpoint import checkpoint

from fsdp_compile import FSDPModule, ShardingStrategy, fully_shard, summon_full_params
from fsdp_compile.core.unit import TRANSITIONS, Phase, unit_of
from fsdp_compile.eager.streams import UnshardedBuffer


def filled(model: nn.Module) -> int:
    """How many buffers of full parameters hold memory."""
    buffers = [each for each in gc.get_objects() if type(each) is UnshardedBuffer and each.unit in units(model)]
    return sum(not (buffer.is_shard or buffer.is_free) for buffer in buffers)


def step(model: nn.Module) -> None:
    model(torch.randn(3, 7)).square().mean().backward()


# --- what a unit is doing ---------------------------------------------------------------------------------------------


class _Tiny(nn.Module):
    """One parameter of one element, which the first rank stores: the others have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Identity(), nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.scale)


def _is_sharded(module: nn.Module) -> bool:
    """Each parameter is exactly this rank's part, in the shard, and the full ones are nowhere to be seen."""
    found = [unit_of(param) for param in module.parameters()]
    parts = [unit.records[index].numel if unit.records[index] else 0 for unit, index in found]
    return [local(param).numel() for param in module.parameters()] == parts and all(
        unit.is_current() for unit, _ in found
    )


def _summon(model: nn.Module, **options: Any) -> None:
    with summon_full_params(model, **options):
        pass


SUMMONS: dict[str, Callable[[nn.Module], Any]] = {
    "with gradients": lambda model: _summon(model, with_grads=True),
    "without writeback": lambda model: _summon(model, writeback=False),
    "on rank 0": lambda model: _summon(model, writeback=False, rank0_only=True),
    "apply": lambda model: model.apply(lambda module: None),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SUMMONS)
def test_an_interrupted_summon(name: str, strategy: str) -> None:
    """An exception at any call of the package within a summon leaves idle units with sharded parameters, gradients and
    all that a forward needs."""
    model = nn.Sequential(Residual(7, 9), nn.Linear(7, 2))
    fully_shard(model, auto_wrap_policy={Residual}, sharding_strategy=ShardingStrategy[strategy])
    step(model)
    kinds = {type(param.grad) for param in model.parameters()}
    calls = interrupted(lambda: SUMMONS[name](model), at=-1)
    for at in range(1, calls + 1):
        with suppress(Interruption):
            interrupted(lambda: SUMMONS[name](model), at)
        assert all(unit.describe_phase() == "idle" for unit in units(model)), f"call {at} of {calls}"
        assert all(unit.phase is Phase.SHARDED for unit in units(model)), f"call {at} of {calls}"
        assert _is_sharded(model), f"call {at} of {calls}"
        assert all(flat.autograd_shard is not None for unit in units(model) for flat in unit.flats), f"call {at}"
        assert {type(param.grad) for param in model.parameters()} == kinds, f"call {at} of {calls}"
    step(model)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    ("options", "complete"),
    [({}, True), ({"writeback": False}, True), ({"writeback": False, "rank0_only": True}, False),
     ({"writeback": False, "rank0_only": True, "offload_to_cpu": True}, False)],
)  # fmt: skip
def test_evaluation_within_a_summon(options: dict[str, Any], complete: bool, records: bool) -> None:
    """A forward without gradients computes with the full parameters that are shown, where each rank has them where it
    computes; any other forward gathers, which is refused there (E-FWD-12)."""
    model = fully_shard(nn.Linear(7, 2))
    with summon_full_params(model, **options), torch.set_grad_enabled(records):
        if complete and not records:
            assert model(torch.ones(3, 7)).shape == (3, 2)
        else:
            with pytest.raises((AssertionError, ValueError), match="summon_full_params"):
                model(torch.ones(3, 7))


@all_strategies
def test_the_cycle_of_a_unit(strategy: str) -> None:
    """Open in forward and in backward, idle before, between and after, with sharded parameters: explicit states.

    Whether a unit is open does not follow from addresses or sizes: it is told alike on a rank that stores nothing of
    it, and where a part is the whole. E-STATE-1, 2, 5, 6, E-LIM-22.
    """
    model = nn.Sequential(Residual(7, 9), _Tiny(), nn.Linear(7, 2))
    fully_shard(model, auto_wrap_policy={Residual, _Tiny}, sharding_strategy=ShardingStrategy[strategy])
    seen: dict[str, list[str]] = {}

    def note(moment: str, unit: Any) -> None:
        seen.setdefault(moment, []).append(unit.describe_phase())

    for module in (model[0], model[1]):
        (unit,) = module._fsdp.units
        assert unit.is_sharded == (strategy != "NO_SHARD")
        note("before", unit)
        module.up.register_forward_pre_hook(lambda *_, unit=unit: note("forward", unit))
        module.down.register_forward_hook(
            lambda *a, unit=unit: a[-1].register_hook(lambda g: note("backward", unit)) and None
        )
    loss = model(torch.randn(3, 7)).sum()
    for moment, run in {"between": lambda: None, "after": loss.backward}.items():
        run()
        for module in (model[0], model[1]):
            note(moment, module._fsdp.units[0])
            assert _is_sharded(module), moment
    with summon_full_params(model):
        assert model[0]._fsdp.units[0].describe_phase() == "inside summon_full_params"
        assert not _is_sharded(model[0])
    running = ["in its forward or backward"] * 2
    assert seen == {"before": ["idle"] * 2, "forward": running, "between": ["idle"] * 2, "backward": running,
                    "after": ["idle"] * 2}  # fmt: skip


@pytest.mark.parametrize(("now", "after"), [(now, after) for now in Phase for after in Phase])
def test_phases_change_as_the_table_says(now: Phase, after: Phase) -> None:
    """A transition that is not in `TRANSITIONS` raises and changes nothing; back to SHARDED is always allowed."""
    unit = units(fully_shard(nn.Linear(7, 2)))[0]
    with mock.patch.object(unit, "_phase", now), mock.patch("fsdp_compile.core.unit.running_backward", lambda: None):
        if after in TRANSITIONS[now]:
            unit.enter(after)
            assert unit.phase is after
        else:
            with pytest.raises(AssertionError, match=rf"Unit\(.*\) cannot change from {now.value} to {after.value}"):
                unit.enter(after)
            assert unit.phase is now
        unit.enter(Phase.SHARDED)


def test_who_is_root() -> None:
    """The outermost call makes the root, at once, until another encloses it; `apply` and forwards change nothing.

    Every sharded module knows at any time, and no full buffer is made in advance. E-LAZY-2, 4, 8, E-ERR-16.
    """
    inner = fully_shard(Residual(7, 9))
    assert filled(inner) == 0
    for use in (lambda: None, lambda: inner.apply(lambda module: None), lambda: inner(torch.ones(1, 7))):
        use()
        assert inner.is_root()
    model = fully_shard(nn.Sequential(inner, nn.Linear(7, 2)))
    for use in (lambda: None, lambda: model.apply(lambda module: None), lambda: inner(torch.ones(1, 7))):
        use()
        assert [each.is_root() for each in FSDPModule.fsdp_modules(model)] == [True, False]


# --- what is left behind ----------------------------------------------------------------------------------------------


class _TwoOutputs(nn.Module):
    """Blocks of which the last feeds an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(7, 9) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[1](self.blocks[0](x))
        return x, self.blocks[2](x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_nothing_is_left_gathered_after_backward(strategy: str) -> None:
    """All units are freed and idle when backward returns: one whose output fed nothing too, and with the graph alive.

    The same where a unit is run backward without its root: any backward has an end (E-FIN-1, E-ERR-13).
    """
    model = fully_shard(_TwoOutputs(), sharding_strategy=ShardingStrategy[strategy])
    used, unused = model(torch.randn(3, 7))
    assert filled(model) == (3 if strategy == "SHARD_GRAD_OP" else 0)
    (used.sum() + unused.detach().sum()).backward(retain_graph=True)
    assert {unit.describe_phase() for unit in units(model)} == {"idle"}
    assert filled(model) == (strategy == "SHARD_GRAD_OP"), "block 2 waits for a backward that may still come"
    unused.sum().backward()
    assert filled(model) == 0
    alone = model.blocks[1](torch.randn(3, 7)).sum()
    alone.backward()
    assert filled(model) == 0 and {unit.describe_phase() for unit in units(model)} == {"idle"}


def test_resharding_is_not_freeing() -> None:
    """Parameters lie in the shard whenever a buffer is freed; a second reshard is harmless; the next forward gathers.

    E-STRAT-2.
    """
    model = fully_shard(unlike_blocks())
    free = UnshardedBuffer.free
    current: list[bool] = []

    def noting(buffer: UnshardedBuffer) -> None:
        current.append(buffer.unit.is_current())
        free(buffer)

    with mock.patch.object(UnshardedBuffer, "free", noting), recorded(model) as log:
        loss = model(torch.randn(3, 7)).sum()
        for _ in range(2):
            model.reshard()
        assert log.about("free root") == ["free root"]
        loss.backward()
        assert log.about("gather root") == ["gather root in unshard"] * 2
        model(torch.randn(3, 7))
        assert log.about("gather root") == ["gather root in unshard"] * 3
    assert current and all(current)


# --- several models, several forwards ---------------------------------------------------------------------------------


def _failing_backward(model: nn.Module) -> None:
    """A backward pass that fails when all blocks but the first have started their reduces."""
    hook = model.blocks[0].register_full_backward_hook(mock.Mock(side_effect=KeyError("on purpose")))
    with pytest.raises(KeyError, match="on purpose"):
        step(model)
    hook.remove()


def test_a_backward_waits_for_reduces_of_its_own_root_only() -> None:
    """Reduces in flight belong to a root: another model's, which another thread may train, are left alone.

    A copy of a model has a queue of its own, which its units share.
    """
    model, other = fully_shard(mlp()), fully_shard(mlp())
    _failing_backward(model)
    in_flight = [reduction for of_unit in model._fsdp_runtime.reduces_in_flight for reduction in of_unit]
    assert in_flight and all(reduction.running is not None for reduction in in_flight)
    step(other)
    assert all(reduction.running is not None for reduction in in_flight)
    step(model)
    assert all(reduction.running is None for reduction in in_flight)
    queues = [each._fsdp_runtime.reduces_in_flight for each in (model, other, copy.deepcopy(model))]
    assert len({id(queue) for queue in queues}) == 3
    copied = copy.deepcopy(model)
    assert all(unit.reduces_in_flight is copied._fsdp_runtime.reduces_in_flight for unit in units(copied))


@pytest.mark.parametrize("parts", [1, 4])
def test_reduces_of_as_many_units_are_in_flight_as_allowed(parts: int) -> None:
    """Two by default; the oldest unit's are waited for when those of one more start. A unit may have several."""
    found = {}
    for limit in (1, None, 3, 9):
        model: Any = nn.Module()
        model.blocks = nn.Sequential(*(Residual(7, 9) for _ in range(6)))
        model.forward = lambda x, blocks=model.blocks: blocks(x)
        with mock.patch("fsdp_compile.construct.units._worth_a_collective", return_value=1 if parts > 1 else 1 << 18):
            for block in model.blocks:
                fully_shard(block)
        fully_shard(model)
        if limit is not None:
            model.set_reduce_scatter_max_input_buffers(limit)
        _failing_backward(model)
        flats = [flat for block in model.blocks[:0:-1] for flat in units(block)[0].flats]  # whose reduces have started
        waited_for = [flat.reduction.running is None for flat in flats]
        assert waited_for == sorted(waited_for, reverse=True), "the oldest ones"
        found[limit] = waited_for.count(False)
    assert found == {1: parts, None: 2 * parts, 3: 3 * parts, 9: 5 * parts}


class _Checkpointed(nn.Module):
    """Blocks, each a unit, within one checkpoint that is not reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(7, 9 + 32 * index) for index in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks, x, use_reentrant=False)


def test_all_ranks_recompute_the_same_forward() -> None:
    """Of several forwards that await their backward, the last is recomputed first, on every rank.

    So each unit is gathered once in the backward of each forward (E-AC-2, E-BWD-5).
    """
    model = fully_shard(_Checkpointed(), auto_wrap_policy={Residual}, reshard_after_forward=True)
    count = 6
    (first, *_) = units(model)
    with recorded(model) as log:
        losses, awaiting = [], []
        for _ in range(count):
            losses.append(model(torch.randn(3, 7)).sum())
            assert list(first.awaiting_backward)[:-1] == awaiting, "in another order than that of the forwards"
            awaiting = list(first.awaiting_backward)
        del awaiting
        log.lines.clear()
        torch.stack(losses).sum().backward()
    assert sorted(log.about("gather")) == sorted(
        f"gather blocks.{index} in unshard" for index in range(3) for _ in range(count)
    )


# --- calls at a wrong time --------------------------------------------------------------------------------------------


def test_a_write_that_autograd_refuses() -> None:
    """Where a forward writes to its own unsharded parameters autograd's error says nothing of parameters: ours takes
    its place, and names it as the cause. In inference mode, where tensors have no version counters, a forward runs."""
    model = fully_shard(mlp())
    with torch.inference_mode():
        assert model(torch.randn(3, 7)).shape == (3, 5)
    model.blocks[1].up.register_forward_pre_hook(lambda module, _: module.weight.mul_(2) and None)
    with pytest.raises(RuntimeError, match=r"forward changed parameter blocks\.1\..* of its own unit, and") as caught:
        model(torch.randn(3, 7))
    assert "is being modified inplace" in str(caught.value.__cause__)
    assert {unit.phase for unit in units(model)} == {Phase.SHARDED}


def test_backward_inside_a_forward() -> None:
    """Running a unit's earlier forward backward within its next one is a ValueError that says so; then all is well.

    E-BWD-3: the unit must be idle.
    """
    model = fully_shard(mlp())
    pending = [model(torch.randn(3, 7)).sum()]
    hook = model.blocks[1].up.register_forward_pre_hook(lambda *_: pending[0].backward())
    with pytest.raises(ValueError, match=r"backward reached Unit\(.*\) while a forward of it runs"):
        model(torch.randn(3, 7))
    hook.remove()
    pending.clear()
    assert {unit.describe_phase() for unit in units(model)} == {"idle"}
    step(model)
    assert filled(model) == 0


def test_the_device_may_not_be_left() -> None:
    """Parameters that were moved off their shard: RuntimeError in the next forward, with both devices.

    Torch looks at the first use and before each forward (E-OFF-2, E-ERR-2, E-ERR-41). The meta device stands for
    another; what moves a whole model takes shards along.
    """
    model = fully_shard(mlp())
    with pytest.raises(RuntimeError, match="parameter weight of Linear is part of a unit"):
        model.stem.to("meta")
    model.stem.weight = nn.Parameter(torch.empty(11, 7, device="meta"))
    with pytest.raises(RuntimeError, match=r"parameter stem\.\w+: expected .* for cpu, found .* on meta"):
        model(torch.randn(3, 7))
    with pytest.raises(RuntimeError, match=r"parameter \S+: expected a device with values, found meta"):
        fully_shard(mlp()).to("meta")


@pytest.mark.parametrize("between", [False, True])
def test_offloaded_shards_stay_on_the_cpu(between: bool) -> None:
    """Moving an offloaded model off the CPU, at whatever time, is a RuntimeError with the device; nothing has changed.

    E-ERR-3, E-ERR-29.
    """
    model = fully_shard(mlp(), cpu_offload=CPUOffload(offload_params=True))
    loss = model(torch.randn(3, 7)).sum() if between else None
    with pytest.raises(RuntimeError, match=r"parameter \S+: expected device cpu, where an offloaded.*, found meta"):
        model.to("meta")
    assert all(param.device.type == "cpu" for param in model.parameters())
    step(model) if loss is None else loss.backward()


@pytest.mark.parametrize("variable", ["FSDP_SKIP_WRITEBACK_CHECK", "FSDP_COMPILE_SKIP_WRITEBACK_CHECK"])
def test_replaced_data_is_always_looked_for(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no switch against it: at half a microsecond a parameter nobody needs one (E-ENV-2)."""
    monkeypatch.setenv(variable, "1")
    model = fully_shard(mlp())
    model.stem.weight.data = torch.full_like(model.stem.weight, 3.0)
    model(torch.randn(3, 7))
    (unit, index) = unit_of(model.stem.weight)
    assert unit.is_current()
    assert (unit.in_flat(index)[0].split(unit.flats[0].shard)[unit.names.index("stem.weight")] == 3.0).all()


@pytest.mark.parametrize("as_flats", [False, True])
def test_what_was_interrupted_is_no_longer_read(as_flats: bool) -> None:
    """After `reset_iter_state`. Who ends a forward leaves alone what another one shows."""
    model = fully_shard(mlp())
    unit, shown = units(model)[0], [torch.zeros(())]
    unit.show_unsharded(shown, as_flats)
    unit.hide_unsharded([torch.zeros(())])
    assert unit.phase is Phase.FORWARD and shown in (unit.unsharded_params, unit.unsharded_flats)
    model.reset_iter_state()
    assert unit.phase is Phase.SHARDED and (unit.unsharded_params, unit.unsharded_flats) == (None, None)
