"""Matrices that are exchanged together: what this rank stores goes to owners, they compute, results return.

stage = Stage(members, optimizer)      made once, for parameters of one process group, device and dtype
stage.arrive(gradients)                what comes before the exchange
stage.send()                           to the owners
stage.compute_at_home(); stage.compute()
stage.finish()                         results have returned: the parameters are updated
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_compile.comm.collectives import Filling
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim.matrices import Functions, MatrixShard, check_like, functions_of, matrix_shape
from fsdp_compile.optim.matrix_exchange import Ranges, Routes
from fsdp_compile.optim.owners import local_data
from fsdp_compile.tensors.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Place:
    """Where the matrices of a parameter are computed: for each its ranges by rank and its owner; and their stage."""

    ranges: tuple[Ranges, ...]
    owners: tuple[int, ...]
    stage: int


class Member:
    """A parameter of a stage.

    Args:
        group: the index of its parameter group.
        flat: the flat parameter that it lies in, if any.

    Attributes:
        within: for each of its matrices which part it is of what this rank stores.
        sent: what `before` has returned.
        updates: of each matrix what this rank stores of its update.
    """

    def __init__(self, param: ShardedTensor, group: int, place: Place, flat: FlatParam | None) -> None:
        self.param, self.group, self.place, self.flat = param, group, place, flat
        self.shard = MatrixShard(local_data(param), tuple(param.shape), param.spec)
        ends = list(accumulate((of_ranks[param.spec.ranks.rank][1] for of_ranks in place.ranges), initial=0))
        self.within = [slice(begin, end) for begin, end in pairwise(ends)]
        self.sent: Tensor | None = None
        self.updates: dict[int, Tensor] = {}

    def run_before(self, functions: Functions, optimizer: Optimizer, grad: Tensor) -> None:
        """Compute what owners need, from `grad` in this rank's part, 1-D."""
        shard = self.shard
        shard.group, shard.state, shard.grad = optimizer.param_groups[self.group], optimizer.state[self.param], grad
        self.sent = check_like(functions.before(shard), (shard.param.numel(),), None, functions, "before")
        shard.grad = None

    def run_after(self, functions: Functions) -> None:
        """Update what this rank stores."""
        assert self.sent is not None
        parts = [self.updates[at] for at in sorted(self.updates)]
        functions.after(self.shard, parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self.sent)
        self.updates.clear()
        self.sent = None

    def keeps(self) -> bool:
        """Whether this rank stores some of it, or numbers that all ranks keep alike, behind a step."""
        numbers = [each for each in self.shard.state.values() if type(each) is not ShardedTensor]
        return bool(numbers or self.shard.param.numel())


class Stage:
    """Parameters of one process group that are exchanged together.

    Attributes:
        params: all of them.
        flats: the flat parameters that they lie in, and how many of them in each.
        number: which stage it is, in the order of the forward.
        arrived: the ids of those that have run what comes before the exchange.
        has_home: whether matrices that lie on this rank are still to be computed.
    """

    def __init__(self, members: Sequence[Member], optimizer: Optimizer) -> None:
        self._members, self._optimizer, self._functions = members, optimizer, functions_of(optimizer)
        self._name = f"matrices of {members[0].param.spec.named()} and {len(members) - 1} others"
        self.number, self.arrived = members[0].place.stage, set[int]()
        self.params = [member.param for member in members]
        self.flats = Counter(member.flat for member in members if member.flat is not None)
        self._matrices = [(member, at) for member in members for at in range(len(member.place.ranges))]
        ranges = [member.place.ranges[at] for member, at in self._matrices]
        owners = [member.place.owners[at] for member, at in self._matrices]
        self._routes = Routes(self.params[0].spec.ranks, ranges, owners)
        self._called, self._was_called = members, False  # those that keep something, once all have been called
        self._empty = torch.empty(0, device=self.params[0].device)  # of the dtype that is sent, once one is known
        self._awaited: list[Filling] = []  # the exchange that is under way
        self._leaving: list[Filling] = []  # one that brings nothing that this rank computes with
        self.has_home = False

    @property
    def is_ready(self) -> bool:
        """Whether all parameters have run what comes before the exchange."""
        return len(self.arrived) == len(self.params)

    def part(self) -> "Stage":
        """Those of the parameters that have arrived, forgotten here."""
        arrived, self.arrived = self.arrived, set[int]()
        found = Stage([member for member in self._members if id(member.param) in arrived], self._optimizer)
        found._called = [member for member in self._called if id(member.param) in arrived]
        found._was_called, found._empty = self._was_called, self._empty
        return found

    def arrive(self, gradients: Mapping[int, Tensor]) -> None:
        """Compute what owners need of the parameters of `gradients`, by their ids: what this rank stores of each."""
        for member in self._called:
            if id(member.param) in gradients:
                member.run_before(self._functions, self._optimizer, gradients[id(member.param)])
        self.arrived.update(gradients)

    def _sent(self, chosen: Sequence[int]) -> list[Tensor]:
        """What this rank stores of some of the matrices, behind `before`."""
        pairs = [self._matrices[index] for index in chosen]
        return [member.sent[member.within[at]] for member, at in pairs if member.sent is not None]

    def send(self) -> None:
        """Begin to send to owners what they need, behind `arrive` of all parameters."""
        self.arrived.clear()
        self.has_home = bool(self._routes.at_home)
        found = {member.sent.dtype: member.sent for member in self._called if member.sent is not None}
        if len(found) > 1:
            raise TypeError(f"{type(self._functions).__name__}.before: expected one dtype for parameters of one, "
                            f"found {sorted(map(str, found))}")  # fmt: skip
        for sent in found.values():  # none where nothing is called any more
            self._empty = sent[:0]
        filling = self._routes.to_owners(self._sent(self._routes.sent), self._empty, self._name)
        started = [] if filling is None else [filling]
        self._awaited, self._leaving = (started, []) if self._routes.owned else ([], started)

    def has_ended(self) -> bool:
        """Whether the host would not wait for the exchange that is under way."""
        return all(work.is_completed() for filling in self._awaited for work in filling.works)

    def update(self, index: int, matrix: Tensor) -> Tensor:
        """The update of a `matrix`, 1-D both, which its owner computes and overwrites; `index`: which one it is."""
        member, _ = self._matrices[index]
        shape, group = matrix_shape(self._functions, member.shard.shape), self._optimizer.param_groups[member.group]
        found = self._functions.whole(matrix.view(shape), group)
        return check_like(found, shape, matrix.dtype, self._functions, "whole").reshape(-1)

    def compute_at_home(self) -> None:
        """Compute with the matrices that lie on this rank, once, at any time between `send` and `finish`."""
        chosen, self.has_home = self._routes.at_home if self.has_home else [], False
        for index, sent in zip(chosen, self._sent(chosen), strict=True):
            member, at = self._matrices[index]
            member.updates[at] = self.update(index, sent.clone())  # which may be state

    def compute(self) -> None:
        """Compute with the other matrices that this rank owns, and begin to send the results."""
        for filling in self._awaited:
            filling.wait()
        full = chain.from_iterable(self._routes.assemble(filling.full) for filling in self._awaited)
        updates = [self.update(index, matrix) for index, matrix in zip(self._routes.owned, full, strict=True)]
        started = self._routes.to_ranks(updates, self._empty, self._name)
        self._awaited = [] if started is None else [started]

    def finish(self) -> None:
        """Update the parameters."""
        self.compute_at_home()
        for filling in (*self._awaited, *self._leaving):
            filling.wait()
        if self._routes.sent:
            full = self._awaited[0].full
            for index, update in zip(self._routes.sent, self._routes.parts_of(full), strict=True):
                member, at = self._matrices[index]
                member.updates[at] = update
        self._awaited, self._leaving = [], []
        for member in self._called:
            member.run_after(self._functions)
        if not self._was_called:
            self._called, self._was_called = [member for member in self._members if member.keeps()], True
        torch.autograd.graph.increment_version(self.params)
