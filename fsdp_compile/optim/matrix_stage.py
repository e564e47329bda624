"""Matrices that are exchanged together: what this rank stores goes to owners, they compute, results return.

stage = Stage(alike, name)             made once, for parameters of one process group and dtype
stage.run_before(gradients)            what comes before the exchange, for some of its parameters or all
stage.send()                           to the owners
stage.compute_at_home(); stage.compute()
stage.finish()                         results have returned: the parameters are updated
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fsdp_compile.optim.matrix_exchange import Arriving, Part, Ranges, Routes
from fsdp_compile.optim.matrix_program import MatrixProgram, run_on_each
from fsdp_compile.optim.owners import local_data
from fsdp_compile.tensors.shard_spec import ShardRanks
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

_BATCH = 1 << 27  # bytes of the matrices of one shape that are computed at once


@dataclass(frozen=True)
class Place:
    """Where the matrices of a parameter are computed: for each its ranges by rank and its owner; and their stage."""

    ranges: tuple[Ranges, ...]
    owners: tuple[int, ...]
    stage: int


@dataclass(eq=False)
class Family:
    """Parameters of one group whose steps are alike: they have one program, which changes with the group's options."""

    params: list[ShardedTensor]
    program: MatrixProgram


class Alike:
    """The parameters of one family in one stage.

    Args:
        places: of the parameters.
        states: for each parameter its state, by name: what this rank stores.
        first: how many matrices of the stage come before the first one of these.

    Attributes:
        values: by position, for each parameter of which this rank stores elements, what the exchange needs of it.
    """

    def __init__(
        self,
        family: Family,
        params: Sequence[ShardedTensor],
        places: Sequence[Place],
        states: Sequence[Mapping[str, Tensor]],
        first: int,
    ) -> None:
        self.family, self.params, self.places, self._given = family, params, places, states
        here = params[0].spec.ranks.rank
        stored = [at for at, param in enumerate(params) if param.spec.numel]
        self._position = {id(params[at]): position for position, at in enumerate(stored)}
        self._locals = [local_data(params[at]) for at in stored]
        self._states = {name: [states[at][name] for at in stored] for name in family.program.state}
        begins = [*accumulate((len(place.ranges) for place in places), initial=first)]
        self.matrices = range(first, begins[-1])
        self._matrices = [range(begins[at], begins[at + 1]) for at in stored]  # in the stage
        self._sizes = [[of[here][1] for of in places[at].ranges] for at in stored]
        self.values: dict[int, list[Tensor]] = {}

    def run_before(self, gradients: Mapping[int, Tensor]) -> None:
        """Run what comes before the exchange for the parameters of `gradients`, by their ids."""
        program = self.family.program
        chosen = [(self._position[id(param)], gradients[id(param)]) for param in self.params
                  if id(param) in self._position and id(param) in gradients]  # fmt: skip
        if not chosen:
            return
        values: dict[int, list[Tensor]] = {0: [self._locals[at] for at, _ in chosen], 1: [grad for _, grad in chosen]}
        for name, position in program.state.items():
            values[position] = [self._states[name][at] for at, _ in chosen]
        run_on_each(program.before, values, self._same_bits)
        for position in {*program.sent, *program.kept}:
            if len(chosen) == len(self._locals):
                self.values[position] = values[position]
                continue
            mine = self.values.setdefault(position, list(self._locals))
            for (at, _), value in zip(chosen, values[position], strict=True):
                mine[at] = value

    def part(self, keys: Collection[int], first: int) -> "Alike | None":
        """Those of the parameters whose ids are in `keys`, and their values, forgotten here; None if there are none."""
        chosen = [at for at, param in enumerate(self.params) if id(param) in keys]
        if not chosen:
            return None
        params, places = [self.params[at] for at in chosen], [self.places[at] for at in chosen]
        found = Alike(self.family, params, places, [self._given[at] for at in chosen], first)
        kept = [self._position[key] for key in found._position]
        found.values = {position: [values[at] for at in kept] for position, values in self.values.items()}
        self.values = {}
        return found

    def take(self, position: int) -> dict[int, Tensor]:
        """What this rank stores of each matrix of the value at `position`, which is forgotten unless it is kept."""
        program = self.family.program
        values = self.values[position] if position in program.kept else self.values.pop(position, [])
        found: dict[int, Tensor] = {}
        for value, matrices, sizes in zip(values, self._matrices, self._sizes, strict=True):
            found.update(zip(matrices, (value,) if len(sizes) == 1 else value.split(sizes), strict=True))
        return found

    def run_after(self, returned: Mapping[int, Sequence[Tensor]]) -> None:
        """Run what comes behind the exchange; `returned`: by position what this rank stores of each matrix."""
        values, self.values = self.values, {}
        if not self._locals:
            return
        for position, parts in returned.items():
            own = ([parts[at] for at in matrices] for matrices in self._matrices)
            values[position] = [some[0] if len(some) == 1 else torch.cat(some) for some in own]
        run_on_each(self.family.program.after, values, self._same_bits)

    @property
    def _same_bits(self) -> bool:
        return self.params[0].spec.ranks.same_bits


class Stage:
    """Parameters of one process group that are exchanged together, with as many values of the same dtypes.

    Attributes:
        params: all of them.
        number: which stage it is, in the order of the forward.
        arrived: the ids of those that have run what comes before the exchange.
    """

    def __init__(self, alike: Sequence[Alike], name: str) -> None:
        self._alike, self._name = alike, name
        self.number, self.arrived = alike[0].places[0].stage, set[int]()
        self.params = [param for each in alike for param in each.params]
        places = [place for each in alike for place in each.places]
        self._ranks: ShardRanks = self.params[0].spec.ranks
        ranges = [each for place in places for each in place.ranges]
        self._routes = Routes(self._ranks, ranges, [owner for place in places for owner in place.owners])
        families = [each.family for each in alike for _ in each.matrices]
        self._families = [families[index] for index in self._routes.owned]
        self._device = self.params[0].device
        self._away = [at for at in range(len(self._routes.owned)) if at not in self._routes.at_home]
        self._arriving: list[Arriving] = []  # for each value that is exchanged
        self._leaving: list[Arriving] = []  # which bring nothing that this rank computes with
        self._at_home: list[dict[int, list[Part]]] = []  # for each value the matrices that lie here
        self._results: list[dict[int, Tensor]] = []  # for each result the matrices that have been computed here

    @property
    def is_ready(self) -> bool:
        """Whether all parameters have run what comes before the exchange."""
        return len(self.arrived) == len(self.params)

    def part(self) -> "Stage":
        """Those of the parameters that have arrived, forgotten here."""
        alike = list[Alike]()
        for each in self._alike:
            found = each.part(self.arrived, alike[-1].matrices.stop if alike else 0)
            alike += [found] if found is not None else []
        self.arrived.clear()
        return Stage(alike, self._name)

    def run_before(self, gradients: Mapping[int, Tensor]) -> None:
        """Compute what owners need of the parameters of `gradients`, by their ids."""
        for alike in self._alike:
            alike.run_before(gradients)
        self.arrived.update(gradients)

    def send(self) -> None:
        """Begin to send to owners what they need."""
        self.arrived.clear()
        first = self._alike[0].family.program
        self._results = [{} for _ in first.returned]
        for number, position in enumerate(first.sent):
            parts: dict[int, Tensor] = {}
            for alike in self._alike:
                parts.update(alike.take(alike.family.program.sent[number]))
            like = torch.empty(0, dtype=first.dtypes[position], device=self._device)
            arriving = self._routes.to_owners(parts, like, f"{self._name}, value {number}")
            (self._arriving if self._away else self._leaving).append(arriving)
            self._at_home.append({at: [(0, parts[self._routes.owned[at]])] for at in self._routes.at_home})

    def has_ended(self) -> bool:
        """Whether this rank would not wait for the exchange that is under way."""
        return all(each.has_ended() for each in self._arriving)

    def compute_at_home(self) -> None:
        """Compute with the matrices that lie on this rank, once, at any time between `send` and `finish`."""
        at_home, self._at_home = self._at_home, []
        if at_home:
            self._compute_all(self._routes.at_home, at_home)

    def compute(self) -> None:
        """Compute with the other matrices that this rank owns, and begin to send the results."""
        self._compute_all(self._away, [dict(enumerate(each.wait())) for each in self._arriving])
        self._arriving = []
        first = self._alike[0].family.program
        for number, position in enumerate(first.returned):
            like = torch.empty(0, dtype=first.dtypes[position], device=self._device)
            what = f"{self._name}, result {number}"
            self._arriving.append(self._routes.to_ranks(self._results[number], like, what))

    def _compute_all(self, chosen: Sequence[int], parts: Sequence[Mapping[int, list[Part]]]) -> None:
        """Compute with some of `routes.owned`, of which `parts` has each value; those of one family together."""
        alike: dict[Family, list[int]] = {}
        for at in chosen:
            alike.setdefault(self._families[at], []).append(at)
        for family, positions in alike.items():
            size = max(1, _BATCH // max(1, _nbytes(family.program)))
            for batch in (positions[begin : begin + size] for begin in range(0, len(positions), size)):
                found = self._compute(family.program, [[of_value[at] for at in batch] for of_value in parts])
                for results, value in zip(self._results, found, strict=True):
                    results.update((self._routes.owned[at], value[i].reshape(-1)) for i, at in enumerate(batch))

    def _compute(self, program: MatrixProgram, arrived: Sequence[Sequence[list[Part]]]) -> list[Sequence[Tensor]]:
        """The results of matrices of one program: for each value one `[*shape]` for each matrix."""
        values: dict[int, Tensor] = {}
        for position, of_matrices in zip(program.sent, arrived, strict=True):
            like = of_matrices[0][0][1]
            values[position] = full = like.new_empty((len(of_matrices), *program.shape))
            for row, parts in zip(full.view(len(of_matrices), -1), of_matrices, strict=True):
                for first, part in parts:
                    row[first : first + part.numel()].copy_(part)
        alone = self._ranks.same_bits or full.is_cpu  # Note [One kernel for several matrices]
        found = program.run_whole(values, one_by_one=alone)
        return [found[position] for position in program.returned]

    def finish(self) -> None:
        """Update the parameters."""
        self.compute_at_home()
        columns = [each.wait() for each in self._arriving]
        for each in self._leaving:
            each.wait()
        self._arriving, self._leaving, self._results = [], [], []
        for alike in self._alike:
            alike.run_after(dict(zip(alike.family.program.returned, columns, strict=True)))
        torch.autograd.graph.increment_version(self.params)


def _nbytes(program: MatrixProgram) -> int:
    numel = torch.Size(program.shape).numel()
    return numel * sum(program.dtypes[position].itemsize for position in program.sent)
