"""`python -m fsdp_compile`: the command `fsdp-compile`."""

import sys

from fsdp_compile.tools.cli import main

sys.exit(main())
