"""Updates by optimizers of complete matrices, such as Muon: one rank computes each matrix, while others are on the way.

    updates = MatrixUpdates.of(optimizer)
    covered = updates.begin(optimizer)      parameters that are updated here; the optimizer steps on the others itself
    updates.start()                         momentum; it goes to the owners of the matrices
    for param in updates.finish(): ...      owners compute, results return, parameters are updated

The optimizer's own operators run, cut in three (matrix_program.py): on the elements that each rank stores, on complete
matrices, and on those elements again. Matrices are exchanged in stages, in the order of the forward:

    rank        | momentum of 0 1 2 | wait 0 | compute 0 | compute 1 | update 0 | compute 2 | update 1 | wait | update 2
    link          [ in 0 ][ in 1 ][ in 2 ]              [ out 0 ]   [ out 1 ]              [ out 2 ]

State is the optimizer's own, sharded as the parameters are. No rank has a complete matrix that it does not own.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.optim.matrix_exchange import Arriving, Part, Ranges, Routes
from fsdp_compile.optim.matrix_program import MatrixProgram, MatrixRecorder, options_of, run
from fsdp_compile.optim.owner_plan import Matrix, OwnerPlan, plan_owners, stages_of
from fsdp_compile.optim.owners import local_data, local_gradient
from fsdp_compile.optim.program import NotRecordable
from fsdp_compile.tensors.shard_spec import ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

LAG = 2
"""How many stages are computed before the results of one are waited for: other ranks may compute later than this."""

_BATCH = 1 << 27  # bytes of the matrices of one shape that are computed at once


class NeedsWholeMatrices(Protocol):
    """What an optimizer declares whose step computes with complete matrices, beside elementwise operators.

    Attributes:
        needs_whole_matrices: True: a parameter is computed as a whole, whatever its dimensions. 2: a parameter of more
            dimensions is a batch of matrices, as of experts, and what becomes of each follows from that one alone.
    """

    needs_whole_matrices: bool | int


def takes_matrices(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is torch's Muon, or declares `needs_whole_matrices`."""
    return type(optimizer) is Muon or bool(getattr(optimizer, "needs_whole_matrices", False))


def _matrix_shape(optimizer: Optimizer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what one rank computes of a parameter; ones stand for the dimensions of a batch."""
    declared = getattr(optimizer, "needs_whole_matrices", True)
    if declared is True or len(shape) <= declared:
        return shape
    return (*[1] * (len(shape) - declared), *shape[-declared:])


@dataclass(frozen=True)
class _Place:
    """Where the matrices of a parameter are computed: for each its ranges by rank and its owner; and their stage."""

    ranges: tuple[Ranges, ...]
    owners: tuple[int, ...]
    stage: int


def _ranges_of(param: ShardedTensor, numel: int) -> tuple[Ranges, ...]:
    """For each matrix of `numel` elements of a parameter what each rank stores."""
    if numel == param.numel():
        return (param.spec.ranges,)
    found = []
    for begin in range(0, param.numel(), numel):
        ends = [(max(first, begin), min(first + size, begin + numel)) for first, size in param.spec.ranges]
        found.append(tuple((low - begin, high - low) if low < high else (0, 0) for low, high in ends))
    return tuple(found)


@dataclass(eq=False)
class _Update:
    """The update of one parameter that is under way."""

    param: ShardedTensor
    program: MatrixProgram
    gradient: Tensor  # what this rank stores, 1-D
    state: dict[str, Tensor]
    place: _Place
    values: dict[int, Tensor] = field(default_factory=dict)

    def parts(self, value: Tensor) -> Sequence[Tensor]:
        """What this rank stores of each matrix, of `value`, 1-D."""
        here = self.param.spec.ranks.rank
        return (value,) if len(self.place.ranges) == 1 else value.split([of[here][1] for of in self.place.ranges])

    def run_before(self) -> None:
        """Run what comes before the exchange."""
        program = self.program
        values = {0: local_data(self.param), 1: self.gradient}
        values.update((position, self.state[name]) for name, position in program.state.items())
        self.values = run(program.before, values)
        self.gradient = self.gradient.new_empty(0)  # it may be freed

    def run_after(self, returned: dict[int, Tensor]) -> None:
        """Run what comes behind it; `returned`: what this rank stores of each result."""
        self.values.update(returned)
        run(self.program.after, self.values)
        self.values.clear()
        torch.autograd.graph.increment_version(self.param)


class _Stage:
    """Parameters of one process group that are exchanged together, with as many values of the same dtypes."""

    def __init__(self, updates: Sequence[_Update], routes: Routes, name: str) -> None:
        self.updates, self._routes, self._name = updates, routes, name
        self._arriving: list[Arriving] = []  # for each value that is exchanged
        self._at_home: list[dict[int, list[Part]]] = []  # for each value the matrices that lie here
        self._results: dict[int, list[Tensor]] = {}  # of those of `routes.owned` that are computed, by position

    def start(self) -> None:
        """Compute what owners need, and begin to send it."""
        for update in self.updates:
            update.run_before()
        columns = zip(*(update.program.sent for update in self.updates), strict=True)
        for number, positions in enumerate(columns):
            pairs = zip(self.updates, positions, strict=True)
            parts = [part for update, at in pairs for part in update.parts(update.values[at])]
            self._arriving.append(self._routes.to_owners(parts, f"{self._name}, value {number}"))
            self._at_home.append({at: [(0, parts[self._routes.owned[at]])] for at in self._routes.at_home})
        for update in self.updates:
            update.values = {at: update.values[at] for at in update.program.kept}

    def compute_at_home(self) -> None:
        """Compute with the matrices that lie on this rank, while others are on the way."""
        at_home, self._at_home = self._at_home, []
        self._compute_all(self._routes.at_home, at_home)

    def compute(self) -> None:
        """Compute with the other matrices that this rank owns, and begin to send the results."""
        arrived = [dict(enumerate(each.wait())) for each in self._arriving]
        owned = range(len(self._routes.owned))
        self._compute_all([at for at in owned if at not in self._results], arrived)
        results, self._results, self._arriving = [self._results[at] for at in owned], {}, []
        first = self.updates[0]
        for number, position in enumerate(first.program.returned):
            like = first.gradient.new_empty(0, dtype=first.program.dtypes[position])
            mine = [of_matrix[number] for of_matrix in results]
            self._arriving.append(self._routes.to_ranks(mine, like, f"{self._name}, result {number}"))

    def _compute_all(self, chosen: Sequence[int], parts: Sequence[Mapping[int, list[Part]]]) -> None:
        """Compute with some of `routes.owned`, of which `parts` has each value; those of one program together."""
        programs = [update.program for update in self.updates for _ in update.place.ranges]
        alike: dict[MatrixProgram, list[int]] = {}
        for at in chosen:
            alike.setdefault(programs[self._routes.owned[at]], []).append(at)
        for program, positions in alike.items():
            size = max(1, _BATCH // max(1, _nbytes(program)))
            for batch in (positions[begin : begin + size] for begin in range(0, len(positions), size)):
                found = self._compute(program, [[of_value[at] for at in batch] for of_value in parts])
                for index, at in enumerate(batch):
                    self._results[at] = [value[index].reshape(-1) for value in found]

    def _compute(self, program: MatrixProgram, arrived: Sequence[Sequence[list[Part]]]) -> list[Tensor]:
        """The results of matrices of one program, each `[n, *shape]`."""
        values: dict[int, Tensor] = {}
        for position, of_matrices in zip(program.sent, arrived, strict=True):
            like = of_matrices[0][0][1]
            values[position] = full = like.new_empty((len(of_matrices), *program.shape))
            for row, parts in zip(full.view(len(of_matrices), -1), of_matrices, strict=True):
                for first, part in parts:
                    row[first : first + part.numel()].copy_(part)
        alone = self._routes.ranks.same_bits or full.is_cpu  # Note [One kernel for several matrices]
        found = program.run_whole(values, one_by_one=alone)
        return [found[position] for position in program.returned]

    def finish(self) -> None:
        """Update the parameters."""
        columns = [iter(each.wait()) for each in self._arriving]
        self._arriving = []
        for update in self.updates:
            returned = {}
            for position, column in zip(update.program.returned, columns, strict=True):
                parts = [next(column) for _ in update.place.ranges]
                returned[position] = parts[0] if len(parts) == 1 else torch.cat(parts)
            update.run_after(returned)


def _nbytes(program: MatrixProgram) -> int:
    numel = torch.Size(program.shape).numel()
    return numel * sum(program.dtypes[position].itemsize for position in program.sent)


def owner_plans(optimizer: Optimizer) -> list[OwnerPlan]:
    """Which rank computes which matrix of `optimizer`: a plan for each group of ranks, equal on all of them.

    Takes one comparison of ranks if parameters are new; `print` shows a plan.

    Raises:
        RuntimeError: ranks disagree about the parameters.
        TypeError: `optimizer` is neither torch's Muon nor declares `needs_whole_matrices`.
    """
    if not takes_matrices(optimizer):
        raise TypeError(
            f"optimizer: expected torch.optim.Muon or one that declares needs_whole_matrices, found "
            f"{type(optimizer).__name__}"
        )
    updates = MatrixUpdates.of(optimizer)
    updates.prepare(optimizer)
    return list(updates.plans.values())


class MatrixUpdates:
    """The updates of one optimizer that needs complete matrices: `of(optimizer)`.

    Attributes:
        plans: for each group of ranks who owns which matrix, since the first step.
        programs: for each parameter that can be updated here, by its id, what the step does.
    """

    _of: ClassVar[WeakKeyDictionary[Optimizer, "MatrixUpdates"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.plans: dict[ShardRanks, OwnerPlan] = {}
        self._planned: list[tuple[ShardedTensor, ShardSpec]] = []  # parameters, and how they were sharded: alive here
        self._places: dict[int, _Place] = {}  # for each parameter, by its id
        self._recorders: dict[Any, MatrixRecorder | None] = {}
        self._routes: dict[Any, Routes] = {}
        self._prepared: dict[int, ShardedTensor] = {}  # by id
        self.programs: dict[int, MatrixProgram] = {}
        self._stages: list[_Stage] = []  # on the way, in the order in which they are computed
        self._waiting: list[_Stage] = []  # to be started

    @classmethod
    def of(cls, optimizer: Optimizer) -> "MatrixUpdates":
        """Those of `optimizer`."""
        return cls._of.setdefault(optimizer, cls())

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> set[int]:
        """Prepare the step of all parameters that have gradients, on all ranks the same; return the ids of those that
        are updated here, also in backward. Others are the optimizer's own to update.

        Raises:
            RuntimeError: a gradient was accumulated under `no_sync` and not reduced; parameters are summoned; or ranks
                disagree about the parameters.
        """
        self.prepare(optimizer)
        params = _with_gradients(self._prepared.values())
        self._waiting = self.add(optimizer, params)
        return {id(update.param) for stage in (*self._stages, *self._waiting) for update in stage.updates}

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, compares: bool = True) -> set[int]:
        """Record what the step does and plan owners; return the ids of the parameters that can be updated here.
        `compares`: whether ranks compare new plans.
        """
        programs = self._programs(optimizer)
        self._plan(programs, compares)
        self._prepared = {id(param): param for param, _ in programs}
        self.programs = {id(param): program for param, program in programs}
        return set(self._prepared)

    def add(self, optimizer: Optimizer, params: Sequence[Any]) -> list[_Stage]:
        """Stages of some of the parameters that `prepare` has returned, which have gradients; `start` starts them."""
        updates = [self._update(optimizer, param, self.programs[id(param)]) for param in params]
        alike: dict[Any, list[_Update]] = {}
        for update in updates:
            program, ranks = update.program, update.param.spec.ranks
            dtypes = tuple(tuple(program.dtypes[at] for at in part) for part in (program.sent, program.returned))
            key = (update.place.stage, ranks, update.gradient.device, dtypes)
            alike.setdefault(key, []).append(update)
        return [
            _Stage(some, self._routes_of(some), f"matrices of {some[0].param.spec.named()} and {len(some) - 1} others")
            for _, some in sorted(alike.items(), key=lambda pair: pair[0][0])
        ]

    @torch.no_grad()
    def start(self, stages: Sequence[_Stage] | None = None) -> None:
        """Begin to send matrices to their owners: those of `begin`, or of `stages`, which come before others then."""
        if stages is None:
            stages, self._waiting = self._waiting, []
            self._stages += stages
        else:
            self._stages[:0] = stages
        for stage in stages:
            stage.start()

    def pending(self) -> Iterator[Tensor]:
        """The parameters whose updates have started."""
        for stage in self._stages:
            for update in stage.updates:
                yield update.param

    def drop(self) -> None:
        """Forget what is under way, after a failure."""
        self._stages, self._waiting = [], []

    @torch.no_grad()
    def finish(self) -> Iterator[Tensor]:
        """Compute and update; the parameters, each as soon as it is updated."""
        stages, self._stages = self._stages, []
        for stage in stages:
            stage.compute_at_home()
        for index, stage in enumerate(stages):
            stage.compute()
            if index >= LAG:
                yield from self._finish(stages[index - LAG])
        for stage in stages[-LAG:]:
            yield from self._finish(stage)

    @staticmethod
    def _finish(stage: _Stage) -> Iterator[Tensor]:
        stage.finish()
        for update in stage.updates:
            yield update.param

    # --- preparation --------------------------------------------------------------------------------------------------

    def _programs(self, optimizer: Optimizer) -> list[tuple[ShardedTensor, MatrixProgram]]:
        found = []
        for index, group in enumerate(optimizer.param_groups):
            options = options_of(group)
            for param in group["params"]:
                if not isinstance(param, ShardedTensor) or param.spec.tensor_parallel is not None:
                    continue
                program = self._program(optimizer, index, options, param)
                if program is not None:
                    found.append((param, program))
        return found

    def _program(self, optimizer: Optimizer, index: int, options: Any, param: ShardedTensor) -> MatrixProgram | None:
        state = optimizer.state.get(param) or {}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
        if any(type(each) is not ShardedTensor or not each.spec.same_ranges(param.spec) for each in tensors.values()):
            return None
        dtypes = tuple((name, value.dtype) for name, value in tensors.items())
        key = (index, param.shape, param.dtype, tuple(state), dtypes)
        try:
            if key not in self._recorders:
                shape = tuple(param.shape)
                self._recorders[key] = MatrixRecorder(shape, _matrix_shape(optimizer, shape), param.dtype, state)
            recorder = self._recorders[key]
            if recorder is None:
                return None
            return recorder.program(optimizer, optimizer.param_groups[index], options, state)
        except NotRecordable:
            self._recorders[key] = None
            return None

    def _plan(self, programs: Sequence[tuple[ShardedTensor, MatrixProgram]], compares: bool) -> None:
        """Plan who owns which matrix, where parameters or ranks are new; all ranks compare that."""
        given = [(param, param.spec) for param, _ in programs]
        pairs = zip(given, self._planned, strict=False)
        if len(given) == len(self._planned) and all(a is b and mine is its for (a, mine), (b, its) in pairs):
            return
        self._places, self.plans, self._routes = {}, {}, {}
        by_ranks: dict[ShardRanks, list[tuple[ShardedTensor, MatrixProgram]]] = {}
        for param, program in programs:
            by_ranks.setdefault(param.spec.ranks, []).append((param, program))
        for ranks, some in by_ranks.items():
            split = [_ranges_of(param, prod(program.shape)) for param, program in some]
            costs = [program.flops for (_, program), ranges in zip(some, split, strict=True) for _ in ranges]
            stages, matrices, begins = stages_of(costs, ranks.size), list[Matrix](), list[int]()
            for (param, program), ranges in zip(some, split, strict=True):
                begins.append(len(matrices))
                matrices += _matrices(param, program, ranges, stages[len(matrices)])
            plan = self.plans[ranks] = plan_owners(matrices, ranks.size, _nodes_of(ranks))
            if compares:
                _compare(plan, ranks)
            for (param, _), ranges, at in zip(some, split, begins, strict=True):
                self._places[id(param)] = _Place(ranges, plan.owners[at : at + len(ranges)], stages[at])
        self._planned = given

    def _update(self, optimizer: Optimizer, param: ShardedTensor, program: MatrixProgram) -> _Update:
        state = optimizer.state[param]
        for name, position in program.state.items():
            if name not in state:
                zeros = torch.zeros(param.spec.numel, dtype=program.dtypes[position], device=param.device)
                state[name] = ShardedTensor(zeros, param.spec)
        for name, value in program.scalars.items():
            if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
                state[name].copy_(value)
            else:
                state[name] = value.clone() if isinstance(value, Tensor) else value
        own = {name: state[name].local for name in program.state}
        return _Update(param, program, local_gradient(param), own, self._places[id(param)])

    def _routes_of(self, updates: Sequence[_Update]) -> Routes:
        key = tuple(id(update.param) for update in updates)
        if key not in self._routes:
            ranges = [each for update in updates for each in update.place.ranges]
            owners = [owner for update in updates for owner in update.place.owners]
            self._routes[key] = Routes(updates[0].param.spec.ranks, ranges, owners)
        return self._routes[key]


def _matrices(param: ShardedTensor, program: MatrixProgram, ranges: Sequence[Ranges], stage: int) -> list[Matrix]:
    """What a plan needs to know of the matrices of `param`."""
    found = []
    for index, of_ranks in enumerate(ranges):
        stored = tuple((rank, numel) for rank, (_, numel) in enumerate(of_ranks) if numel)
        name = param.spec.named() + (f" [{index}]" if len(ranges) > 1 else "")
        found.append(Matrix(name, program.shape, program.flops, stored, stage))
    return found


def _with_gradients(params: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Those of `params` that have a gradient of their own dtype; with another one, state has another one too."""
    return [param for param in params if (grad := param.grad) is not None and grad.dtype == param.dtype]


def _nodes_of(ranks: ShardRanks) -> list[int]:
    """For each of `ranks` the node that it is on, as torchrun places them."""
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.accelerator.device_count() or ranks.size)
    return [rank // here for rank in torch.distributed.get_process_group_ranks(group_named(ranks.group))]


def _compare(plan: OwnerPlan, ranks: ShardRanks) -> None:
    """RuntimeError on all ranks if they have planned for different parameters."""
    digests = collectives.gather_objects((plan.digest, len(plan.matrices)), group_named(ranks.group))
    for rank, (digest, number) in enumerate(digests):
        if digest != digests[0][0]:
            raise RuntimeError(
                f"step: rank {rank} of {ranks.size} updates {number} matrices, and rank 0 {digests[0][1]}, or others; "
                f"give the optimizer the same parameters in the same order and groups on all ranks"
            )
