"""Processes that fork from a server, which has imported once what they need. This module imports no torch.

A command starts the server before it imports torch itself: both do so at the same time.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

FILE = "FSDP_COMPILE_SERVED_FILE"  # in the server's environment: the user's file, whose imports it has ready
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}  # Inductor's own processes do not survive a fork


def start_server(factory: str = "") -> "ForkServerContext":
    """Start the server, unless it runs; `FILE.py:FUNCTION` is what its processes will load."""
    from multiprocessing import forkserver, get_context  # what --help has no time for

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RANK" not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = factory.rpartition(":")[0]
    if path.endswith(".py"):
        os.environ[FILE] = path
    context = get_context("forkserver")
    context.set_forkserver_preload(["fsdp_compile.tools.served"])
    forkserver.ensure_running()
    return context
