"""Updates within the backward pass: each unit's as soon as its gradient is reduced, which is freed then.

    with updates.running(loss):
        loss.backward()
    updates.updated             the flat parameters that have been updated

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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim._torch import has_step_hooks
from fsdp_compile.optim.flat import ELEMENTWISE, ELEMENTWISE_NAMES
from fsdp_compile.optim.joint import JointStep
from fsdp_compile.optim.matrices import takes_matrices


class UpdateInBackward:
    """Updates flat parameters within the backward pass of each step.

    Args:
        step: what updates them.
        flats: the flat parameters of the model.

    Attributes:
        updated: those that have been updated in this step.

    Raises:
        ValueError: the optimizer updates more than each element by itself, or is differentiable.
    """

    def __init__(self, step: JointStep, flats: Sequence[FlatParam]) -> None:
        for optimizer in step.optimizers:
            is_known = type(optimizer) in ELEMENTWISE or takes_matrices(optimizer)
            if not is_known or any(group.get("differentiable") for group in optimizer.param_groups):
                raise ValueError(
                    f"update_in_backward takes elementwise optimizers ({ELEMENTWISE_NAMES}) and Muon, without "
                    f"differentiable=True, not {type(optimizer).__name__}; leave update_in_backward out"
                )
        self.updated: list[FlatParam] = []
        self._step, self._flats = step, flats

    @contextmanager
    def running(self, loss: Tensor) -> Iterator[None]:
        """Update units in the backward pass of `loss`, which is run in this block.

        Raises:
            ValueError: a unit was called several times in the forward.
            RuntimeError: the optimizer has step hooks.
        """
        if any(map(has_step_hooks, self._step.optimizers)):
            raise RuntimeError(
                "update_in_backward: the optimizer has step hooks, which would see no step of the whole optimizer; "
                "remove them, or leave update_in_backward out"
            )
        self._check_called_once(loss)
        for flat in self._step.expect(self._flats):
            flat.reduction.update = partial(self._run, flat)
        try:
            yield
        finally:
            for flat in self._flats:
                flat.reduction.update = None

    def _run(self, flat: FlatParam, grad: Tensor) -> None:
        """Update a flat parameter by `grad`, 1-D `[shard_numel]`."""
        if flat in self.updated:
            raise RuntimeError(
                f"update_in_backward: a second gradient of parameter {flat.names[0]} arrived after its update, so its "
                f"unit was called several times; load a checkpoint, and leave update_in_backward out"
            )
        self.updated.append(flat)
        self._step.update(flat, grad)

    def _check_called_once(self, loss: Tensor) -> None:
        """Raise ValueError if backward of `loss` reaches a shard in several ways.

        That is from several forwards of its unit, or from one and from what reads a parameter outside of it.
        """
        by_param = {id(param): flat for flat in self._flats for param in flat.params}
        shards: dict[Any, FlatParam] = {}
        for flat in self._flats:
            if flat.trains and flat.autograd_shard is not None and flat.deferred is not None:
                shards[flat.autograd_shard.grad_fn] = flat
        readers: dict[FlatParam, Any] = {}
        work = [loss.grad_fn]
        seen = set(work)
        while work:
            node = work.pop()
            for following, _ in node.next_functions if node is not None else ():
                known = shards.get(following) or by_param.get(id(getattr(following, "variable", None)))
                if known is not None and readers.setdefault(known, node) is not node:
                    raise ValueError(
                        f"update_in_backward: the unit of {known.names[0]} gets several gradients in a step, "
                        f"because it is called more than once or something else reads its parameters; leave "
                        f"update_in_backward out"
                    )
                if known is None and following not in seen:
                    seen.add(following)
                    work.append(following)
