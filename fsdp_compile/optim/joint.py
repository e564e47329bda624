"""The optimizers of `compile_step` as one step.

updates = step.begin()          elementwise updates of single flat parameters, as of `FlatStep`
step.step_others(updates)       matrices go to their owners; all other parameters are updated
updates[0].run()                runs while matrices are on the way
for flat in step.finish(): ...  matrices are updated; flat parameters that are complete now
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim._torch import announce_step, has_step_hooks, note_step, step_without_hooks
from fsdp_compile.optim.flat import FlatStep, FlatUpdate
from fsdp_compile.optim.matrix_step import MatrixUpdates, takes_matrices
from fsdp_compile.optim.segments import show_segments


class JointUpdate:
    """The update of one flat parameter in backward, by one or several optimizers.

    Attributes:
        params: what is updated.
        matrices: those among them that are computed from complete ones, by optimizer.
    """

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.params: list[nn.Parameter] = []
        self._elementwise: list[FlatUpdate] = []
        self.matrices: list[tuple[Optimizer, list[nn.Parameter]]] = []

    def add(self, update: FlatUpdate) -> None:
        """Also run `update`."""
        self._elementwise.append(update)
        self.params += update.params

    def add_matrices(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        """Also take the gradients of the matrices `params` of `optimizer`."""
        self.matrices.append((optimizer, params))
        self.params += params

    @torch.no_grad()
    def run_with(self, gradient: Tensor) -> None:
        """Update by `gradient` of the flat parameter, 1-D `[shard_numel]`; matrices are complete after `finish`."""
        self.flat.reduction.flat_gradient = gradient
        for optimizer, params in self.matrices:
            MatrixUpdates.of(optimizer).arrive(params)
        for update in self._elementwise:
            if update.recorded:
                update.run_with(gradient)
            else:
                update.run()
        self.flat.reduction.flat_gradient = None
        for param in self.params:
            param.grad = None


class JointStep:
    """Updates by one or several optimizers.

    Args:
        optimizers: which have no parameter in common.
        fuses: whether Inductor compiles elementwise updates.

    Raises:
        ValueError: two optimizers have the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], fuses: bool) -> None:
        self.optimizers, self.fuses = tuple(optimizers), fuses
        self._flat = [FlatStep(each, fuses) for each in optimizers if not takes_matrices(each)]
        self._matrix = [each for each in optimizers if takes_matrices(each)]
        self._pending: dict[FlatParam, int] = {}  # how many of its matrices are under way
        owners: dict[int, Optimizer] = {}
        pairs = ((each, param) for each in optimizers for group in each.param_groups for param in group["params"])
        for optimizer, param in pairs:
            if owners.setdefault(id(param), optimizer) is not optimizer:
                raise ValueError(
                    f"optimizer: a parameter of shape {tuple(param.shape)} is in two optimizers; give it to one of them"
                )

    def can_update(self) -> bool:
        """Whether flat parameters can be updated one by one."""
        return all(step.can_update() for step in self._flat) and not any(map(has_step_hooks, self._matrix))

    def begin(self) -> list[FlatUpdate]:
        """The elementwise updates of this step; call `step_others` for the rest, then `finish`."""
        updates = [update for step in self._flat for update in step.begin()]
        covered = Counter[FlatParam]()  # how many parameters of each are updated from its gradient as one tensor
        for update in updates:
            covered[update.flat] += len(update.params)
        for optimizer in self._matrix:
            matrices = MatrixUpdates.of(optimizer)
            matrices.prepare(optimizer)
            covered.update(matrices.covers)
        for flat in {*covered, *(segment.flat for step in self._flat for segment in step.segments)}:
            if covered[flat] < len(flat.params):
                flat.binding.show_gradient()
        return updates

    @torch.no_grad()
    def step_others(self, updates: Sequence[FlatUpdate]) -> None:
        """Send matrices to their owners, and step on the other parameters that none of `updates` changes."""
        for optimizer in self._matrix:
            if has_step_hooks(optimizer):
                optimizer.step()
                continue
            announce_step(optimizer)
            matrices = MatrixUpdates.of(optimizer)
            covered = matrices.begin(optimizer, is_prepared=True)
            matrices.start(drops=True)
            rest = [[p for p in group["params"] if id(p) not in covered] for group in optimizer.param_groups]
            if any(param.grad is not None for param in chain.from_iterable(rest)):
                show_segments(optimizer, (), rest)
                step_without_hooks(optimizer)
            note_step(optimizer)
        for step in self._flat:
            step.step_others([update for update in updates if update.step is step])
        self._pending = {}
        for stage in chain.from_iterable(MatrixUpdates.of(each).stages for each in self._matrix):
            for flat, number in stage.flats.items():
                self._pending[flat] = self._pending.get(flat, 0) + number
        for flat in self._pending.keys() - {update.flat for update in updates}:
            flat.reduction.flat_gradient = None

    def has_pending(self, flat: FlatParam) -> bool:
        """Whether matrices of a flat parameter are under way."""
        return flat in self._pending

    def finish(self) -> Iterator[FlatParam]:
        """Update all matrices, under `no_grad`; yields flat parameters, each when none of its matrices is under way."""
        for step in self._flat:
            step.finish()
        for stage in chain.from_iterable(MatrixUpdates.of(each).finish() for each in self._matrix):
            for flat, number in stage.flats.items():
                left = self._pending.pop(flat) - number
                if left:
                    self._pending[flat] = left
                else:
                    yield flat

    def drop(self) -> None:
        """Forget updates under way, after a failure."""
        self._pending.clear()
        for step in self._flat:
            step.drop()
        for optimizer in self._matrix:
            MatrixUpdates.of(optimizer).drop()

    def before_backward(self) -> dict[FlatParam, JointUpdate]:
        """For each flat parameter the update by a gradient that is still to come."""
        joint: dict[FlatParam, JointUpdate] = {}
        for step in self._flat:
            for flat, update in step.before_backward().items():
                joint.setdefault(flat, JointUpdate(flat)).add(update)
        for optimizer in self._matrix:
            matrices = MatrixUpdates.of(optimizer)
            covered = matrices.prepare(optimizer)
            of_flats: dict[FlatParam, list[nn.Parameter]] = {}
            for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if id(param) in covered and id(param) in matrices.flats:
                    of_flats.setdefault(matrices.flats[id(param)], []).append(param)
            for flat, params in of_flats.items():
                joint.setdefault(flat, JointUpdate(flat)).add_matrices(optimizer, params)
        return joint

    def expect(self, updates: Iterable[JointUpdate]) -> None:
        """Expect to run some of the updates of `before_backward` in this backward."""
        of_each: dict[Optimizer, list[nn.Parameter]] = {optimizer: [] for optimizer in self._matrix}
        for optimizer, params in chain.from_iterable(update.matrices for update in updates):
            of_each[optimizer] += params
        for optimizer, params in of_each.items():
            MatrixUpdates.of(optimizer).expect(optimizer, params)
