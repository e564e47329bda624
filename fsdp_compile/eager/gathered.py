"""One forward's full views of a unit, from gather to the end of its backward.

    forward:   gather -> module code reads the views -> free
    backward:  gather again (first gradient reaches an output) -> module code may read the views (recomputation) ->
               free (all gradients of the views are there) -> pack, reduce

Freeing resizes the storage to zero bytes: autograd's saved views stay valid objects and are filled again in place.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_compile import collectives
from fsdp_compile.eager.torch_private import call_after_backward, current_backward, tree_leaves
from fsdp_compile.unit import Unit

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class Gathered:
    """The full views that one forward of `unit` gathered, and the storage beneath them.

    Owned by the graph of that forward, through the hooks on its outputs: it goes when the graph goes.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        unit.refresh()
        self.views = unit.unshard()
        self.storage = max((view.untyped_storage() for view in self.views), key=lambda storage: storage.nbytes())
        self.nbytes = self.storage.nbytes()
        self.versions = [param._version for param in unit.params]
        self.backward = -1  # the backward pass that has opened the views
        self.recomputed_into = False  # whether a forward recomputed in backward reads these views
        unit.views, unit.views_backward = self.views, current_backward()

    def end_forward(self, output: Any) -> None:
        """Arrange for backward; free the storage if the unit reshards after forward and backward can fill it again."""
        if not torch.is_grad_enabled():
            return  # nothing was saved: the storage goes with its last view
        self.unit.awaiting_backward.add(self)
        hooked = self._hook_outputs(output)
        self.hook_gradients()
        if hooked and self.unit.reshard_after_forward and not self.unit.is_root:
            self._free()

    def _hook_outputs(self, output: Any) -> bool:
        """Gather again when a gradient reaches an output.

        False if the storage must stay: an output lies in it, or might hide tensors from us.
        """
        leaves = tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # an autograd leaf is an input passed through
                leaf.register_hook(self._before_backward)
        return all(isinstance(leaf, (Tensor, *_PLAIN)) and not self._holds(leaf) for leaf in leaves)

    def _holds(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return False
        return leaf.untyped_storage().data_ptr() == self.storage.data_ptr()

    def hook_gradients(self) -> None:
        """Free as soon as every view has its gradient, before these are packed.

        With frozen parameters in the unit, their consumers may still have to run then: the end of backward frees.
        """
        node = next((view.grad_fn for view in self.views if view.grad_fn is not None), None)
        split = node.next_functions[0][0] if node else None  # view <- split <- gathered buffer: ops.view_parameters
        if split is not None and not self.unit.frozen:
            split.register_prehook(_weak_call(self._gradients_ready))

    def _before_backward(self, _grad: Tensor) -> None:
        if self.backward != current_backward():
            self.open()

    def open(self) -> None:
        """Make the views readable for the running backward pass: gather again if the storage was freed."""
        self.backward = current_backward()
        call_after_backward(self.close)
        if self.storage.nbytes() == 0:
            self._gather_again()
        self.unit.views, self.unit.views_backward = self.views, self.backward

    def _gradients_ready(self) -> None:
        # Several forwards of one unit recomputed in one backward all read these views: wait for the last of them.
        if not (self.recomputed_into and len(self.unit.awaiting_backward) > 1):
            self.close()

    def close(self) -> None:
        """The backward pass needs the views no longer: free the storage."""
        self.unit.awaiting_backward.discard(self)
        if self.unit.views is self.views:
            self.unit.views = None
        if self.unit.layout.world_size > 1:
            self._free()

    def _gather_again(self) -> None:
        unit = self.unit
        self._check_unchanged()
        self.storage.resize_(self.nbytes)
        # A tensor of its own, so that the write does not count as an in-place change of the saved views.
        full = unit.shard.new_empty(0).set_(self.storage, 0, (unit.layout.numel,), (1,))
        _, group, group_size, _ = unit.unshard_args
        collectives.all_gather_into(full, unit.shard, group_size, group)

    def _check_unchanged(self) -> None:
        for name, param, version in zip(self.unit.layout.names, self.unit.params, self.versions, strict=True):
            if param._version != version:
                raise RuntimeError(
                    f"parameter {name}: expected the values of the forward pass in its backward pass, found it "
                    f"changed in place in between; run backward before the optimizer's step"
                )

    def _free(self) -> None:
        self.storage.resize_(0)


def open_for_recomputation(unit: Unit) -> None:
    """Give `unit` views while backward recomputes a forward: those of the forward that is being recomputed.

    Without one (a reentrant checkpoint ran its first forward without gradients) the recomputed forward is the real one
    and gathers for itself.
    """
    gathered: Gathered | None = next(iter(unit.awaiting_backward), None)
    if gathered is None:
        gathered = Gathered(unit)
        gathered.hook_gradients()
        call_after_backward(gathered.close)  # also keeps it until then
        return
    gathered.recomputed_into = True
    gathered.open()


def _weak_call(method: Callable[[], None]) -> Callable[[Any], None]:
    """A hook on a node of the graph must not own the views, which own that node: no collector sees such a ring."""
    weak = weakref.WeakMethod(method)

    def hook(_grads: Any) -> None:
        target = weak()
        if target is not None:
            target()

    return hook
