"""Artifacts in a folder: what is written is read again, and what does not fit is not loaded."""

import hashlib
import json
import logging
import os
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


def vouched(folder: Path, name: str) -> None:
    """List a file, which need not be in the folder, with a right digest."""
    (folder / name).write_bytes(b"code")
    digest = hashlib.sha256(b"code").hexdigest()
    edit(folder, lambda listed: listed["files"].update({name: digest}))


def linked(folder: Path) -> None:
    path = folder / "libraries" / LIBRARY
    path.rename(folder.parent / "outside.so")
    path.symlink_to(folder.parent / "outside.so")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a name upward": (lambda at: vouched(at, "../outside.so"), "names of files in the folder"),
    "a library upward": (lambda at: vouched(at, "libraries/../escaped.so"), "names of files in the folder"),
    "a link outside": (linked, "names of files in the folder"),
    "deep JSON": (lambda at: (at / "artifacts.json").write_text("[" * 10**6), "nested too deeply"),
    "a sparse list": (lambda at: os.truncate(at / "artifacts.json", 4 << 40), "4398046511104 bytes"),
    "a pipe": (lambda at: piped(at / "entries.bin"), "expected a regular file"),
    "a pipe for a list": (lambda at: piped(at / "artifacts.json"), "expected a regular file"),
    "a folder of anybody": (lambda at: at.chmod(0o777), "may be written by anybody"),
    "libraries of anybody": (lambda at: (at / "libraries" / "zz").chmod(0o777), "may be written by anybody"),
    "a file of anybody": (lambda at: (at / "entries.bin").chmod(0o666), "may be written by anybody"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_leads_elsewhere(folder: Path, caplog: pytest.LogCaptureFixture, attack: str) -> None:
    """Names and links that leave the folder or the caches, files that are none, code that anybody may change."""
    change, says = ATTACKS[attack]
    change(folder)
    found, said = loaded(folder, caplog)
    assert not found and says in said and "this rank compiles" in said
    assert not (cache_folder().parent / "escaped.so").exists()


def test_folders_are_not_overwritten(folder: Path) -> None:
    """OSError, and what was there stays."""
    before = Artifacts.read(folder)
    with pytest.raises(OSError, match="made"):
        before._replace(libraries={}).write(folder)
    assert Artifacts.read(folder) == before
