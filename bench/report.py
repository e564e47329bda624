"""Results as files: one JSON for each day and kind of machine, tables in Markdown, traces for Perfetto."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.systems import label

HERE = Path(__file__).parent
RESULTS = Path(os.environ.get("FSDP_COMPILE_RESULTS") or HERE / "results")
PAGE = HERE.parent / "docs" / "measurements.md"
COMMAND = re.compile(r"(?=<!-- (python -m bench .+?) -->)(<!--.+?<!-- end -->)", re.DOTALL)

Found = dict[str, Any]


def save(name: str, found: Found) -> Path:
    """Put a part into today's file for this kind of machine, beside the parts that are there."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    target = RESULTS / f"{today()}-{kind}.json"
    known = json.loads(target.read_text())["parts"] if target.exists() else {}
    known[name] = {"date": today(), "commit": commit(), **found}
    parts = ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in known.items())
    target.write_text(f'{json.dumps(here())[:-1]},\n"parts": {{\n{parts}\n}}}}\n')
    return target


def write(name: str, figures: Found) -> None:
    """Write `results/NAME.json`: of a command that is no part."""
    (RESULTS / f"{name}.json").write_text(json.dumps(here() | figures, indent=1) + "\n")


def parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with `--dry`."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dry", action="store_true", help="print the table, write nothing")
    return made


def load() -> dict[str, Found]:
    """The newest result of every part, with the machine that it is from."""
    newest: dict[str, Found] = {}
    for path in sorted(RESULTS.glob("????-??-??-*.json")):
        report = json.loads(path.read_text())
        for name, part in report["parts"].items():
            known = {"machine": report["machine"], "versions": report["versions"], "commit": commit(path)}
            newest[name] = known | part
    return newest


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def here() -> Found:
    """What decides the figures: machine and versions, beside the date."""
    return {"date": today(), "machine": machine(), "versions": versions()}


def commit(path: Path | None = None) -> str:
    """The commit that is checked out, or the one that last changed `path`; "unknown" outside of a checkout."""
    command = ["git", "log", "-1", "--format=%h", *(["--", str(path)] if path else [])]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def machine() -> str:
    """Processor, number of cores, GPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {model or 'unknown processor'}, {os.cpu_count()} cores{gpu}"


def versions() -> dict[str, str]:
    try:
        titan = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        titan = "not installed"
    return {"python": platform.python_version(), "torch": torch.__version__, "torchtitan": titan}


def tables(parts: dict[str, Found]) -> str:
    return "\n\n".join("\n".join(_section(name, part)) for name, part in parts.items())


def _section(name: str, part: Found) -> Iterator[str]:
    yield f"**{name}**: {part['about']}. {origin(part)}."
    yield ""
    rows = [_row(part, system) for system in part["first"]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield "| " + " | ".join(["", *columns]) + " |"
    yield "| --- |" + " ---: |" * len(columns)
    for system, row in zip(part["first"], rows, strict=True):
        yield "| " + " | ".join([label(system), *(row.get(column, "") for column in columns)]) + " |"
    for system, reason in part["failed"].items():
        lines = [line for line in reason.splitlines() if "Error" in line]
        yield f"\n{label(system)} did not run: {(lines or ['see the log'])[-1]}"
    for setting in part["settings"]:
        if "bound" in setting:
            yield f"\n{_bound_line(part, setting)}"


def origin(part: Found) -> str:
    """When, from which commit and on what a part was measured."""
    where = f"{part['machine']}, torch {part['versions']['torch']}"
    return f"{part['date']}, commit {part['commit']}, {where}"


def _bound_line(part: Found, setting: Found) -> str:
    step, unavoidable, dependent = (1e3 * setting["bound"][key] for key in ("step", "unavoidable", "dependent"))
    return (
        f"Communication {setting['ratio']:g} of compute ({setting['bandwidth'] / 1e6:,.0f} MB/s): the shortest "
        f"possible step takes {step:,.1f} ms, of which {unavoidable:,.1f} ms are exposed; with these units, "
        f"all gathered again in backward, {dependent:,.1f} ms."
    )


def _row(part: Found, system: str) -> dict[str, str]:
    """The cells of a system, by column."""
    row: dict[str, str] = {}
    for setting in part["settings"]:
        row.update(_speed(part, setting, system))
    if "copies" in part:
        row["copied, MB"] = f"{part['copies'][system] / 1e6:,.1f}"
    if "calls" in part:
        summary = part["calls"][system]["summary"]
        row["collectives"] = str(_total(summary["calls"]))
        row["sent, MB"] = f"{_total(summary['bytes']) / 1e6:,.1f}"
    if "memory" in part:
        memory = part["memory"][system]
        row["peak, MB"] = f"{(memory['allocator'] or memory['resident'] + memory['above']) / 1e6:,.1f}"
        row["RSS, MB"] = f"{memory['rss'] / 1e6:,.0f}"
    row["first step, CPU s"] = f"{part['first'][system]['cpu']:,.1f}"
    return row


def _total(by_group: dict[str, dict[str, int]]) -> int:
    return sum(number for kinds in by_group.values() for number in kinds.values())


def _speed(part: Found, setting: Found, system: str) -> dict[str, str]:
    """Speed and spread; on an emulated link what is exposed, as time beyond that on a free one."""
    figures = setting["systems"][system]
    unit, number = part["per_step"]["unit"], part["per_step"]["number"]
    least, most = (f"{1e3 * value:,.1f}" for value in figures["spread"])
    at = f" at {setting['ratio']:g}" if setting["ratio"] else (", free link" if part["mode"] == "link" else "")
    row = {f"{unit}/s{at}": f"{number / figures['step']:,.1f}"}
    if not setting["ratio"]:
        return {**row, f"ms a step{at}": f"{1e3 * figures['step']:,.1f} ({least} to {most})"}
    row[f"exposed, ms{at}"] = f"{1e3 * exposed(part, setting, system):,.1f}"
    row[f"of the bound{at}"] = f"{figures['step'] / setting['bound']['step']:.2f}"
    return row


def exposed(part: Found, setting: Found, system: str) -> float:
    """Seconds of a step for which the link held computing up.

    On the CPU what waits slept. What DDP and streams wait is not seen: there the step less that on a free link.
    """
    figures, free = setting["systems"][system], part["settings"][0]["systems"][system]
    seen = part["device"] == "cpu" and system != "ddp"
    return figures["exposed"] if seen else max(0.0, figures["step"] - free["step"])


def write_page() -> None:
    """Run the commands that comments of docs/measurements.md name, and put what each prints behind its comment."""
    at = f"{today()}, commit {commit()}"
    for command, shown in COMMAND.findall(PAGE.read_text()):
        run = [sys.executable, *command.split()[1:]]
        printed = subprocess.run(run, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        if "| --- |" not in printed:
            printed = f"```text\n$ {command}  # {at}\n{printed}\n```"
        PAGE.write_text(PAGE.read_text().replace(shown, f"<!-- {command} -->\n{printed}\n<!-- end -->"))


def trace(calls: Found) -> list[Found]:
    """One step as events of Chrome's trace format: lanes of computing and of the link; microseconds."""
    found = []
    for begin, end in computing(calls):
        found.append(_event("compute", "compute", begin, end))
    for number, call in enumerate(calls["list"]):
        name = f"{call['kind']} {number}, {call['nbytes'] / 1e6:.2f} MB"
        found.append(_event(name, "link", call["begin"] - call["origin"], call["end"] - call["origin"]))
        for begin, end in call["waits"]:
            found.append(_event(f"wait for {number}", "compute", begin - call["origin"], end - call["origin"]))
    return found


def computing(calls: Found) -> list[tuple[float, float]]:
    """The stretches of a step between waits, seconds after its beginning."""
    waits = sorted((b - call["origin"], e - call["origin"]) for call in calls["list"] for b, e in call["waits"])
    borders = [0.0, *(border for wait in waits for border in wait), calls["step"]]
    return [(begin, end) for begin, end in zip(borders[::2], borders[1::2], strict=True) if end > begin]


def _event(name: str, lane: str, begin: float, end: float) -> Found:
    return {"name": name, "ph": "X", "pid": "step", "tid": lane, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}


def write_traces(name: str, part: Found) -> None:
    """A file for each system; open it at ui.perfetto.dev."""
    folder = RESULTS / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    for system, calls in part.get("calls", {}).items():
        target = folder / f"{name}-{system.replace(':', '-')}.json"
        target.write_text(json.dumps({"traceEvents": trace(calls)}))
