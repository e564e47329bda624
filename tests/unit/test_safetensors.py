"""Files of safetensors: what we write the `safetensors` package reads, and the other way round."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdp_compile import checkpoint
from fsdp_compile.checkpoint import hugging_face


class Mixed(nn.Module):
    """Tied, empty, 0-d, non-contiguous and half-precision parameters, buffers that are saved, some of them views that
    are computed when they are read, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.scale, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.low = nn.Parameter(torch.randn(9).bfloat16())
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.randn(3, dtype=torch.complex64).conj().imag)
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def build(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def read_by_package(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's files."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("limit", [10**9, 100])
def test_the_package_and_we_read_what_we_write(tmp_path: Path, limit: int) -> None:
    """One file or several with an index: values, and the names of tied parameters, which are written once; also into
    parameters that are not contiguous."""
    model = build(0)
    checkpoint.save_safetensors(model, tmp_path, max_shard_size=limit)
    expected = model.state_dict()
    del expected["head.weight"]
    assert_equal(read_by_package(tmp_path), expected)
    files = sorted(tmp_path.glob("*.safetensors"))
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "tokens.weight"}
    if limit > 100:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files} and len(files) > 2
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    other = build(1)
    checkpoint.load_safetensors(other, tmp_path)
    assert_equal(other.state_dict(), model.state_dict())


def test_every_dtype(tmp_path: Path) -> None:
    """What either writes the other one reads, in any order."""
    tensors = {str(n): torch.arange(6).view(2, 3).to(dtype) for n, dtype in enumerate(hugging_face.NAMES)}
    save_file(tensors, tmp_path / "any.safetensors")
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, torch.zeros_like(tensor))
    checkpoint.load_safetensors(model, tmp_path)
    checkpoint.save_safetensors(model, tmp_path / "again")
    for found in (model.state_dict(), load_file(tmp_path / "again" / "model.safetensors")):
        assert_equal({name: t.view(torch.uint8) for name, t in found.items()},
                     {name: t.view(torch.uint8) for name, t in tensors.items()})  # fmt: skip


def test_values_are_converted(tmp_path: Path) -> None:
    """To the model's dtype, in parts, so that a buffer stays small."""
    tensors = {"weight": torch.randn(3000, 2000).bfloat16(), "bias": torch.arange(3000)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Linear(2000, 3000)
    checkpoint.load_safetensors(model, tmp_path)
    assert torch.equal(model.weight, tensors["weight"].float())
    assert torch.equal(model.bias, tensors["bias"].float())


def test_one_name_of_tied_parameters_is_enough(tmp_path: Path) -> None:
    """Whichever of them the file has."""
    torch.manual_seed(0)
    model = MODELS["tied"].build()
    values = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    values["head.weight"] = values.pop("tokens.weight")
    save_file(values, tmp_path / "model.safetensors")
    checkpoint.load_safetensors(model, tmp_path)
    assert torch.equal(model.tokens.weight, values["head.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": None}, "names that the checkpoint does not have: weight"),
        ({"more": torch.zeros(1)}, "names that .* does not have: more"),
        ({"bias": torch.zeros(4)}, r"bias: expected shape \(3,\), as in state, found \(4,\)"),
    ],
)
def test_wrong_names_and_shapes_change_nothing(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """An error says what differs; with `strict=False` names may differ, shapes may not."""
    values = {"weight": torch.ones(3, 2), "bias": torch.ones(3)} | change
    save_file({name: value for name, value in values.items() if value is not None}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match=said):
        checkpoint.load_safetensors(model, tmp_path)
    assert_equal(model.state_dict(), before)
    if "bias" in change:
        with pytest.raises(checkpoint.CheckpointError, match=said):
            checkpoint.load_safetensors(model, tmp_path, strict=False)
    else:
        checkpoint.load_safetensors(model, tmp_path, strict=False)
        assert torch.equal(model.bias, torch.ones(3))


def test_damaged_files(tmp_path: Path) -> None:
    """A truncated file, a header that is none, an index that is wrong: errors name the file and the tensor."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, path)
    content = path.read_bytes()
    for broken in (content[:-1], content[:4], content.replace(b"[3,2]", b"[3,9]"), content.replace(b'"F32"', b'"F33"')):
        path.write_bytes(broken)
        with pytest.raises(checkpoint.CheckpointError, match=f"{path}: expected a file of safetensors, found .*Error"):
            checkpoint.load_safetensors(nn.Linear(2, 3), tmp_path)
    path.write_bytes(content)
    (tmp_path.parent / "outside.safetensors").write_bytes(content)
    for index in (
        "{",
        '{"weight_map": {"weight": "model.safetensors", "other": "model.safetensors"}}',
        '{"weight_map": {"weight": "../outside.safetensors"}}',
        json.dumps({"weight_map": {"weight": str(path)}}),
        '{"weight_map": {"weight": 3}}',
    ):
        (tmp_path / hugging_face.INDEX).write_text(index)
        with pytest.raises(checkpoint.CheckpointError, match=r"names of files in the folder|\.index\.json"):
            checkpoint.load_safetensors(nn.Linear(2, 3), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors.index.json or one file"):
        checkpoint.load_safetensors(nn.Linear(2, 3), tmp_path / "none")


def test_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    """Files of the earlier export go, others stay; while it is written the old one is complete."""
    (tmp_path / "config.json").write_text("{}")
    checkpoint.save_safetensors(nn.Linear(20, 30), tmp_path, max_shard_size=100)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    new = nn.Linear(20, 30)
    checkpoint.save_safetensors(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), new.state_dict())


def test_failing_export_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while values are written changes no file that was there."""
    old = nn.Linear(2, 3)
    checkpoint.save_safetensors(old, tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "bytes_of", fail)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank 0.*No space left"):
            checkpoint.save_safetensors(nn.Linear(2, 3), tmp_path)
        assert not [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), old.state_dict())
    checkpoint.save_safetensors(nn.Linear(2, 3), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_index_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an index does not stay."""

    def fail(path: Path, content: bytes, real: Any = hugging_face.write_synced) -> None:
        real(path, content)
        if hugging_face.INDEX in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(hugging_face, "write_synced", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_safetensors(nn.Linear(2, 3), tmp_path, max_shard_size=12)
    assert len([*tmp_path.iterdir()]) == 2 and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize(("before", "after"), [(100, 100), (100, 10**9), (10**9, 100), (10**9, 10**9), (100, 50)])
def test_export_that_stops_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    """After whichever rename or removal the machine stops: all of the old export, all of the new, or an error."""
    old, new = ({name: torch.full((6, 4), value) for name in "abc"} for value in (1.0, 2.0))
    seen = set()
    for stop in range(12):
        folder = tmp_path / str(stop)
        checkpoint.save_safetensors(nn.ParameterDict(old), folder, max_shard_size=before)
        with monkeypatch.context() as patch:
            left = [stop]

            def stopping(method: Any, left: list[int] = left) -> Any:
                def call(path: Path, *rest: Any, **options: Any) -> Any:
                    if left[0] == 0:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    return method(path, *rest, **options)

                return call

            patch.setattr(Path, "rename", stopping(Path.rename))
            patch.setattr(Path, "unlink", stopping(Path.unlink))
            with suppress(KeyboardInterrupt):
                checkpoint.save_safetensors(nn.ParameterDict(new), folder, max_shard_size=after)
        found = nn.ParameterDict({name: torch.zeros(6, 4) for name in "abc"})
        try:
            checkpoint.load_safetensors(found, folder, strict=False)
        except FileNotFoundError:
            seen.add("none")
            continue
        values = {float(value) for param in found.values() for value in param.detach().unique()}
        assert values in ({1.0}, {2.0}), f"after {stop}: found {values}"
        seen |= values
    assert {1.0, 2.0} <= seen


def test_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    """Nothing is written."""
    model = nn.ParameterDict({"z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"z: safetensors has no torch\.complex128; convert it first"):
        checkpoint.save_safetensors(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_groups_of_files() -> None:
    """Filled up to a limit, in order."""
    tensors = {str(n): torch.empty(size, dtype=torch.uint8) for n, size in enumerate((3, 3, 9, 1, 0, 4))}
    sizes = [[tensor.nbytes for tensor in group.values()] for group in hugging_face.fill_up(tensors, 7)]
    assert sizes == [[3, 3], [9], [1, 0, 4]]
    exactly = {str(n): torch.empty(size, dtype=torch.uint8) for n, size in enumerate((2, 4, 6, 1, 5))}
    sizes = [[tensor.nbytes for tensor in group.values()] for group in hugging_face.fill_up(exactly, 6)]
    assert sizes == [[2, 4], [6], [1, 5]]
    assert hugging_face.fill_up({}, 3) == [{}]
