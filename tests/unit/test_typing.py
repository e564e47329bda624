"""What type checkers make of the public interface, of a user's file that mypy or pyright reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import fsdp_compile

ROOT = Path(fsdp_compile.__file__).parents[1]
SITE = Path(pytest.__file__).parents[1]

SCRIPT = """
from typing import assert_type

import torch
from torch import nn

from fsdp_compile import FSDPModule, explain_plan, fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(), Block()]
        self.layer = nn.Linear(2, 2)

    def generate(self, length: int) -> list[int]:
        return [length]


net = Net()
model = fully_shard(net, auto_wrap_policy={Block})
assert_type(model, Net)
assert_type(model.blocks, list[Block])
assert_type(fully_shard(net.blocks), list[Block])
assert_type(fully_shard([net.layer]), list[nn.Linear])
assert_type(fully_shard(nn.ModuleList(net.blocks)), nn.ModuleList)
assert isinstance(model, FSDPModule)
assert_type(model.blocks[0].up, nn.Linear)
assert_type(model.generate(3), list[int])
with model.no_sync():
    loss: torch.Tensor = model(torch.ones(2)).sum()
assert_type(model.set_requires_gradient_sync(True), None)
assert_type(model.clip_grad_norm_(1.0), torch.Tensor)
assert_type(FSDPModule.fsdp_modules(net), list[FSDPModule])
torch.optim.SGD(model.parameters(), lr=0.1)
bound: float = explain_plan(model, (torch.ones(2),), link="h100-nvlink").scheduled.bound
assert_type(net, Net)
"""
MISTAKES = (
    SCRIPT
    + """
model.clip_grad_norm_("1")
fully_shard(net, reduction_order=3)
fully_shard(net).generate("3")
fully_shard(torch.ones(2))
"""
)
WRONG = {("wrong.py", MISTAKES.count("\n") - 3 + line) for line in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(MISTAKES)
    return tmp_path


def errors_of_mypy(folder: Path, *options: str, **environment: str) -> set[tuple[str, int]]:
    """Lines of its errors in the user's files: a second where `.mypy_cache` has torch and the package, else 20.

    Those in the package depend on how the installed torch is annotated, and `make test` asks for them on one.
    """
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *options]
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([*command, "right.py", "wrong.py"], cwd=folder, capture_output=True, text=True,
                          env=given | environment, timeout=250)  # fmt: skip
    lines = [line.split(":") for line in done.stdout.splitlines() if " error: " in line]
    assert done.returncode == bool(lines), done.stdout + done.stderr
    return {(name, int(number)) for name, number, *_ in lines if not Path(name).is_absolute()}


def test_mypy(folder: Path) -> None:
    """What `fully_shard` returns keeps the user's class, also in lists; where `isinstance` says that it is sharded, it
    has both classes' attributes. Mistakes are found."""
    assert errors_of_mypy(folder, "--cache-dir", str(ROOT / ".mypy_cache"), MYPYPATH=str(ROOT)) == WRONG


def test_pyright(folder: Path) -> None:
    """The same for pyright, in the build that PyPI carries whole."""
    pyright = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("basedpyright is not installed")
    settings = {
        "include": ["right.py", "wrong.py"],
        "typeCheckingMode": "standard",
        "extraPaths": [*map(str, (ROOT, SITE))],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run([pyright, "--outputjson"], cwd=folder, capture_output=True, text=True, timeout=250)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    where = {(Path(error["file"]).name, error["range"]["start"]["line"] + 1) for error in errors}
    assert where == WRONG, errors


def test_an_editable_install_is_found_by_type_checkers(tmp_path: Path) -> None:
    """They read paths, not code that finds modules: an editable install is one path, which has the package's marker."""
    project = tmp_path / "project"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fsdp_compile", project / "fsdp_compile", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    build = "import setuptools.build_meta as backend; backend.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".pth")]
        (path,) = map(Path, archive.read(name).decode().splitlines())
    assert path.is_dir() and (path / "fsdp_compile" / "py.typed").exists(), path
