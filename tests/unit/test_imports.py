"""Imports go in a direction that the table allows and never in a circle; private names of torch have their files."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import fsdp_compile

PACKAGE = Path(fsdp_compile.__file__).parent

# Who may import whom. A folder may import itself; modules at the top of the package that are not named here, any.
# The first entry that a module lies within holds for it: collectives lie below `core`, and what unites both above it.
ALLOWED = {
    "comm": set(),
    "core": {"comm.collectives", "comm.groups", "comm.hops", "comm._torch", "tensors"},
    "tensors": {"core._torch", "core.exact_sums", "core.layout", "core.settings", "core.traced_writes", "comm"},
    "edits": {"core", "comm", "tensors", "eager", "agree"},
    "agree": {"core", "comm", "tensors", "eager", "edits"},
    "construct": {"core", "comm", "tensors", "config"},
    "eager": {"core", "comm", "tensors"},
    "optim": {"core", "comm", "tensors"},
    "passes": {
        *("core.ops", "core.flat_collectives", "core.layout"),
        *("config", "comm"),
        "agree.rank_order",  # what graphs call to compare ranks
    },
    "state_dict": {"core", "comm", "tensors"},
    "checkpoint": {"state_dict", "core", "comm", "config", "tensors"},
    "explain": {"core", "construct", "passes", "comm", "config", "optim.matrix_step", "optim.owner_plan"},
    "config": set(),
}
PLAIN = {"passes.plan": {"torch"}, "passes.cost": {"torch"}}  # folders that import nothing of these packages


Graph = dict[str, set[str]]  # for each module the modules that it imports


@cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((name, ast.parse(path.read_text())))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports, dotted; `from a import b` is both `a` and `a.b`, as `b` may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


def breaches(name: str, imported: Iterable[str]) -> list[str]:
    """Those of the dotted names `imported` that module `name` of the package must not import."""
    found = []
    for target in imported:
        ours = target.removeprefix("fsdp_compile.") if within(target, "fsdp_compile") else None
        room = next((room for room in ALLOWED if within(name, room)), None)
        allowed = ALLOWED[room] | {room} if room is not None else set()
        if ours is not None and allowed and not any(within(ours, each) for each in allowed):
            found.append(f"{name} imports {target}")
        for folder, packages in PLAIN.items():
            if within(name, folder) and any(within(target, package) for package in packages):
                found.append(f"{name} imports {target}")
    return found


def file_graph(trees: Iterable[tuple[str, ast.Module]]) -> Graph:
    """What each file of the package imports, also in functions and under `TYPE_CHECKING`.

    The package's own `__init__` is left out: it imports names when they are asked for.
    """
    imported = {name: list(imports(tree)) for name, tree in trees if name}
    graph: Graph = {name: set() for name in imported}
    for name, targets in imported.items():
        for parts in (target.removeprefix("fsdp_compile.").split(".") for target in targets):
            prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}  # packages run first
            graph[name] |= {each for each in prefixes if each in graph and not within(name, each)}
    return graph


def circles(graph: Graph) -> list[set[str]]:
    """The sets of modules of which each imports all others, directly or not."""
    reached: Graph = {}
    for start in graph:
        reached[start], waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - reached[start]
            reached[start] |= new
            waiting += new
    found = ({other for other in reached[start] if start in reached[other]} for start in graph)
    return [set(circle) for circle in sorted({tuple(sorted(circle)) for circle in found if circle})]


def private_torch(name: str, tree: ast.Module) -> list[str]:
    """Private names of torch that a module other than a `_torch.py` mentions."""
    if name.split(".")[-1] == "_torch":
        return []
    found = [target for target in imports(tree) if within(target, "torch") and re.search(r"\._[a-z]", target)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*", text) and "__" not in text:
                found.append(text)
    return [f"{name} uses {target}" for target in found]


def test_imports_run_downward() -> None:
    """No module of the package imports what the table does not allow."""
    assert [each for name, tree in modules() for each in breaches(name, imports(tree))] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also counting imports within functions and for type checkers, no file imports itself through others."""
    assert circles(file_graph(modules())) == []


def test_private_names_of_torch_are_in_their_files() -> None:
    """Only files named `_torch.py` mention a private name of torch, and each folder has at most one."""
    assert [each for name, tree in modules() for each in private_torch(name, tree)] == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("core.layout", "from fsdp_compile.core.unit import Unit"),
        ("tensors.shard_spec", "def later():\n    from fsdp_compile.tensors import sharded_rules"),
        ("core.ops", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fsdp_compile.core.flat_param"),
        ("comm", "from fsdp_compile.core.ops import NamedGroup"),
        ("comm.collectives", "import fsdp_compile.core.unit"),
        ("passes.post_grad.order", "import fsdp_compile.core.unit"),
        ("passes.plan.schedule", "import torch.fx"),
        ("core.unit", "import torch\nfrom torch._inductor import config"),
        ("core.unit", "import torch\nx = torch._C._functions"),
    ],
)
def test_what_is_wrong_is_found(name: str, code: str) -> None:
    """One of the tests above fails when one of these imports or uses is added, also where a package's `__init__` closes
    a circle."""
    added = ast.parse(code)
    trees = [(each, ast.parse(ast.unparse(tree) + "\n" + code) if each == name else tree) for each, tree in modules()]
    closed = any(name in circle and len(circle) > 1 for circle in circles(file_graph(trees)))
    assert closed or breaches(name, imports(added)) or private_torch(name, added)


def test_who_calls_is_asked_in_one_file() -> None:
    """Frames of the stack decide something in tensors/_torch.py alone, which says why; and where a warning points."""
    looks = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")
             if re.search(r"_getframe|currentframe|\.f_back\b|inspect\.stack", path.read_text())}  # fmt: skip
    assert looks == {"tensors/_torch.py", "core/settings.py"}
