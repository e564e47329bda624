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
# So these units are updated when backward has ended, as without the option: those with plain or frozen parameters, with
# parameters of which the optimizer has not all, with gradients that were there before or that were accumulated under
# no_sync, with hooks on parameters, and with gradients in low precision. Two forwards of a unit in one step give two
# gradients, and the backward of the first would read what the second has updated: that is refused before backward, by
# the graph that autograd has recorded.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.optim.compiled_update import CompiledUpdate, FlatUpdate
from fsdp_compile.optim.flat_step import ELEMENTWISE


class UpdateInBackward:
    """The updates of flat parameters within the backward pass of one step after the other.

    Args:
        update: what updates them.
        flats: the flat parameters of the model.

    Attributes:
        updated: those that have been updated in this step.

    Raises:
        ValueError: the optimizer updates more than each element by itself, or is differentiable.
    """

    def __init__(self, update: CompiledUpdate, flats: Sequence[FlatParam]) -> None:
        optimizer = update.optimizer
        if type(optimizer) not in ELEMENTWISE or any(group.get("differentiable") for group in optimizer.param_groups):
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"update_in_backward: expected an optimizer that updates elementwise and is not differentiable, one of "
                f"{names}, found {type(optimizer).__name__}; leave update_in_backward out"
            )
        self.updated: list[FlatParam] = []
        self._update, self._flats = update, flats

    @contextmanager
    def running(self, loss: Tensor) -> Iterator[None]:
        """Let units be updated in the backward pass of `loss`, which is run in this block.

        Raises:
            ValueError: a unit was called several times in the forward.
            RuntimeError: the optimizer has step hooks.
        """
        if self._update.has_hooks():
            raise RuntimeError(
                "update_in_backward: expected an optimizer without step hooks, found some, which would see no step of "
                "the whole optimizer; remove them, or leave update_in_backward out"
            )
        check_called_once(loss, self._flats)
        known = {id(param) for group in self._update.optimizer.param_groups for param in group["params"]}
        updates = {each.flat: each for each in self._update.before_backward()}
        for flat in self._flats:
            if flat.only_trains() and all(id(param) in known for param in flat.params):
                flat.reduction.update = partial(self._run, flat, updates.get(flat))
        try:
            yield
        finally:
            for flat in self._flats:
                flat.reduction.update = None

    def _run(self, flat: FlatParam, update: FlatUpdate | None, grad: Tensor) -> None:
        """Update `flat` by `grad`, 1-D `[shard_numel]`."""
        if flat in self.updated:
            raise RuntimeError(
                f"parameter {flat.layout.names[0]}: expected one gradient in a backward pass with update_in_backward, "
                f"found a second one after the update: its unit was called several times"
            )
        self.updated.append(flat)
        if update is not None and len(update.params) == len(flat.params):
            update.run_with(grad)
        else:
            self._update.step_alone(flat, grad)


def check_called_once(loss: Tensor, flats: Sequence[FlatParam]) -> None:
    """Raise ValueError if backward of `loss` reaches the shard of one of `flats` in several ways.

    That is from several forwards of its unit, or from one and from what reads a parameter outside of it.
    """
    by_param = {id(param): flat for flat in flats for param in flat.params}
    shards: dict[Any, FlatParam] = {}
    of_graphs: set[Any] = set()  # nodes between a shard and graphs that do not return its gradient
    for flat in flats:
        if flat.trains and flat.autograd_shard is not None and flat.deferred is not None:
            of_graphs.add(flat.deferred.grad_fn)
            shards |= {flat.autograd_shard.grad_fn: flat, flat.deferred.grad_fn: flat}
    readers: dict[FlatParam, Any] = {}
    work = [loss.grad_fn]
    seen = set(work)
    while work:
        node = work.pop()
        for following, _ in node.next_functions if node is not None and node not in of_graphs else ():
            known = shards.get(following) or by_param.get(id(getattr(following, "variable", None)))
            if known is not None and readers.setdefault(known, node) is not node:
                raise ValueError(
                    f"update_in_backward: expected the unit of {known.layout.names[0]} to be called once in a step, "
                    f"and nothing else to read its parameters, found several gradients that add up; leave "
                    f"update_in_backward out"
                )
            if known is None and following not in seen:
                seen.add(following)
                work.append(following)


def describe_partial(updated: Sequence[FlatParam], flats: Sequence[FlatParam]) -> str:
    """What a failure in the middle has left, for an error."""
    trained = [flat for flat in flats if flat.trains]
    rest = [flat for flat in trained if flat not in updated]
    not_updated = f", and {len(rest)} are not (the first with {rest[0].layout.names[0]})" if rest else ""
    return (
        f"{len(updated)} of {len(trained)} flat parameters are updated (the first with "
        f"{updated[0].layout.names[0]}){not_updated}"
    )
