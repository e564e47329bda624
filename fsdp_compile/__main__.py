"""`python -m fsdp_compile`: the command `fsdp-compile`."""

import sys

from fsdp_compile.command_line import main

sys.exit(main())
