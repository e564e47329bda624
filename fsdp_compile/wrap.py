"""Which modules become units of their own."""

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

AutoWrapPolicy = str | None | ModuleWrapPolicy | Callable[..., bool]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(model: nn.Module, policy: AutoWrapPolicy, is_taken: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The submodules of `model` that become units, innermost first, and `model` itself last.

    Args:
        model: the module that `fully_shard` was called on.
        policy: "auto", None, or a callable as `torch.distributed.fsdp` takes it, `ModuleWrapPolicy` included.
        is_taken: whether a module is a unit already; it and its submodules are left alone.

    Raises:
        TypeError: `policy` is none of these.
        ValueError: `policy` is a string other than "auto".
    """
    if policy is None:
        chosen: list[nn.Module] = []
    elif policy == "auto":
        chosen = [] if any(is_taken(m) for m in model.modules()) else repeated_blocks(model)
    elif isinstance(policy, str):
        raise ValueError(f'auto_wrap_policy: expected "auto", None or a policy, found the string {policy!r}')
    elif callable(policy):
        chosen = _ask_policy(model, policy, is_taken)
    else:
        raise TypeError(
            f"auto_wrap_policy: expected 'auto', None, a ModuleWrapPolicy or a callable "
            f"(module, recurse, nonwrapped_numel) -> bool, found {type(policy).__name__}"
        )
    return [*chosen, model]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks: elements of one container, of one class, with parameters worth a collective.

    A block has submodules, or is a layer with a weight matrix; a lone normalisation layer joins the enclosing unit.
    """
    return list(dict.fromkeys(_blocks_below(model)))


def _blocks_below(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    classes = Counter(type(child) for child in children)
    for child in children:
        if isinstance(module, _CONTAINERS) and classes[type(child)] > 1 and _is_block(child):
            yield child
        else:
            yield from _blocks_below(child)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return False
    return any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters())


def _ask_policy(
    model: nn.Module, policy: Callable[..., bool], is_taken: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """Ask a torch auto-wrap policy bottom-up; `nonwrapped_numel` counts elements that no chosen submodule holds."""
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in set(module.parameters()))
        if module in seen or is_taken(module):
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
