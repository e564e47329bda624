"""`optimizer.step()` on flat shards: whatever a user does around it has the effect that it has on ordinary steps.

Each member trains two equal models with equal gradients, one by flat steps and one by steps on each parameter, and
compares parameters and state bit for bit. Parts of parameters have multiples of 64 elements, so that kernels use the
same instructions for all of them.
"""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_compile import FullyShardedDataParallel, fully_shard
from fsdp_compile.optim import flat_step
from fsdp_compile.optim.segments import Segments
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "foreach_sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "adam_tensor_rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), maximize=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "foreach_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)) for _ in range(3)]
    return fully_shard(
        nn.Sequential(*blocks), auto_wrap_policy=lambda module, recurse, **_: recurse or module in blocks
    )


def backward(of: nn.Module, seed: int, adds: bool = False) -> None:
    """Gradients of this rank, which are segments of flat ones."""
    before = [param.grad.to_local().clone() if adds else 0 for param in of.parameters()]
    of(torch.ones(2, 64)).sum().backward()
    generator = torch.Generator().manual_seed(seed)
    for param, earlier in zip(of.parameters(), before, strict=True):
        local = param.grad.to_local()
        local.copy_(torch.randn(local.shape, generator=generator) + earlier)


class Side:
    """One of the two models, with its optimizer; `flat` counts the parameters that the last step updated as one."""

    held: Any = None  # by a user

    def __init__(self, make: Make, is_flat: bool) -> None:
        self.model, self.is_flat, self.flat = model(), is_flat, 0
        self.params = list(self.model.parameters())
        self.optimizer = self.choose(make(self.params))

    def choose(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return flat_step(optimizer, self.is_flat) if type(optimizer).__module__.startswith("torch") else optimizer

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with counting() as counts:
            result = self.optimizer.step(*args, **kwargs)
        self.flat = sum(counts)
        return result

    def shown(self) -> list[Any]:
        """Parameters, gradients and state: what a user sees."""
        return [
            [param.to_local() for param in self.params],
            [param.grad for param in self.params],
            [list(map(type, state.values())) for state in self.optimizer.state.values()],
            self.optimizer.state_dict(),
            [[self._number(param) for param in group["params"]] for group in self.optimizer.param_groups],
            [self._number(param) for param in self.optimizer.state],
            [type(self.optimizer.param_groups), len(self.optimizer._optimizer_step_pre_hooks)],
        ]

    def _number(self, param: Tensor) -> int:
        return list(map(id, self.params)).index(id(param))


@contextmanager
def counting() -> Iterator[list[int]]:
    """The numbers of parameters that steps in this block update as one."""
    counts: list[int] = []
    ready = Segments.ready

    def counted(self: Segments, *args: Any) -> Any:
        found = ready(self, *args)
        counts.append(sum(len(segment.params) for segment, _ in found))
        return found

    with mock.patch.object(Segments, "ready", counted):
        yield counts


def assert_same(one: Any, other: Any) -> None:
    if hasattr(one, "to_local") and not isinstance(one, type):
        assert type(one) is type(other) and one.shape == other.shape
        one, other = one.to_local(), other.to_local()
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def trained(make: Make, steps: int, between: Callable[[Side, int], Any] = lambda side, number: None) -> list[Side]:
    """Two models after so many steps; `between` runs between each backward and step, and returns something to compare,
    or True if it has stepped by itself."""
    sides = [Side(make, is_flat) for is_flat in (True, False)]
    for number in range(steps):
        found = []
        for side in sides:
            side.optimizer.zero_grad()
            backward(side.model, number)
            found.append(between(side, number))
            if found[-1] is not True:
                side.step()
        assert_same(*found)
        assert_same(*[side.shown() for side in sides])
    return sides


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_bit_for_bit(name: str) -> None:
    """All steps of each class are those on each parameter, from the first one on, and all of them are flat."""

    def all_are_flat(side: Side, number: int) -> None:
        assert side.flat == (len(side.params) if side.is_flat and number else 0)

    trained(OPTIMIZERS[name], 10, all_are_flat)


# --- what users do between backward and step --------------------------------------------------------------------------

ADAMW = OPTIMIZERS["adamw"]
Edit = Callable[[Side], Any]


def _state(side: Side, index: int) -> dict[str, Any]:
    return side.optimizer.state[side.params[index]]


def _exchange(of: Any, one: Any, other: Any) -> None:
    of[one], of[other] = of[other], of[one]


def _exchange_gradients(side: Side) -> None:
    one, other = side.params[0], side.params[5]
    one.grad, other.grad = other.grad, one.grad


def _exchange_moments(side: Side) -> None:
    one, other = _state(side, 0), _state(side, 5)
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _replace_counts(side: Side) -> None:
    for state in side.optimizer.state.values():
        state["step"] = torch.tensor(5.0)


def _hold_a_moment(side: Side) -> None:
    side.held = _state(side, 1)["exp_avg"]
    _state(side, 0)["exp_avg"] = torch.ones_like(side.params[0])


def _load(side: Side) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.held))


def _save(side: Side) -> None:
    side.held = copy.deepcopy(side.optimizer.state_dict())


def _average(side: Side) -> None:
    """An average takes the parameter's place for a step, as in docs/optimizers.md."""
    side.held = side.params[0].data
    side.params[0].data = side.params[0].data * 0.5


def _copy_state(side: Side) -> None:
    side.optimizer.state = copy.copy(side.optimizer.state)
    for param, state in side.optimizer.state.items():
        side.optimizer.state[param] = {name: value.clone() * 0.5 for name, value in state.items()}


def _permute_state(side: Side) -> None:
    """The state of other parameters, in the same order."""
    params, values = list(side.optimizer.state), side.optimizer.state.values()
    _exchange(params, 0, 5)
    side.optimizer.state = defaultdict(dict, zip(params, values, strict=True))


def _summon(side: Side) -> None:
    with FullyShardedDataParallel.summon_full_params(side.model), torch.no_grad():
        for param in side.model.parameters():
            param.mul_(0.5)


def _swap(side: Side) -> None:
    """Two tensors of the state cannot exchange their contents unnoticed: torch refuses it."""
    if side.is_flat:
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(_state(side, 0)["exp_avg"], _state(side, 4)["exp_avg"])


def _add_gradients(side: Side) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    backward(side.model, 10, adds=True)
    backward(side.model, 11, adds=True)


def _turn(on: bool) -> Edit:
    return lambda side: flat_step(side.optimizer, on and side.is_flat) and None


def _scale(infinite: bool) -> Edit:
    return lambda side: vars(side.optimizer).update(  # as GradScaler does
        grad_scale=torch.tensor(2.0), found_inf=torch.tensor(float(infinite))
    )


def _schedule(side: Side) -> None:
    """It wraps the step, and changes the learning rate."""
    side.held = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.5, 10)


def _set_options(number: int) -> Edit:
    rates = {"lr": 0.1 / (number + 1), "weight_decay": 0.1 * number}
    return lambda side: side.optimizer.param_groups[0].update(rates, maximize=number % 2 == 1, foreach=number > 2)


def _set_grad(index: int, make: Callable[[Side], Any]) -> Edit:
    return lambda side: setattr(side.params[index], "grad", make(side))


EVERY = range(6)
EDITS: dict[str, dict[int, Edit]] = {  # before which steps
    "no gradient once": {2: _set_grad(1, lambda side: None)},
    "no gradient at first": {0: _set_grad(1, lambda side: None)},
    "assigned gradient": dict.fromkeys((1, 3, 5), _set_grad(2, lambda side: side.params[2].grad.clone() * 2)),
    "data of a gradient": {1: lambda side: setattr(side.params[0].grad, "data", torch.ones(64, 64))},
    "clipped": dict.fromkeys(EVERY, lambda side: nn.utils.clip_grad_norm_(side.params, 0.1)),
    "count in place": {2: lambda side: [_state(side, 1)["step"].zero_()],
                       4: lambda side: [_state(side, 3)["step"].data.fill_(7.0)]},
    "count replaced": {2: lambda side: _state(side, 1).update(step=torch.tensor(5.0))},
    "counts replaced": {2: _replace_counts},
    "moment in place": {2: lambda side: [_state(side, 1)["exp_avg"].fill_(0.5).to_local()]},
    "data of a moment": {2: lambda side: setattr(_state(side, 1)["exp_avg"], "data", torch.ones(64))},
    "held moment": {2: _hold_a_moment,
                    **dict.fromkeys((3, 4, 5), lambda side: [side.held is _state(side, 1)["exp_avg"], True])},
    "state cleared": dict.fromkeys((2, 3), lambda side: side.optimizer.state.clear()),
    "state of one cleared": {2: lambda side: side.optimizer.state.pop(side.params[1]) and None},
    "foreign state": {2: lambda side: _state(side, 0).update(note="mine")},
    "loaded": {1: _save, 3: _load, 4: _load},
    "data of a parameter": {2: _average, 3: lambda side: setattr(side.params[0], "data", side.held)},
    "earlier gradient": {2: lambda side: setattr(side, "held", side.params[6].grad),
                         3: _set_grad(6, lambda side: side.held)},
    "exchanged gradients": dict.fromkeys(range(2, 6), _exchange_gradients),
    "exchanged states": dict.fromkeys(
        range(2, 6), lambda side: _exchange(side.optimizer.state, side.params[0], side.params[5])),
    "exchanged moments": dict.fromkeys(range(2, 6), _exchange_moments),
    "other state": {2: _copy_state, 3: _permute_state},
    "summoned": {2: _summon},
    "exchanged contents": {2: _swap},
    "options": {number: _set_options(number) for number in EVERY},
    "schedule": {0: _schedule, **dict.fromkeys(range(1, 6), lambda side: side.held.step())},
    "turned off and on": {1: _turn(False), 3: _turn(True)},
    "zeroed and added": {2: _add_gradients},
    "scaled": {number: _scale(number == 2) for number in EVERY},
    "compiled": {number: torch.compiler.set_stance("fail_on_recompile" if number == 4 else "default")(
        lambda side: torch.compile(side.optimizer.step, backend="eager")() or True) for number in (0, 2, 4)},
}  # fmt: skip
OF_OTHERS = {
    ("scaled", "fused_adamw"), ("scaled", "fused_sgd"), ("loaded", "sgd"), ("loaded", "radam"),
    ("state cleared", "sgd"), ("no gradient once", "nadam"), ("compiled", "sgd"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "adamw") for name in EDITS if name not in ("scaled", "compiled")), *sorted(OF_OTHERS)]
)
def test_what_users_change(name: str, kind: str) -> None:
    """Gradients, state, counts, data and options that users change count as in ordinary steps; a step that they compile
    is compiled once."""
    trained(OPTIMIZERS[kind], 6, lambda side, number: EDITS[name].get(number, lambda side: None)(side))


# --- around the step --------------------------------------------------------------------------------------------------


def test_closures() -> None:
    """A closure, positional or by name, runs once, may clear and compute gradients, and its loss is returned."""

    def between(side: Side, number: int) -> Any:
        calls: list[int] = []

        def closure() -> Tensor:
            assert torch.is_grad_enabled() and type(side.optimizer.param_groups) is list
            side.optimizer.zero_grad()
            backward(side.model, number + 20)
            calls.append(number)
            return torch.tensor(float(number))

        given = [((closure,), {}), ((), {"closure": closure}), ((None,), {}), ((), {"closure": None})][number % 4]
        loss = side.step(*given[0], **given[1])
        assert side.flat == (len(side.params) if side.is_flat else 0)
        assert calls == ([number] if number % 4 < 2 else []) and (loss is not None) == bool(calls)
        return True

    trained(ADAMW, 6, between)


def test_hooks() -> None:
    """Hooks see arguments, groups and state of an ordinary step, in their order, and may change gradients."""
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def hook(name: str, side: Side) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is side.optimizer:
                state = [state["step"].item() for state in optimizer.state.values()]
                numbers = [[side._number(param) for param in group["params"]] for group in optimizer.param_groups]
                seen[side.is_flat].append((name, args[0] is optimizer, [*args[1:], *kwargs.values()], numbers, state))
                if name == "before":
                    side.params[0].grad.mul_(3)
                    side.params[1].grad = None

        return call

    handles = []

    def nothing() -> None:
        pass

    def between(side: Side, number: int) -> Any:
        if number == 1:
            side.optimizer.register_step_pre_hook(hook("before", side))
            side.optimizer.register_step_post_hook(hook("after", side))
            handles.append(register_optimizer_step_pre_hook(hook("all before", side)))
            handles.append(register_optimizer_step_post_hook(hook("all after", side)))
        side.step(*([nothing] if number == 3 else []))
        return True

    try:
        trained(ADAMW, 5, between)
    finally:
        for handle in handles:
            handle.remove()
    assert [each[0] for each in seen[True][:4]] == ["all before", "before", "after", "all after"]
    assert seen[True] == seen[False]


def test_errors() -> None:
    """A hook, a closure or a step that raises leaves groups, state and gradients as an ordinary step does."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    def between(side: Side, number: int) -> Any:
        if number == 1:
            handle = side.optimizer.register_step_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                side.step()
            handle.remove()
        if number == 2:
            with pytest.raises(ArithmeticError):
                side.step(fail)
        if number == 3:
            side.optimizer.param_groups[0]["capturable"] = True  # refused on a CPU, within the step
            with pytest.raises(AssertionError):
                side.step()
            side.optimizer.param_groups[0]["capturable"] = False
        if number == 4:
            side.optimizer.param_groups[0]["amsgrad"] = True  # without the state that it needs
            with pytest.raises(KeyError):
                side.step()
            side.optimizer.param_groups[0]["amsgrad"] = False
        if number == 5:
            with pytest.raises(TypeError):
                side.step(None, None)
            with pytest.raises(TypeError):
                side.step(wrong=1)

    trained(ADAMW, 7, between)


def test_groups() -> None:
    """Groups by name, added later and with options of their own, and a plain parameter beside segments, whose state is
    made later than theirs and stays.
    """

    def make(params: list[Any]) -> torch.optim.Optimizer:
        plain = nn.Parameter(torch.ones(64))
        decayed = [param for param in params if param.dim() > 1]
        rest = [param for param in params[:4] if param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": [*rest, plain], "lr": 0.2, "foreach": True}]
        return torch.optim.AdamW(groups, lr=0.1)

    sides = [Side(make, is_flat) for is_flat in (True, False)]
    for number in range(6):
        for side in sides:
            plain = side.optimizer.param_groups[1]["params"][-1]
            side.optimizer.zero_grad()
            backward(side.model, number)
            plain.grad = torch.full((64,), 1.0 + number) if number > 1 else None
            if number == 3:
                known = {id(each) for group in side.optimizer.param_groups for each in group["params"]}
                side.optimizer.add_param_group({"params": [each for each in side.params if id(each) not in known]})
            side.step()
            count = len(side.params) if number > 2 else len(side.params) - 6
            assert side.flat == (count if side.is_flat else 0)
            assert side.optimizer.state.get(plain, {}).get("step", 0) == max(0, number - 1)
        assert_same(*[[side.optimizer.state_dict(), [each.to_local() for each in side.params]] for side in sides])


class _Subclass(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert all(type(param.grad) is ShardedTensor for group in self.param_groups for param in group["params"])
        return super().step(closure)


NEVER: dict[str, Make] = {
    "subclass": lambda params: _Subclass(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "turned_off": lambda params: flat_step(torch.optim.AdamW(params, lr=0.1), False),
}


@pytest.mark.parametrize("name", NEVER)
def test_never(name: str) -> None:
    """Subclasses, classes that are not elementwise, and optimizers that it was turned off for step as they are.

    `flat_step` refuses those whose update of an element depends on others.
    """
    side = Side.__new__(Side)
    side.model = model()
    side.optimizer = NEVER[name](list(side.model.parameters()))
    with counting() as counts:
        for number in range(2):
            backward(side.model, number)
            side.optimizer.step()
    assert counts == []
    if name == "adafactor":
        refused = r"flat_step takes optimizers that update elementwise \(SGD, .*, not Adafactor"
        with pytest.raises(TypeError, match=refused):
            flat_step(side.optimizer)


def test_made_before_sharding() -> None:
    """An optimizer whose parameters are sharded later, some after others, steps on flat shards then."""
    parts = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = flat_step(torch.optim.SGD(parts.parameters(), lr=0.1))
    for sharded in (0, 2, 4):
        optimizer.zero_grad()
        if sharded:
            fully_shard(parts[sharded // 2 - 1])
        for _ in range(2):
            optimizer.zero_grad()
            parts(torch.ones(2, 64)).sum().backward()
            with counting() as counts:
                optimizer.step()
            assert sum(counts) == sharded


def test_differentiable() -> None:
    """A group that is differentiable steps as it is."""

    def between(side: Side, number: int) -> None:
        assert number == 0 or side.flat == (len(side.params) if number != 2 and side.is_flat else 0)
        side.optimizer.param_groups[0]["differentiable"] = number == 1

    trained(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 4, between)


def test_copies() -> None:
    """An optimizer and its state can be copied and saved between steps, and each parameter's state is its own."""
    sides = trained(ADAMW, 3)
    for side in sides:
        steps = [state["step"] for state in side.optimizer.state.values()]
        assert len({each.data_ptr() for each in steps}) == len(steps)
        copied_model, copied = copy.deepcopy((side.model, side.optimizer))
        side.held = Side.__new__(Side)
        vars(side.held).update(model=copied_model, optimizer=side.choose(copied), is_flat=side.is_flat)
        side.held.params = list(copied_model.parameters())
    assert_same(*[pickle.loads(pickle.dumps(side.optimizer)).state_dict()["state"] for side in sides])
    for number in range(3):
        for side in sides:
            backward(side.held.model, number)
            side.held.step()
            assert side.held.flat == (len(side.params) if side.is_flat else 0)
        assert_same(*[side.held.shown() for side in sides])
        assert_same(*[side.shown() for side in sides])


SCALING: dict[str, Callable[[list[Tensor]], Any]] = {
    "mul": lambda grads: torch._foreach_mul_(grads, 2.0),
    "mul by a tensor": lambda grads: torch._foreach_mul_(grads, torch.tensor(2.0)),
    "div": lambda grads: torch._foreach_div_(grads, 0.5),
    "zero": torch._foreach_zero_,
    "unscale": lambda grads: torch._amp_foreach_non_finite_check_and_unscale_(
        grads, torch.zeros(1), torch.full((1,), 2.0)
    ),
}


@pytest.mark.parametrize("name", SCALING)
def test_scaled_gradients(name: str) -> None:
    """What scales gradients scales those that it is given, once each: all, in any order, or some of a unit's."""
    of = model()
    for chosen in (slice(None), slice(None, None, -1), slice(0, 5), slice(1, 4)):
        backward(of, 0)
        grads: Any = [param.grad for param in of.parameters()]
        factor = 0.0 if name == "zero" else 2.0
        expected = [grad.to_local().clone() for grad in grads]
        expected[chosen] = [each * factor for each in expected[chosen]]
        versions = [grad._version for grad in grads]
        SCALING[name](grads[chosen])
        assert_same([grad.to_local() for grad in grads], expected)
        flats = {id(vars(grad)["_flat"]): vars(grad)["_flat"].grad for grad in grads}
        assert sum(flat.norm(1) for flat in flats.values()) == pytest.approx(sum(each.norm(1) for each in expected))
        changed = [grad._version > before for grad, before in zip(grads, versions, strict=True)]
        assert name == "unscale" or changed[chosen] == [True] * len(changed[chosen])
        of.zero_grad()
