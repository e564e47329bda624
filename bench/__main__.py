"""`python -m bench`: run every measurement and write its figures to `bench/results/`.

python -m bench eager_peers --quick    runs one, with its own options
"""

import subprocess
import sys

MEASUREMENTS = ("host_overhead", "compile_time", "eager_peers", "regional", "checkpoint")


def main() -> None:
    """Each in a process of its own: they start process groups."""
    chosen, options = sys.argv[1:2] or list(MEASUREMENTS), sys.argv[2:]
    if unknown := set(chosen) - set(MEASUREMENTS):
        sys.exit(f"bench: error: expected one of {', '.join(MEASUREMENTS)}, found {', '.join(unknown)}")
    for name in chosen:
        status = subprocess.run([sys.executable, "-m", f"bench.{name}", *options]).returncode
        if status:
            sys.exit(status)


main()
