"""What the server of processes imports before they fork from it (server.py)."""

import os

import fsdp_compile.compare.alike
import fsdp_compile.compare.systems
import fsdp_compile.passes.inductor  # noqa: F401
from fsdp_compile.tools.files import import_for
from fsdp_compile.tools.server import FILE

if FILE in os.environ:
    import_for(os.environ[FILE])
