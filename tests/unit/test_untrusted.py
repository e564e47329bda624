"""Folders that may come from anybody: no code runs, nothing outside is read, and there is a line that says why."""

import json
import os
import pickle
import resource
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from fsdp_compile import checkpoint
from fsdp_compile.checkpoint import CheckpointError
from fsdp_compile.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:passed over a damaged")


class Run:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def plain(folder: Path) -> None:
    """A folder that DCP wrote."""
    dcp.save({"weight": torch.ones(4, 3), "epoch": 3, "none": torch.ones(0, 3)}, checkpoint_id=folder)


def ours(folder: Path) -> None:
    """The same with a manifest."""
    checkpoint.save({"weight": torch.ones(4, 3), "epoch": 3}, folder, step=1)


def indexed(folder: Path) -> None:
    """A folder in Hugging Face's layout."""
    folder.mkdir()
    save_file({"weight": torch.ones(4, 3)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Change `.metadata`; what `change` returns, if anything, takes its place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


def moved(**changes: Any) -> Callable[[Metadata], None]:
    """A change of where the tensor lies."""

    def change(metadata: Metadata) -> None:
        index = MetadataIndex("weight", torch.Size([0, 0]))
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)

    return change


def tensor(**changes: Any) -> Callable[[Metadata], None]:
    """A change of what is said of the tensor."""

    def change(metadata: Metadata) -> None:
        stored = metadata.state_dict_metadata["weight"]
        if "chunk" in changes:
            stored.chunks[0] = replace(stored.chunks[0], **changes["chunk"])
        elif "dtype" in changes:
            stored.properties.dtype = changes["dtype"]
        else:
            metadata.state_dict_metadata["weight"] = replace(stored, **changes)

    return change


def before(metadata: Metadata) -> None:
    """Move the tensor's only chunk to a negative place, in both lists."""
    place = torch.Size([-1, 0])
    tensor(chunk={"offsets": place})(metadata)
    metadata.storage_data[MetadataIndex("weight", place)] = metadata.storage_data[
        MetadataIndex("weight", torch.Size([0, 0]))
    ]


def called(folder: Path, mark: Path) -> None:
    """Put a call where the list of tensors says that there is one."""
    torch.save(Run(mark), folder / "__0_0.distcp")
    edit(folder, moved(offset=0, length=(folder / "__0_0.distcp").stat().st_size))


DOTTED = b"\x80\x04\x8c\x05torch\x8c\x0bserialization.load\x93."
HUGE = torch.Size([10**9, 10**9])
HUGE_CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), HUGE)
ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "a call": lambda at, mark: edit(at, lambda _: Run(mark)),
    "a call in a list": lambda at, mark: edit(at, lambda _: [Run(mark)]),
    "a call of getattr": lambda at, mark: (at / ".metadata").write_bytes(b"cbuiltins\ngetattr\n."),
    "a dotted name": lambda at, mark: (at / ".metadata").write_bytes(DOTTED),
    "a call among names": lambda at, mark: edit(at, lambda m: setattr(m, "planner_data", {"weight": (Run(mark),)})),
    "a name of another type": lambda at, mark: edit(at, lambda m: setattr(m, "planner_data", {"weight": (1.5,)})),
    "no places": lambda at, mark: edit(at, lambda m: setattr(m, "storage_data", None)),
    "a call as a size": lambda at, mark: edit(at, tensor(size=Run(mark))),
    "a call as a dtype": lambda at, mark: edit(at, tensor(dtype=Run(mark))),
    "a path upward": lambda at, mark: edit(at, moved(relative_path="../secret")),
    "an absolute path": lambda at, mark: edit(at, moved(relative_path=str(at.parent / "secret"))),
    "the folder itself": lambda at, mark: edit(at, moved(relative_path=".")),
    "a path of another type": lambda at, mark: edit(at, moved(relative_path=7)),
    "a negative offset": lambda at, mark: edit(at, moved(offset=-1)),
    "a length of another type": lambda at, mark: edit(at, moved(length="many")),
    "half a tensor": lambda at, mark: edit(at, moved(length=24)),
    "no location": lambda at, mark: edit(at, lambda m: m.storage_data.clear()),
    "a huge tensor": lambda at, mark: edit(at, tensor(size=HUGE, chunks=[HUGE_CHUNK])),
    "a negative shape": lambda at, mark: edit(at, tensor(size=torch.Size([-4, 3]))),
    "a chunk outside": lambda at, mark: edit(at, tensor(chunk={"sizes": torch.Size([5, 3])})),
    "a chunk before its tensor": lambda at, mark: edit(at, before),
    "a chunk of negative sizes": lambda at, mark: edit(at, tensor(chunk={"sizes": torch.Size([-4, -3])})),
    "a chunk of other dimensions": lambda at, mark: edit(at, tensor(chunk={"sizes": torch.Size([12])})),
    "a dtype that is text": lambda at, mark: edit(at, tensor(dtype="float32")),
    "no list": lambda at, mark: edit(at, lambda _: {"weight": 1}),
    "an empty list": lambda at, mark: (at / ".metadata").write_bytes(b""),
    "half a list": lambda at, mark: (at / ".metadata").write_bytes((at / ".metadata").read_bytes()[:200]),
    "a sparse list": lambda at, mark: os.truncate(at / ".metadata", (1 << 30) + 1),
    "a deep list": lambda at, mark: (at / ".metadata").write_bytes(b"(" * 10**6 + b"."),
    "a link outside": lambda at, mark: link(at / "__0_0.distcp", mark.parent / "secret"),
    "a linked list": lambda at, mark: link(at / ".metadata", mark.parent / "secret"),
    "a circle of links": lambda at, mark: circle(at / "__0_0.distcp"),
    "a size beyond torch's": lambda at, mark: edit(at, tensor(size=torch.Size([1 << 62, 1 << 62, 0]), chunks=[])),
    "a pipe": lambda at, mark: pipe(at / "__0_0.distcp"),
    "a call as a tensor": called,
    "a damaged file": lambda at, mark: (at / "__0_0.distcp").write_bytes(b"\0" * (at / "__0_0.distcp").stat().st_size),
}  # fmt: skip

MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a path upward": lambda body: body["files"].update({"../../secret": [["x", 0, 6, 0]]}),
    "an absolute path": lambda body: body["files"].update({"/etc/hostname": [["x", 0, 6, 0]]}),
    "no list of tensors": lambda body: body["files"].pop(".metadata"),
    "a segment of two fields": lambda body: body["files"].update({"x": [["x", 0]]}),
    "a negative size": lambda body: body["files"].update({"x": [["x", 0, -5, 0]]}),
    "a file without segments": lambda body: body["files"].update({"x": []}),
    "a step of text": lambda body: body.update(step="one"),
    "files of another type": lambda body: body.update(files=[1]),
    "no format": lambda body: body.pop("format"),
    "another format": lambda body: body.update(format=99),
}

SAFETENSORS: dict[str, Callable[[Path, Path], Any]] = {
    "a path upward": lambda at, mark: index(at, "../secret"),
    "an absolute path": lambda at, mark: index(at, str(at.parent / "secret")),
    "a number for a path": lambda at, mark: index(at, 7),
    "a file that is not there": lambda at, mark: index(at, "b.safetensors"),
    "a link outside": lambda at, mark: link(at / "a.safetensors", at.parent / "secret"),
    "a linked index": lambda at, mark: link(at / "model.safetensors.index.json", at.parent / "outside.json", True),
    "only a link outside": lambda at, mark: only(at, at.parent / "outside.safetensors"),
    "a size beyond torch's": lambda at, mark: entry(at, [1 << 63, 0], [0, 0]),
    "a pipe": lambda at, mark: pipe(at / "a.safetensors"),
    "a deep index": lambda at, mark: (at / "model.safetensors.index.json").write_text("[" * 10**6),
    "a list for an index": lambda at, mark: (at / "model.safetensors.index.json").write_text("[]"),
    "a sparse index": lambda at, mark: os.truncate(at / "model.safetensors.index.json", 1 << 34),
    "a deep header": lambda at, mark: header(at, b'{"a":' * 10**6),
    "a huge tensor": lambda at, mark: entry(at, [10**12, 10**12], [0, 4 * 10**24]),
    "another dtype": lambda at, mark: entry(at, [1], [0, 4], "F3"),
}


def link(path: Path, to: Path, moves: bool = False) -> None:
    """Put a link in the place of a file: to a secret, or to what the file was."""
    if moves:
        path.rename(to)
    else:
        to.write_text("secret words")
        path.unlink()
    path.symlink_to(to)


def only(at: Path, to: Path) -> None:
    (at / "model.safetensors.index.json").unlink()
    link(at / "a.safetensors", to, moves=True)


def circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def index(at: Path, file: Any) -> None:
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))


def header(at: Path, text: bytes) -> None:
    (at / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def entry(at: Path, shape: list[int], offsets: list[Any], dtype: str = "F32") -> None:
    header(at, json.dumps({"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode() + b"\0" * 16)


OUTSIDE = ("a path upward", "an absolute path", "the folder itself", "a link outside", "a linked list",
           "a linked index", "only a link outside")  # fmt: skip
OF_DATA = ("a damaged file", "a call as a tensor")  # which lists can be shown
SAYS = {"a call as a tensor": "weight: expected what torch.save writes, found"}  # and no advice to trust it


def refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    mark: Path,
    may_show: bool = False,
    says: str = "",
    to: str = "torch",
) -> None:
    """Showing and converting end with an error line, without running or reading what the folder names."""
    target = folder.parent / "converted"
    for command in ([] if may_show else [["show", str(folder)]]) + [
        ["convert", str(folder), str(target), "--format", to]
    ]:
        assert main(["checkpoint", *command]) in (1, 2), command
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if not line.startswith("fsdp-compile: warning: ")]
        assert len(lines) == 1 and lines[0].startswith("fsdp-compile: error: ") and "\x1b" not in printed.err
        assert says in printed.err
        assert "secret words" not in printed.out + printed.err
        assert not mark.exists() and not target.exists()


@pytest.fixture
def at(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret words")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("attack", ATTACKS)
def test_lists_of_tensors(at: Path, attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A `.metadata` that calls, leads outside or lies, and data files that are no files: show and convert refuse."""
    plain(at)
    mark = at.parent / "mark"
    assert main(["checkpoint", "show", str(at)]) == 0
    ATTACKS[attack](at, mark)
    says = "names of files in the folder" if attack in OUTSIDE else SAYS.get(attack, "")
    refused(at, capsys, mark, attack in OF_DATA, says)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=pytest.mark.nightly if name == "a sparse list" else ())  # a GiB is read
        for name in ATTACKS
        if name not in ("a link outside", "a circle of links", "a pipe", *OF_DATA)
    ],
)
def test_lists_with_a_valid_manifest(at: Path, attack: str) -> None:
    """`checkpoint.load` refuses them too where a manifest with right checksums vouches for them."""
    ours(at)
    [folder] = at.glob("step-*")
    mark = at.parent / "mark"
    checkpoint.load({"weight": torch.zeros(4, 3), "epoch": 0}, at)
    ATTACKS[attack](folder, mark)
    content = (folder / ".metadata").read_bytes() if (folder / ".metadata").exists() else b"secret words"

    def vouch(body: dict[str, Any]) -> None:
        body["files"][".metadata"] = [["list", 0, len(content), zlib.crc32(content)]]

    rewrite(folder, vouch)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        checkpoint.load({"weight": torch.zeros(4, 3), "epoch": 0}, at)
    assert not mark.exists()


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body)
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc, "manifest": body}))


OF_FILES: dict[str, Callable[[Path], Any]] = {
    "deep": lambda folder: (folder / "manifest.json").write_text("[" * 10**6),
    "sparse": lambda folder: os.truncate(folder / "manifest.json", 1 << 34),
    "a pipe": lambda folder: pipe(folder / "manifest.json"),
    "a link": lambda folder: link(folder / "manifest.json", folder.parents[1] / "outside.json", moves=True),
    "the folder is a link": lambda folder: link(folder, folder.parents[1] / "outside", moves=True),
}


@pytest.mark.parametrize("attack", [*MANIFESTS, *OF_FILES])
def test_manifests(at: Path, attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that leads outside, lies, or is too large is a damaged checkpoint, for load as for the commands."""
    ours(at)
    [folder] = at.glob("step-*")
    checkpoint.load({"weight": torch.zeros(4, 3)}, at)
    rewrite(folder, MANIFESTS[attack]) if attack in MANIFESTS else OF_FILES[attack](folder)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        checkpoint.load({"weight": torch.zeros(4, 3)}, at)
    refused(at, capsys, at.parent / "mark")


@pytest.mark.parametrize("attack", SAFETENSORS)
def test_safetensors(at: Path, attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An index that leads outside and headers that lie are refused by an error line."""
    indexed(at)
    assert main(["checkpoint", "show", str(at)]) == 0
    SAFETENSORS[attack](at, at.parent / "mark")
    refused(at, capsys, at.parent / "mark", says="names of files in the folder" if attack in OUTSIDE else "")


def test_hidden_list_beside_safetensors(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of safetensors is read as such, and a hidden pickle in it is not looked at."""
    indexed(at)
    (at / ".metadata").write_bytes(pickle.dumps(Run(at.parent / "mark")))
    assert main(["checkpoint", "show", str(at)]) == 0
    assert "safetensors" in capsys.readouterr().out
    assert not (at.parent / "mark").exists()


@pytest.mark.parametrize("part", ["", "unet"])
def test_links_of_a_cache(tmp_path: Path, part: str) -> None:
    """A snapshot in Hugging Face's cache consists of links to blobs, and is read; so is a folder of it, as diffusers
    have. `blobs` that are a link themselves lead outside."""
    folder = tmp_path / "snapshots" / "0123" / part
    folder.parent.mkdir(parents=True), (tmp_path / "blobs").mkdir()
    indexed(folder)
    for file in list(folder.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(Path("../../../blobs" if part else "../../blobs") / file.name)
    assert main(["checkpoint", "show", str(folder)]) == 0
    link(tmp_path / "blobs", tmp_path / "elsewhere", moves=True)
    assert main(["checkpoint", "show", str(folder)]) == 1


def test_a_linked_checkpoint_is_pruned(at: Path) -> None:
    """A save that makes room removes the link, and nothing of what it leads to; also one that an earlier save left."""
    outside, step = at.parent / "outside", "step-00000001"
    ours(outside)
    content = {path: path.read_bytes() for path in (outside / step).iterdir()}
    at.mkdir()
    (at / step).symlink_to(outside / step)
    (at / f".{step}.removed").symlink_to(outside / step)
    with pytest.raises(CheckpointError, match="names of files in the folder"):
        checkpoint.load({"weight": torch.zeros(4, 3)}, at, step=1)
    checkpoint.save({"weight": torch.ones(4, 3)}, at, step=2, keep=1)
    assert [path.name for path in at.iterdir()] == ["step-00000002"]
    assert {path: path.read_bytes() for path in (outside / step).iterdir()} == content


@pytest.mark.parametrize("size", [1, 10_000])
def test_export_into_a_folder_of_links(at: Path, size: int) -> None:
    """Files of an export are new ones: links under the names of staged and final files lead nothing elsewhere."""
    at.mkdir()
    for name in ("model", "model-00001-of-00002", "model-00002-of-00002", "model.safetensors.index"):
        name = f"{name}.json" if name.endswith("index") else f"{name}.safetensors"
        for each in (name, f".{name}.partial"):
            (at / each).symlink_to(at.parent / "secret")
    checkpoint.save_safetensors(torch.nn.Linear(2, 2), at, max_shard_size=size)
    assert (at.parent / "secret").read_text() == "secret words"
    assert main(["checkpoint", "show", str(at)]) == 0


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_no_space_for_the_result(at: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the size of files, or a full disk: an error line, and nothing is left."""
    at.mkdir()
    save_file({"weight": torch.ones(1 << 16)}, at / "a.safetensors")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        refused(
            at, capsys, at.parent / "mark", may_show=True, says="File too large" if to == "safetensors" else "", to=to
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in at.parent.iterdir()) == ["checkpoint", "secret"]


def test_a_sparse_file_of_torch(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 TB without bytes, behind a valid file or as a tensor in it, are an error line."""
    torch.save({"weight": torch.ones(4)}, at)
    os.truncate(at, 4 << 40)
    refused(at, capsys, at.parent / "mark")


def test_pickled_values(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that is neither a tensor nor plain is loaded with `trust` only, by the function and by the command."""
    mark = at.parent / "mark"
    checkpoint.save({"weight": torch.ones(2), "value": Run(mark)}, at, step=1)
    with pytest.raises(CheckpointError, match=r"value: expected tensors and plain values.*pass trust=True"):
        checkpoint.load({"weight": torch.zeros(2), "value": None}, at)
    refused(at, capsys, mark, may_show=True)
    assert main(["checkpoint", "convert", str(at), str(at.parent / "converted"), "--format", "torch", "--trust"]) == 0
    assert mark.exists()
    mark.rmdir()
    checkpoint.load({"weight": torch.zeros(2), "value": None}, at, trust=True)
    assert mark.exists()


def test_names_for_a_terminal(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names with control characters are printed with escapes."""
    dcp.save({"\x1b[2Jweight\r\n": torch.ones(2), "\x1b]0;": 3}, checkpoint_id=at)
    assert main(["checkpoint", "show", str(at)]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[2Jweight\\r\\n" in printed and "\x1b" not in printed


def test_file_with_the_name_of_a_step(at: Path) -> None:
    """A plain file that is named as a checkpoint hinders neither a save nor a load."""
    at.mkdir()
    (at / "step-00000001").write_text("")
    for step in (1, 2):
        checkpoint.save({"weight": torch.ones(2)}, at, step=step, keep=2)
    assert checkpoint.load({"weight": torch.zeros(2)}, at) == 2
    assert checkpoint.load({"weight": torch.zeros(2)}, at, step=1) == 1
