"""The optimizers of `compile_step` as one step.

with step.running(loss, ...):   updates flat parameters when their gradients arrive, if that is asked for
    loss.backward()
step.begin()                    finds the segments that are updated as one parameter, `step.ready`
step.run()                      updates all that backward has not: matrices are on their way meanwhile

gradients of units, and which of them live at once:

    updates after backward      | d | c d | b c d | a b c d | update a, b, c, d |
    updates in backward         | d | c   | b     | a       |

Where its gradient arrives, in the eager runtime, in a graph or behind one, `GradientReduction.update` is called.
"""

# Note [What is not updated in backward]
# A unit's gradient is complete when it has been reduced once, and may be freed if nothing but the optimizer reads it.
# So some units are updated when backward has ended, as without the option: those with plain or frozen parameters, with
# parameters that the optimizer lacks, with earlier or accumulated gradients, with hooks on parameters, and with
# gradients in low precision. Two forwards of a unit in one step give two gradients, and the backward of the first would
# read what the second has updated: that is refused before backward, by the graph that autograd has recorded.

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core._torch import without_torch_function
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim._torch import announce_step, has_step_hooks, note_step, step_without_hooks
from fsdp_compile.optim.flat import ELEMENTWISE, ELEMENTWISE_NAMES, show_others, step_segments, steps_segments
from fsdp_compile.optim.matrix_optimizers import takes_matrices
from fsdp_compile.optim.matrix_step import MatrixUpdates
from fsdp_compile.optim.segments import Ready, Segments


class JointStep:
    """Updates by one or several optimizers.

    Args:
        optimizers: which have no parameter in common.
        flats: the flat parameters of the model.
        fuses: whether torch's fused kernels run where a group of an optimizer leaves it open.
        in_backward: whether flat parameters are updated within the backward pass of each step.

    Attributes:
        ready: for each elementwise optimizer the segments that `run` updates in this step.
        updated: the flat parameters that backward has updated in this step.

    Raises:
        ValueError: two optimizers have the same parameter; or one that steps in backward updates more than each element
            by itself, or is differentiable.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], flats: Sequence[FlatParam], fuses: bool, in_backward: bool
    ) -> None:
        self.optimizers, self.fuses, self.in_backward = tuple(optimizers), fuses, in_backward
        self.ready: dict[Optimizer, Ready] = {}
        self.updated: list[FlatParam] = []
        self._flats = flats
        self._elementwise = [each for each in optimizers if not takes_matrices(each)]
        self._matrices = {each: MatrixUpdates.of(each) for each in optimizers if takes_matrices(each)}
        owners: dict[int, Optimizer] = {}
        for optimizer in optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if owners.setdefault(id(param), optimizer) is not optimizer:
                    raise ValueError(
                        f"optimizer: a parameter of shape {tuple(param.shape)} is in two optimizers; give it to one of "
                        f"them"
                    )
            is_known = type(optimizer) in ELEMENTWISE or takes_matrices(optimizer)
            if in_backward and (not is_known or any(group.get("differentiable") for group in optimizer.param_groups)):
                raise ValueError(
                    f"update_in_backward takes elementwise optimizers ({ELEMENTWISE_NAMES}) and Muon, without "
                    f"differentiable=True, not {type(optimizer).__name__}; leave update_in_backward out"
                )

    @torch.no_grad()
    def begin(self, clips: bool = False) -> None:
        """Find what is updated from the gradients of flat parameters. Others show theirs as `.grad`, and so do matrices
        if the caller `clips` them. Call `run` next.
        """
        covered = Counter[FlatParam]()  # how many parameters of each are updated from its gradient as one tensor
        self.ready = {}
        for optimizer in filter(steps_segments, self._elementwise):
            announce_step(optimizer)
            self.ready[optimizer] = Segments.of(optimizer).ready(optimizer)
            for segment, _ in self.ready[optimizer]:
                covered[segment.flat] += len(segment.params)
        for optimizer, matrices in self._matrices.items():
            matrices.prepare(optimizer)
            covered.update({} if clips else matrices.covers)
        for flat in self._flats:  # others keep no gradient
            if covered[flat] < len(flat.params):
                flat.binding.show_gradient()

    @torch.no_grad()
    def run(self, factor: Tensor | None = None) -> None:
        """Update all. The gradients of segments, which are freed, count times `factor`, shape `()`."""
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
        for optimizer, ready in self.ready.items():
            if ready:
                step_segments(optimizer, ready, factor=factor, fuses=self.fuses)
            for segment, _ in ready:
                _free(segment.flat, segment.params)
        self.ready.clear()
        for matrices in self._matrices.values():
            matrices.finish()

    def drop(self) -> None:
        """Forget updates under way, after a failure."""
        self.ready.clear()
        for matrices in self._matrices.values():
            matrices.drop()

    # --- in backward --------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, loss: Tensor, keeps_flat: bool) -> Iterator[None]:
        """Serve the backward pass of `loss`, which is run in this block: update flat parameters, if that is asked for.

        Args:
            keeps_flat: whether gradients may stay in flat tensors, instead of `.grad`, where updates of segments read
                them.

        Raises:
            ValueError: a unit was called several times in the forward.
            RuntimeError: an optimizer has step hooks.
        """
        hooked = list(filter(has_step_hooks, self._matrices if keeps_flat else ()))
        keeps_flat = keeps_flat and self.fuses and not hooked and all(map(steps_segments, self._elementwise))
        chosen = self._expected(loss) if self.in_backward else ()
        for flat in self._flats:
            flat.reduction.keeps_flat = keeps_flat
            flat.reduction.update = partial(self.update, flat) if flat in chosen else None
        try:
            yield
        finally:
            for flat in self._flats:
                flat.reduction.keeps_flat, flat.reduction.update = False, None

    def _expected(self, loss: Tensor) -> list[FlatParam]:
        """The flat parameters that `update` can update in the backward of `loss`."""
        if any(map(has_step_hooks, self.optimizers)):
            raise RuntimeError(
                "update_in_backward: the optimizer has step hooks, which would see no step of the whole optimizer; "
                "remove them, or leave update_in_backward out"
            )
        check_called_once(loss, self._flats)
        covered = Counter[FlatParam]()
        for segment in chain.from_iterable(Segments.of(optimizer).all for optimizer in self._elementwise):
            covered[segment.flat] += len(segment.params)
        for optimizer, matrices in self._matrices.items():
            matrices.prepare(optimizer)
            covered.update(matrices.covers)
        chosen = [flat for flat in self._flats if covered[flat] == len(flat.params) and flat.only_trains()]
        for optimizer, matrices in self._matrices.items():
            matrices.expect(optimizer, chosen)
        return chosen

    @torch.no_grad()
    def update(self, flat: FlatParam, gradient: Tensor) -> None:
        """Update a flat parameter by its gradient, 1-D `[shard_numel]`; matrices are complete after `run`."""
        if flat in self.updated:
            raise RuntimeError(
                f"update_in_backward: a second gradient of parameter {flat.names[0]} arrived after its update, so its "
                f"unit was called several times; load a checkpoint, and leave update_in_backward out"
            )
        self.updated.append(flat)
        flat.reduction.flat_gradient = gradient
        for optimizer, matrices in self._matrices.items():
            matrices.arrive(optimizer, flat, gradient)
        for optimizer in self._elementwise:
            segments = Segments.of(optimizer, known=True)
            if chosen := [segment for segment in segments.all if segment.flat is flat]:
                ready = segments.ready(optimizer, chosen)
                if len(ready) < len(chosen):
                    flat.binding.show_gradient()
                step_segments(optimizer, ready, segments.others(ready, chosen), fuses=self.fuses)
        _free(flat, flat.params)


def check_called_once(loss: Tensor, flats: Iterable[FlatParam]) -> None:
    """Raise ValueError if backward of `loss` reaches one of `flats` in several ways.

    That is from several forwards of its unit, or from one and from what reads a parameter outside of it.
    """
    shards: dict[Any, FlatParam] = {id(param): flat for flat in flats for param in flat.params}
    for flat in flats:
        if flat.trains and flat.autograd_shard is not None and flat.deferred is not None:
            shards[flat.autograd_shard.grad_fn] = flat
    readers: dict[FlatParam, Any] = {}
    work = [loss.grad_fn]
    seen = set(work)
    while work:
        node = work.pop()
        for following, _ in node.next_functions if node is not None else ():
            known = shards.get(following) or shards.get(id(getattr(following, "variable", None)))
            if known is not None and readers.setdefault(known, node) is not node:
                raise ValueError(
                    f"update_in_backward: the unit of {known.names[0]} gets several gradients in a step, because it is "
                    f"called more than once or something else reads its parameters; leave update_in_backward out"
                )
            if known is None and following not in seen:
                seen.add(following)
                work.append(following)


def _free(flat: FlatParam, params: Iterable[nn.Parameter]) -> None:
    """Free the gradient of a flat parameter, which has updated `params`: these have none where it was kept in one."""
    kept, flat.reduction.flat_gradient = flat.reduction.flat_gradient, None
    for param in params if kept is None else ():
        param.grad = None
