"""`python -m bench`: measure every part that this machine can, write `bench/results/` and pictures.

python -m bench                      all parts for this machine, then the report
python -m bench link many_small      some of them (`--list` names them)
python -m bench report               tables and pictures of the newest results, those of docs/measurements.md too
python -m bench foresight            steps that were predicted from a calibration, beside the same steps measured
python -m bench runs CSV             a table of training runs beside predictions; `fit` fits constants to reported ones
python -m bench host_overhead        where host time goes, ours beside the unsharded model; others alike: ALONE
"""

import argparse
import dataclasses
import subprocess
import sys

from bench import parts, pictures, report

# Modules of their own, with options of their own.
ALONE = {
    name: f"bench.{name}"
    for name in (
        "host_overhead", "compile_time", "planner", "memory_choice", "planned_step", "foresight", "checkpoint", "runs",
    )
} | {"fit": "bench.runs.fit"}  # fmt: skip


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        sys.exit(subprocess.run([sys.executable, "-m", ALONE[sys.argv[1]], *sys.argv[2:]]).returncode)
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help=f"parts and `report`, or one of {', '.join(ALONE)}")
    arguments.add_argument("--list", action="store_true", help="name all parts")
    arguments.add_argument("--rounds", type=int, help="rounds of each setting")
    arguments.add_argument("--systems", nargs="+", help="only these systems")
    arguments.add_argument("--dry", action="store_true", help="print the table, write nothing")
    args = arguments.parse_args()
    if args.list:
        print("\n".join(f"{name:12} {part.about}" for name, part in parts.PARTS.items()))
        return
    names = args.names or [*parts.ON_THE_CPU, "cuda_link", "nccl", "report"]
    if unknown := set(names) - {*parts.PARTS, "report"}:
        sys.exit(f"bench: error: expected parts named by --list, found {', '.join(sorted(unknown))}")
    for name in names:
        if name == "report":
            write_report()
        elif reason := parts.runnable(parts.PARTS[name]):
            print(f"{name}: left out, {reason}", file=sys.stderr)
        else:
            measure(name, args)


def measure(name: str, args: argparse.Namespace) -> None:
    """Run one part; print and keep what it shows."""
    part = parts.PARTS[name]
    part = dataclasses.replace(part, rounds=args.rounds or part.rounds, systems=tuple(args.systems or part.systems))
    found = parts.run(name, part)
    shown = {
        **found,
        "date": report.today(),
        "commit": report.commit(),
        "machine": report.machine(),
        "versions": report.versions(),
    }
    print(f"\n{report.tables({name: shown})}\n")
    if not args.dry:
        print(f"{name}: written to {report.save(name, found)}", file=sys.stderr)


def write_report() -> None:
    """Tables, pictures and traces of the newest results."""
    newest = report.load()
    (report.RESULTS / "tables.md").write_text(report.tables(newest) + "\n")
    report.write_page(report.tables({name: newest[name] for name in ("gloo", "link") if name in newest}))
    for name, part in newest.items():
        report.write_traces(name, part)
        for path in pictures.draw(name, part):
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
