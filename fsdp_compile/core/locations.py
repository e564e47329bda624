"""Which modules hold a unit's parameters, under which names, and whether they still do."""

import operator

from torch import nn

Location = tuple[dict[str, nn.Parameter | None], str]
"""A module's `_parameters`, and a name there."""


class ParameterLocations:
    """For each parameter of a unit its locations; tied parameters have several.

    Attributes:
        of: the locations of each parameter, by index.
    """

    def __init__(self, params: int) -> None:
        self.of: list[list[Location]] = [[] for _ in range(params)]
        self.record()

    def add(self, index: int, parameters: dict[str, nn.Parameter | None], name: str) -> None:
        """Parameter `index` is in `parameters`, a module's `_parameters`, under `name`."""
        self.of[index].append((parameters, name))
        self.record()

    def record(self) -> None:
        """Record what modules hold now, to compare with later."""
        flattened = [location for locations in self.of for location in locations]
        self._registries = [parameters for parameters, _ in flattened]
        self._names = [name for _, name in flattened]
        self._recorded = [parameters.get(name) for parameters, name in flattened]

    def are_unchanged(self) -> bool:
        """Whether modules hold what they held at the last `record`.

        Asked at every eager forward: the work for each parameter runs in C, at the cost that eager/writeback.py tells.
        """
        held = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, held, self._recorded))
