"""Units are made, one by one, from what validate.py has prepared; then modules, units and the root are connected.

make_unit      initial values, device, equality; then the parameters of one unit are sharded
connect        modules find their parameters, and the root knows its units
join_divided   makes one unit of what an earlier call divided: its parameters are plain tensors again meanwhile
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_compile.construct.initial_values import broadcast_states, materialize, move_from_cpu
from fsdp_compile.construct.validate import NamedParams, PreparedUnit, prepare_units
from fsdp_compile.construct.wrap_policy import Ignored
from fsdp_compile.core._torch import swap_wrapper
from fsdp_compile.core.inner_params import put_back, take_apart
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.sharding import (
    ModuleSharding,
    add_lookups,
    original_class,
    sharding_of,
    swap_class,
    units_gathered_below,
)
from fsdp_compile.core.tensor_parallel import with_local_parameters
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.core.unit_state import check_idle


class ModuleGroup(nn.Module):
    """The modules of one call of `fully_shard` with a list, as children."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)


def group_of(modules: Sequence[Any]) -> ModuleGroup:
    """The modules of a list. ValueError if one is inside another, or there is none."""
    for module in modules:
        inside = [other for other in modules if other is not module and module in set(other.modules())]
        if inside or sum(other is module for other in modules) > 1:
            raise ValueError(
                f"module: expected a list of modules none of which contains another, found {type(module).__name__} "
                f"twice or inside {type(inside[0] if inside else module).__name__}; pass each part of the model once"
            )
    if not modules:
        raise ValueError("module: expected a list with at least one module, found an empty one")
    return ModuleGroup(modules)


def check_module(module: Any) -> None:
    """Raise an error if `module` cannot be given to `fully_shard`."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fully_shard: expected to be called outside inference_mode, found it on; leave it first")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module or a list of them, found {type(module).__name__}")
    if "_orig_mod" in module._modules:
        raise ValueError(
            f"module: expected the module itself, found what torch.compile made of {type(module._orig_mod).__name__}; "
            f"call fully_shard(model) first and compile what it returns, or call model.compile() before or after"
        )
    if sharding_of(module):
        raise ValueError(f"module: {type(module).__name__} is sharded already; call fully_shard once per module")


def make_unit(model: nn.Module, prepared: PreparedUnit, ignored: Ignored, mixin: type) -> None:
    """Give one unit's tensors values, a device and equality, in this order; then shard it.

    Its module, or each module of a list, becomes an instance of `mixin`.
    """
    settings = prepared.settings
    has_data = any(param.numel() for _, param in prepared.params)  # else there is nothing to communicate (E-FLAT-12)
    modules = [module for _, module in prepared.modules]
    take_apart(model, prepared.inner)
    if not prepared.stays_on_meta:
        materialize(prepared.modules, prepared.device, settings.param_init_fn, ignored.params)
    params = with_local_parameters(model, prepared.params)
    plain = [param for _, param in params]
    move_from_cpu(plain, modules, prepared.device)
    if settings.sync_module_states:
        broadcast_states(plain, prepared.module, settings.groups)
    unit = None
    if has_data:
        sections = divide_at_units(params, prepared.module)
        unit = Unit(sections, settings, device=prepared.device, on_meta=prepared.stays_on_meta)
    is_group = isinstance(prepared.module, ModuleGroup)
    sharded = list(prepared.module.children()) if is_group else [prepared.module]
    for module in sharded:
        module.__dict__["_fsdp"] = ModuleSharding(
            settings,
            prepared.device,
            _buffer_dtypes(module, modules),
            units=(unit,) if unit else (),
            shared_units=frozenset((unit,) if unit and is_group else ()),
        )
        swap_class(module, mixin)


# Note [A unit around other units has several flat parameters]
# A model's own unit holds what is outside of its blocks: an embedding, which forward reads first, and a head, which it
# reads last. In one flat parameter the head would be gathered before forward can begin, and its gradients would be
# reduced when backward has ended, although they are ready at its beginning; nothing hides either. In large models both
# are larger than a block. So what lies before, between and after the units inside, in the order of registration, has a
# flat parameter for itself, if it is large enough to be worth a collective. The unit stays one: outside of graphs all
# of it is gathered when the module's forward begins, and the module finds its parameters wherever it reads them.

_WORTH_A_COLLECTIVE = 2**22  # elements


def divide_at_units(params: NamedParams, module: nn.Module) -> list[NamedParams]:
    """Divide the parameters of a unit of `module` where other units lie between them, if both sections are large."""
    position = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    sections: list[list[tuple[str, nn.Parameter]]] = [[]]
    following = 0
    for name, param in params:
        at = position.get(name, following)
        if at > following and _numel(sections[-1]) >= _WORTH_A_COLLECTIVE:
            sections.append([])
        sections[-1].append((name, param))
        following = at + 1
    if len(sections) > 1 and _numel(sections[-1]) < _WORTH_A_COLLECTIVE:
        small = sections.pop()
        sections[-1] += small
    return list[NamedParams](sections)


def _numel(params: NamedParams) -> int:
    return sum(param.numel() for _, param in params)


def _buffer_dtypes(module: nn.Module, own: Collection[nn.Module]) -> dict[str, torch.dtype]:
    """The dtypes of the floating buffers that the modules `own`, at or below `module`, have; by name in `module`."""
    return {
        f"{path}.{name}" if path else name: buffer.dtype
        for path, owner in module.named_modules()
        if owner in own
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }


# --- connecting -------------------------------------------------------------------------------------------------------


def connect(model: Any, ignored: Ignored, runtime: Any, mixin: type) -> None:
    """Let all modules, now instances of `mixin`, find their parameters; tied ones are gathered around all their users.

    `runtime` is what the units below `model` share (eager/runtime.py).
    """
    roots: list[Any] = list(model.children()) if isinstance(model, ModuleGroup) else [model]
    for root in roots:
        root._fsdp.ignored_modules, root._fsdp.ignored_params = ignored.modules, ignored.params  # E-INIT-9
    users: dict[Unit, list[nn.Module]] = {}
    for module in model.modules():
        units = {name: unit_of(p) for name, p in module._parameters.items() if p is not None}
        managed = {name: at for name, at in units.items() if at}
        known = {lookup.name for lookup in getattr(type(module), "_fsdp_lookups", ())}
        if managed.keys() - known:
            add_lookups(module, {name: at for name, at in managed.items() if name not in known}, mixin)
        for unit, _ in managed.values():
            users.setdefault(unit, []).append(module)
    scopes = list(_scopes(model))
    shared = frozenset[Unit]().union(*(scope._fsdp.shared_units for scope in scopes))
    for scope in scopes:
        scope.__dict__["_fsdp_runtime"] = runtime
        scope._fsdp.is_root = scope in roots
        for unit in scope._fsdp.units:
            if unit not in shared:
                _widen(unit, scope, users.get(unit, []), model)
    for root in roots:
        root._fsdp.shared_units = shared
    for scope in scopes:
        scope._fsdp.traced_units = tuple(dict.fromkeys((*scope._fsdp.units, *scope._fsdp.shared_units)))
        scope._fsdp.units_below = tuple(units_gathered_below(scope))
        for unit in scope._fsdp.units:
            unit.reduces_in_flight = runtime.reduces_in_flight


def _scopes(model: nn.Module) -> Iterator[Any]:
    """The sharded modules among `model` and those below."""
    return filter(sharding_of, model.modules())


def _widen(unit: Unit, scope: Any, users: list[nn.Module], model: nn.Module) -> None:
    """Move `unit` to the innermost sharded module that encloses all its users: tied parameters are gathered once."""
    if set(users) <= set(scope.modules()):
        return
    enclosing = [m for m in _scopes(model) if set(users) <= set(m.modules())]
    innermost = min(enclosing, key=lambda m: sum(1 for _ in m.modules()))
    scope._fsdp.units = tuple(u for u in scope._fsdp.units if u is not unit)
    innermost._fsdp.units = (*innermost._fsdp.units, unit)


# --- from units to plain parameters again -----------------------------------------------------------------------------


def join_divided(model: nn.Module, mixin: type) -> None:
    """Make one unit of each module below that an earlier call divided by "auto"; all ranks take part.

    `fully_shard(block)` cannot know whether the block is a model of its own, which "auto" divides into units, or will
    lie in a model that is sharded by a later call. Only that call tells, so it undoes the division and makes one unit
    of the block, as FSDP2 does.

    Raises:
        ValueError: a unit is not idle, or has gradients. Nothing has been changed then.
    """
    divided = [module for module in _scopes(model) if module._fsdp.is_root and module._fsdp_runtime.is_divided]
    for module in divided:
        units = units_gathered_below(module)
        check_idle(units, "fully_shard")
        for unit in units:
            for name, param in zip(unit.names, unit.params, strict=True):
                if param.grad is not None:
                    raise ValueError(f"parameter {name} has a gradient; call zero_grad() before fully_shard is called "
                                     "on the module around it")  # fmt: skip
    for module in divided:
        settings = module._fsdp_runtime.settings
        ignored = Ignored(module._fsdp.ignored_modules, module._fsdp.ignored_params)
        _undo(module)
        settings = replace(settings, param_init_fn=None, sync_module_states=False, shard_placement_fn=None)
        for prepared in prepare_units(module, {module: {}}, settings, ignored):
            make_unit(module, prepared, ignored, mixin)


def _undo(module: nn.Module) -> None:
    """Give `module` and all below full parameters and their own classes."""
    for unit in units_gathered_below(module):
        full = [_full(param) for param in unit.params]
        for flat in unit.flats:
            flat.release()
        for param, values in zip(unit.params, full, strict=True):
            swap_wrapper(param, values)
            for name in ("_fsdp_unit", "_fsdp_is_inner", "local", "spec", "_is_param"):
                vars(param).pop(name, None)
    for each in module.modules():
        _restore_class(each)
    put_back(module)


def _full(param: nn.Parameter) -> nn.Parameter:
    """A parameter of its own memory with all elements of `param`, or of the local tensor where it was a DTensor."""
    if not isinstance(param, ShardedTensor):
        return nn.Parameter(param.detach().clone(), param.requires_grad)
    shape = param.spec.split_shape
    values = (
        torch.empty(shape, dtype=param.dtype, device="meta") if param.is_meta else param.spec.gather_split(param.local)
    )
    return nn.Parameter(values, param.requires_grad)


def _restore_class(module: Any) -> None:
    module.__class__ = original_class(module)
    for name in ("_fsdp", "_fsdp_units", "_fsdp_runtime"):
        vars(module).pop(name, None)
    gathering = module._compiled_call_impl
    if gathering is not None and hasattr(gathering, "args"):  # what gathers around a compiled forward (fsdp_module.py)
        module._compiled_call_impl = gathering.args[1]
