"""Which modules hold a unit's parameters, under which names, and whether they still do."""

import operator

from torch import nn

Place = tuple[dict[str, nn.Parameter | None], str]
"""A module's `_parameters`, and a name there."""


class ParameterLocations:
    """For each parameter of a unit its places; tied parameters have several.

    Attributes:
        of: the places of each parameter, by index.
    """

    def __init__(self, params: int) -> None:
        self.of: list[list[Place]] = [[] for _ in range(params)]
        self.note()

    def add(self, index: int, registry: dict[str, nn.Parameter | None], name: str) -> None:
        """Note that `registry`, a module's `_parameters`, holds parameter `index` under `name`."""
        self.of[index].append((registry, name))
        self.note()

    def note(self) -> None:
        """See what modules hold now; it counts as known."""
        flattened = [place for places in self.of for place in places]
        self._registries = [registry for registry, _ in flattened]
        self._names = [name for _, name in flattened]
        self._held = [registry.get(name) for registry, name in flattened]

    def hold_what_is_known(self) -> bool:
        """Whether modules hold what they held at the last `note`.

        Asked at every eager forward: what is done for each parameter runs in C, at its price in eager/writeback.py.
        """
        found = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, found, self._held))
