"""A folder of checkpoints in one process: complete or invisible, checked when read, cleaned of leftovers."""

import json
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_compile import checkpoint
from fsdp_compile.checkpoint import directory
from fsdp_compile.checkpoint.entries import Model
from fsdp_compile.checkpoint.save_load import all_succeed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed: int = 0) -> dict[str, Any]:
    """Tensors that are views, some of them computed when they are read, of several dtypes, empty and 0-d, beside values
    that are no tensors."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(100, generator=generator)
    complexes = torch.randn(3, 4, dtype=torch.complex64, generator=generator)
    tensors = {
        "view": flat[7:31].view(4, 6),
        "strided": flat[:60].view(6, 10).t(),
        "bf16": flat.bfloat16()[3:10],
        "bytes": flat.to(torch.uint8),
        "scalar": flat[5],
        "empty": flat[:0].view(0, 3),
        "complex": complexes,
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "turned": complexes.t().conj()[1:],
    }
    return {"model": tensors, "steps": [seed, {"name": "adam"}], "optimizer": {"momentum": flat[50:]}}


def blank() -> dict[str, Any]:
    """The same with other values."""
    made = state()
    for tensor in (*made["model"].values(), made["optimizer"]["momentum"]):
        tensor.zero_()
    made["model"]["complex"] = torch.zeros(3, 4, dtype=torch.complex64)  # with memory of its own
    return made | {"steps": [None, {"name": None}]}


def assert_loads(root: Path, seed: int, step: int | None = None) -> None:
    """What was saved with `seed` comes back bit for bit."""
    found, expected = blank(), state(seed)
    checkpoint.load(found, root, step)
    assert found["steps"] == expected["steps"]
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["optimizer"]["momentum"], expected["optimizer"]["momentum"])


def names(root: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in root.iterdir())


def files(path: Path) -> list[Path]:
    """Files of a checkpoint that hold something."""
    return sorted(file for file in path.iterdir() if file.stat().st_size)


def test_saved_is_loaded(tmp_path: Path) -> None:
    """Values come back bit for bit, from the newest step or from the one asked for; nothing else lies in the folder."""
    for step in (1, 2, 30):
        checkpoint.save(state(step), tmp_path / "root", step)
    assert names(tmp_path / "root") == ["step-00000001", "step-00000002", "step-00000030"]
    assert checkpoint.latest(tmp_path / "root") == tmp_path / "root" / "step-00000030"
    assert checkpoint.load(blank(), tmp_path / "root") == 30
    assert_loads(tmp_path / "root", 30)
    assert_loads(tmp_path / "root", 2, step=2)


def test_functions_of_torch(tmp_path: Path) -> None:
    """The files are those of `torch.distributed.checkpoint`: `dcp.async_save` makes them, and `dcp.load` reads them."""
    dcp.async_save(state(4), storage_writer=checkpoint.DirectoryWriter(tmp_path, 4)).result()
    assert_loads(tmp_path, 4)
    found = blank()
    dcp.load(found, checkpoint_id=tmp_path / "step-00000004")
    assert torch.equal(found["model"]["view"], state(4)["model"]["view"])
    assert found["steps"] == state(4)["steps"]


@pytest.mark.parametrize("use", [checkpoint.save, checkpoint.load])
def test_what_lies_too_deep(tmp_path: Path, use: Any) -> None:
    """A model, an optimizer or the like within a nested dict or list would be pickled as it is: it is refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for nested, where in (
        ({"a": {"b": model}}, r"state\['a'\]\['b'\]: .* found a Linear"),
        ({"a": [1, {"b": optimizer}]}, r"state\['a'\]\[1\]\['b'\]: .* found a SGD"),
        ({"a": (schedule,)}, r"state\['a'\]\[0\]: .* found a StepLR; put what has a state_dict\(\)"),
    ):
        checkpoint.save(state(), tmp_path, 0)
        with pytest.raises(ValueError, match=where):
            use(nested, tmp_path, 0)


def test_nothing_to_load(tmp_path: Path) -> None:
    """A folder that does not exist or lacks the step is an error that names what is there."""
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError, match="expected a complete checkpoint, found steps: none"):
        checkpoint.load(blank(), tmp_path / "none")
    checkpoint.save(state(), tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint of step 4, found steps: 3"):
        checkpoint.load(blank(), tmp_path, 4)


def test_bad_arguments(tmp_path: Path) -> None:
    """Nothing is made for a step or a number to keep that makes no sense."""
    for step, keep in ((-1, None), (1, 0)):
        with pytest.raises(ValueError, match="expected step of at least 0 and keep of at least 1"):
            checkpoint.save(state(), tmp_path / "root", step, keep=keep)
    assert not (tmp_path / "root").exists()


def test_keep_the_newest(tmp_path: Path) -> None:
    """With `keep` the oldest go, after the new one can be seen."""
    for step in range(5):
        checkpoint.save(state(step), tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    checkpoint.save(state(9), tmp_path, 1, keep=2)  # somebody went back
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    assert_loads(tmp_path, 9, step=1)
    checkpoint.save(state(9), tmp_path, 2, keep=7)
    assert len(names(tmp_path)) == 3


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    """It gets a name of its own, so that at no moment neither is there."""
    for seed in (1, 2, 3):
        checkpoint.save(state(seed), tmp_path, 10)
        assert_loads(tmp_path, seed)
        assert_loads(tmp_path, seed, step=10)
    assert names(tmp_path) == ["step-00000010.2"]


@pytest.mark.parametrize("lost", [1, 1000])
def test_truncated_file(tmp_path: Path, lost: int) -> None:
    """An error names the file and what was lost first; `latest` warns and passes over it."""
    checkpoint.save(state(1), tmp_path, 1)
    checkpoint.save(state(2), tmp_path, 2)
    path = tmp_path / "step-00000002" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - lost)
    with pytest.raises(checkpoint.CheckpointError, match=r"__0_0.distcp, with [a-z]+\.\w+: expected"):
        checkpoint.load(blank(), tmp_path, 2)
    with pytest.warns(UserWarning, match="passed over a damaged checkpoint"):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="passed over"):
        assert_loads(tmp_path, 1)


def test_altered_bytes_and_missing_files(tmp_path: Path) -> None:
    """Whichever byte of whichever file is altered: an error names the file, and the tensor that the byte is part of; so
    it does if the file is gone.

    All but those that say how an empty tensor was stored: nothing of it is read.
    """
    checkpoint.save(state(1), tmp_path, 1)
    folder = tmp_path / "step-00000001"
    segments = json.loads((folder / "manifest.json").read_text())["manifest"]["files"]["__0_0.distcp"]
    for path in files(folder):
        content = path.read_bytes()
        for at in range(0, len(content), 1 + len(content) // 40):
            there = [name for name, start, size, _ in segments if start <= at < start + size]
            name = there[0] if path.suffix == ".distcp" else "(the list of )?all tensors"
            if name != "model.empty":
                path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
                with pytest.raises(checkpoint.CheckpointError, match=f"{re.escape(path.name)}, with {name}: "):
                    checkpoint.load(blank(), tmp_path, 1)
        path.unlink()
        with pytest.raises(checkpoint.CheckpointError, match=re.escape(path.name)):
            checkpoint.load(blank(), tmp_path, 1)
        path.write_bytes(content)
    assert_loads(tmp_path, 1)


def test_only_what_is_loaded_is_checked(tmp_path: Path) -> None:
    """A model can be loaded although the optimizer's state beside it was altered."""
    checkpoint.save(state(1), tmp_path, 1)
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["manifest"]
    start = next(p[1] for p in manifest["files"]["__0_0.distcp"] if p[0] == "optimizer.momentum")
    with open(tmp_path / "step-00000001" / "__0_0.distcp", "r+b") as file:
        file.seek(start + 400)
        file.write(b"?")
    checkpoint.load({"model": blank()["model"]}, tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.momentum"):
        checkpoint.load(blank(), tmp_path)


@pytest.mark.parametrize("call", [(os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "unlink"), (torch, "save")])
def test_failing_save(tmp_path: Path, call: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in a save, a checkpoint stays, what was written goes, and the next save succeeds."""
    checkpoint.save(state(1), tmp_path, 1)
    real, left, newest = getattr(*call), [0], 1

    def fail(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(28, "No space left on device")
        return real(*args, **options)

    for step in range(2, 40):
        left[0] = step - 2
        with monkeypatch.context() as patch:
            patch.setattr(*call, fail)
            try:
                checkpoint.save(state(step), tmp_path, step, keep=1)
            except checkpoint.CheckpointError as error:
                assert re.search(r"rank 0: .*No space left", str(error))
        newest = max(directory.step_of(path) for path in directory.committed(tmp_path))
        assert newest == step or left[0] < 0
        assert_loads(tmp_path, newest)
        assert not [name for name in names(tmp_path) if name.startswith(".")]
        if left[0] >= 0:
            return
    raise AssertionError("it failed each time")


def staged(root: Path, step: int) -> checkpoint.DirectoryWriter:
    """A save that has begun."""
    writer = checkpoint.DirectoryWriter(root, step)
    writer.prepare_global_plan([])
    return writer


def test_leftovers(tmp_path: Path) -> None:
    """A save removes what killed saves left behind, not what is being written, and nothing of anybody else's."""
    (tmp_path / ".step-00000005.abc").mkdir()
    (tmp_path / ".step-00000005.abc" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step-00000001.removed").mkdir()
    for name in ("step-last", "notes.txt", ".step-x", ".hidden"):
        (tmp_path / name).mkdir()
    busy = staged(tmp_path, 7)
    checkpoint.save(state(), tmp_path, 8)
    stay = {".hidden", ".step-x", "notes.txt", "step-00000008", "step-last"}
    assert set(names(tmp_path)) == {*stay, busy.path.name}
    busy._staged.pop_all()  # as if it had been killed: nobody removes its folder, and nobody holds its lock
    checkpoint.save(state(), tmp_path, 9)
    assert set(names(tmp_path)) == {*stay, "step-00000009"}


def test_another_save_begins_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the moment when it is seen, a checkpoint is no leftover to others."""
    sync = directory.sync_folder

    def begin_first(path: Path) -> None:
        if path.name.startswith(".step-00000003"):
            staged(tmp_path, 4).discard()
        sync(path)

    monkeypatch.setattr(directory, "sync_folder", begin_first)
    checkpoint.save(state(3), tmp_path, 3)
    assert_loads(tmp_path, 3)
    assert not (tmp_path / "step-00000003" / ".lock").exists()


def test_saves_begin_one_after_the_other(tmp_path: Path) -> None:
    """Nobody looks for leftovers while another has a folder that is not locked yet."""
    with ThreadPoolExecutor() as threads:
        with directory._locked(tmp_path):
            begun = threads.submit(staged, tmp_path, 1)
            with pytest.raises(TimeoutError):
                begun.result(timeout=0.2)
            assert names(tmp_path) == []
        assert begun.result(timeout=20).path.parent == tmp_path


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save succeeds, and warns."""
    checkpoint.save(state(1), tmp_path, 1)
    rename = Path.rename

    def refuse_to_hide(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_to_hide)
    with pytest.warns(UserWarning, match="could not remove an old checkpoint: .*Permission denied"):
        checkpoint.save(state(2), tmp_path, 2, keep=1)
    assert_loads(tmp_path, 2)


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """Both save, with few to keep, while a third loads the newest again and again: all succeed, nothing is mixed."""
    checkpoint.save(state(100), tmp_path, 100)

    def save(job: int) -> None:
        for step in range(101, 113):
            checkpoint.save(state(step), tmp_path, step, keep=1)

    with ThreadPoolExecutor() as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old checkpoint that the other job has removed first
        jobs = [threads.submit(save, job) for job in range(2)]
        while not all(job.done() for job in jobs):
            found = blank()
            assert found["steps"][0] is None and checkpoint.load(found, tmp_path) == found["steps"][0]
        for job in jobs:
            job.result()


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    """As those of any folder that is made."""
    before = os.umask(0o027)
    try:
        checkpoint.save(state(), tmp_path, 0)
    finally:
        os.umask(before)
    assert (tmp_path / "step-00000000").stat().st_mode & 0o777 == 0o750


def test_errors_without_words() -> None:
    """An error that says nothing is an error all the same."""

    def fail() -> None:
        raise MemoryError

    with pytest.raises(checkpoint.CheckpointError, match=r"reading: rank 0: MemoryError\(\)"):
        all_succeed(fail, "reading", None)


def test_every_file_is_synced_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the folder of checkpoints, which is new, then all files, then their folder reach the disk before the
    rename, and the folder of checkpoints after it."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(number: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(f"-> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    checkpoint.save(state(), tmp_path / "root", 3)
    hidden = events[-3]
    assert hidden.startswith(".step-00000003.")
    assert events[-3:] == [hidden, "-> step-00000003", "root"]
    assert events[:-3] == [tmp_path.name, "__0_0.distcp", ".metadata.tmp", "-> .metadata", "manifest.json"]


def test_views_are_written_alone(tmp_path: Path) -> None:
    """Of a view into a large shard the rest of its storage is not written."""
    shard = torch.randn(100_000)
    checkpoint.save({"a": shard[1:1001].view(10, 100), "b": shard[1001:3001]}, tmp_path, 0)
    assert (tmp_path / "step-00000000" / "__0_0.distcp").stat().st_size < 20_000


def test_what_trains_is_saved_without_the_rest() -> None:
    """The state of what trains has buffers, no frozen parameter under any name, and leaves frozen ones as they are."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[2].weight = model[0].weight
    inner = Model("model", model, only_trained=True)
    saved = inner.collect()
    assert {*saved} == {name for name in model.state_dict() if name[0] == "1" or name == "2.bias"}
    frozen = model[0].weight.clone()
    inner.put({name: torch.full_like(value, 7) for name, value in saved.items()})
    assert torch.equal(model[0].weight, frozen)
    assert bool((model[2].bias == 7).all())
