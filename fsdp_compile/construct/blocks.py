"""Which modules become units where nobody chooses them, and what is left alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Ignored:
    """Modules that become no units and have none inside, and parameters that are not sharded, moved or broadcast."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


NOTHING = Ignored()


def repeated_blocks(model: nn.Module, ignored: Ignored = NOTHING) -> list[nn.Module]:
    """The outermost repeated blocks: elements of one container, of one class, with parameters worth a collective.

    A block has submodules, or is a layer with a weight matrix; a lone normalization layer joins the enclosing unit. An
    `nn.Sequential` is a block where others of the same layers are beside it, and a container where it is a list of
    blocks itself.
    """

    def blocks_below(module: nn.Module) -> Iterator[nn.Module]:
        children = [
            c for c in module.children() if c not in ignored.modules and not ignored.params.issuperset(c.parameters())
        ]
        kinds = Counter(map(_kind, children))
        for child in children:
            if isinstance(module, _CONTAINERS) and kinds[_kind(child)] > 1 and _is_block(child):
                yield child
            else:
                yield from blocks_below(child)

    return list(dict.fromkeys(blocks_below(model)))


def _kind(module: nn.Module) -> Any:
    """What elements of a list have in common that are repeated."""
    return (nn.Sequential, *map(type, module)) if type(module) is nn.Sequential else type(module)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *map(_structure, module.children()))


def _is_block(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        is_list = len(children) > 1 and len(set(map(_structure, children))) == 1 and list(children[0].children())
        return not is_list and any(p.dim() > 1 for p in module.parameters())
    if isinstance(module, _CONTAINERS):
        return False
    return bool(children) or any(p.dim() > 1 for p in module.parameters())
