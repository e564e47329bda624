"""What differs first in a step: which module's input, output or gradient, or which value.

Each module gets hooks that send its inputs and outputs through an operator. It returns a copy, and notes the tensor
when it runs; so does its backward with the gradient. Compilers keep it as it is, so that values within a compiled graph
are seen as those of eager code are. Children are noted before the output of their module is: if that is the first to
differ, the module's own code or parameters are at fault, and if it is an input, the code between two modules.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_compile.compare.values import Allowed, Difference, Key, Values, differences


class Recorder:
    """What the operator notes: the tensors of the step for which it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: Values = {}

    def begin(self) -> None:
        """Forget all, and note what comes."""
        self.is_on, self.events = True, {}

    def note(self, kind: str, module: str, place: int, tensor: Tensor) -> None:
        """Keep a copy, if switched on."""
        if self.is_on:
            name = (f"`{module}`" if module else "the model") + (f" {place}" if place > 1 else "")
            key, call = Key(kind, name), 0
            while key in self.events:
                key, call = Key(kind, f"{name}, call {call + 1}"), call + 1
            self.events[key] = tensor.detach().to("cpu", copy=True).contiguous()


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

    events: Values
    values: Values

    @property
    def all(self) -> Values:
        """Both."""
        return {**self.events, **self.values}


def first(found: Step, expected: Step, allowed: Allowed) -> tuple[int, Difference] | None:
    """What differs first by more than rounding, with its place in the order of the unsharded model's step.

    Args:
        found: of the sharded model, by a way that may not show all events.
        expected: of the unsharded model.
        allowed: by how much that differs from itself.
    """
    seen = [key for key in expected.events if key in found.events]
    shown = {**{key: expected.events[key] for key in seen}, **expected.values}
    also = {**{key: found.events[key] for key in seen}, **found.values}
    places = {key: place for place, key in enumerate(expected.all)}
    faults = (each for each in differences(also, shown, allowed) if each.is_fault)
    return next(((places.get(each.key, len(places)), each) for each in faults), None)
