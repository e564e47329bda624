"""Files altered at random by a seed: no code runs, nothing outside is touched, and a line says what is wrong."""

import json
import os
import platform
import random
import re
import resource
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fsdp_compile import checkpoint
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad.plan_by_cost import plans_in_file
from fsdp_compile.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = int(os.environ.get("FSDP_COMPILE_MUTATIONS", 200))  # of each kind
STATE = {"weight": torch.arange(12.0).view(4, 3), "nested": {"bias": torch.ones(3), "epoch": 3}, "names": ["a", "b"]}


def dcp_folder(at: Path) -> Path:
    dcp.save(STATE, checkpoint_id=at)
    return at / ".metadata"


def our_folder(at: Path) -> Path:
    checkpoint.save(STATE, at, step=1)
    return at / "step-00000001" / "manifest.json"


def torch_file(at: Path) -> Path:
    torch.save(STATE, at)
    return at


def safetensors_file(at: Path) -> Path:
    at.mkdir()
    save_file({"weight": torch.ones(4, 3), "bias": torch.ones(3, dtype=torch.bfloat16)}, at / "a.safetensors")
    return at / "a.safetensors"


def indexed_folder(at: Path) -> Path:
    safetensors_file(at)
    index = {"metadata": {"total_size": 54}, "weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))
    return at / "model.safetensors.index.json"


def plan_file(at: Path) -> Path:
    at.write_text("forward:\nat 0 gather a\nat 1 wait a\nat 3 free a\n\nbackward:\nat 2 reduce a\n")
    return at


KINDS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each for each in (dcp_folder, our_folder, torch_file, safetensors_file, indexed_folder, plan_file)
}
NUMBERS = [
    b"-1",
    b"0",
    b"true",
    b"null",
    b"1e999",
    b"NaN",
    b"[]",
    b"{}",
    b"9" * 5000,
    b"9223372036854775808",
    b"4611686018427387904",
]
NAMES = [b"../secret", b"/etc/passwd", b".", b"", b"a" * 5000, b"\\u0000", b"\\ud800", b"libraries/../../secret"]


def mutated(content: bytes, draw: random.Random, mark: Path) -> bytes:
    """`content` with one to three alterations."""
    for _ in range(draw.randint(1, 3)):
        at, way = draw.randrange(len(content) + 1), draw.randrange(9)
        runs = list(re.finditer(rb"\d+", content)) if way in (3, 4) else list(re.finditer(rb"[a-z_./]{3,}", content))
        if way <= 1 and content:
            flipped = bytearray(content)
            for _ in range(draw.randint(1, 8)):
                flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            content = bytes(flipped)
        elif way == 2:
            content = content[:at]
        elif way <= 5 and runs:
            run = draw.choice(runs)
            put = draw.choice(NUMBERS if way < 5 else NAMES)
            content = content[: run.start()] + put + content[run.end() :]
        elif way == 6:
            deep = draw.choice([b"[", b'{"a":', b"(", b"]", b"("]) * draw.choice([100, 100_000])
            content = content[:at] + deep + content[at:]
        elif way == 7:  # a number of 8 bytes
            content = content[:at] + draw.choice([b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x40"]) + content[at + 8 :]
        else:  # a pickle that makes a folder
            content = content[:at] + f"cposix\nmkdir\n(V{mark}\ntR".encode() + content[at:]
    return content


def vouch(path: Path) -> None:
    """Let the checksum of a manifest be right, so that what it says is looked at."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        body = json.loads(path.read_text())["manifest"]
        path.write_text(json.dumps({"crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode()), "manifest": body}))


watched: list[tuple[str, Any]] | None = None  # what the process has done, while this is a list
FILES = {"open": 1, "os.mkdir": 1, "os.remove": 1, "os.truncate": 1, "os.rename": 2, "os.symlink": 2}  # -> paths
STARTS = ("exec", "os.system", "os.exec", "os.fork", "subprocess.Popen", "socket.connect")
PYTHON = (sys.prefix, sys.base_prefix, *map(str, (Path(torch.__file__).parents[1], Path(__file__).parents[2])), "/proc")


def watch(event: str, args: Any) -> None:
    if watched is not None and event in (*FILES, *STARTS):
        watched.append((event, args))


@pytest.fixture(scope="module", autouse=True)
def hooked() -> Iterator[None]:
    sys.addaudithook(watch)
    yield


def run(kind: str, folder: Path, target: Path) -> None:
    """Show, convert and load; an exception that is no stated refusal escapes."""
    if kind == "plan_file":
        with suppress(PlanError):
            plans_in_file(str(folder))
    else:
        assert main(["checkpoint", "show", str(folder)]) in (0, 1, 2)
        assert main(["checkpoint", "convert", str(folder), str(target), "--format", "dcp"]) in (0, 1, 2)
    if kind == "our_folder":
        with suppress(checkpoint.CheckpointError, FileNotFoundError):
            checkpoint.load({"weight": torch.zeros(4, 3), "nested": {"bias": torch.zeros(3), "epoch": 0}}, folder)


def check(seen: list[tuple[str, Any]], parent: str, own: tuple[str, ...]) -> None:
    """Only `parent` itself and files under `own` were touched, and nothing was started."""
    for event, args in seen:
        assert event in FILES or (event == "exec" and args[0].co_filename.startswith(("<", *PYTHON))), (event, args)
        for each in args[: FILES.get(event, 0)]:
            if isinstance(each, (str, bytes)):
                where = os.path.abspath(os.fsdecode(each))
                assert where == parent or where.startswith((*own, *PYTHON)), (event, where)


def late(*_: Any) -> None:
    raise TimeoutError


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """2 GiB more than there are now: Python before its issue 115952 allocates gigabytes for a number in a pickle."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_mutations(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte flips, truncation, spliced numbers, names and pickles, deep nesting, by seed.

    Every file leads to one line of error or to a result, within 20 seconds; no code of it runs, and nothing outside of
    its folder is opened, made or removed, other than the result.
    """
    global watched
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    (tmp_path / "secret").write_text("secret words")
    platform.processor()  # which starts a command, once
    signal.signal(signal.SIGALRM, late)
    for seed in range(COUNT):
        folder, target = tmp_path / f"{kind}{seed}", tmp_path / f"converted{seed}"
        path, draw = KINDS[kind](folder), random.Random(f"{kind} {seed}")
        path.write_bytes(mutated(path.read_bytes(), draw, tmp_path / "mark"))
        if kind == "our_folder" and draw.random() < 0.7:
            vouch(path)
        capsys.readouterr()
        signal.alarm(20)
        watched = []
        try:
            run(kind, folder, target)
        except BaseException as error:
            error.add_note(f"seed {seed} of {kind}")
            raise
        finally:
            seen, watched = watched, None
            signal.alarm(0)
        own = (folder, target, tmp_path / f".{target.name}.", tmp_path / "caches")
        check(seen, str(tmp_path), tuple(map(str, own)))
        assert not (tmp_path / "mark").exists(), seed
        printed = capsys.readouterr()
        assert "secret words" not in printed.out + printed.err
        errors = [line for line in printed.err.splitlines() if line.startswith("fsdp-compile: error: ")]
        assert len(errors) <= 2 and "Traceback" not in printed.err, (seed, printed.err)
