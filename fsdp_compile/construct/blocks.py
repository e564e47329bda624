"""Which modules become units where nobody chooses them, and what is left alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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

    A block has submodules, or is a layer with a weight matrix; a lone normalisation layer joins the enclosing unit.
    """

    def blocks_below(module: nn.Module) -> Iterator[nn.Module]:
        children = [
            c for c in module.children() if c not in ignored.modules and not ignored.params.issuperset(c.parameters())
        ]
        classes = Counter(type(child) for child in children)
        for child in children:
            if isinstance(module, _CONTAINERS) and classes[type(child)] > 1 and _is_block(child):
                yield child
            else:
                yield from blocks_below(child)

    return list(dict.fromkeys(blocks_below(model)))


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return False
    return any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters())
