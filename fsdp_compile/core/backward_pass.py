"""What belongs to one backward pass of autograd: made where it first reaches a sharded model, gone when it has ended.

A reentrant checkpoint runs a backward pass within another one, and each has an object of its own. Whoever needs to know
in which pass something happened keeps that object, and compares it with the running one.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fsdp_compile.comm._torch import current_backward
from fsdp_compile.core._torch import call_after_backward, executes_node, never_compile


class BackwardPass:
    """A backward pass that has reached a sharded model.

    Attributes:
        begun: the `GradientReduction`s that have reduced in it, all that was accumulated under no_sync included.
        results: for each of them the reduced gradients, `[shard_numel]`, that its flat shard is still to get.
        is_nested: whether it runs within another one, as that of a reentrant checkpoint does.
        is_over: whether it has ended or failed; not while another one runs within it.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.is_nested = any(other.thread == self.thread for other in _running.values())
        self.is_over = False
        self.begun: set[object] = set()
        self.results: dict[object, list[Tensor]] = {}
        self._asked_once: list[object] = []
        self._last: deque[tuple[Callable[[], Any], Callable[[], Any] | None]] = deque()

    def at_end(self, call: Callable[[], Any], if_failed: Callable[[], Any] | None = None) -> None:
        """Call `call` when the pass has ended without error, in the order of these requests, else `if_failed`."""
        self._last.append((call, if_failed))

    def at_end_once(self, what: object, call: Callable[[], Any]) -> None:
        """As `at_end`, unless that was asked for `what` before."""
        if all(each is not what for each in self._asked_once):
            self._asked_once.append(what)
            self.at_end(call)

    def end(self) -> None:
        """Call what was left to the end, and what that leaves to it."""
        while self._last:
            self._last.popleft()[0]()
        self._close()

    def fail(self) -> None:
        """Undo what was left to an end that does not come."""
        while self._last:
            _, if_failed = self._last.popleft()
            if if_failed is not None:
                if_failed()
        self._close()

    def _close(self) -> None:  # others may keep this object, to compare it
        self.is_over = True
        self.begun.clear()
        self.results.clear()
        self._asked_once.clear()


_running: dict[int, BackwardPass] = {}  # by autograd's number, which is never used again; threads of a pass share it


def running_backward() -> BackwardPass | None:
    """The backward pass that runs in this thread, also while functions left to its end run; None outside of one."""
    number = current_backward()
    if number == -1:
        return None
    running = _running.get(number)
    if running is None:
        call_after_backward(partial(_end_pass, number), if_failed=partial(_fail_pass, number))
        running = _running[number] = BackwardPass()  # last: an interrupt would leave it here for ever
    return running


def _end_pass(number: int) -> None:
    _running[number].end()
    del _running[number]


def _fail_pass(number: int) -> None:
    running = _running.pop(number, None)
    if running is not None:
        running.fail()


def call_with_gradients(tensors: Sequence[Tensor], method: weakref.WeakMethod[Any]) -> Callable[[], None]:
    """Call `method`, while it is there, in a backward pass that has computed the gradients of all `tensors` in its way.

    Return what ends that. As `register_multi_grad_hook`, which fails for leaves in `torch.autograd.grad`: whether such
    a pass reaches a leaf, nobody can tell, so `method` is called there if it reaches all.
    """
    nodes, left = [get_gradient_edge(each).node for each in tensors], dict[BackwardPass | None, int]()

    @never_compile
    def hook(_grad: Tensor) -> None:
        now = running_backward()
        if now not in left:
            try:
                left[now] = sum(map(executes_node, nodes))
            except RuntimeError:
                left[now] = len(nodes)
        left[now] -= 1
        if left[now] == 0:
            del left[now]
            if (call := method()) is not None:
                call()

    handles = [each.register_hook(hook) for each in tensors]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
