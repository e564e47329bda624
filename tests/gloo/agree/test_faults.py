"""One rank fails, in every stage: the others raise within the group's timeout, with the collective and the unit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

from ..faults import TIMEOUT

LATE = r"^RuntimeError: .*([Tt]imed out|[Tt]imeout|closed by peer|reset by peer|Broken pipe).* This was the .*{where}"
LOST = r"^RuntimeError: .*(closed by peer|reset by peer|Broken pipe).* This was the .*{where}"
NO_SIGN = r"|^RuntimeError: compiled graph: .* found no sign of rank 1 for \d+ s"  # the comparison waits as long
SAID = {  # by scenario, what the other ranks say; rank 1 in the same place of a pair
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
}
HYBRID = r"(all-gather|reduce) of .*HYBRID_SHARD\) in (forward|backward)"  # in each of which other ranks wait
MISSING = (
    r"^RuntimeError: .*([Tt]imed out|[Tt]imeout|closed by peer|reset by peer|Broken pipe).* This was {where}\.; "
    r"newest checkpoint: step-0000000{newest}$"
)
TOLD = r"^CheckpointError: {where}: rank 1: {text} newest checkpoint: step-0000000{newest}$"
SAID_OF_CHECKPOINTS = {
    "raise": (TOLD.replace("{text}", "the user's code fails"),) * 2,
    "out of memory": (TOLD.replace("{text}", "out of memory"),) * 2,
    "stop": (MISSING, None),
    "kill": (MISSING, None),
}
CHECKPOINTS = {  # by stage, what is being done, and the newest checkpoint after it
    "save": ("saving step 2 in .*", 1),
    "write": ("saving step 2 in .*", 1),
    "load": ("loading .*step-00000002", 2),
}
EARLY = (  # the ranks that send need not wait, and come to the first comparison
    r"^RuntimeError: .*([Tt]imed out|[Tt]imeout|closed by peer|reset by peer|Broken pipe).* This was the broadcast of "
    r"\d parameters and buffers in fully_shard|^RuntimeError: \w+ forward: .* found no sign of rank 1 for \d+ s"
)
ROWS = [
    (scenario, stage, "eager")
    for scenario in ("raise", "out of memory", "stop", "kill")
    for stage in ("forward", "backward", "optimizer", "save", "write")
]
ROWS += [  # a checkpoint does not depend on what runs the model, nor the wait of others on why a rank is late
    (scenario, stage, how)
    for how in ("aot_eager", "inductor")
    for scenario in ("stop", "kill")
    for stage in ("forward", "backward", "optimizer")
]
ROWS += [(scenario, stage, "eager") for scenario in ("stop", "kill") for stage in ("construction", "first forward")]
ROWS += [(scenario, "load", "eager") for scenario in ("raise", "stop", "kill")]
ROWS += [(scenario, "forward", how) for how in ("eager", "aot_eager", "inductor") for scenario in ("batch", "option")]
ROWS += [("skip", "forward", how) for how in ("eager", "aot_eager", "inductor")] + [("cache", "forward", "inductor")]
ROWS += [
    ("stop", stage, f"{how} hybrid")
    for how in ("eager", "aot_eager")
    for stage in ("forward", "backward", "optimizer", "write")
]


def _expected(scenario: str, stage: str, how: str) -> dict[str, str]:
    """By rank, the pattern of what it says."""
    is_hybrid = how.endswith("hybrid")
    ranks = ["0", "2", "3"] if is_hybrid else ["0", "2"]
    if stage in ("construction", "first forward"):
        return dict.fromkeys(ranks, EARLY)
    doing, newest = CHECKPOINTS.get(stage, ("", 0))
    others, odd = (SAID_OF_CHECKPOINTS if doing else SAID)[scenario]
    where = doing or (HYBRID if is_hybrid else WHERE[stage])
    if stage == "forward" and how.startswith("aot_eager") and scenario in ("stop", "kill"):
        others += NO_SIGN
    named = {"where": where, "newest": newest}

    def pattern(text: str) -> str:
        for name, value in named.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    return {rank: pattern(others) for rank in ranks} | ({"1": pattern(odd)} if odd is not None else {})


def _run(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    package = str(Path(fsdp_compile.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": package}
    command = [
        sys.executable,
        str(Path(__file__).parents[1].joinpath("faults.py")),
        str(folder),
        *(w for row in rows for w in row),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90 * len(rows))
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    wrong = []
    for line in found:
        print(json.dumps(line))
        (scenario, stage, how), said = line["row"], line["said"]
        limit = TIMEOUT[how.split()[0]]
        for rank, pattern in _expected(scenario, stage, how).items():
            seconds, text = said.get(rank, [None, "nothing"])
            in_time = scenario == "option" if seconds is None else seconds <= limit + 5
            if not re.search(pattern, text, re.DOTALL) or not in_time:
                wrong.append(f"rank {rank} in {line['row']}: {seconds} s: {text}")
    assert len(found) == len(rows), f"{found}\n{run.stderr[-4000:]}"
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_fault_table(tmp_path: Path, how: str) -> None:
    """Raise, out of memory, SIGSTOP, SIGKILL, another batch size, another option, a skipped step, a cache on one rank;
    in construction, forward, backward, optimizer, save, load; on three ranks, and on two replicas of two.
    """
    _run(tmp_path, [row for row in ROWS if row[2].split()[0] == how])
