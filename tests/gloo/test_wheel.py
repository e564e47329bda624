"""What a user installs: the source distribution and the wheel made from it, in an environment without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, started without this process's paths to modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution of a copy, so that nothing is written to the checkout."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("made")
    shutil.copytree(ROOT / "fsdp_compile", copy / "fsdp_compile", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(made)!r})", cwd=copy)
    source = made / f"fsdp_compile-{PROJECT['version']}.tar.gz"
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", source)
    run(*command, "--wheel-dir", made, cwd=made)
    return made / f"fsdp_compile-{PROJECT['version']}-py3-none-any.whl"


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and, behind it, what this one has installed, less editable installs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    run(*command, cwd=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Behind the wheel, and only after its installation; `.pth` files in a folder that one names are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_what_is_in_it(wheel: Path) -> None:
    """Source distribution and wheel have each file of the package; the metadata are those of pyproject.toml."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_compile").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {"fsdp_compile/py.typed", "fsdp_compile/passes/cost/data/links.json"} < files
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"fsdp_compile-{PROJECT['version']}.dist-info/METADATA").decode()
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert files | {"pyproject.toml", "README.md", "LICENSE"} <= inside
    assert "License-Expression: BSD-3-Clause" in metadata and "Requires-Python: >=3.11" in metadata
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch>=")]
    assert (ROOT / "README.md").read_text().strip() in metadata


def test_it_is_installed(python: Path, tmp_path: Path) -> None:
    """Found without the checkout: the package, its version, its entry points, and the command with its data."""
    code = (
        "import fsdp_compile, json; from importlib.metadata import entry_points as points; "
        "print(json.dumps([fsdp_compile.__file__, fsdp_compile.__version__, "
        "[each.value for each in points(group='torch_dynamo_backends') if each.name == 'fsdp_compile']]))"
    )
    file, version, backends = json.loads(run(python, "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(python.parents[1]) and version == PROJECT["version"]
    assert backends == ["fsdp_compile.passes.inductor:fsdp_compile_backend"]
    command = python.with_name("fsdp-compile")
    assert run(command, "--version", cwd=tmp_path) == f"fsdp-compile {version}\n"
    assert "h100" in run(command, "explain", "--hardware", "list", cwd=tmp_path)
