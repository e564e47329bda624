"""One rank fails, in every stage: the others learn it in seconds, and which collective, unit and rank it was."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

from .faults import WATCHDOG

LATE = (
    r"^RuntimeError: .*{where}.*: expected all ranks within {limit} s .*, found no sign of rank 1; ranks 0, 2 in the "
)
LOST = r"^RuntimeError: .*(closed by peer|reset by peer|Broken pipe).* This was the .*{where}"
SAID = {  # by scenario, what ranks 0 and 2 say; rank 1 in the same place of a pair
    "raise": (LATE, "^ArithmeticError"),
    "out of memory": (LATE, "^OutOfMemoryError"),
    "stop": (LATE, None),
    "kill": (LOST, None),
    "skip": (LATE, "^$"),
    "batch": ("^$", "^$"),
    "cache": ("^$", "^$"),
    "option": (r"^RuntimeError: \w+ forward: .* ranks 0, 2: .*; rank 1: .*bfloat16",) * 2,
}
WHERE = {  # by stage, the collective that the others wait for
    "forward": r"all-gather of .*Linear, FULL_SHARD\) in forward",
    "backward": r"(all-gather|reduce) of .*in backward",
    "optimizer": r"all-gather of .*in forward",
    "save": r"all-gather of objects",
}
DAILY = [("stop", "forward", "eager")]
ROWS = [
    (scenario, stage, how)
    for how in ("eager", "aot_eager")
    for scenario in ("raise", "out of memory", "stop", "kill")
    for stage in ("forward", "backward", "optimizer")  # a save is within torch: it waits for the timeout of the group
]
ROWS += [(scenario, "forward", how) for how in ("eager", "aot_eager", "inductor") for scenario in ("batch", "option")]
ROWS += [("skip", "forward", how) for how in ("eager", "aot_eager", "inductor")] + [("cache", "forward", "inductor")]
ROWS += [("stop", "backward", "inductor"), ("raise", "forward", "inductor"), ("kill", "backward", "inductor")]


def _run(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    package = str(Path(fsdp_compile.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": package}
    command = [
        sys.executable,
        str(Path(__file__).with_name("faults.py")),
        str(folder),
        *(w for row in rows for w in row),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90 * len(rows))
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    wrong = []
    for line in found:
        print(json.dumps(line))
        (scenario, stage, how), said = line["row"], line["said"]
        others, odd = SAID[scenario]
        expected = {"0": others, "2": others} | ({"1": odd} if odd is not None else {})
        for rank, pattern in expected.items():
            seconds, text = said.get(rank, [None, "nothing"])
            pattern = pattern.replace("{where}", WHERE[stage]).replace("{limit}", str(WATCHDOG[how]))
            in_time = scenario == "option" if seconds is None else seconds <= WATCHDOG[how] + 5
            if not re.search(pattern, text, re.DOTALL) or not in_time:
                wrong.append(f"rank {rank} in {line['row']}: {seconds} s: {text}")
    assert len(found) == len(rows), f"{found}\n{run.stderr[-4000:]}"
    assert not wrong, "\n".join(wrong)


def test_a_rank_fails(tmp_path: Path) -> None:
    """A rank is stopped: the others raise when the time of the watchdog is up, and name it."""
    _run(tmp_path, DAILY)


@pytest.mark.nightly
def test_fault_table(tmp_path: Path) -> None:
    """Raise, out of memory, SIGSTOP, SIGKILL, another batch size, another option, a skipped step, a cache on one rank;
    in forward, backward and optimizer; eager, `aot_eager` and Inductor.
    """
    _run(tmp_path, ROWS)
