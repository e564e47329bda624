"""Which modules become units of their own: the automatic choice, and the policies that torch's wrapper takes; and what
is left alone: modules and parameters that the caller names, or that another API has sharded.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.sharding import sharding_of

_FOREIGN = (torch.distributed.fsdp.FSDPModule, torch.distributed.fsdp.FullyShardedDataParallel)


@dataclass(frozen=True)
class Ignored:
    """Modules that become no units and have none inside, and parameters that are not sharded, moved or broadcast."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


def collect_ignored(
    model: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """All that is ignored in `model`, whole subtrees included (E-INIT-7 to 10).

    Nested units and what is below them are not ignored with the module around them; what was ignored when they were
    made stays so (E-INIT-9).

    Raises:
        TypeError: an argument is not iterable.
        ValueError: both are given, or one holds anything but modules, or anything but parameters, or a unit; or another
            sharding API has `model` itself.
    """
    if isinstance(model, _FOREIGN):
        raise ValueError(f"module: expected a module that is not sharded, found {type(model).__name__}; shard it once")
    modules, params = _given(ignored_modules, ignored_states)
    for module in modules:
        if sharding_of(module):
            raise ValueError(
                f"ignored modules: expected modules that are not sharded, found the unit {type(module).__name__}; "
                f"ignore it before it is sharded"
            )
    if model in modules:
        warn_caller(f"ignored modules: found the model itself, {type(model).__name__}; all of it is ignored")
    roots = [*modules, *(module for module in model.modules() if isinstance(module, _FOREIGN))]
    inside = [module for root in roots for module in _subtree(root)]
    owned = [param for module in inside for param in module._parameters.values() if param is not None]
    nested = [sharding for sharding in map(sharding_of, model.modules()) if sharding]
    return Ignored(
        frozenset(inside).union(*(sharding.ignored_modules for sharding in nested)),
        frozenset([*params, *owned]).union(*(sharding.ignored_params for sharding in nested)),
    )


def _given(ignored_modules: Any, ignored_states: Any) -> tuple[list[nn.Module], list[nn.Parameter]]:
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states: expected at most one, found both; use ignored_states")
    if ignored_modules is not None:
        modules = _as_list("ignored_modules", ignored_modules)
        _check_all("ignored_modules", modules, nn.Module)
        return modules, []
    states = _as_list("ignored_states", () if ignored_states is None else ignored_states)
    if any(isinstance(state, nn.Parameter) for state in states):
        _check_all("ignored_states", states, nn.Parameter)
        return [], states
    _check_all("ignored_states", states, nn.Module)
    return states, []


def _as_list(what: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{what}: expected an iterable, found {type(values).__name__}; pass a list") from None


def _check_all(what: str, values: list[Any], kind: type) -> None:
    if not all(isinstance(each, kind) for each in values):
        types = ", ".join(sorted({type(each).__name__ for each in values}))
        kinds = "modules" if what == "ignored_modules" else "modules only or parameters only"
        raise ValueError(f"{what}: expected {kinds}, found {types}; leave the others out")


def _subtree(root: nn.Module) -> list[nn.Module]:
    """`root` and the modules below it, without nested units and what is below these."""
    subtree: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in subtree and not sharding_of(module):
            subtree[module] = None
            waiting.extend(module.children())
    return list(subtree)


# --- units ------------------------------------------------------------------------------------------------------------

AutoWrapPolicy = str | None | ModuleWrapPolicy | CustomPolicy | Set[type[nn.Module]] | Callable[..., bool]
Chosen = dict[nn.Module, dict[str, Any]]
"""Units, innermost first; with each the settings in which a policy lets it differ from the model's."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(
    model: nn.Module,
    policy: AutoWrapPolicy,
    ignored: Ignored = Ignored(),
    exempt: tuple[type[nn.Module], ...] = (),
) -> Chosen:
    """The submodules of `model` that become units, innermost first, and `model` itself last.

    Modules that are sharded already and their submodules are left alone.

    Args:
        model: the module that `fully_shard` was called on.
        policy: "auto", None, a set of module classes, or a policy as `torch.distributed.fsdp` takes it.
        ignored: modules that are left alone as well, and parameters that do not count.
        exempt: classes whose modules are units without mixed precision, unless `policy` is None (E-INIT-6).

    Raises:
        TypeError: `policy` is none of these.
        ValueError: `policy` is a string other than "auto".
    """
    chosen = _ask(model, policy, ignored)
    candidates = _innermost_first(model, ignored) if policy is not None else []
    exempted: Chosen = {module: {"mixed_precision": None} for module in candidates if isinstance(module, exempt)}
    exempted.pop(model, None)
    if not exempted:
        return chosen
    return {each: chosen.get(each, {}) | exempted.get(each, {}) for each in candidates if each in chosen | exempted}


def exempt_classes(policy: MixedPrecision) -> tuple[type[nn.Module], ...]:
    """Classes that auto-wrapping leaves out of mixed precision (E-INIT-6); none if the settings change no dtype."""
    casts = policy.param_dtype or policy.reduce_dtype or policy.buffer_dtype
    return tuple(policy._module_classes_to_ignore) if casts else ()


def _ask(model: nn.Module, policy: AutoWrapPolicy, ignored: Ignored) -> Chosen:
    if isinstance(policy, Set):
        for each in policy:
            if not (isinstance(each, type) and issubclass(each, nn.Module)):
                raise TypeError(
                    f"auto_wrap_policy: expected a set of module classes, found {each!r} in it; pass classes"
                )
        policy = ModuleWrapPolicy(policy)
    if isinstance(policy, CustomPolicy):
        return {**_ask_custom_policy(model, policy, ignored), model: {}}
    if policy is None:
        chosen: list[nn.Module] = []
    elif policy == "auto":
        chosen = [] if any(map(sharding_of, model.modules())) else repeated_blocks(model, ignored)
    elif isinstance(policy, str):
        raise ValueError(f'auto_wrap_policy: expected "auto", None or a policy, found the string {policy!r}')
    elif callable(policy):
        chosen = _ask_policy(model, policy, ignored)
    else:
        raise TypeError(
            f"auto_wrap_policy: expected 'auto', None, a set of module classes, a ModuleWrapPolicy, a CustomPolicy or "
            f"a callable (module, recurse, nonwrapped_numel) -> bool, found {type(policy).__name__}"
        )
    return {module: {} for module in (*chosen, model)}


def repeated_blocks(model: nn.Module, ignored: Ignored = Ignored()) -> list[nn.Module]:
    """The outermost repeated blocks: elements of one container, of one class, with parameters worth a collective.

    A block has submodules, or is a layer with a weight matrix; a lone normalisation layer joins the enclosing unit.
    """
    return list(dict.fromkeys(_blocks_below(model, ignored)))


def _blocks_below(module: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    children = [
        c for c in module.children() if c not in ignored.modules and not ignored.params.issuperset(c.parameters())
    ]
    classes = Counter(type(child) for child in children)
    for child in children:
        if isinstance(module, _CONTAINERS) and classes[type(child)] > 1 and _is_block(child):
            yield child
        else:
            yield from _blocks_below(child, ignored)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return False
    return any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters())


def _ask_policy(model: nn.Module, policy: Callable[..., bool], ignored: Ignored) -> list[nn.Module]:
    """Ask a torch auto-wrap policy bottom-up; `nonwrapped_numel` counts elements that no chosen submodule holds."""
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in set(module.parameters()) - ignored.params)
        if module in seen or sharding_of(module) or module in ignored.modules:
            return numel
        seen.add(module)
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            wrapped = sum(visit(child) for child in module.children())
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            chosen.append(module)
            return numel
        return wrapped

    visit(model)
    return chosen


def _ask_custom_policy(model: nn.Module, policy: CustomPolicy, ignored: Ignored) -> Chosen:
    """What a `CustomPolicy` answers, innermost first; its answers about modules that are left alone are ignored.

    torch's policy classes share no public call, only this method: checked on torch 2.11 and 2.13.
    """
    answers: Chosen = policy._run_policy(model, set(ignored.modules), {})
    candidates = _innermost_first(model, ignored)
    return {module: answers[module] for module in candidates if module in answers and module is not model}


def _innermost_first(model: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """`model` and the modules below it that are not left alone, each after those below it."""
    ordered: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in ordered or sharding_of(module) or module in ignored.modules:
            return
        for child in module.children():
            visit(child)
        ordered[module] = None

    visit(model)
    return list(ordered)
