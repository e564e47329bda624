"""A copy of this process that works, while this one trains: what it compiles is in the compiler's caches then.

Note [Why a process compiles and plans]
Tracing and Inductor change what all threads of a process see: modules' calls, the flag that stops compiled functions
within a trace, and the state of the random generator, which they put back when they end. So a thread that compiles
would change the numbers that training draws meanwhile. A copy of the process has all that there is to compile, and
nothing that it does is seen but files. Planning changes nothing, but Python threads take turns: a step would wait for a
thread that plans wherever it comes back from a kernel.

A copy talks to nobody. It closes all sockets at once, or a rank that is killed would seem alive as long as its copy,
and it asks no other rank anything. It has no GPU, as CUDA does not survive a copy.
"""

import atexit
import ctypes
import gc
import logging
import os
import secrets
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from fsdp_compile.passes import agreement
from fsdp_compile.passes._torch import inductor_config

LIMIT = 1800.0  # seconds that a copy may take
_DIE_WITH_PARENT = 1  # of prctl
_LATER = 10  # less urgent than training: beside a thread that trains it has a tenth of a core, and that one the rest


class Child:
    """A copy of this process that calls `work`, and then ends. OSError or AttributeError if it cannot be made.

    Args:
        work: returns text.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        parent, self._place = os.getpid(), f"learning/child/{os.getpid()}/{secrets.token_hex(8)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of copies of processes with threads, from 3.12 on
            self._pid = os.fork()
        if not self._pid:
            _run_in_copy(work, parent, self._place)
        self._until = time.monotonic() + LIMIT
        self._status: int | None = None
        atexit.register(self.stop)

    @property
    def status(self) -> str:
        """ "compiling", "ready" or "failed"."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self._pid, 0
            if pid:
                self._status = status
                atexit.unregister(self.stop)
            elif time.monotonic() > self._until:
                self.stop()
        return "compiling" if self._status is None else "failed" if self._status else "ready"

    @property
    def result(self) -> str:
        """What `work` has returned, once."""
        text = agreement.kept(self._place) or ""
        agreement.forget(self._place)
        return text

    def stop(self) -> None:
        """End it."""
        if self._status is None:
            self._status = 1
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            atexit.unregister(self.stop)


def _run_in_copy(work: Callable[[], str], parent: int, place: str) -> None:
    try:
        gc.disable()  # nothing that owns a socket may find its number taken by a file
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.closerange(3, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))
        logging.disable()
        os.nice(_LATER)
        agreement.be_alone()
        inductor_config.compile_threads = 1  # the others are not in the copy
        agreement.keep(place, work())
        os._exit(0)
    except BaseException:
        if os.environ.get("FSDP_COMPILE_PRINT", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        os._exit(1)
