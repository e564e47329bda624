"""docs/stability.md lists the public names, no more and no fewer."""

import ast
import re
from importlib import import_module
from pathlib import Path

import fsdp_compile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stability.md").read_text()
REFERENCE = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


def named(name: str) -> object:
    """What the reference shows by this name."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def rows(heading: str) -> list[tuple[str, list[str]]]:
    """First and second cell of each row of the table below a heading; of the second, the names."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return [(row[0].removeprefix("| "), re.findall(r"`(.+?)`", row[1])) for row in cells]


def public() -> dict[str, list[str]]:
    """What each file of the package lists in `__all__`, by module.

    A `_torch.py` lists what its folder uses. Lists are read where they can be, because frameworks may be missing.
    """
    found = {}
    for path in (ROOT / "fsdp_compile").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name != "_torch.py" and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                read = isinstance(node.value, ast.List)
                found[name] = sorted(ast.literal_eval(node.value) if read else import_module(name).__all__)
    return found


def test_the_page_has_each_public_name_once() -> None:
    """Its rows are what the modules list, and tell torch's names from ours."""
    listed: dict[str, list[str]] = {}
    for where, names in rows("Public names"):
        if module := re.match(r"`(.+?)`", where):
            listed[module[1]] = sorted([*listed.get(module[1], []), *names])
        if module and module[1] == "fsdp_compile":
            defined_in = {fsdp_compile._MODULES[name].partition(".")[0] for name in names}
            assert defined_in == {"torch" if where.endswith("torch") else "fsdp_compile"}
    assert listed == public()


def test_the_page_has_what_the_reference_has() -> None:
    """What the reference shows beside the modules' lists is public too; both are the same objects."""
    [beside] = [names for where, names in rows("Public names") if not where.startswith("`")]
    known = [getattr(import_module(module), name) for module, names in public().items() if "integrations" not in module
             for name in names]  # fmt: skip
    assert beside == sorted(name for name in REFERENCE if not any(named(name) is each for each in known))
