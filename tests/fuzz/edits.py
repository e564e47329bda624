"""What a script does before a step, to the sharded model and to the unsharded one."""

import copy
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from interruptions import Interruption, interrupted
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fsdp_compile import (
    StateDictType,
    checkpoint,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
    summon_full_params,
)

from .models import loss_of, play_rank
from .rounded import with_weights

if TYPE_CHECKING:
    from .run import Comparison


def is_quantized(tensor: Tensor) -> bool:
    """Whether its values mean something only with a scale, or are whole numbers."""
    return tensor.dtype.itemsize == 1 or not tensor.is_floating_point()


def _multiply(comparison: "Comparison", when: str) -> None:
    with torch.no_grad():
        for param in comparison.all_parameters():
            param.mul_(0.9)


def _replace(comparison: "Comparison", when: str) -> None:
    for param in comparison.all_parameters():
        param.data = 0.9 * param.data


def _summon(comparison: "Comparison", when: str) -> None:
    with summon_full_params(comparison.model), torch.no_grad():
        _multiply(comparison, when)


def _state(comparison: "Comparison", when: str) -> None:
    """What is loaded back replaces what was changed in between."""
    for model in (comparison.model, comparison.reference):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                if not is_quantized(param):
                    param.mul_(0.5)
        model.load_state_dict(state)


def _full_state(comparison: "Comparison", when: str) -> None:
    options = StateDictOptions(full_state_dict=True)
    state, expected = (get_model_state_dict(m, options=options) for m in (comparison.model, comparison.reference))
    for name, value in expected.items():
        comparison.check(f"{when}: {name}", state[name], value, comparison.tolerance_of_sums)
    sent = {name: value for name, value in expected.items() if value.dtype != torch.float8_e4m3fn}  # not by gloo
    changed = {name: value if is_quantized(value) else 0.9 * value for name, value in sent.items()}
    options = StateDictOptions(full_state_dict=True, strict=False)
    for model in (comparison.model, comparison.reference):
        set_model_state_dict(model, dict(changed), options=options)  # torch puts DTensors into it


def _optimizer_state(comparison: "Comparison", when: str) -> None:
    for optimizer in comparison.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _freeze(comparison: "Comparison", when: str) -> None:
    """Parameters of the first node that train no longer do, and the reverse."""
    for model in (comparison.model, comparison.reference):
        for param in (*model.nest.inner[:1].parameters(), model.head.bias):
            if not is_quantized(param):
                param.requires_grad_(not param.requires_grad)


def _evaluate(comparison: "Comparison", when: str) -> None:
    losses = []
    reference = with_weights(comparison.reference, comparison.arrived_weights())
    for model, run in ((comparison.model, comparison.run), (reference, reference)):
        play_rank(model, comparison.rank)
        model.eval()
        with torch.no_grad(), comparison.autocast():
            losses.append(loss_of(run(comparison.example())))
        model.train()
    if not comparison.case.param_dtype:
        comparison.check(when, losses[0], losses[1])


def _abandon(comparison: "Comparison", when: str) -> None:
    """A forward without a backward, but for those within it."""
    comparison.forward_alone()
    for optimizer in comparison.optimizers:
        optimizer.zero_grad()


def _fail(comparison: "Comparison", when: str) -> None:
    """A pass that raises on all ranks, and is caught."""
    nest = comparison.model.nest
    nest.fails = "forward" if "forward" in when else "backward"
    with suppress(ArithmeticError):
        comparison.forward_alone().backward()
    nest.fails = ""
    for optimizer in comparison.optimizers:
        optimizer.zero_grad()


def _deepcopy(comparison: "Comparison", when: str) -> None:
    """A copy runs once, and leaves the model as it was."""
    reference, model = (copy.deepcopy(each) for each in (comparison.reference, comparison.model))
    reference = with_weights(reference, comparison.arrived_weights())
    for each in (reference, model):
        play_rank(each, 0)
    expected = comparison.loss_of_reference(reference)
    expected.backward()
    with comparison.autocast():
        loss = loss_of(model(comparison.example()))
    loss.backward()
    if not comparison.case.param_dtype and not comparison.case.reduce_dtype:
        comparison.check(when, loss, expected)
        comparison.check_gradients(when, model, reference)
    comparison.check_parameters(when)


def _new_parameter(comparison: "Comparison", when: str) -> None:
    """The first parameter of the first node is replaced by a new one, which a new optimizer trains."""
    for model in (comparison.model, comparison.reference):
        name, old = next(model.nest.inner[0].named_parameters())
        owner, _, attribute = name.rpartition(".")
        if not is_quantized(old) and sum(param is old for param in _all_places(model)) == 1:
            new = nn.Parameter(0.9 * old.detach(), requires_grad=old.requires_grad)
            setattr(model.nest.inner[0].get_submodule(owner), attribute, new)
    comparison.make_optimizers()


def _all_places(model: nn.Module) -> list[nn.Parameter]:
    return [param for _, param in model.named_parameters(remove_duplicate=False)]


def _roll_back(comparison: "Comparison", when: str) -> None:
    """A step, after which the model and its optimizer get back the state that was kept before it."""
    model, reference, optimizer = comparison.model, comparison.reference, comparison.optimizers[1]
    optimizer.zero_grad()
    comparison.optimizers[0].zero_grad()
    before = copy.deepcopy(reference.state_dict())  # a forward may change parameters
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        kept, of_optimizer = model.state_dict(), optim_state_dict(model, optimizer)
        comparison.forward_alone().backward()
        optimizer.step()
        for each in comparison.optimizers:
            each.zero_grad()
        model.load_state_dict(kept)
        optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, of_optimizer))
    reference.load_state_dict(before)
    comparison.check_parameters(when)


def _thaw(comparison: "Comparison", when: str) -> None:
    """What is frozen trains from now on."""
    for param in comparison.all_parameters():
        param.requires_grad_(True)


def _remove(comparison: "Comparison", when: str) -> None:
    """The first bias of a linear layer that its model has in one place goes; new optimizers train the rest."""
    for model in (comparison.model, comparison.reference):
        for module in model.modules():
            bias = module.bias if isinstance(module, nn.Linear) else None
            if bias is not None and sum(param is bias for param in _all_places(model)) == 1:
                module.bias = None
                break
    comparison.make_optimizers()


def _call_functionally(comparison: "Comparison", when: str) -> None:
    """A forward with other tensors in the place of parameters, and a gradient of these."""
    grads, named = [], dict(comparison.reference.named_parameters())
    others = {name: param.detach() * 0.5 for name, param in named.items() if not is_quantized(param)}
    for model in (comparison.reference, comparison.model):
        play_rank(model, 0)
        given = {name: value.clone().requires_grad_() for name, value in others.items()}
        loss = loss_of(torch.func.functional_call(model, given, (comparison.example(),)))
        grads.append(torch.autograd.grad(loss, [*given.values()], allow_unused=True))
    for name, expected, found in zip(others, *grads, strict=True):
        assert (expected is None) == (found is None), name
        if expected is not None:
            comparison.check(f"{when}: {name}", found, expected)


def _penalize(comparison: "Comparison", when: str) -> None:
    """A backward of parameters alone, in full and by operators on what is sharded, before that of the step."""
    for model in (comparison.model, comparison.reference):
        trained = [param for param in model.parameters() if param.requires_grad]
        full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trained[::2]]
        terms = [0.1 * each.square().sum() for each in (*full, *trained[1::2])]
        if terms:
            torch.stack([term.double() for term in terms]).sum().backward()


def _call_a_part(comparison: "Comparison", when: str) -> None:
    """The head, a part of the model's own unit, is called by itself."""
    outputs = []
    for model in (comparison.reference, comparison.model):
        outputs.append(model.head(torch.ones(2, model.head.in_features, dtype=model.head.weight.dtype)))
    if not comparison.case.param_dtype:
        comparison.check(when, *reversed(outputs), comparison.tolerance_of_sums)


def _save_frozen(comparison: "Comparison", when: str) -> None:
    """A save while every other parameter that trains is frozen, which a new optimizer and changed parameters load."""
    model: nn.Module = comparison.model
    frozen = [param for param in model.parameters() if param.requires_grad][::2]
    for param in frozen:
        param.requires_grad_(False)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoint.save({"model": model, "optimizer": comparison.optimizers[1]}, Path(folder[0]), 0)
        with torch.no_grad():
            for param in model.parameters():
                if not is_quantized(param):
                    param.mul_(0.5)
        comparison.optimizers[1] = comparison.new_optimizer(model)
        checkpoint.load({"model": model, "optimizer": comparison.optimizers[1]}, Path(folder[0]))
        dist.barrier()
    for param in frozen:
        param.requires_grad_(True)
    comparison.check_parameters(when)


def _interrupt(comparison: "Comparison", when: str) -> None:
    """A step of the sharded model alone in which some function of the package raises, on all ranks the same one."""
    at = random.Random(f"{comparison.case.seed} {when}").randrange(1, 3000)
    comparison.loss_of_reference(comparison.reference)  # which may be sharded as well, and is not interrupted
    with suppress(Interruption, RuntimeError):
        interrupted(lambda: comparison.forward_of_model().backward(), at)
    for optimizer in comparison.optimizers:
        optimizer.zero_grad()


def _plant(comparison: "Comparison", when: str) -> None:
    """A defect on purpose: no case that is drawn has it, and the fuzzer must see it."""
    with torch.no_grad():
        next(comparison.reference.parameters()).mul_(1.0001)


EDITS: dict[str, Callable[["Comparison", str], None]] = {
    "mul": _multiply,
    "data": _replace,
    "summon": _summon,
    "state": _state,
    "full state": _full_state,
    "optimizer state": _optimizer_state,
    "freeze": _freeze,
    "eval": _evaluate,
    "abandon": _abandon,
    "failed forward": _fail,
    "failed backward": _fail,
    "deepcopy": _deepcopy,
    "new parameter": _new_parameter,
    "roll back": _roll_back,
    "thaw": _thaw,
    "remove": _remove,
    "functional call": _call_functionally,
    "penalty": _penalize,
    "part": _call_a_part,
    "frozen save": _save_frozen,
    "interrupt": _interrupt,
    "planted": _plant,
}
