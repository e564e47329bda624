"""What to run when a GPU is there, in the order of worth: 40 minutes at most, and fewer where a part is done.

    python tools/gpu_day.py FOLDER                run the parts that FOLDER has no success of
    python tools/gpu_day.py FOLDER --list         say what would run, with limits in minutes
    FSDP_COMPILE_RESULTS=FOLDER python -m bench report        tables and pictures of what was measured

FOLDER has for each part `NAME.log`, all that it printed, and `NAME.json` with its exit status, its seconds and the
commit. A part that was cut off at its limit, or that failed, runs again the next time. Results of the benchmark go
there too, so that a machine that is lent needs to give back one folder.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MINUTES = 40


class Part(NamedTuple):
    """A command, and after how many minutes it is stopped."""

    name: str
    minutes: float
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def drawn(seed: int, count: int = 6) -> tuple[str, ...]:
    """Files of tests/gloo, drawn by chance: the draw of a seed is always the same."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gloo").rglob("test_*.py"))
    return tuple(random.Random(seed).sample(files, count))


def parts(seed: int = 0) -> tuple[Part, ...]:
    """All parts, the one that is worth most first."""
    python = sys.executable
    tests = (python, "-m", "pytest", "--no-header", "-q", "-p", "no:cacheprovider")
    bench = (python, "-m", "bench")
    return (
        Part("selfcheck", 3, (python, "-m", "fsdp_compile", "selfcheck")),
        Part("tests_gpu", 7, (*tests, "tests/gpu")),
        Part("cuda_link", 10, (*bench, "cuda_link", "--rounds", "3")),
        Part("cuda_step", 7, (*bench, "cuda_step", "--rounds", "3")),
        Part("memory", 5, (*bench, "cuda_link", "--rounds", "1", "--dry", "--systems", "fsdp2_compile:ends",
                           "simple_fsdp", "ours_blocks", "ours_compiled")),
        Part("nccl_draw", 8, (*tests, *drawn(seed)), (("FSDP_COMPILE_RANKS_ON", "cuda"),)),
    )  # fmt: skip


def is_done(folder: Path, part: Part) -> bool:
    """Whether the folder has a success of the part."""
    try:
        return bool(json.loads((folder / f"{part.name}.json").read_text())["rc"] == 0)
    except (OSError, ValueError, KeyError, TypeError):  # anything else is none
        return False


def run(part: Part, folder: Path) -> dict[str, Any]:
    """Run a part, with all that it starts, and note how it ended. A part that is stopped has the exit status 124."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "FSDP_COMPILE_RESULTS": str(folder), **dict(part.environment)}
    begin = time.monotonic()
    with (folder / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(60 * part.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = 124
    found = {
        "rc": status,
        "seconds": round(time.monotonic() - begin, 1),
        "command": [*part.command],
        "commit": commit(),
    }
    (folder / f"{part.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def commit() -> str:
    """The commit that is checked out; empty outside of a checkout."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()


def run_all(todo: Sequence[Part], folder: Path) -> int:
    """Run parts that are not done; how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in todo:
        if is_done(folder, part):
            print(f"{part.name}: done before", flush=True)
            continue
        print(f"{part.name}: at most {part.minutes:g} minutes", flush=True)
        found = run(part, folder)
        failed += found["rc"] != 0
        print(f"{part.name}: exit status {found['rc']} after {found['seconds']} s", flush=True)
    return failed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=lambda text: Path(text).resolve(), help="for all that is found")
    arguments.add_argument("--list", action="store_true", help="run nothing")
    arguments.add_argument("--only", nargs="+", help="only these parts")
    arguments.add_argument("--seed", type=int, default=0, help="of the draw of tests that run by NCCL")
    args = arguments.parse_args()
    known = parts(args.seed)
    if unknown := set(args.only or ()) - {part.name for part in known}:
        arguments.error(f"--only: expected names among {', '.join(part.name for part in known)}, found "
                        f"{', '.join(sorted(unknown))}")  # fmt: skip
    chosen = [part for part in known if args.only is None or part.name in args.only]
    if args.list:
        for part in chosen:
            state = "done" if is_done(args.folder, part) else f"{part.minutes:g} minutes"
            print(f"{part.name:12} {state:12} {' '.join(part.command[1:])}")
        return
    sys.exit(1 if run_all(chosen, args.folder) else 0)


if __name__ == "__main__":
    main()
