"""A sharded module: how it is sharded, and how its code finds unsharded parameters.

    module._fsdp          ModuleSharding: of a module that `fully_shard` was called on or that it chose as a unit
    module._fsdp_units    the units that hold the module's own parameters; generated look-up code reads it

The class of a module that owns managed parameters is replaced by a subclass with a property for each. It returns the
unit's full view while the unit is gathered, else the sharded parameter: nothing is set or restored per step. So does
the property `_parameters`, which all methods of `nn.Module` that list parameters read, also those of modules around.
Classes are cached by (original class, where each parameter is found, forward, constants of a traced forward), so equal
blocks share one class and one compiled graph, and different models share no code object: Dynamo counts recompilations
for each, and stops at a limit. What belongs to an instance, its units, lives in its `__dict__`.

A place whose parameter was removed has no property until a parameter is back: the class is swapped again.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import (
    RNN_WITHOUT_LIST,
    executes_formula,
    in_backward,
    mark_as_sharded,
    while_tracing,
)
from fsdp_compile.core.inner_params import inner_names, recipes_of
from fsdp_compile.core.settings import Settings
from fsdp_compile.core.traced_writes import check_read, note_read
from fsdp_compile.core.unit import Unit, unit_of


@dataclass(eq=False)  # not frozen: Dynamo reads every field of a frozen dataclass, and would guard on each of them
class ModuleSharding:
    """How one module is sharded. `fully_shard` writes it; a call around the module may change it."""

    settings: Settings  # those of the module's unit
    device: torch.device  # where the module computes
    buffer_dtypes: dict[str, torch.dtype]  # that its floating buffers had, by their names in the module
    # The units that are gathered around the module's forward: its own one, unless that has no data or an enclosing
    # module gathers it, and those that modules below share.
    units: tuple[Unit, ...] = ()
    shared_units: frozenset[Unit] = frozenset()  # of `units`, those of module lists; of a root all such units below
    # The units that a compiled forward of the module gathers: `units`, and of a root all shared ones. The passes place
    # their all-gathers where they are needed.
    traced_units: tuple[Unit, ...] = ()
    units_below: tuple[Unit, ...] = ()  # `units`, and those of all sharded modules below
    is_root: bool = True  # whether no sharded module is around this one
    in_hooked_call: bool = False  # whether a call of the module runs that gathered around its hooks
    ignored_modules: frozenset[nn.Module] = frozenset()  # that the call of `fully_shard` on this module left alone
    ignored_params: frozenset[nn.Parameter] = frozenset()  # likewise
    checked: Any = None  # of a root that was checked (agree/root_checks.py)


def sharding_of(module: nn.Module) -> ModuleSharding | None:
    """How `module` is sharded; None if it is not a sharded module itself."""
    return module.__dict__.get("_fsdp")


def modules_below(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, in the order of `module.modules()`, which takes ten times as long for deep ones."""
    found: dict[nn.Module, None] = {}
    waiting: list[Any] = [module]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found[each] = None
            waiting += reversed(each._modules.values())
    return list(found)


def units_gathered_below(module: nn.Module) -> list[Unit]:
    """The units that `module` and all modules below gather, each once, in the order of `module.modules()`."""
    return units_gathered_by(modules_below(module))


def units_gathered_by(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units that `modules` gather, each once."""
    shardings: Iterable[Any] = filter(None, map(sharding_of, modules))
    return list(dict.fromkeys(unit for sharding in shardings for unit in sharding.units))


def units_used_below(module: nn.Module) -> list[Unit]:
    """The units with a parameter in `module` or below, each once, in the order of `module.modules()`."""
    return _units_of(module.modules())


def own_units(module: nn.Module) -> list[Unit]:
    """The units with a parameter in `module` or below, but not only below another sharded module (E-MOD-1)."""
    return _units_of(own_modules(module))


def own_modules(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, except other sharded modules and what is below these."""
    owned = [module]
    for child in module.children():
        if sharding_of(child) is None:
            owned += own_modules(child)
    return owned


def _units_of(modules: Iterable[nn.Module]) -> list[Unit]:
    pairs = ((sharding_of(module), module.__dict__.get("_fsdp_units", ())) for module in modules)
    return list(dict.fromkeys(u for sharding, own in pairs for u in (*(sharding.units if sharding else ()), *own)))


# --- look-up ----------------------------------------------------------------------------------------------------------

WRAPPED, CHECKPOINTED = "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
_ADDED = (f"{WRAPPED}.", f"{CHECKPOINTED}.", "_orig_mod.")  # by wrappers: ours, checkpoints', the compiler's


@dataclass(frozen=True)
class Lookup:
    """Where a module finds one parameter: `module._fsdp_units[slot].unsharded_params[index]`."""

    name: str
    slot: int
    index: int


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module before its class was swapped."""
    return getattr(type(module), "_fsdp_original", type(module))


def by_original_class(visit: Callable[[nn.Module], None], but: tuple[type, ...] = ()) -> Callable[[nn.Module], None]:
    """`visit`, for which a module has the class that it had before it was swapped, unless it is one of the types `but`.

    So `type(module) is nn.Linear` holds. Not for use within a forward: that class finds no unsharded parameters.
    """

    def visit_original(module: nn.Module) -> None:
        swapped, original = type(module), original_class(module)
        if swapped is original or isinstance(module, but):
            return visit(module)
        module.__class__ = original
        try:
            visit(module)
        finally:
            module.__class__ = swapped

    return visit_original


def add_lookups(module: nn.Module, params: dict[str, tuple[Unit, int]], mixin: type) -> None:
    """Let `module` find `params`, by name, in the given units at the given indices.
    It becomes an instance of `mixin`, unless its class has a mixin already.
    """
    units = list(module.__dict__.get("_fsdp_units", ()))
    lookups = list(getattr(type(module), "_fsdp_lookups", ()))
    for name, (unit, index) in params.items():
        if unit not in units:
            units.append(unit)
        lookups.append(Lookup(name, units.index(unit), index))
        unit.locations.add(index, module, stored_parameters(module), name)
    module.__dict__["_fsdp_units"] = tuple(units)
    constants = getattr(type(module), "_fsdp_traced_constants", ())
    _swap_class(module, tuple(lookups), getattr(type(module), "_fsdp_mixin", mixin), constants)


def swap_class(module: nn.Module, mixin: Any) -> None:
    """Make `module`, which knows its units, an instance of `mixin` as well.
    If `mixin` has `wrap_forward`, that wraps the original forward, and `wrap_call` the call of hooks and forward.
    """
    constants = tuple(text for unit in units_gathered_below(module) for text in unit.traced_constants)
    _swap_class(module, getattr(type(module), "_fsdp_lookups", ()), mixin, constants)
    mark_as_sharded(module)
    mixin.on_swap(module)


def _swap_class(module: nn.Module, lookups: tuple[Lookup, ...], mixin: type, constants: tuple[str, ...]) -> None:
    names = tuple((name, tuple(inner_names(name, recipe))) for name, recipe in recipes_of(module).items())
    stored = _stored_names(module, lookups)
    swapped = _swapped_class(original_class(module), lookups, stored, names, mixin, constants)  # type: ignore[arg-type]  # a cached function
    if hasattr(type(module), "_fsdp_original") and "_fsdp_original" not in vars(type(module)):
        type(module).__bases__ = (swapped,)  # of the class that a parametrization within the forward has given it
    else:
        module.__class__ = swapped
    if lookups:
        _store_parameters(module, module.__dict__["_parameters"])


def _stored_names(module: nn.Module, lookups: tuple[Lookup, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """The names in `lookups` under which `module` stores a parameter of a unit: not where it was removed, or another
    tensor was put into its place. And the names of its other parameters, None or ignored.
    """
    stored = stored_parameters(module)
    found = frozenset(each.name for each in lookups if (param := stored.get(each.name)) is not None and unit_of(param))
    return found, frozenset(stored.keys() - found if lookups else ())


def record_locations(unit: Unit) -> None:
    """Record what modules hold in the places of the unit's parameters, and let them find there what they hold."""
    unit.locations.record()
    for module in list(unit.locations.modules):
        _look_up_again(module)


@torch.compiler.disable
def _look_up_again(module: nn.Module) -> None:
    """Let `module` find in units what it stores now, after parameters were removed or put back."""
    cls: Any = type(module)
    (found, others), (had, had_beside) = _stored_names(module, cls._fsdp_lookups), cls._fsdp_stored_names
    if found != had or not others >= had_beside:
        _swap_class(module, cls._fsdp_lookups, cls._fsdp_mixin, cls._fsdp_traced_constants)


@cache
def _swapped_class(
    original: type[nn.Module],
    lookups: tuple[Lookup, ...],
    stored: tuple[frozenset[str], frozenset[str]],
    together: tuple[tuple[str, tuple[str, ...]], ...],
    mixin: Any,
    constants: tuple[str, ...],
) -> type[nn.Module]:
    found, others = stored
    finds = {each.name: _property(_FIND, asdict(each)) for each in lookups if each.name in found}
    finds |= {name: _property(_FIND_STORED, {"name": name}) for name in others}
    namespace: dict[str, Any] = {name: find.setter(partial(_take_place, name)) for name, find in finds.items()}
    for name, inner in together:
        tensors = ", ".join(f"module.{each}" for each in inner)
        namespace[name] = _property(_PUT_TOGETHER, {"name": name, "tensors": tensors})
    if lookups:
        namespace["_parameters"] = _shown_parameters(lookups, found)
    if lookups and issubclass(original, nn.RNNBase):
        namespace |= RNN_WITHOUT_LIST
    namespace |= {"_fsdp_original": original, "_fsdp_lookups": lookups, "_fsdp_stored_names": stored}
    namespace |= {"_fsdp_mixin": mixin, "_fsdp_traced_constants": constants}
    namespace |= {"__new__": staticmethod(partial(_make_original, original)), "__doc__": original.__doc__}
    namespace |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    if not hasattr(mixin, "wrap_forward"):
        return type(original.__name__, (mixin, original), namespace)
    namespace["forward"] = mixin.wrap_forward(original.forward)
    namespace["_fsdp_hooked_call"] = mixin.wrap_call(original._call_impl)
    return type("FSDP" + original.__name__, (mixin, original), namespace)


def _make_original(original: Any, cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """What calling a swapped class makes: an instance of the original one, as when a sharded `Sequential` is sliced.
    Copying and unpickling call this without arguments.
    """
    return original(*args, **kwargs) if args or kwargs else object.__new__(cls)


# Slot, index and name are literals of generated code: as closure variables Dynamo would guard on each of them, for each
# parameter, on every call.
_FIND = """
def find(module):
    views = module._fsdp_units[{slot}].unsharded_params
    if views is not None:
        return views[{index}]
    return find_closed(module, {name!r}, {slot}, {index})
"""

# Of parameters that are None or ignored, beside managed ones: torch 2.11 does not find them in `ShownParameters`, and
# where torch does, Dynamo traces the making of these for each read.
_FIND_STORED = """
def find(module):
    if {name!r} in module._fsdp_parameters:
        return module._fsdp_parameters[{name!r}]
    raise AttributeError({name!r})
"""

_PUT_TOGETHER = """
def find(module):
    return module._fsdp_recipes[{name!r}].put_together(iter(({tensors},)))
"""  # Note [Inner tensors]


def find_closed(module: Any, name: str, slot: int, index: int) -> Tensor | None:
    """The parameter as it is stored, for code outside of its unit's forward; traced with gradients, an unsharded one.

    The latter is gathered for this use alone, in the parameter's own dtype. So does an operator with what is stored,
    where a module of the unit runs alone. `parameters()` and access to a gathered unit do not come here.
    """
    unit: Unit = module._fsdp_units[slot]
    traced = torch.compiler.is_compiling() and torch.is_grad_enabled() and unit.summoned is None
    if traced and unit.in_flat(index)[0].trains and name in module._fsdp_parameters:
        while_tracing(check_read)
        params = unit.traced_unshard(full_precision=not unit.casts_closed)
        while_tracing(note_read)
        return params[index]
    try:
        param: nn.Parameter | None = module._fsdp_parameters[name]
    except KeyError:
        raise AttributeError(name) from None
    if unit.casts_closed and param is not None:  # to what the forward computes with
        return param.to(unit.compute_dtype(unit.in_flat(index)[0]))
    return param


def _property(code: str, literals: dict[str, Any]) -> property:
    scope: dict[str, Any] = {"find_closed": find_closed}
    exec(code.format(**literals), scope)
    return property(scope["find"])


def _take_place(name: str, module: nn.Module, value: Any) -> None:
    """Let `value` be a plain attribute in the place of a parameter that was removed, as `prune` and others set one."""
    _look_up_again(module)
    setattr(module, name, value)


class ShownParameters(dict[str, Any]):
    """`_parameters` of a module whose parameters are gathered: full ones in the place of those that are stored.
    What is set or deleted here is set or deleted there too, and the module's code finds it (`functional_call`).
    """

    def __init__(self, module: Any, shown: dict[str, Any]) -> None:
        super().__init__(shown)
        self.module = module  # not what it stores, all of which Dynamo would make inputs of the graph

    def __setitem__(self, name: str, value: Any) -> None:
        self.module._fsdp_parameters[name] = stored_for(self.module, name, value)
        super().__setitem__(name, value)
        _look_up_again(self.module)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.module._fsdp_parameters[name]
        _look_up_again(self.module)

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`."""
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    popitem, clear = MutableMapping.popitem, MutableMapping.clear  # by the methods above
    update, setdefault = MutableMapping.update, MutableMapping.setdefault


@torch.compiler.disable
def stored_for(module: Any, name: str, value: Any) -> Any:
    """What `module` stores for `value`, which its forward puts into the place `name`: for the full parameter that was
    found there, the parameter. RuntimeError for a new one that trains: its gradient would be this rank's alone.
    """
    for lookup in type(module)._fsdp_lookups:
        if lookup.name == name and value is not None:
            unit: Unit = module._fsdp_units[lookup.slot]
            if unit.unsharded_params is not None and value is unit.unsharded_params[lookup.index]:
                return unit.params[lookup.index]
            if isinstance(value, nn.Parameter) and value.requires_grad and unit_of(value) is None:
                raise RuntimeError(changed_in_forward([unit.names[lookup.index]]))
    return value


def changed_in_forward(names: Sequence[str]) -> str:
    """The error of a forward that changed parameters."""
    return (
        f"forward changed parameter {' or '.join(names)} of its own unit, and the change would be lost: module code "
        f"reads a copy that was gathered; change it outside of forward, use a buffer, or name it in ignored_params"
    )


def stored_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """`module._parameters` as it is stored: sharded parameters, also within their unit's forward."""
    stored: dict[str, nn.Parameter | None] = module.__dict__["_parameters"]
    return stored


def get_parameter(module: nn.Module, target: str) -> Any:
    """As `nn.Module.get_parameter`; within a forward of its unit, the unsharded parameter, a plain tensor."""
    path, _, name = target.rpartition(".")
    shown = module.get_submodule(path)._parameters.get(name)
    return nn.Module.get_parameter(module, target) if shown is None else shown


def _readable_params(unit: Unit) -> list[Tensor] | None:
    """The unsharded parameters of `unit` if its forward or backward runs; None in hooks behind accumulated gradients,
    which look for the parameters that have them.
    """
    if torch.compiler.is_compiling():
        return unit.unsharded_params
    runs = unit.is_shown and (not in_backward() or executes_formula())
    return unit.unsharded_params if runs else None


def _shown_parameters(lookups: tuple[Lookup, ...], found: frozenset[str]) -> property:
    """The property `_parameters` of a class with `lookups`, which are literals as in `_FIND`. While a unit is gathered
    it is a `ShownParameters`, also where none of the module's parameters are `found` there.
    """
    code = "def show(module):\n    shown = None\n"
    for slot in sorted({lookup.slot for lookup in lookups}):
        here = [each for each in lookups if each.slot == slot and each.name in found]
        items = ", ".join(f"{each.name!r}: views[{each.index}]" for each in here)
        code += f"    views = readable(module._fsdp_units[{slot}])\n"
        code += f"    if views is not None:\n        shown = (shown or {{}}) | {{{items}}}\n"
    code += "    stored = module._fsdp_parameters\n    if shown is None:\n        return stored\n"
    code += "    return Shown(module, {name: shown[name] if name in shown else stored[name] for name in stored})\n"
    scope: dict[str, Any] = {"readable": _readable_params, "Shown": ShownParameters}
    exec(code, scope)
    return property(scope["show"], _store_parameters)


def _store_parameters(module: nn.Module, stored: dict[str, nn.Parameter | None]) -> None:
    # Under both names: where Dynamo traces `module.__dict__["_parameters"]`, torch 2.11 calls the property.
    module.__dict__.update(_parameters=stored, _fsdp_parameters=stored)


def join_registries(root: nn.Module) -> None:
    """Let modules store their parameters in one dict again: torch.export restores copies of dicts that it finds."""
    for module in root.modules():
        stored: Any = module.__dict__.get("_parameters")  # torch.jit.trace makes modules without
        copied = module.__dict__.get("_fsdp_parameters")
        if copied is not None and copied is not stored:
            stored.clear()
            stored.update(copied)
            module.__dict__["_fsdp_parameters"] = stored


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes that wrappers add."""
    for prefix in _ADDED:
        name = name.replace(prefix, "")
    return name


def clean_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """For each parameter its first clean name."""
    return {param: clean_name(name) for name, param in model.named_parameters()}
