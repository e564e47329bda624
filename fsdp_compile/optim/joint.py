"""The optimizers of `compile_step` as one step.

step.begin(flats)               finds the segments that are updated as one parameter, `step.ready`
step.step_others()              matrices go to their owners; all other parameters are updated
step.run()                      updates segments, while matrices are on the way
step.finish()                   updates matrices

in backward:
step.expect(flats)              which of them are updated as soon as their gradients arrive
step.update(flat, gradient)     updates one of these; begin, step_others, run and finish update all others
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core._torch import without_torch_function
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim._torch import announce_step, has_step_hooks, note_step, step_without_hooks
from fsdp_compile.optim.flat import show_others, step_segments, steps_segments
from fsdp_compile.optim.matrices import takes_matrices
from fsdp_compile.optim.matrix_step import MatrixUpdates
from fsdp_compile.optim.segments import Ready, Segments


class JointStep:
    """Updates by one or several optimizers.

    Args:
        optimizers: which have no parameter in common.
        fuses: whether torch's fused kernels run where a group of an optimizer leaves it open.

    Attributes:
        ready: for each elementwise optimizer the segments that `run` updates in this step.

    Raises:
        ValueError: two optimizers have the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], fuses: bool) -> None:
        self.optimizers, self.fuses = tuple(optimizers), fuses
        self.ready: dict[Optimizer, Ready] = {}
        self._elementwise = [each for each in optimizers if not takes_matrices(each)]
        self._matrices = {each: MatrixUpdates.of(each) for each in optimizers if takes_matrices(each)}
        owners: dict[int, Optimizer] = {}
        pairs = ((each, param) for each in optimizers for group in each.param_groups for param in group["params"])
        for optimizer, param in pairs:
            if owners.setdefault(id(param), optimizer) is not optimizer:
                raise ValueError(
                    f"optimizer: a parameter of shape {tuple(param.shape)} is in two optimizers; give it to one of them"
                )

    def can_update(self) -> bool:
        """Whether flat parameters can be updated one by one."""
        return all(map(steps_segments, self._elementwise)) and not any(map(has_step_hooks, self._matrices))

    @torch.no_grad()
    def begin(self, flats: Iterable[FlatParam], clips: bool = False) -> None:
        """Find what is updated from the gradients of flat parameters; others, also of `flats`, show theirs as `.grad`,
        and so do matrices if the caller `clips` them. Call `step_others` next, then `run`, then `finish`.
        """
        covered = Counter[FlatParam]()  # how many parameters of each are updated from its gradient as one tensor
        managed, self.ready = dict.fromkeys(flats), {}
        for optimizer in filter(steps_segments, self._elementwise):
            announce_step(optimizer)
            segments = Segments.of(optimizer)
            self.ready[optimizer] = segments.ready(optimizer)
            for segment, _ in self.ready[optimizer]:
                covered[segment.flat] += len(segment.params)
            managed.update(dict.fromkeys(segment.flat for segment in segments.all))
        for optimizer, matrices in self._matrices.items():
            matrices.prepare(optimizer)
            covered.update({} if clips else matrices.covers)
            managed.update(dict.fromkeys(matrices.covers))
        for flat in managed:
            if covered[flat] < len(flat.params):
                flat.binding.show_gradient()

    @torch.no_grad()
    def step_others(self) -> None:
        """Send matrices to their owners, and step on the other parameters that `run` does not update."""
        for optimizer, matrices in self._matrices.items():
            if has_step_hooks(optimizer):
                optimizer.step()
                continue
            announce_step(optimizer)
            covered = matrices.begin(optimizer, drops=True)
            params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            if any(param.grad is not None for param in params if id(param) not in covered):
                show_others(optimizer, covered)
                step_without_hooks(optimizer)
            note_step(optimizer)
        for optimizer in self._elementwise:
            if optimizer not in self.ready:
                optimizer.step()
                continue
            others = Segments.of(optimizer, known=True).others(self.ready[optimizer])
            with without_torch_function():
                others = [[param for param in some if param.grad is not None] for some in others]
            if any(others):
                step_segments(optimizer, (), others, fuses=self.fuses)
            note_step(optimizer)
        stages = chain.from_iterable(matrices.stages for matrices in self._matrices.values())
        elementwise = {segment.flat for segment, _ in chain.from_iterable(self.ready.values())}
        for flat in set().union(*(stage.flats for stage in stages)) - elementwise:
            flat.reduction.flat_gradient = None

    @torch.no_grad()
    def run(self, factor: Tensor | None = None) -> None:
        """Update the segments. Their gradients, which are freed, count times `factor`, shape `()`."""
        for optimizer, segments in self.ready.items():
            if segments:
                step_segments(optimizer, segments, factor=factor, fuses=self.fuses)
            for segment, _ in segments:
                _free(segment.flat, segment.params)
        self.ready.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """Update all matrices."""
        for matrices in self._matrices.values():
            matrices.finish()

    def drop(self) -> None:
        """Forget updates under way, after a failure."""
        self.ready.clear()
        for matrices in self._matrices.values():
            matrices.drop()

    def expect(self, flats: Sequence[FlatParam]) -> list[FlatParam]:
        """Those of `flats` that `update` can update in this backward, for each of which it is to be called."""
        covered = Counter[FlatParam]()
        for segment in chain.from_iterable(Segments.of(optimizer).all for optimizer in self._elementwise):
            covered[segment.flat] += len(segment.params)
        for optimizer, matrices in self._matrices.items():
            matrices.prepare(optimizer)
            covered.update(matrices.covers)
        chosen = [flat for flat in flats if covered[flat] == len(flat.params) and flat.only_trains()]
        for optimizer, matrices in self._matrices.items():
            matrices.expect(optimizer, chosen)
        return chosen

    @torch.no_grad()
    def update(self, flat: FlatParam, gradient: Tensor) -> None:
        """Update a flat parameter by its gradient, 1-D `[shard_numel]`; matrices are complete after `finish`."""
        flat.reduction.flat_gradient = gradient
        for optimizer, matrices in self._matrices.items():
            matrices.arrive(optimizer, flat)
        for optimizer in self._elementwise:
            segments = Segments.of(optimizer, known=True)
            if chosen := [segment for segment in segments.all if segment.flat is flat]:
                ready = segments.ready(optimizer, chosen)
                if len(ready) < len(chosen):
                    flat.binding.show_gradient()
                step_segments(optimizer, ready, segments.others(ready, chosen), fuses=self.fuses)
        _free(flat, flat.params)


def _free(flat: FlatParam, params: Iterable[nn.Parameter]) -> None:
    """Free the gradient of a flat parameter, which has updated `params`: these have none where it was kept in one."""
    kept, flat.reduction.flat_gradient = flat.reduction.flat_gradient, None
    for param in params if kept is None else ():
        param.grad = None
