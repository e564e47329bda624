"""Run a command quietly, and say what it does and for how long: `narrate.py WHAT COMMAND...`.

A line at the beginning, one every 5 seconds and one at the end, on any kind of output; what the command itself prints
is shown only if it fails, whose exit status is then this script's. Needs nothing but Python's standard library.
"""

import subprocess
import sys
import tempfile
import time

INTERVAL = 5.0  # seconds


def main(what: str, command: list[str]) -> int:
    """Run `command`; the exit status."""
    begin = time.monotonic()
    print(f"{what} ...", flush=True)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                status = process.wait(timeout=INTERVAL)
                break
            except subprocess.TimeoutExpired:
                print(f"{what}: {time.monotonic() - begin:.0f} s", flush=True)
        if status:
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
    print(f"{what}: {'failed' if status else 'done'} after {time.monotonic() - begin:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
