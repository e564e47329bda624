"""Run a part of `parts.py`, or a module that is a command of its own; this file imports nothing slow."""

import importlib
import sys

COMMANDS = {
    **{name: f"bench.{name}" for name in ("host_overhead", "compile_time", "planner", "links", "export",
                                          "first_plan", "muon", "titan_link", "wire")},
    "runs": "bench.runs.__main__",
    "fit": "bench.runs.fit",
}  # fmt: skip

if __name__ == "__main__":
    name = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
    if name:
        sys.argv[:2] = [f"bench {name}"]
    importlib.import_module(COMMANDS.get(name, "bench.parts")).main()
