"""Changes one operator, constant or statement of the package at a time, and says which changes no test notices.

    python tools/mutate.py [--count 200] [--seed 0] [--file fsdp_compile/passes ...] [--least 0.9]
                           [--record FILE] [--list] [--at COMMIT]
    python tools/mutate.py --passes [NAME ...]      breaks each pass that docs/passes.md shows once, and reads that page

Each mutant is a copy of the package in a temporary folder, beside which the tests named in nearest_tests.toml run until
one fails: those of one process first, then those that killed other mutants, then short ones. Left alone are
annotations, docstrings, decorators, and the texts of errors, warnings and notes. The exit status is 1 if fewer than
`--least` of the mutants are killed. Mutants with the fewest tests of several ranks come first. With `--record`,
verdicts and the seconds of tests are appended to a file, and a run that was stopped goes on where it was.

`--list` prints the mutants and runs none. With `--at` they are drawn from the package as it was at that commit, so that
a run can be repeated after survivors have been mended: each is looked for in today's files, and those whose lines have
changed since are printed as gone.

A mutant that takes three times the seconds of its tests, and 30 more, is out of time. The machine may have been busy,
so it runs again at the end, with five times as long. If it is out of time again it counts as killed: a rank that waits
for ever is noticed.

With `--passes`, a broken pass must show in its section of the page, and in no section before that one.
"""

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 900.0  # seconds of one file of tests without a mutant
MEMORY = 2**33  # bytes that a process of tests may allocate: a mutant whose loop never ends fails with a MemoryError
SURVIVED, KILLED, LATE = "SURVIVED", "killed", "out of time"
# Before torch is imported, as in tests/conftest.py.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}

TABLE = ROOT / "tools" / "nearest_tests.toml"


def nearest() -> dict[str, str]:
    """For each file that can have mutants, by its path in the package, the tests that are nearest to it."""
    table = tomllib.loads(TABLE.read_text())
    groups = {f"@{name}": tests for name, tests in table["groups"].items()}
    return {
        path: " ".join(dict.fromkeys(test for each in tests for test in groups.get(each, [each])))
        for path, tests in table["files"].items()
    }


# --passes: for each pass its file, and a text in it that is replaced by another one.
_JOINT, _POST = "passes/joint", "passes/post_grad"
BROKEN = {
    "insert_collectives": (f"{_JOINT}/insert_collectives.py", "args = packed, how.op,", 'args = packed, "sum",'),
    "reshard": (f"{_JOINT}/reshard.py", "        if tag.reshard:\n", "        if not tag.reshard:\n"),
    "check_saved": ("passes/graph_checks.py", "if is_gathered or was_tagged:", "if was_tagged:"),
    "pack_in_place": (f"{_POST}/in_place_grads.py", "while grad.target in nodes.SAME_ORDER:", "while False:"),
    "read_graph": ("passes/graph/analyze.py", "*(last + 1 for _, last in spans)}", "*(last for _, last in spans)}"),
    "choose_plan": ("passes/plan/schedule.py", "waited.append((ready + 1,", "waited.append((ready + 2,"),
    "verify_plan": ("passes/plan/plan.py", "if reduces[name].at <= ready:", "if reduces[name].at < ready:"),
    "order": (f"{_POST}/order.py", "before[step.at].append", 'before[step.at - (step.kind == "reduce")].append'),
    "check_order": ("passes/graph_checks.py", "if actual != planned:", "if len(actual) != len(planned):"),
    "pin_order": (f"{_POST}/order.py", "    return is_product(node) and not any", "    return False and not any"),
}
_PAGE = "tests/fake/test_passes_page.py::test_the_graphs_are_those_of_today"

_COMPARED = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is",
             "in": "not in", "not in": "in"}  # fmt: skip
_COMPUTED = {"+": "-", "-": "+", "*": "//", "//": "*", "%": "+", "|": "&", "&": "|"}
_WORDS: dict[type[ast.AST], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
    ast.FloorDiv: "//", ast.Mod: "%", ast.BitOr: "|", ast.BitAnd: "&", ast.And: "and", ast.Or: "or",
}  # fmt: skip
_TALKS = ("warn", "warning", "info", "debug", "add_note")  # calls whose arguments are texts for people
# Arguments that change no value on a CPU: checks of lengths that always agree, and copies that need not wait.
_UNSEEN = ("strict", "non_blocking")


class Mutant(NamedTuple):
    """`old` at bytes [begin, end) of `path` is replaced by `new`."""

    path: Path
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {' '.join(self.old.split())} -> {self.new}"


class _Finder:
    """The mutants of one file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def mutants(self) -> list[Mutant]:
        return list(self._below(ast.parse(self.source)))

    def find_again(self, mutant: Mutant, then: "_Finder") -> Mutant | None:
        """`mutant` of the file as it was `then`; None if its lines are others now."""
        before, now = then.source.splitlines(), self.source.splitlines()
        last = mutant.line + then.source[mutant.begin : mutant.end].count(b"\n")
        for old, new, size in difflib.SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks():
            if old < mutant.line and last <= old + size:
                begin = mutant.begin - then.starts[old] + self.starts[new]
                return mutant._replace(line=mutant.line - old + new, begin=begin, end=begin + mutant.end - mutant.begin)
        return None

    def _below(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign) and not _has_value(node):
            return
        yield from self._of(node)
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST) and not _is_text(each) and getattr(each, "arg", "") not in _UNSEEN:
                    yield from self._below(each)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from self._between(left, right, _WORDS[type(operator)], _COMPARED)
        elif isinstance(node, ast.BoolOp):
            word = _WORDS[type(node.op)]
            yield from self._between(node.values[0], node.values[1], word, {"and": "or", "or": "and"})
        elif (
            isinstance(node, ast.BinOp)
            and type(node.op) in _WORDS
            and not isinstance(node.left, ast.Constant | ast.JoinedStr)
        ):
            yield from self._between(node.left, node.right, _WORDS[type(node.op)], _COMPUTED)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replace(node, self._text(node.operand))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._replace(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield self._replace(node, str(node.value + 1))
        elif isinstance(node, ast.If | ast.IfExp) and not self._text(node.test).startswith("TYPE_CHECKING"):
            yield self._replace(node.test, f"(not ({self._text(node.test)}))")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._replace(node, "pass")

    def _between(self, left: ast.expr, right: ast.expr, word: str, others: dict[str, str]) -> Iterator[Mutant]:
        begin, end = self._end(left), self._begin(right)
        between = self.source[begin:end].decode()
        if word in others and between.count(word) == 1:
            yield self._mutant(begin, end, between.replace(word, others[word]), left.lineno)

    def _replace(self, node: ast.AST, new: str) -> Mutant:
        return self._mutant(self._begin(node), self._end(node), new, node.lineno)  # type: ignore[attr-defined]

    def _mutant(self, begin: int, end: int, new: str, line: int) -> Mutant:
        return Mutant(self.path, line, begin, end, self.source[begin:end].decode(), new)

    def _text(self, node: ast.AST) -> str:
        return self.source[self._begin(node) : self._end(node)].decode()

    def _begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _has_value(node: ast.AST) -> bool:
    """Whether an annotated assignment gives a value, which counts while its annotation does not."""
    return isinstance(node, ast.AnnAssign) and node.value is not None


def _is_text(node: ast.AST) -> bool:
    """A docstring, or a call that tells people something."""
    value = node.value if isinstance(node, ast.Expr) else node
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in _TALKS
    return isinstance(node, ast.Expr) and isinstance(value, ast.Constant)


class _Order:
    """A plugin of pytest: tests that killed before come first, then short ones; what failed, and how long each took.

    `without` are left out.
    """

    def __init__(self, kills: Counter[str], seconds: dict[str, float], without: Collection[str]) -> None:
        self.kills, self.before, self.seconds, self.without = kills, seconds, dict[str, float](), without
        self.failed: list[str] = []
        self.is_late = False  # whether what failed is that ranks did not end in time

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid not in self.without]
        items[:] = sorted(kept, key=lambda item: (-self.kills[item.nodeid], self.before.get(item.nodeid, 0.0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.failed += [report.nodeid] * report.failed
        self.is_late |= report.failed and "failed on ranks [], did not finish on" in report.longreprtext


class _Ran(NamedTuple):
    """A run of pytest: its exit status, None if it did not end; what it said, what failed, and each test's seconds."""

    code: int | None
    said: str
    failed: list[str]
    seconds: dict[str, float]
    is_late: bool


class Bench:
    """A copy of the package at `package`, and processes in which tests meet it.

    torch is imported once, here. Each run of a tier's tests is a fork of this process, and its ranks are forks of the
    run, so that a mutant costs the seconds of its tests alone.
    """

    def __init__(self, package: Path) -> None:
        self.package = package
        self.seconds: dict[str, float] = {}  # of each test, without a mutant
        self.kills: Counter[str] = Counter()  # by each test
        self.failing: list[str] = []  # tests that fail without a mutant, and are left out
        shutil.copytree(ROOT / "fsdp_compile", package)
        for module in ("torch._inductor.compile_fx", "torch.distributed.tensor", "torch.distributed.checkpoint",
                       "torch.distributed.fsdp", "torch.testing._internal.distributed.fake_pg"):  # fmt: skip
            importlib.import_module(module)

    def measure(self, tests: str) -> str:
        """Note how long each of `tests` takes without a mutant; what it said if one of them fails."""
        ran = self._run(tests, LIMIT, 120.0, "--maxfail=100")
        self.seconds |= ran.seconds
        self.failing += ran.failed
        return "" if ran.code == 0 else ran.said

    def verdict(self, mutant: Mutant, tests: str, patience: float = 1.0) -> tuple[str, str]:
        """What becomes of `mutant` beside `tests`, SURVIVED, KILLED or LATE, and the test that says so.

        `patience` multiplies the seconds that tests may take.
        """
        with self._changed(mutant):
            for tier in _tiers(tests):
                taken = [seconds for test, seconds in self.seconds.items() if test.split("::")[0] in _files(tier)]
                if not taken:  # all of them are left out by day
                    continue
                limits = (patience * (30.0 + 3 * sum(taken)), patience * (15.0 + 3 * max(taken)))
                ran = self._run(tier, *limits, "-x")
                by = next(iter(ran.failed), "")
                if ran.code is None or ran.is_late:
                    return LATE, by
                broken = "ImportError while loading conftest" in ran.said  # which pytest takes for a wrong call
                if ran.code in (1, 2, 3) or broken:  # failed, did not even import, or broke pytest itself
                    self.kills.update(ran.failed[:1])
                    return KILLED, by
                if ran.code != 0:
                    raise RuntimeError(f"pytest {tier} ended with {ran.code}:\n{ran.said}")
            return SURVIVED, ""

    def sections(self, name: str) -> list[str]:
        """The sections of docs/passes.md that are no longer true if the pass of that name is broken."""
        path, old, new = BROKEN[name]
        source = (ROOT / "fsdp_compile" / path).read_text()
        if source.count(old) != 1:
            raise ValueError(f"{name}: expected {old!r} once in {path}, found it {source.count(old)} times")
        begin = len(source[: source.index(old)].encode())
        mutant = Mutant(ROOT / "fsdp_compile" / path, 0, begin, begin + len(old.encode()), old, new)
        with self._changed(mutant):
            said = self._run(_PAGE, LIMIT, 120.0, "-x").said
        found = re.search(r"AssertionError: sections that differ: (.*)", said)
        return found[1].split() if found else []

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        """The copy of the package has the mutant meanwhile."""
        changed, source = self.package / mutant.path.relative_to(ROOT / "fsdp_compile"), mutant.path.read_bytes()
        _write(changed, source[: mutant.begin] + mutant.new.encode() + source[mutant.end :])
        try:
            yield
        finally:
            _write(changed, source)

    def _run(self, tests: str, limit: float, call: float, stop: str) -> "_Ran":
        """Run pytest in a fork; `call`: seconds that ranks have for one call."""
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()
            if not pid:
                self._in_the_fork([stop, *tests.split()], Path(folder), call)
            code = _wait(pid, limit)
            said, result = Path(folder, "said").read_text(errors="replace"), Path(folder, "result")
            noted = json.loads(result.read_text()) if result.exists() else ([], {}, False)
        return _Ran(code, said, *noted)

    def _in_the_fork(self, arguments: list[str], folder: Path, call: float) -> None:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            os.setsid()  # a group of its own: ranks that wait for each other end with the tests
            said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.chdir(ROOT)
            before = [str(self.package.parent), str(ROOT / "tests"), str(ROOT)]  # `bench` is in ROOT
            sys.path[:0] = before
            os.environ |= {"PYTHONPATH": os.pathsep.join(before), "LIMIT": str(call), "FSDP_COMPILE_RANKS": "fork",
                           "TMPDIR": str(folder)}  # fmt: skip
            tempfile.tempdir = None
            order = _Order(self.kills, self.seconds, self.failing)
            code = int(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *arguments], [order]))
            (folder / "result").write_text(json.dumps((order.failed, order.seconds, order.is_late)))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _write(path: Path, source: bytes) -> None:
    """Without what Python kept of the former text, which may have the same size and second."""
    path.write_bytes(source)
    for kept in path.parent.glob(f"__pycache__/{path.stem}.*"):
        kept.unlink()


def _wait(pid: int, limit: float) -> int | None:
    """The exit status of the group `pid` after at most `limit` seconds; nothing of it is left."""
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        time.sleep(0.05)
        done, state = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(state) if done else None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def _tiers(tests: str) -> list[str]:
    """`tests` by folder, the fastest first: ranks cannot fork from a process that ran a backward."""
    names = [[name for name in tests.split() if name.startswith(f"tests/{tier}")] for tier in ("unit", "fake", "gloo")]
    return [" ".join(tier) for tier in names if tier]


def _files(tests: str) -> set[str]:
    return {name.split("::")[0] for name in tests.split()}


def _break_passes(names: Collection[str]) -> int:
    """Break each of these passes, print the sections that differ; 1 if one is not noticed where it is described."""
    order, missed = list(BROKEN), 0
    os.environ["FSDP_COMPILE_TESTS"] = "nightly"  # by day the test leaves out some graphs of the page
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "fsdp_compile")
        if said := bench.measure(_PAGE):
            print(f"{said}\nthe page is wrong without any mutant", flush=True)
            return 1
        for name in names or order:
            begin, differ = time.monotonic(), bench.sections(name)
            early = set(differ) - {*order[order.index(name) :]}
            missed += name not in differ or bool(early)
            verdict = "NOT NOTICED" if name not in differ else "TOO EARLY" if early else "noticed"
            print(f"{verdict:11} {time.monotonic() - begin:4.0f} s {name}: {' '.join(differ)}", flush=True)
    print(f"{len(names or order)} passes broken, {missed} not noticed where the page describes them")
    return int(missed > 0)


def _sample(finders: Iterable[_Finder], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, or all where there are fewer."""
    every = [mutant for finder in finders for mutant in finder.mutants()]
    return random.Random(seed).sample(every, min(count, len(every)))


def _draw(files: Collection[Path], count: int, seed: int, commit: str | None) -> list[Mutant]:
    """`count` mutants of `files`; with `commit`, drawn from what they were then, without those that are gone."""
    today = {path: _Finder(path, path.read_bytes()) for path in files}
    if commit is None:
        return _sample(today.values(), count, seed)
    show = ("git", "-C", str(ROOT), "show")
    then = {
        path: _Finder(path, subprocess.check_output((*show, f"{commit}:{path.relative_to(ROOT).as_posix()}")))
        for path in files
    }
    drawn = _sample(then.values(), count, seed)
    again = [(mutant, today[mutant.path].find_again(mutant, then[mutant.path])) for mutant in drawn]
    for mutant in sorted(mutant for mutant, found in again if found is None):
        print(f"gone: {mutant}", flush=True)
    return [found for _, found in again if found is not None]


def main() -> int:
    """Run what the arguments ask for; 1 if too few mutants were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many, or all that there are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", action="append", help="a file or a folder of the package; can be given several times")
    parser.add_argument("--least", type=float, default=0.9, help="the share of mutants that has to be killed")
    parser.add_argument("--record", type=Path, help="a file of verdicts, which the run continues")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run no test")
    parser.add_argument("--at", metavar="COMMIT", help="draw from the package as it was at that commit")
    parser.add_argument("--passes", nargs="*", choices=BROKEN, help="break these passes, or each of them")
    asked = parser.parse_args()
    if asked.passes is not None:
        return _break_passes(asked.passes)
    files = {ROOT / "fsdp_compile" / name: tests for name, tests in nearest().items()}
    if asked.file:
        places = [ROOT / each for each in asked.file]
        files = {path: tests for path, tests in files.items() if {path, *path.parents} & set(places)}
        for place in places:
            if not any(place in (path, *path.parents) for path in files):
                print(f"left out, as {TABLE.name} has no tests for it: {place.relative_to(ROOT)}", flush=True)
    drawn = _draw(files, asked.count, asked.seed, asked.at)
    drawn.sort(key=lambda mutant: (files[mutant.path].count("/gloo/"), mutant))
    if asked.list:
        print("\n".join(f"{number:4d} {mutant}" for number, mutant in enumerate(drawn, 1)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        verdicts = _judge(drawn, files, Bench(Path(folder) / "fsdp_compile"), asked.record)
    count = Counter(verdicts.values())
    killed = 1 - count[SURVIVED] / len(drawn)
    print(f"{len(drawn)} mutants, {count[SURVIVED]} survived, {count[LATE]} were out of time: {killed:.0%} killed")
    return int(killed < asked.least)


def _judge(drawn: Sequence[Mutant], files: Mapping[Path, str], bench: Bench, record: Path | None) -> dict[Mutant, str]:
    """The verdict of each mutant, beside the tests of its file; `record` has those of an earlier run, and gets more."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    known = [json.loads(line) for line in lines]
    before = {(each["mutant"], each["begin"], each["patience"]): each for each in known if "mutant" in each}
    measured = set[str]()
    for each in known:
        if "tests" in each:
            measured.add(each["tests"])
            bench.seconds |= each["seconds"]
            bench.failing += each["failing"]
        elif each["verdict"] == KILLED and each["by"]:
            bench.kills[each["by"]] += 1

    def note(entry: dict[str, object]) -> None:
        if record:
            with record.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def judge(number: int, mutant: Mutant, patience: float) -> str:
        for tests in files[mutant.path].split():
            if tests not in measured:
                measured.add(tests)
                if said := bench.measure(tests):
                    print(f"{said}\nleft out, because it fails without any mutant: {bench.failing}", flush=True)
                of_file = {test: taken for test, taken in bench.seconds.items() if test.startswith(tests)}
                failing = [test for test in bench.failing if test.startswith(tests)]
                note({"tests": tests, "seconds": of_file, "failing": failing})
        begin, entry = time.monotonic(), before.get((str(mutant), mutant.begin, patience))
        if entry is None:
            verdict, by = bench.verdict(mutant, files[mutant.path], patience)
            entry = {"mutant": str(mutant), "begin": mutant.begin, "patience": patience, "verdict": verdict, "by": by}
            note(entry)
        seconds = time.monotonic() - begin
        print(f"{number:4d} {entry['verdict']:11} {seconds:4.0f} s {mutant}  {entry['by']}", flush=True)
        return entry["verdict"]

    verdicts = {mutant: judge(number, mutant, 1.0) for number, mutant in enumerate(drawn, 1)}
    late = [(number, mutant) for number, mutant in enumerate(drawn, 1) if verdicts[mutant] == LATE]
    return verdicts | {mutant: judge(number, mutant, 5.0) for number, mutant in late}


if __name__ == "__main__":
    sys.exit(main())
