"""`make fuzz ARGS="--cases 200 --seed 1 --world 2 --how eager"`: draws cases, runs them, shrinks what fails."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from gloo.ranks import Ranks, RanksFailed

from .cases import Case, draw
from .shrink import shrink

LIMITS = {"eager": 25.0, "aot_eager": 90.0, "joint": 120.0, "inductor": 240.0}  # seconds of one case
START = 120.0  # seconds in which ranks start


class Fuzzer:
    """Runs cases on a pool of ranks, which it starts again after a failure.

    Args:
        folder: for files of the ranks.
        world_size: how many ranks.
        how: "eager", "aot_eager", "joint" (with the passes on joint graphs) or "inductor".
    """

    def __init__(self, folder: Path, world_size: int, how: str) -> None:
        self.how, self.ranks = how, Ranks(world_size, folder, LIMITS[how], "spawn")
        self.invalid = 0

    def failure(self, case: Case) -> str | None:
        """What goes wrong, or None."""
        from .run import INVALID, attempt

        if not self.ranks.workers:
            self.ranks.limit = START
            self.ranks.run(attempt, Case(), "eager")
            self.ranks.limit = LIMITS[self.how]
        try:
            found = self.ranks.run(attempt, case, self.how)
        except RanksFailed as error:
            return str(error)
        raised = ["Traceback" in str(text) for text in found]
        if any(raised) and not all(raised):
            self.ranks.stop()  # they may no longer be together
        if INVALID in found:
            self.invalid += 1
            print(f"invalid: {case}", flush=True)
            return None
        return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), None)

    def shrunk(self, case: Case, failure: str) -> Case:
        """The smallest case that fails in the same way."""
        return shrink(case, lambda smaller: kind_of(self.failure(smaller)) == kind_of(failure))


def kind_of(failure: str | None) -> str:
    """Failures of one kind are taken for one defect: the last line of an error, without numbers, or the fact."""
    if failure is None:
        return ""
    if "failed on ranks [], did not finish on" in failure:  # what the other ranks returned follows
        return "hangs"
    if ": differs by" in failure:
        return "differs"
    errors = [line for line in failure.splitlines() if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return "".join(each for each in (errors or [failure])[0][:60] if not each.isdigit())


def main() -> int:
    """Run what the arguments ask for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--world", type=int, default=2, choices=(1, 2, 3, 4))
    parser.add_argument("--how", default="eager", choices=sorted(LIMITS))
    parser.add_argument("--order", default="any", choices=("any", "tree"), help="reduction_order; with tree the bits "
                        "of one rank are expected")  # fmt: skip
    parser.add_argument("--wires", action="store_true", help="parameters and gradients are sent in formats")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args()
    failures, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), asked.world, asked.how)
        for seed in range(asked.seed, asked.seed + asked.cases):
            case = draw(seed, asked.how, asked.world, asked.order, asked.wires)
            failure = fuzzer.failure(case)
            if failure is not None:
                failures += 1
                print(f"seed {seed} fails: {failure}\n    {case}", flush=True)
                if not asked.no_shrink:
                    case = fuzzer.shrunk(case, failure)
                    failure = fuzzer.failure(case) or failure
                    print(f"smaller:\n    {case}\n{failure}", flush=True)
                fuzzer.ranks.stop()
        fuzzer.ranks.stop()
    seconds = time.monotonic() - begin
    counts = f"{failures} fail, {fuzzer.invalid} invalid, {seconds:.0f} s"
    print(f"{asked.cases} cases {asked.how}, order {asked.order}, on {asked.world} ranks: {counts}")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
