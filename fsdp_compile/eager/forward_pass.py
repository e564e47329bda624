"""What belongs to one forward of a root, and the layers that hear of it: the runtime calls none of these by name."""

import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fsdp_compile.core.backward_pass import BackwardPass
from fsdp_compile.core.unit import Unit


class ForwardPass:
    """One forward of a root, or of a sharded module that runs outside of one.

    Args:
        root: the `Runtime`.
        of_root: whether it is a forward of the root.
        kind: forwards of one kind do the same: whether gradients are recorded, and whether the module trains.

    Attributes:
        shared: the `UnshardedUnit`s of several modules that it has gathered; the root closes them.
        ended: how many forwards of each unit have ended in it; the last one last.
        has_gathered: whether it has come to a unit.
        has_communicated: whether that was one that is split: other ranks run this forward too.
        lines: what it has done that ranks compare at its end, besides the order of its units.
        written: by unit what the forward may have written to its own parameters (edits/own_writes.py).
    """

    def __init__(self, root: Any, of_root: bool = False, kind: tuple[bool, bool] | None = None) -> None:
        self.root, self.of_root, self.kind = root, of_root, kind
        self.shared: list[Any] = []
        self.ended: dict[Unit, int] = {}
        self.has_gathered = self.has_communicated = False
        self.lines: list[str] = []
        self.written: dict[Unit, Any] = {}

    @property
    def last(self) -> "weakref.ref[Unit] | None":
        """The unit whose forward, its only one in this pass, ended just before the root's."""
        unit = next(reversed(self.ended), None)
        return None if unit is None or self.ended[unit] > 1 else weakref.ref(unit)


class Listener:
    """What a layer hears of the passes over one root, whose `Runtime` makes it; it overrides what it needs."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def check(self, module: nn.Module) -> None:
        """A forward of the root, `module`, is about to begin: raise ValueError if none can be right."""

    def compare(self, module: nn.Module, settings: str, compiled: bool) -> bool:
        """The first forward that communicates is about to begin; return whether ranks need not be compared again."""
        return True

    def begin_forward(self, forward: ForwardPass, module: nn.Module) -> None:
        """A forward of the root, `module`, begins."""

    def complete_forward(self, forward: ForwardPass) -> None:
        """A forward of the root has come to its end; all ranks are there."""

    def end_forward(self) -> None:
        """A forward of the root has ended or failed."""

    def before_values(self, unit: Unit) -> None:
        """The values of `unit` are about to be gathered for a forward, perhaps early."""

    def before_gather(self, unit: Unit, forward: ForwardPass) -> None:
        """`forward` has come to `unit`, and is about to gather it, or to take what was gathered early."""

    def in_forward(self, gathered: Any) -> None:
        """Module code may read `gathered`, an `UnshardedUnit`, from here on."""

    def after_forward(self, gathered: Any, module: nn.Module) -> None:
        """The forward of `module` has ended, and `gathered` is about to be freed."""

    def after_split(self, units: Sequence[Unit]) -> None:
        """The eager forward of a block has ended for which `units` were gathered as a graph reads them."""

    def kept_tensors(self, module: nn.Module) -> Iterable[Tensor]:
        """Tensors beside outputs that outlive the forward of `module`: backward may begin there."""
        return ()

    def stays(self, module: nn.Module, unit: Unit, opaque: type | None) -> None:
        """`unit` stays unsharded until backward: the type of an output hides tensors, or something left otherwise."""

    def before_backward(self, gathered: Any, backward: BackwardPass, was_prefetched: bool) -> None:
        """`backward` has come to `gathered`, and is about to gather it again where it was freed."""

    def in_backward(self, gathered: Any, backward: BackwardPass) -> None:
        """`backward` may read `gathered` from here on."""

    def after_backward(self, gathered: Any, backward: BackwardPass | None) -> None:
        """All gradients of `gathered` are there, and are about to be reduced."""

    def after_reduce(self, gathered: Any) -> None:
        """The gradients of `gathered` are on their way, or are kept for a later reduce."""


def heard_by(listeners: Sequence[Listener]) -> SimpleNamespace:
    """For each method of a listener the bound ones of those that override it, in the order of `listeners`."""
    methods = {name: method for name, method in vars(Listener).items() if not name.startswith("_")}
    return SimpleNamespace(**{
        name: tuple(getattr(each, name) for each in listeners if getattr(type(each), name) is not method)
        for name, method in methods.items()
    })  # fmt: skip
