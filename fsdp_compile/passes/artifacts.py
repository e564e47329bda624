"""What compiling has left behind, to be taken to where the same graphs are compiled again.

    Artifacts.of_this_process()             entries of the compiler's caches, and libraries that the C++ backend built
        through a process group's store     from the first rank to the others (sharing.py)
        write(FOLDER), load_folder(FOLDER)  from `fsdp-compile build` to `CompileConfig.artifacts`
    .load()                                 into the cache folder of another process, before it compiles

Entries are what `torch.compiler.save_cache_artifacts` returns; they hold no libraries of the C++ backend.
"""

# Note [Only time depends on artifacts]
# The caches are asked by keys that hold what decides generated code: the graph, versions, devices, configuration. An
# artifact that does not fit is never found, and the process compiles for itself and says so in the log. Two things are
# missing from these keys that decide how C++ is generated and built: what the processor can do, for code written for
# wide vectors is wrong on another one, and the number of threads. So artifacts with libraries are loaded only where
# both are the same. Of a folder, which may be an old one, more is compared, to say what has changed; not the
# configuration, of which each compilation may have its own.

import hashlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_compile.passes._torch import cache_folder, cache_hits, call_after_compiling

log = logging.getLogger("fsdp_compile")

_BEGUN = time.time()  # libraries that are younger were built while this process ran
_FORMAT = 1
_LIST, _ENTRIES = "artifacts.json", "entries.bin"


class Artifacts(NamedTuple):
    """What compiling has left in a cache folder, for another one.

    Attributes:
        entries: of the compiler's caches, as torch serializes them; empty if nothing can be cached.
        libraries: contents of shared libraries, by their paths in the cache folder.
        target: what the libraries were built for.
    """

    entries: bytes
    libraries: dict[str, bytes]
    target: str

    @classmethod
    def of_this_process(cls) -> "Artifacts":
        """What this process has compiled or loaded so far."""
        saved = torch.compiler.save_cache_artifacts()
        root = cache_folder()
        libraries = {path.relative_to(root).as_posix(): path.read_bytes() for path in _libraries(root)}
        return cls(saved[0] if saved is not None else b"", libraries, _target())

    def load(self) -> None:
        """Put them into the cache folder of this process. What is there already stays.

        Raises:
            ValueError: there are libraries for another processor, or another number of threads; nothing was loaded.
            OSError: the folder cannot be written.
        """
        if self.libraries and self.target != _target():
            raise ValueError("they were compiled for another kind of processor, or another number of threads per rank")
        if self.entries:
            torch.compiler.load_cache_artifacts(self.entries)
        root = cache_folder()
        for name, content in self.libraries.items():
            if not (target := root / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f"{target.name}.{dist.get_rank()}.partial")
                partial.write_bytes(content)
                partial.rename(target)


def _libraries(root: Path) -> list[Path]:
    """The libraries in the cache folder that this process uses: those that it has loaded, or built for a probe."""
    young = {path for path in root.glob("*/*.so") if path.stat().st_mtime >= _BEGUN}
    try:
        mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    except OSError:  # not on Linux
        mapped = set()
    return sorted(path for path in young | mapped if path.is_relative_to(root) and path.is_file())


def _target() -> str:
    """What a library is built for: the kind of processor with all that it can do, threads, Python and torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    able = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    text = f"{platform.machine()} {able} {torch.get_num_threads()} {sys.version} {torch.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def hash_of_sources() -> str:
    """A digest of all files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# --- in a folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where the artifacts in a folder come from. They fit where all of this is the same.

    Attributes:
        torch: its version.
        package: a digest of the files of this package.
        ranks: the world size.
        device: "cpu", or the name of the GPU.
    """

    torch: str
    package: str
    ranks: int
    device: str

    @classmethod
    def here(cls, device: str) -> "Origin":
        """Of artifacts that this process compiles for `device`, "cpu" or "cuda"."""
        known = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
        return cls(torch.__version__, hash_of_sources(), dist.get_world_size(), known)


def write(artifacts: Artifacts, origin: Origin, folder: Path) -> None:
    """Write `artifacts` into `folder`, which does not exist yet.

    Raises:
        FileExistsError: it does.
        OSError: it cannot be written.
    """
    staged = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    contents = {
        _ENTRIES: artifacts.entries,
        **{f"libraries/{name}": each for name, each in artifacts.libraries.items()},
    }
    for name, content in contents.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    listed = {"format": _FORMAT, "origin": asdict(origin), "target": artifacts.target, "files": digests}
    (staged / _LIST).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    staged.rename(folder)


def read(folder: Path) -> tuple[Artifacts, Origin]:
    """The artifacts in `folder`, and where they come from.

    Raises:
        ValueError: it holds none, or files are missing or damaged.
    """
    try:
        listed = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        if listed["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, found {listed['format']}")
        contents = {name: (folder / name).read_bytes() for name in listed["files"]}
        damaged = [name for name, each in contents.items() if hashlib.sha256(each).hexdigest() != listed["files"][name]]
        if damaged:
            raise ValueError(f"{damaged[0]} is not what was written")
        entries = contents.pop(_ENTRIES)
        libraries = {name.removeprefix("libraries/"): content for name, content in contents.items()}
        return Artifacts(entries, libraries, listed["target"]), Origin(**listed["origin"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected what fsdp-compile build has written, found none: {error}") from None


@cache
def load_folder(folder: str) -> None:
    """Load the artifacts in `folder` before this process compiles; where they do not fit, log why."""
    try:
        artifacts, origin = read(Path(folder))
        here = asdict(Origin.here("cpu" if origin.device == "cpu" else "cuda"))
        for name, built in asdict(origin).items():
            if built != here[name]:
                raise ValueError(f"they were built for {name} {built}, found {here[name]}; build them again")
        artifacts.load()
    except (OSError, ValueError) as error:
        log.warning("artifacts: nothing was loaded from %s, and this rank compiles: %s", folder, error)
        return
    call_after_compiling(_check_use(folder))


def _check_use(folder: str) -> Callable[[Any], None]:
    """What looks, after the first compilation, whether it has found anything."""
    before = [cache_hits()]

    def check(_: Any) -> None:
        if before and cache_hits() == before.pop():
            log.warning("artifacts: nothing in %s is what this rank has compiled: its model, its inputs or settings of "
                        "compilation differ, or the compiler's caches are off", folder)  # fmt: skip

    return check
