"""What is gathered ahead, when, and that a wrong guess does no harm."""

from functools import partial
from typing import Any

import pytest
import torch
from models import Case, Residual, Stack, squared_error, vectors
from recording import Log, recorded, unlike_blocks
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import backward, build, follow, mine, shard, units

CASE = Case(unlike_blocks, vectors, squared_error)
MODES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def _logged_step(case: Case, model: nn.Module, seed: int = 1) -> Log:
    with recorded(model) as log:
        backward(model, case, mine(case, seed))
    return log


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward_order(mode: str) -> list[str]:
    lines = _logged_step(CASE, shard(CASE, backward_prefetch=MODES[mode])).lines
    _assert_one_ahead(lines)
    return lines


@on_ranks(2)
def test_gathered_before_compute() -> None:
    """The unit whose forward ended before this one's is gathered after this one's wait and before its compute.

    It is waited for later, when its own backward begins, and not gathered again; at most one is on its way while
    another is in use. E-PRE-1, E-PRE-3, E-PRE-4.
    """
    lines = _backward_order("pre")
    for name, following in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")):
        computed = lines.index(f"backward {name}")
        gathers = [place for place, line in enumerate(lines) if line == f"gather {following} in unshard"]
        waits = [place for place, line in enumerate(lines) if line == f"wait for {following} in unshard"]
        own_wait = max(place for place in range(computed) if lines[place] == f"wait for {name} in unshard")
        assert len(gathers) == len(waits) == 2, "once in forward, once in backward"
        assert own_wait < gathers[1] < computed < waits[1] < lines.index(f"backward {following}")


@on_ranks(2)
def test_gathered_after_compute() -> None:
    """The other mode gathers after this unit is freed and before its gradients are reduced (E-PRE-1, E-BWD-8)."""
    lines = _backward_order("post")
    for name, following in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")):
        computed = lines.index(f"backward {name}")
        freed = lines.index(f"free {name}", computed)
        gathered = lines.index(f"gather {following} in unshard", computed)
        assert computed < freed < gathered < lines.index(f"reduce {name} in post-backward")


@on_ranks(2)
def test_not_gathered_ahead() -> None:
    """Without prefetch a unit is gathered when its own backward begins, and waited for at once (E-PRE-1, E-BWD-4)."""
    lines = _backward_order("none")
    for name, following in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")):
        reduced = lines.index(f"reduce {name} in post-backward")
        gathered = lines.index(f"gather {following} in unshard", lines.index(f"backward {name}"))
        assert reduced < gathered
        assert lines[gathered + 1] == f"wait for {following} in unshard"


def _assert_one_ahead(lines: list[str]) -> None:
    """While a unit computes no more than one other is on its way."""
    filling: list[str] = []
    for line in lines:
        if line.startswith("gather "):
            filling.append(line.split()[1])
        elif line.startswith("wait for ") and line.endswith("in unshard"):
            filling.remove(line.split()[2])
        elif line.startswith(("compute b", "backward ")):
            assert len(filling) <= 1, f"{filling} at {line!r} in\n" + "\n".join(lines)


@on_ranks(2)
def test_chosen_for_backward() -> None:
    """The units that the user chose are gathered, in that order, when the unit that names them begins; each once."""
    model: Any = shard(CASE)
    model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    lines = _logged_step(CASE, model).lines
    names = ("blocks.1", "blocks.2", "blocks.0")
    gathers = [[at for at, line in enumerate(lines) if line == f"gather {name} in unshard"] for name in names]
    assert all(len(each) == 2 for each in gathers), "once in forward, once in backward"
    one, two, zero = (again for _, again in gathers)
    assert one < two < zero < lines.index("backward blocks.2")


# --- forward ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_forward_prefetch() -> None:
    """From the second iteration on, the next unit of the first one's order is gathered before this unit computes.

    E-PRE-2, E-PRE-4, E-ORD-1, E-ORD-2.
    """
    model = shard(CASE, forward_prefetch=True)
    first, *later = [_logged_step(CASE, model, seed).lines for seed in range(3)]
    assert first.index("compute blocks.0") < first.index("gather blocks.1 in unshard")
    for lines in later:
        _assert_one_ahead(lines)
        for name, following in (("root", "blocks.0"), ("blocks.0", "blocks.1"), ("blocks.1", "blocks.2")):
            gathered = lines.index(f"gather {following} in unshard")
            assert lines.index(f"wait for {name} in unshard") < gathered < lines.index(f"compute {following}")
            if name != "root":
                assert gathered < lines.index(f"compute {name}") < lines.index(f"wait for {following} in unshard")


# --- wrong guesses ----------------------------------------------------------------------------------------------------


class _Branches(Stack):
    """Units in changing order, some skipped, some unused by the loss, some called twice."""

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        x = self.stem(x)
        total = x
        for index in order[0].tolist():
            if index == 9:
                self.blocks[0](x)  # feeds nothing
            else:
                total = total + self.blocks[index](x if index % 2 else total)
        return self.head(total)


ORDERS = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0], [9, 1, 1, 3], [0, 9, 3], [1, 2, 9]]


def _branching() -> Stack:
    return _Branches([Residual(11, 23 + 32 * index) for index in range(4)])


def _branches(seed: int, size: int) -> tuple[Tensor, ...]:
    x, y = vectors(seed, size)
    return x, torch.tensor([ORDERS[seed % len(ORDERS)] for _ in range(size)]), y


BRANCHES = Case(_branching, _branches, squared_error)


def _skips(seed: int, size: int) -> tuple[Tensor, ...]:
    x, y = vectors(seed, size)
    return x, torch.tensor([[0, 2, 3]] * size), y


@on_ranks(2)
def test_a_wrong_guess_in_forward() -> None:
    """A unit that was gathered early and is skipped is freed when the next one comes, after which units are foreseen
    again."""
    skipping = Case(_branching, _skips, squared_error)
    model = shard(skipping, forward_prefetch=True)
    backward(model, BRANCHES, mine(BRANCHES, 0))
    lines = _logged_step(skipping, model).lines
    freed = lines.index("free blocks.1")
    assert freed < lines.index("compute blocks.2")
    assert freed < lines.index("gather blocks.3 in unshard") < lines.index("compute blocks.2")


def _assert_all_freed(log: Log, model: nn.Module) -> None:
    for name in log.units.values():
        gathers, frees = log.lines.count(f"gather {name} in unshard"), log.lines.count(f"free {name}")
        assert gathers == frees, f"{name}: gathered {gathers} times, freed {frees} times"
    assert all(unit.unsharded_params is None for unit in units(model))


@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_wrong_guesses(mode: str, forward_prefetch: bool) -> None:
    """Branches, skipped and repeated units: what was gathered for nothing is freed, numbers are right.

    E-PRE-5, E-ORD-1, E-FIN-4.
    """
    reference = build(BRANCHES)
    model = shard(BRANCHES, backward_prefetch=MODES[mode], forward_prefetch=forward_prefetch)
    for seed in range(len(ORDERS)):
        # units that the loss does not use get zeros here and nothing there: plain gradients cannot be compared
        log = _logged_step(BRANCHES, model, seed)
        _assert_one_ahead(log.lines)
        _assert_all_freed(log, model)
        model.zero_grad()
    follow(model, reference, BRANCHES, steps=2, first_seed=0)


class _LeavesOne(Stack):
    """Its first block feeds an output that the loss does not use."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # Stack has one
        x = self.stem(x)
        left = self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](x))), left


@pytest.mark.parametrize("mode", ["pre", "post"])
@on_ranks(2)
def test_a_unit_whose_backward_does_not_come(rank: int, mode: str) -> None:
    """What was gathered ahead of it is freed when the backward pass has ended (E-PRE-5)."""
    case = Case(lambda: _LeavesOne([Residual(11, 23 + 32 * index) for index in range(3)]), vectors, squared_error)
    model = shard(case, backward_prefetch=MODES[mode])
    x, _ = vectors(rank, 3)
    with recorded(model) as log:
        used, left = model(x)  # which the graph behind it outlives
        used.square().sum().backward()
    assert log.lines.count("gather blocks.0 in unshard") == 2, "for forward, and ahead of a backward that does not come"
    _assert_all_freed(log, model)
    assert left.requires_grad


# --- checkpointing, repeated units, frozen units ----------------------------------------------------------------------


class _Apart(Stack):
    """Something between the units, so that the gradient of one's inputs is not that of the other's outputs."""

    log: Log | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).sin()
            x.register_hook(lambda grad: self.log and self.log.add("backward between"))
            x = x.cos()
        return self.head(x)


def _frozen_blocks() -> Stack:
    model = _Apart([Residual(11, 23 + 32 * index) for index in range(3)])
    for module in (model.stem, model.blocks[1]):
        module.requires_grad_(False)
    return model


FROZEN = Case(_frozen_blocks, vectors, squared_error)


@pytest.mark.parametrize("mode", ["pre", "post"])
@on_ranks(2)
def test_frozen_unit(mode: str) -> None:
    """A frozen unit is freed when its inputs have their gradients, and the next one is gathered ahead all the same.

    E-FRZ-2, E-PRE-6.
    """
    model = shard(FROZEN, backward_prefetch=MODES[mode])
    with recorded(model) as log:
        model.log = log
        backward(model, FROZEN, mine(FROZEN, 1))
    lines = log.lines
    computed = lines.index("backward blocks.1")
    freed = lines.index("free blocks.1", computed)
    gathered = lines.index("gather blocks.0 in unshard", lines.index("backward blocks.2"))
    assert freed < lines.index("backward blocks.0")
    assert gathered < computed if mode == "pre" else freed < gathered
    between = lines.index("backward between", max(computed, gathered))
    assert between < lines.index("wait for blocks.0 in unshard", gathered)
    assert not any(line.startswith("reduce blocks.1") for line in lines)


# --- settings ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_settings_that_a_root_has_once() -> None:
    """Units under one root have one limit; another is a ValueError at first use (E-STRAT-11, E-ERR-5)."""
    model = build(CASE)
    fully_shard(model.blocks[1], limit_all_gathers=False)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"limit_all_gathers is True for the root .* False for blocks.1"):
        model(mine(CASE, 1)[0])


@pytest.mark.parametrize("options", [{}, {"forward_prefetch": True, "backward_prefetch": None}])
@on_ranks(2)
def test_a_former_root_gets_a_parent(options: dict[str, Any]) -> None:
    """A unit that has run as a root may be sharded into a larger model: then that one is the root.

    E-LAZY-3, E-LAZY-1, E-LAZY-7, E-ERR-7.
    """
    reference, model = build(CASE), build(CASE)
    fully_shard(model.blocks[1], **options)
    alone = Case(CASE.build, partial(vectors, inputs=11, outputs=11), squared_error)
    follow(model.blocks[1], reference.blocks[1], alone, steps=1)
    fully_shard(model, **options)
    follow(model, reference, CASE)
    with pytest.raises(RuntimeError, match=r"no_sync: .* is inside another sharded module"), model.blocks[1].no_sync():
        pass
