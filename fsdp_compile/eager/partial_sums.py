"""The sum of a step's gradients as one binary tree over its microbatches, wherever these are computed.

With `fully_shard(..., reduction_order="tree")`. Four microbatches on one rank, which accumulates three of them under
no_sync, and on two ranks, each of which accumulates one; the additions are the same:

    rank 0 | 0    1    2    3        rank 0 | 0    1    rank 1 | 2    3
           | 0 + 1     2 + 3                | 0 + 1            | 2 + 3         before the reduce
           | (0 + 1) + (2 + 3)              | (0 + 1) + (2 + 3)                by the reduce (comm/collectives.py)

A microbatch is one backward pass of a root. What it gives a flat parameter, also in several parts, is a leaf.
"""

import torch
from torch import Tensor

from fsdp_compile.core.backward_pass import BackwardPass, running_backward

# Note [Microbatches that a flat parameter takes no part in]
# A unit that one microbatch does not use (an expert without tokens) has no leaf there, on whichever rank that is. The
# leaf counts as zeros, which keep the others in their places. Adding zeros makes a sum of -0.0 into 0.0, so they are
# added where they are missing too.


class Microbatches:
    """Which microbatch of a step the running backward pass of a root is."""

    def __init__(self) -> None:
        self.index = 0
        self._counted: BackwardPass | None = None

    def begin(self, is_first: bool) -> None:
        """Count the running backward pass, which was not counted yet; `is_first`: a step begins with it.
        RuntimeError within a reentrant checkpoint, whose backward pass is not that of a microbatch.
        """
        backward = running_backward()
        if backward is not None and backward.is_nested:
            raise RuntimeError(
                "reduction_order='tree': a reentrant checkpoint runs backward passes of its own, which cannot be told "
                "from those of microbatches; call torch.utils.checkpoint with use_reentrant=False"
            )
        self.index = 0 if is_first else self.index + 1
        self._counted = backward

    @property
    def has_begun(self) -> bool:
        """Whether the running backward pass is counted."""
        return self._counted is running_backward()


class PartialSums:
    """Sums of some of a flat parameter's leaves, which add up to the gradient in the order of the tree.

    There is one for each complete subtree that waits for its sibling, so at most about log2 of the number of leaves,
    and the last leaf, to which its backward pass may still add.
    """

    def __init__(self) -> None:
        self._complete: list[tuple[int, int, Tensor]] = []  # first leaf, height and sum of a subtree, from the left
        self._leaf: tuple[int, Tensor] | None = None

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to leaf `index` a gradient, 1-D, which this owns from now on. No earlier leaf follows."""
        if self._leaf is not None and self._leaf[0] == index:
            self._leaf[1].add_(gradient)
            return
        self._complete_leaf()
        self._leaf = (index, gradient)

    def _complete_leaf(self) -> None:
        if self._leaf is not None:
            (first, total), self._leaf = self._leaf, None
            self._raise_subtrees(before=first)
            self._push_subtree(first, 0, total)

    def _raise_subtrees(self, before: int) -> None:
        """Let subtrees become their parents if these end before leaf `before`: their right siblings have no leaves."""
        while self._complete and (top := self._complete[-1])[0] + (2 << top[1]) <= before:
            first, height, total = self._complete.pop()
            self._push_subtree(first, height + 1, total.add_(0.0))

    def _push_subtree(self, first: int, height: int, total: Tensor) -> None:
        """Add a subtree, and join it with the siblings to the left that it completes."""
        while first >> height & 1:
            first -= 1 << height
            has_sibling = bool(self._complete) and self._complete[-1][:2] == (first, height)
            total = self._complete.pop()[2].add_(total) if has_sibling else total.add_(0.0)
            height += 1
        self._complete.append((first, height, total))

    def parts(self) -> list[Tensor]:
        """All sums, 1-D; their own sum is the gradient so far."""
        return [total for *_, total in self._complete] + ([self._leaf[1]] if self._leaf is not None else [])

    def so_far(self, before: Tensor | None = None) -> Tensor:
        """The gradient so far, 1-D: a part itself if there is but one, else a tensor of its own: `before` if that,
        which an earlier call has returned, is one.
        """
        first, *others = parts = self.parts()
        if not others:
            return first
        total = torch.add(first, others[0], out=None if any(before is part for part in parts) else before)
        for other in others[1:]:
            total.add_(other)
        return total

    def finish(self, leaves: int) -> Tensor:
        """The sum of the tree of so many leaves, 1-D."""
        self._complete_leaf()
        self._raise_subtrees(before=2 * leaves - 1)
        [(_, _, total)] = self._complete
        return total
