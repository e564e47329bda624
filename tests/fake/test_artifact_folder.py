"""Artifacts in a folder: what is written is read again, and what does not fit is not loaded."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compile.passes._torch import cache_folder
from fsdp_compile.passes.artifacts import Artifacts, load_folder

LIBRARY = "zz/cnothing.main.so"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one library and no entries, written by this process; empty caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    made = Artifacts.of_this_process()._replace(entries=b"", libraries={LIBRARY: b"code"})
    made.write(tmp_path / "made")
    assert Artifacts.read(tmp_path / "made") == made
    return tmp_path / "made"


def loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[bool, str]:
    """Whether loading has put the library into the caches, and what the log says."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fsdp_compile"):
        load_folder(str(folder))
    return (cache_folder() / LIBRARY).exists(), caplog.text


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the list of what is in the folder."""
    path = folder / "artifacts.json"
    listed = json.loads(path.read_text())
    change(listed)
    path.write_text(json.dumps(listed))


def test_what_fits_is_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same versions, ranks and device: it lies in the caches."""
    assert loaded(folder, caplog) == (True, "")


@pytest.mark.parametrize("name", ["torch", "package", "ranks", "device"])
def test_what_is_stale_or_foreign(folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Another version, package, world size or device: nothing is loaded, and the log names it."""
    edit(folder, lambda listed: listed["origin"].update({name: "another"}))
    found, said = loaded(folder, caplog)
    assert not found and f"built for {name} another, found " in said and "this rank compiles" in said


def test_another_processor_or_number_of_threads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Libraries for another target are never loaded, nor are the entries that call them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        found, said = loaded(folder, caplog)
    finally:
        torch.set_num_threads(threads)
    assert not found and "built for processor" in said and f"{threads} threads" in said


@pytest.mark.parametrize("fault", ["none", "damaged", "missing", "format"])
def test_what_is_no_artifact(folder: Path, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    """A folder that is not there, or whose files are not those that were written: the log says so."""
    if fault == "none":
        folder = folder / "elsewhere"
    elif fault == "damaged":
        (folder / "libraries" / LIBRARY).write_bytes(b"other")
    elif fault == "missing":
        (folder / "entries.bin").unlink()
    else:
        edit(folder, lambda listed: listed.update(format=99))
    found, said = loaded(folder, caplog)
    assert not found and "expected what fsdp-compile build has written" in said


def test_folders_are_not_overwritten(folder: Path) -> None:
    """OSError, and what was there stays."""
    before = Artifacts.read(folder)
    with pytest.raises(OSError, match="made"):
        before._replace(libraries={}).write(folder)
    assert Artifacts.read(folder) == before
