"""`FSDPModule`: what a sharded module can do beside what its own class does."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_compile.eager import sharded_forward
from fsdp_compile.eager.inputs import cast_buffers
from fsdp_compile.unit import Unit


class FSDPModule:
    """What a module that `fully_shard` was called on, or that it chose as a unit, is as well as its own class."""

    @staticmethod
    def wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the swapped class: `forward` with the module's units gathered around it."""

        def gathered_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return sharded_forward(self, forward, args, kwargs)

        # A code object for each class: Dynamo counts recompilations per code object, and these are different programs.
        gathered_forward.__code__ = gathered_forward.__code__.replace(co_name="gathered_forward")
        return functools.wraps(forward)(gathered_forward)

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`; with FSDP_COMPILE_FULL_PREC_IN_EVAL=1, buffers change their dtype with the mode."""
        super().train(mode)  # type: ignore[misc]  # a mixin of modules
        cast_buffers(self)
        return self

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Choose whether backward passes from now on reduce the gradients of this module's units and those below.

        Without, gradients add up whole and local, in full size on every rank; the next reduce takes their sum.
        """
        for unit in units_below(self):
            unit.syncs = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce gradients (E-ACC-1). Also usable as a decorator.

        Raises:
            RuntimeError: this module is not the root: a module around it is sharded too.
            ValueError: a forward of this module is under way.
        """
        if not self._fsdp_is_root:  # type: ignore[attr-defined]  # set by fully_shard
            raise RuntimeError(f"no_sync: expected the root module, found {type(self).__name__} inside another sharded "
                               f"module; call it on that one")  # fmt: skip
        check_idle(self, "no_sync")
        units = units_below(self)
        before = [unit.syncs for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, syncs in zip(units, before, strict=True):
                unit.syncs = syncs


def units_below(module: Any) -> list[Unit]:
    """The units of `module` and of all modules below it, each once, in the order of `module.modules()`."""
    found = (unit for each in module.modules() for unit in each.__dict__.get("_fsdp_scope", ()))
    return list(dict.fromkeys(found))


def check_idle(module: Any, what: str) -> None:
    """Raise ValueError if a unit of `module` is gathered for a forward or backward that is under way (E-STATE-4)."""
    for unit in units_below(module):
        if unit.views is not None:
            raise ValueError(f"{what}: expected an idle module, found {unit} in its forward or backward; "
                             f"call it between steps")  # fmt: skip
