"""Which modules become units, automatically or by torch's policies, and which modules and parameters are ignored."""

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile.construct.blocks import NOTHING, Ignored, repeated_blocks
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import WRAPPED, sharding_of


def _is_foreign(module: nn.Module) -> bool:
    """Whether torch has sharded `module`."""
    theirs = (torch.distributed.fsdp.FSDPModule, torch.distributed.fsdp.FullyShardedDataParallel)
    return isinstance(module, theirs) and not sharding_of(module)


def collect_ignored(
    model: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """All that is ignored in `model`, whole subtrees included (E-INIT-7 to 10).

    Nested units and what is below them are not ignored with the module around them; what they ignore stays ignored.

    Raises:
        TypeError: an argument is not iterable.
        ValueError: both are given; or one mixes modules and parameters, or holds a unit; or another API has sharded
            `model` itself.
    """
    if _is_foreign(model):
        raise ValueError(f"module: torch has sharded this {type(model).__name__} already; shard it once")
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states: pass only one of them; ignored_states takes both kinds")
    modules = _as_list("ignored_modules", ignored_modules)
    states = _as_list("ignored_states", ignored_states)
    has_params = any(isinstance(state, nn.Parameter) for state in states)
    _check_all("ignored_modules", modules, nn.Module, "modules")
    _check_all("ignored_states", states, nn.Parameter if has_params else nn.Module, "modules only or parameters only")
    params = states if has_params else []
    modules += [] if has_params else states
    for module in modules:
        if sharding_of(module) or sharding_of(getattr(module, WRAPPED, module)):
            raise ValueError(f"ignored modules: {type(module).__name__} is sharded already; ignore it before")
    if model in modules:
        warn_caller(f"ignored modules: found the model itself, {type(model).__name__}; all of it is ignored")
    inside: dict[nn.Module, None] = {}
    waiting = [*modules, *(module for module in model.modules() if _is_foreign(module))]
    while waiting:
        module = waiting.pop()
        if module not in inside and not sharding_of(module):
            inside[module] = None
            waiting.extend(module.children())
    owned = [param for module in inside for param in module._parameters.values() if param is not None]
    nested = [sharding for sharding in map(sharding_of, model.modules()) if sharding]
    return Ignored(
        frozenset(inside).union(*(sharding.ignored_modules for sharding in nested)),
        frozenset([*params, *owned]).union(*(sharding.ignored_params for sharding in nested)),
    )


def _as_list(name: str, values: Any) -> list[Any]:
    try:
        return list(() if values is None else values)
    except TypeError:
        raise TypeError(f"{name}: expected an iterable, found {type(values).__name__}; pass a list") from None


def _check_all(name: str, values: list[Any], kind: type, kinds: str) -> None:
    if not all(isinstance(each, kind) for each in values):
        types = ", ".join(sorted({type(each).__name__ for each in values}))
        raise ValueError(f"{name}: expected {kinds}, found {types}; leave the others out")


# --- units ------------------------------------------------------------------------------------------------------------

AutoWrapPolicy = str | None | ModuleWrapPolicy | CustomPolicy | Set[type[nn.Module]] | Callable[..., bool]
Chosen = dict[nn.Module, dict[str, Any]]
"""Units, innermost first; with each the settings in which a policy lets it differ from the model's."""


def choose_units(
    model: nn.Module,
    policy: AutoWrapPolicy,
    ignored: Ignored = NOTHING,
    precision: MixedPrecision = MixedPrecision(),  # noqa: B008  (nobody changes it)
) -> Chosen:
    """The submodules of `model` that become units, innermost first, and `model` itself last.

    Leaves out modules that are sharded already or ignored, and what is below them. `policy` is "auto", None, a set of
    module classes or a policy of `torch.distributed.fsdp`; else TypeError or ValueError. `precision` names classes
    whose modules are units without mixed precision, unless `policy` is None (E-INIT-6).
    """
    chosen = _ask(model, policy, ignored)
    casts = precision.param_dtype or precision.reduce_dtype or precision.buffer_dtype
    if policy is None or not casts:
        return chosen
    exempt = tuple(precision._module_classes_to_ignore)
    candidates = _innermost_first(model, ignored)
    exempted = (each for each in candidates if each is not model and isinstance(each, exempt))
    own: Chosen = {each: {"mixed_precision": None} for each in exempted}
    if not own:
        return chosen
    if policy != "auto":
        names = ", ".join(sorted({type(each).__name__ for each in own}))
        warn_caller(f"mixed_precision: modules of {names} become units of their own, without mixed precision; pass "
                    f"_module_classes_to_ignore=() to MixedPrecision to include them")  # fmt: skip
    return {each: chosen.get(each, {}) | own.get(each, {}) for each in candidates if each in chosen or each in own}


def _ask(model: nn.Module, policy: AutoWrapPolicy, ignored: Ignored) -> Chosen:
    if isinstance(policy, Set):
        for each in policy:
            if not (isinstance(each, type) and issubclass(each, nn.Module)):
                raise TypeError(f"auto_wrap_policy: expected a set of module classes, found {each!r} in it")
        policy = ModuleWrapPolicy(policy)
    if isinstance(policy, type):
        raise TypeError(f"auto_wrap_policy: {policy.__name__} is a class; pass a set of classes, {{{policy.__name__}}}")
    if isinstance(policy, ModuleWrapPolicy):
        classes: set[type] = policy._module_classes  # has no public name: checked on torch 2.11 and 2.13
        if classes and not any(isinstance(each, tuple(classes)) for each in model.modules()):
            names = ", ".join(sorted(each.__name__ for each in classes))
            raise ValueError(f"auto_wrap_policy: {type(model).__name__} has no module of class {names}")
    if isinstance(policy, CustomPolicy):
        # torch's policy classes share no public call, only this method: checked on torch 2.11 and 2.13. What it answers
        # about modules that are left alone is ignored.
        answers: Chosen = policy._run_policy(model, set(ignored.modules), {})
        candidates = _innermost_first(model, ignored)
        return {each: answers[each] for each in candidates if each in answers and each is not model} | {model: {}}
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


def _ask_policy(model: nn.Module, policy: Callable[..., bool], ignored: Ignored) -> list[nn.Module]:
    """Ask a torch auto-wrap policy bottom-up; `nonwrapped_numel` counts elements that no chosen submodule holds."""
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in set(module.parameters()) - ignored.params)
        if module in seen or sharding_of(module) or module in ignored.modules:
            return numel
        seen.add(module)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0  # neither it nor what is inside of it
        wrapped = sum(visit(child) for child in module.children())
        if module is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            chosen.append(module)
            return numel
        return wrapped

    visit(model)
    return chosen


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
