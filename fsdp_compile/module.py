"""`FSDPModule`: what a sharded module can do beside what its own class does."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_compile.eager import sharded_forward


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
