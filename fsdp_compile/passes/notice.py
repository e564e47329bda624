"""A line for who waits while a sharded model is compiled."""

import sys
import threading
from typing import Any

import torch.distributed as dist

from fsdp_compile.passes._torch import call_after_compiling


class CompileNotice:
    """Prints on rank 0 that a sharded model is being compiled, if that takes more than `after` seconds."""

    def __init__(self, after: float = 5.0) -> None:
        self.after = after
        self.timer: threading.Timer | None = None  # until the compilation has ended

    def start(self) -> None:
        """Call when a compilation begins."""
        if self.timer is None and (not dist.is_initialized() or dist.get_rank() == 0):
            call_after_compiling(self.end)
            text = "fsdp_compile: compiling a sharded model; later steps do not wait for this"
            self.timer = threading.Timer(self.after, lambda: print(text, file=sys.stderr))
            self.timer.daemon = True
            self.timer.start()

    def end(self, _: Any = None) -> None:
        """Call when the compilation has ended."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
