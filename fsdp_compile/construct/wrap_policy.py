"""Which modules become units of their own: the automatic choice, and the policies that torch's wrapper takes."""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile.construct.ignored import Ignored

AutoWrapPolicy = str | None | ModuleWrapPolicy | CustomPolicy | Set[type[nn.Module]] | Callable[..., bool]
Chosen = dict[nn.Module, dict[str, Any]]
"""Units, innermost first; with each the settings in which a policy lets it differ from the model's."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(
    model: nn.Module,
    policy: AutoWrapPolicy,
    is_taken: Callable[[nn.Module], bool],
    ignored: Ignored = Ignored(),  # noqa: B008  (immutable)
    exempt: tuple[type[nn.Module], ...] = (),
) -> Chosen:
    """The submodules of `model` that become units, innermost first, and `model` itself last.

    Args:
        model: the module that `fully_shard` was called on.
        policy: "auto", None, a set of module classes, or a policy as `torch.distributed.fsdp` takes it.
        is_taken: whether a module is a unit already; it and its submodules are left alone.
        ignored: modules that are left alone as well, and parameters that do not count.
        exempt: classes whose modules are units without mixed precision, unless `policy` is None (E-INIT-6).

    Raises:
        TypeError: `policy` is none of these.
        ValueError: `policy` is a string other than "auto".
    """
    chosen = _ask(model, policy, is_taken, ignored)
    candidates = _innermost_first(model, is_taken, ignored) if policy is not None else []
    exempted: Chosen = {module: {"mixed_precision": None} for module in candidates if isinstance(module, exempt)}
    exempted.pop(model, None)
    if not exempted:
        return chosen
    return {each: chosen.get(each, {}) | exempted.get(each, {}) for each in candidates if each in chosen | exempted}


def _ask(model: nn.Module, policy: AutoWrapPolicy, is_taken: Callable[[nn.Module], bool], ignored: Ignored) -> Chosen:
    if isinstance(policy, Set):
        policy = _of_classes(policy)
    if isinstance(policy, CustomPolicy):
        return {**_ask_custom_policy(model, policy, is_taken, ignored), model: {}}
    if policy is None:
        chosen: list[nn.Module] = []
    elif policy == "auto":
        chosen = [] if any(is_taken(m) for m in model.modules()) else repeated_blocks(model, ignored)
    elif isinstance(policy, str):
        raise ValueError(f'auto_wrap_policy: expected "auto", None or a policy, found the string {policy!r}')
    elif callable(policy):
        chosen = _ask_policy(model, policy, is_taken, ignored)
    else:
        raise TypeError(
            f"auto_wrap_policy: expected 'auto', None, a set of module classes, a ModuleWrapPolicy, a CustomPolicy or "
            f"a callable (module, recurse, nonwrapped_numel) -> bool, found {type(policy).__name__}"
        )
    return {module: {} for module in (*chosen, model)}


def _of_classes(classes: Set[Any]) -> ModuleWrapPolicy:
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"auto_wrap_policy: expected a set of module classes, found {each!r} in it; pass classes")
    return ModuleWrapPolicy(classes)


def repeated_blocks(model: nn.Module, ignored: Ignored = Ignored()) -> list[nn.Module]:  # noqa: B008  (immutable)
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


def _ask_policy(
    model: nn.Module, policy: Callable[..., bool], is_taken: Callable[[nn.Module], bool], ignored: Ignored
) -> list[nn.Module]:
    """Ask a torch auto-wrap policy bottom-up; `nonwrapped_numel` counts elements that no chosen submodule holds."""
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in set(module.parameters()) - ignored.params)
        if module in seen or is_taken(module) or module in ignored.modules:
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


def _ask_custom_policy(
    model: nn.Module, policy: CustomPolicy, is_taken: Callable[[nn.Module], bool], ignored: Ignored
) -> Chosen:
    """What a `CustomPolicy` answers, innermost first; its answers about modules that are left alone are ignored.

    torch's policy classes share no public call, only this method: checked on torch 2.11 and 2.13.
    """
    answers: Chosen = policy._run_policy(model, set(ignored.modules), {})
    candidates = _innermost_first(model, is_taken, ignored)
    return {module: answers[module] for module in candidates if module in answers and module is not model}


def _innermost_first(model: nn.Module, is_taken: Callable[[nn.Module], bool], ignored: Ignored) -> list[nn.Module]:
    """`model` and the modules below it that are not left alone, each after those below it."""
    ordered: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in ordered or is_taken(module) or module in ignored.modules:
            return
        for child in module.children():
            visit(child)
        ordered[module] = None

    visit(model)
    return list(ordered)
