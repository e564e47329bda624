"""Which tests run: those of every day, or with FSDP_COMPILE_TESTS=nightly all. This module imports no torch."""

import os

NIGHTLY = os.environ.get("FSDP_COMPILE_TESTS") == "nightly"
