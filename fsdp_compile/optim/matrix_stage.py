"""Matrices that are exchanged together: what this rank stores goes to owners, they compute, results return.

stage = Stage(members, name)           made once, for parameters of one process group and dtype
run_before(stage.groups, gradients)    what comes before the exchange, also of several stages at once
stage.send()                           to the owners
run_beside(stage.groups)               what needs no results, also of several stages at once
stage.compute_at_home(); stage.compute()
stage.finish()                         results have returned: the parameters are updated
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import Filling
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim.matrix_exchange import Ranges, Routes
from fsdp_compile.optim.matrix_program import MatrixProgram, run_on_each
from fsdp_compile.optim.owners import local_data
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
    """Parameters of one group and device whose steps are alike: they have one program, which changes with options."""

    params: list[ShardedTensor]
    program: MatrixProgram

    @cached_property
    def same_bits(self) -> bool:
        """Whether results must not depend on what is computed beside them."""
        return any(param.spec.ranks.same_bits for param in self.params)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What tensors share that one call of an operator may take (Note [One call for several tensors])."""
        return self.params[0].device, self.params[0].dtype, self.same_bits


@dataclass(eq=False, slots=True)
class Part:
    """What this rank stores of one matrix: views, which stay, and values, which live within a step.

    Attributes:
        key: the id of its parameter.
        within: where it lies in what this rank stores of the parameter; None: it is all of that.
        local: of the parameter.
        states: of its state, by name.
        values: by position, what the exchange needs of it, and brings.
    """

    family: Family
    key: int
    within: slice | None
    local: Tensor
    states: dict[str, Tensor]
    values: dict[int, Tensor] = field(default_factory=dict)


class Member:
    """A parameter of a stage.

    Args:
        states: what this rank stores of its state, by name.
        flat: the flat parameter that it lies in, if any.

    Attributes:
        parts: for each of its matrices what this rank stores; None: nothing.
    """

    def __init__(
        self, param: ShardedTensor, family: Family, place: Place, states: Mapping[str, Tensor], flat: FlatParam | None
    ) -> None:
        self.param, self.family, self.place, self.flat = param, family, place, flat
        self.parts: list[Part | None] = []
        local, here, end = local_data(param), param.spec.ranks.rank, 0
        for of_ranks in place.ranges:
            begin, end = end, end + of_ranks[here][1]
            within = None if len(place.ranges) == 1 else slice(begin, end)
            own = [each if within is None else each[within] for each in (local, *states.values())]
            part = Part(family, id(param), within, own[0], dict(zip(states, own[1:], strict=True)))
            self.parts.append(part if end > begin else None)


Groups = Sequence[tuple[Family, Sequence[Part]]]
"""Parts by their families, each in one order."""


def _by_family(parts: Iterable[Part]) -> Groups:
    found: dict[Family, list[Part]] = {}
    for part in parts:
        found.setdefault(part.family, []).append(part)
    return list(found.items())


def _computed_alike(groups: Groups, step: str) -> Iterator[tuple[Family, list[Part]]]:
    """The parts of `groups`, those together for which `step` of the programs is the same: "before" or "beside".

    Families differ in what owners compute, and in the update, more often than in these.
    """
    found: list[tuple[Any, Family, list[Part]]] = []
    for family, parts in groups:
        program = family.program
        key = (getattr(program, step), program.state, program.sent, program.kept, family.kind)
        together = next((own for known, _, own in found if known == key), None)
        if together is None:
            found.append((key, family, list(parts)))
        else:
            together += parts
    return ((family, parts) for _, family, parts in found)


def run_before(groups: Groups, gradients: Mapping[int, Tensor]) -> None:
    """Run what comes before the exchange; `gradients`: what this rank stores of them, by the parameters' ids."""
    for family, parts in _computed_alike(groups, "before"):
        program = family.program
        grads = [gradients[part.key] if part.within is None else gradients[part.key][part.within] for part in parts]
        values = {0: [part.local for part in parts], 1: grads}
        for name, position in program.state.items():
            values[position] = [part.states[name] for part in parts]
        run_on_each(program.before, values, family.same_bits)
        for position in {*program.sent, *program.kept}:
            for part, value in zip(parts, values[position], strict=True):
                part.values[position] = value


def run_beside(groups: Groups) -> None:
    """Run what needs no results, behind `run_before`: while the exchange is under way."""
    for family, parts in _computed_alike(groups, "beside"):
        values = {at: [part.values[at] for part in parts] for at in family.program.kept}
        run_on_each(family.program.beside, values, family.same_bits)


def _run_after(groups: Groups) -> None:
    """Run what comes behind the exchange, and forget values."""
    for family, parts in groups:
        program = family.program
        values = {at: [part.values[at] for part in parts] for at in (*program.kept, *program.returned)}
        for part in parts:
            part.values.clear()
        run_on_each(program.after, values, family.same_bits)


class Stage:
    """Parameters of one process group that are exchanged together, with as many values of the same dtypes.

    Attributes:
        params: all of them.
        flats: the flat parameters that they lie in, and how many of them in each.
        number: which stage it is, in the order of the forward.
        arrived: the ids of those that have run what comes before the exchange.
        groups: what this rank stores of their matrices.
        stored: the ids of the parameters of which that is something.
        has_home: whether matrices that lie on this rank are still to be computed.
    """

    def __init__(self, members: Sequence[Member], name: str) -> None:
        self._members, self._name = members, name
        self.number, self.arrived = members[0].place.stage, set[int]()
        self.params = [member.param for member in members]
        self.flats = Counter(member.flat for member in members if member.flat is not None)
        matrices = [(member, at) for member in members for at in range(len(member.place.ranges))]
        ranges = [member.place.ranges[at] for member, at in matrices]
        self._routes = Routes(self.params[0].spec.ranks, ranges, [member.place.owners[at] for member, at in matrices])
        parts = [member.parts[at] for member, at in matrices]
        self._sent, self._home = (
            [part for index in chosen if (part := parts[index]) is not None]
            for chosen in (self._routes.sent, self._routes.at_home)
        )
        self.groups = _by_family([*self._sent, *self._home])
        self.stored = list(dict.fromkeys(part.key for part in (*self._sent, *self._home)))
        self._batches = _batches([matrices[index][0].family for index in self._routes.owned])
        self._home_batches = _batches([part.family for part in self._home])
        self._empty: dict[torch.dtype, Tensor] = {}
        self._awaited: list[Filling] = []  # for each value that is exchanged
        self._leaving: list[Filling] = []  # which bring nothing that this rank computes with
        self.has_home = False

    @property
    def is_ready(self) -> bool:
        """Whether all parameters have run what comes before the exchange."""
        return len(self.arrived) == len(self.params)

    def part(self) -> "Stage":
        """Those of the parameters that have arrived, forgotten here."""
        arrived, self.arrived = self.arrived, set[int]()
        return Stage([member for member in self._members if id(member.param) in arrived], self._name)

    def arrive(self, gradients: Mapping[int, Tensor]) -> None:
        """Compute what owners need of the parameters of `gradients`, by their ids."""
        parts = chain.from_iterable(some for _, some in self.groups)
        run_before(_by_family(part for part in parts if part.key in gradients), gradients)
        self.arrived.update(gradients)

    def send(self) -> None:
        """Begin to send to owners what they need, behind `run_before`."""
        self.arrived.clear()
        self.has_home = bool(self._home)
        first = self._members[0].family.program
        started: list[Filling] = []
        for number, position in enumerate(first.sent):
            parts = [_taken(part, part.family.program.sent[number]) for part in self._sent]
            filling = self._routes.to_owners(parts, self._like(first.dtypes[position]), f"{self._name}, value {number}")
            started += [] if filling is None else [filling]
        self._awaited, self._leaving = (started, []) if self._routes.owned else ([], started)

    def _like(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._empty:
            self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.params[0].device)
        return self._empty[dtype]

    def has_ended(self) -> bool:
        """Whether the host would not wait for the exchange that is under way."""
        return all(work.is_completed() for filling in self._awaited for work in filling.works)

    def compute_at_home(self) -> None:
        """Compute with the matrices that lie on this rank, once, at any time between `send` and `finish`."""
        home, self.has_home = self._home_batches if self.has_home else [], False
        for family, chosen in home:
            some, program = [self._home[at] for at in chosen], family.program
            columns = [torch.cat([_taken(part, position) for part in some]) for position in program.sent]
            for position, results in zip(program.returned, _computed(family, columns), strict=True):
                for part, result in zip(some, results, strict=True):
                    part.values[position] = result

    def compute(self) -> None:
        """Compute with the other matrices that this rank owns, and begin to send the results."""
        for filling in self._awaited:
            filling.wait()
        first = self._members[0].family.program
        results: list[dict[int, Tensor]] = [{} for _ in first.returned]
        for family, chosen in self._batches:
            columns = [self._routes.assemble(filling.full, chosen) for filling in self._awaited]
            for of_result, found in zip(results, _computed(family, columns), strict=True):
                of_result.update(zip(chosen, found, strict=True))
        self._awaited = []
        for number, position in enumerate(first.returned):
            matrices = [results[number][at] for at in range(len(self._routes.owned))]
            like = self._like(first.dtypes[position])
            started = self._routes.to_ranks(matrices, like, f"{self._name}, result {number}")
            self._awaited += [] if started is None else [started]

    def finish(self) -> None:
        """Update the parameters."""
        self.compute_at_home()
        for filling in (*self._awaited, *self._leaving):
            filling.wait()
        for number, filling in enumerate(self._awaited if self._sent else ()):
            for part, value in zip(self._sent, self._routes.parts_of(filling.full), strict=True):
                part.values[part.family.program.returned[number]] = value
        self._awaited, self._leaving = [], []
        _run_after(self.groups)
        torch.autograd.graph.increment_version(self.params)


def _batches(families: Sequence[Family]) -> list[tuple[Family, list[int]]]:
    """The positions of what is computed at once, with its family."""
    found: dict[Family, list[int]] = {}
    for at, family in enumerate(families):
        found.setdefault(family, []).append(at)
    return [
        (family, chosen[begin : begin + size])
        for family, chosen in found.items()
        for size in (max(1, _BATCH // max(1, _nbytes(family.program))),)
        for begin in range(0, len(chosen), size)
    ]


def _nbytes(program: MatrixProgram) -> int:
    numel = torch.Size(program.shape).numel()
    return numel * sum(program.dtypes[position].itemsize for position in program.sent)


def _taken(part: Part, position: int) -> Tensor:
    """The value at `position`, which is forgotten unless it is kept."""
    return part.values[position] if position in part.family.program.kept else part.values.pop(position)


def _computed(family: Family, columns: Sequence[Tensor]) -> list[list[Tensor]]:
    """The results of several matrices, each 1-D; `columns`: for each value all of them, one after the other, 1-D."""
    program = family.program
    values = {at: column.view(-1, *program.shape) for at, column in zip(program.sent, columns, strict=True)}
    alone = family.same_bits or columns[0].is_cpu  # Note [One kernel for several matrices]
    found = program.run_whole(values, one_by_one=alone)
    return [[each.reshape(-1) for each in found[position]] for position in program.returned]
