"""Workflows, which do not run here, name versions and commands that exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tool

from fsdp_compile.tested_torch import TESTED_TORCH

yaml = pytest.importorskip("yaml")  # mkdocs brings it
ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps() -> list[dict[str, Any]]:
    action = read(ROOT / ".github" / "actions" / "setup" / "action.yml")["runs"]["steps"]
    return action + [step for path in WORKFLOWS for job in read(path)["jobs"].values() for step in job["steps"]]


def test_versions() -> None:
    """CI has each torch that counts as tested and each Python of the package; pre-commit has the tests' ruff."""
    versions = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["versions"]
    assert tuple(each["torch"] for each in versions) == TESTED_TORCH
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {each.rpartition(" ")[2] for each in classifiers if "Python :: " in each}
    assert {each["python"] for each in versions} == named
    hooks = {each["repo"].rpartition("/")[2]: each["rev"] for each in read(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert f"ruff=={hooks['ruff-pre-commit'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_what_they_run_exists() -> None:
    """Files, folders and targets of make that commands name, and the files of tools/gpu_day.py."""
    makefile = (ROOT / "Makefile").read_text()
    for step in steps():
        command = re.sub(r"\$\{\{ matrix\.tier \}\}", "unit", step.get("run", ""))
        for target in re.findall(r"^make (?:PYTHON=\w+ )?(.*?)(?: ARGS=.*)?$", command, re.MULTILINE):
            for each in target.split():
                assert (ROOT / each.removesuffix(".tier")).is_dir() or re.search(rf"^{each}:", makefile, re.M), each
        assert all((ROOT / path).exists() for path in re.findall(r"\b(?:tests|tools)/[\w/]+\.py", command))
    parts = tool.load("gpu_day").parts(seed=3)
    named = [word for part in parts for word in part.command if word.startswith("tests/")]
    assert len(named) > 4 and all((ROOT / word).exists() for word in named)
