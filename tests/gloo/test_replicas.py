"""Replicas that are lost and join: the example, and other ways in which a replica can be lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

ROOT = Path(fsdp_compile.__file__).parents[1]
FAULTS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "examples")
import replicas

def fault(name, shard, step):
    how, victim, of = sys.argv[1:4]
    if (name, shard) == (victim, int(of)) and step == (12 if victim == "c" else 5):
        if how == "raise":
            raise ValueError("a mistake")
        if how == "broken":
            raise RuntimeError("this rank fails whenever it runs the step")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    if (name, shard, step) == ("b", 1, 5) and victim == "c":
        os.kill(os.getpid(), signal.SIGKILL)

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
logs = replicas.launch(Path(sys.argv[4]), fault, lambda step, index: index, timeout=4.0)
ends = {rank: log[-1] for rank, log in logs.items() if log and log[-1][0] == "end"}
print("ended", *sorted(ends))
assert len({str(end[1]) for end in ends.values()}) == 1, ends
"""


def run(*arguments: str, seconds: float = 200) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("how", [[], ["--compile"]])
def test_the_example(how: list[str]) -> None:
    """A replica is killed and another one joins; losses and parameters are those of a run without a failure, bit for
    bit."""
    said = run("examples/replicas.py", *how)
    assert "replica b is lost" in said and "bit for bit" in said, said


@pytest.mark.parametrize(
    ("how", "victim", "shard"),
    [
        pytest.param("kill", "a", 0, marks=pytest.mark.nightly),  # the replica that state would be copied from
        pytest.param("stop", "b", 1, marks=pytest.mark.nightly),
        pytest.param("raise", "b", 0, marks=pytest.mark.nightly),
        pytest.param("kill", "c", 1, marks=pytest.mark.nightly),  # the new one is lost too
    ],
)
def test_other_losses(how: str, victim: str, shard: int, tmp_path: Path) -> None:
    """Whichever replica is lost, and however, two are there at the end with the same parameters."""
    (tmp_path / "faults.py").write_text(FAULTS)
    said = run(str(tmp_path / "faults.py"), how, victim, str(shard), str(tmp_path / "logs"))
    kept = [name for name in "abcd" if name != victim and (name != "b" or victim != "c")][:2]
    assert said.splitlines()[-1] == " ".join(["ended", *(f"{name}{shard}" for name in kept for shard in range(2))])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shards", "how", "optimizer"),
    [("2", "eager", "adamw"), ("1", "eager", "adamw"), ("2", "aot_eager", "adamw"), ("2", "eager", "muon")],
)
def test_the_same_bits(shards: str, how: str, optimizer: str, tmp_path: Path) -> None:
    """With `reduction_order="tree"` losses and parameters are those of one process that takes all microbatches, while
    one replica is away, of two ranks or of one, and after another one has joined: Muon's momentum with it.
    """
    script = Path(__file__).with_name("same_bits_of_replicas.py")
    said = run(str(script), shards, str(tmp_path / "logs"), how, optimizer)
    assert said.endswith("the same bits\n"), said
