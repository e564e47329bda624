"""Which module's output or gradient differs first.

Each module gets hooks that send its inputs and outputs through an operator. It returns a copy, and notes the tensor
when it runs; so does its backward with the gradient. Compilers keep it as it is, so that values within a compiled graph
are seen as those of eager code are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_compile.compare.values import Allowed, Difference, Key, Values, differences

# Note [Which module a difference is of]
# Events of a forward are the inputs and outputs of modules; those of a backward the gradients of outputs and inputs. If
# the first event that differs is the output of a module, or the gradient of its input, the fault is between this event
# and those before it: in the module, because what its own parts do has events of its own. If it is the input of a
# module, or the gradient of its output, then what is around the module has computed it: the module that calls it.
# A parameter's gradient comes behind the last event of its module's backward, and so does a buffer behind the last of
# its forward: if all events are the same, the module's own gradient or buffer got lost on its way.

FORWARD, BACKWARD = ("input", "output"), ("gradient of the output", "gradient of the input")
AROUND = ("input", "gradient of the output")


class Event(NamedTuple):
    """A tensor that went into or came out of a module, or its gradient.

    Attributes:
        kind: one of `FORWARD` or `BACKWARD`.
        module: its name.
        place: which of the tensors.
        call: of how many of its calls it is.
    """

    kind: str
    module: str
    place: int
    call: int


class Recorder:
    """What the operator notes: the tensors of the step for which it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: dict[Event, Tensor] = {}

    def begin(self) -> None:
        """Forget all, and note what comes."""
        self.is_on, self.events = True, {}

    def note(self, kind: str, module: str, place: int, tensor: Tensor) -> None:
        """Keep a copy, if switched on."""
        if self.is_on:
            event = Event(kind, module, place, 0)
            while event in self.events:
                event = event._replace(call=event.call + 1)
            self.events[event] = tensor.detach().to("cpu", copy=True).contiguous()


RECORDER = Recorder()


@torch.library.custom_op("fsdp_compile_check::noted", mutates_args=())
def noted(tensor: Tensor, forward: str, backward: str, module: str, place: int) -> Tensor:
    """A copy of `tensor`, which the recorder notes by the first kind; its gradient by the second."""
    RECORDER.note(forward, module, place, tensor)
    return tensor.clone()


@noted.register_fake
def _(tensor: Tensor, forward: str, backward: str, module: str, place: int) -> Tensor:
    return torch.empty_like(tensor)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.named = inputs[2:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    backward, module, place = ctx.named
    return noted(grad, backward, "", module, place), None, None, None, None


noted.register_autograd(_backward, setup_context=_setup)


def watch(model: nn.Module) -> None:
    """Give each module its hooks."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(partial(_note_inputs, name), with_kwargs=True)
            module.register_forward_hook(partial(_note_output, name))


def _note_inputs(name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    places: list[int] = []
    kinds = ("input", "gradient of the input", name)
    return _note_tensors(args, kinds, places), _note_tensors(kwargs, kinds, places)


def _note_output(name: str, module: nn.Module, args: Any, output: Any) -> Any:
    return _note_tensors(output, ("output", "gradient of the output", name), [])


def _note_tensors(value: Any, named: tuple[str, str, str], places: list[int]) -> Any:
    """The floating tensors within tuples, lists and dicts, each sent through the operator."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or isinstance(value, nn.Parameter):
            return value
        places.append(0)
        return noted(value, *named, len(places))
    if type(value) in (tuple, list):
        return type(value)([_note_tensors(each, named, places) for each in value])
    if type(value) is dict:
        return {key: _note_tensors(each, named, places) for key, each in value.items()}
    if isinstance(value, dict):  # of a class of its own
        for key, each in list(value.items()):
            value[key] = _note_tensors(each, named, places)
    return value


# --- the first difference ---------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What a step has shown: tensors of modules in the order in which they came, and values."""

    events: Mapping[Event, Tensor]
    values: Values

    @property
    def all(self) -> dict[Key, Tensor]:
        """Both by their keys."""
        return {**{_key_of_event(event): tensor for event, tensor in self.events.items()}, **self.values}


class First(NamedTuple):
    """The first difference.

    Attributes:
        position: in the order of the unsharded model's step.
        module: that it is of, by name; "" for the model.
        difference: what differs.
    """

    position: float
    module: str
    difference: Difference


def _key_of_event(event: Event) -> Key:
    place = f" {event.place}" if event.place > 1 else ""
    call = f", call {event.call}" if event.call else ""
    return Key(event.kind, f"`{event.module}`{place}{call}" if event.module else f"the model{place}{call}")


def first(found: Step, expected: Step, allowed: Allowed, modules: Sequence[str]) -> First | None:
    """What differs first by more than rounding: Note [Which module a difference is of].

    Args:
        found: of the sharded model, by a way that may not show all.
        expected: of the unsharded model.
        allowed: by how much that differs from itself.
        modules: the names of its modules.
    """
    shown = {key: value for key, value in expected.all.items() if key in found.all or key in expected.values}
    also = {key: value for key, value in found.all.items() if key in shown or key in found.values}
    faults = {each.key: each for each in differences(also, shown, allowed) if each.is_fault}
    events = {_key_of_event(event): event for event in expected.events}
    called = {event.module for event in expected.events} | {""}
    firsts = []
    for key, each in faults.items():
        event = events.get(key)
        if event is not None:
            module = owner_of(event.module, called) if event.kind in AROUND and event.module else event.module
            firsts.append(First(list(events).index(key), module, each))
        elif key.kind in ("output", "loss"):
            firsts.append(First(3 * len(events) + 1, "", each))  # nothing else may differ
        else:
            module = owner_of(key.name.rpartition(" ")[2], set(modules))
            firsts.append(First(_position_of_key(key, module, list(expected.events)), module, each))
    return min(firsts, default=None, key=lambda each: each.position)


def owner_of(name: str, modules: set[str]) -> str:
    """The innermost of `modules` that the parameter, buffer or module `name` lies in."""
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return name
    return ""


def _position_of_key(key: Key, module: str, events: Sequence[Event]) -> float:
    """Behind which event a parameter's gradient or a buffer comes; behind all, what an update leaves."""
    kinds = {"gradient": BACKWARD, "buffer": FORWARD}.get(key.kind, ())
    last = max((at for at, each in enumerate(events) if each.module == module and each.kind in kinds), default=None)
    if last is not None:
        return last + 0.5
    calls = [at for at, each in enumerate(events) if each.module == module and each.kind in FORWARD]
    return len(events) * (1 if key.kind in ("gradient", "buffer") else 2) + min(calls, default=len(events)) / 2
