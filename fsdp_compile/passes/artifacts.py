"""Compiled code for other ranks that compile the same graphs: `CompileConfig.share_artifacts`.

    Artifacts.of_this_process()         entries of the compiler's caches, and libraries that the C++ backend built
        through the group's store       from the first rank to the others
    .load()                             into the cache folder of another process, before it compiles

`torch.compiler.save_cache_artifacts` returns the entries; they hold no libraries of the C++ backend.
"""

# Note [Only time depends on artifacts]
# The keys of the caches hold what decides generated code: the graph, versions, devices, configuration. An artifact that
# does not fit is never found; the process compiles for itself and logs that. The keys lack two things that decide how
# C++ is generated and built: the processor's instruction sets, as code for wide vectors is wrong on another one, and
# the number of threads. So artifacts with libraries are loaded only where both are equal. Everything else is compared
# to say what has changed; not the configuration, which may differ between compilations.

import hashlib
import json
import logging
import pickle
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_compile.comm.comparison import exists, limit_in
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.passes._torch import (
    cache_folder,
    cache_hits,
    call_after_compiling,
    compiling_backward_at_once,
)
from fsdp_compile.passes.pipeline import hash_of_sources

log = logging.getLogger("fsdp_compile")

_BEGUN = time.time()  # this process has built libraries that are younger


class Artifacts(NamedTuple):
    """Compiled code from one cache folder, to be loaded into another.

    Attributes:
        entries: entries of the compiler's caches, as torch serializes them; empty if nothing can be cached.
        libraries: paths of shared libraries in the cache folder -> contents.
        origin: `origin_of_this_process` of the process that compiled.
    """

    entries: bytes
    libraries: dict[str, bytes]
    origin: dict[str, Any]

    @classmethod
    def of_this_process(cls, device: str = "cpu") -> "Artifacts":
        """Collect what this process has compiled or loaded so far for `device`, "cpu" or "cuda"."""
        saved = torch.compiler.save_cache_artifacts()
        root = cache_folder()
        libraries = {path.relative_to(root).as_posix(): path.read_bytes() for path in _list_libraries(root)}
        return cls(saved[0] if saved is not None else b"", libraries, origin_of_this_process(device))

    def load(self) -> None:
        """Copy them into the cache folder of this process; files that exist stay.

        Raises:
            ValueError: they were built for another version, device or world size, or hold libraries for another
                processor or number of threads; nothing was loaded.
            OSError: the folder cannot be written.
        """
        here = origin_of_this_process("cpu" if self.origin["device"] == "cpu" else "cuda")
        for name, found in here.items():
            if self.origin[name] != found and (name != "processor" or self.libraries):
                raise ValueError(f"they were built for {name} {self.origin[name]}, found {found}; build them again")
        if self.entries:
            torch.compiler.load_cache_artifacts(self.entries)
        root = cache_folder()
        for name, content in self.libraries.items():
            if not (target := root / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                staged = target.with_name(f"{target.name}.{dist.get_rank()}.partial")
                staged.write_bytes(content)
                staged.rename(target)


def origin_of_this_process(device: str) -> dict[str, Any]:
    """Describe what code compiled here for `device`, "cpu" or "cuda", depends on: versions, ranks, hardware."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    able = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    digest = hashlib.sha256(f"{able} {sys.version}".encode()).hexdigest()
    return {
        "torch": torch.__version__,
        "package": hash_of_sources(),
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device,
        "processor": f"{platform.machine()} {digest[:16]} with {torch.get_num_threads()} threads for each rank",
    }


def _list_libraries(root: Path) -> list[Path]:
    """List the libraries in the cache folder that this process has built or loaded."""
    young = {path for path in root.glob("*/*.so") if path.stat().st_mtime >= _BEGUN}
    try:
        mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    except OSError:  # not on Linux
        mapped = set()
    return sorted(path for path in young | mapped if path.is_relative_to(root) and path.is_file())


# --- among ranks ------------------------------------------------------------------------------------------------------

# Note [The first rank compiles]
# All ranks compile the same graphs (Note [Graphs without a rank]), so one rank's cache entries serve the others. In the
# n-th compilation of a graph with sharded parameters
#
#     the first rank                                   every other rank
#     posts that it begins                             waits until the first rank has ended
#     compiles forward and backward
#     writes its artifacts into the store              loads them into its caches, if it does not share their folder
#                                                      traces, and finds both graphs there
#
# All waits end: if the first rank does not begin or end in time, this rank compiles. A rank that is at another
# compilation than the first one compiles for itself (Note [Only time depends on artifacts]).

BEGIN_LIMIT = 60.0  # seconds to wait for the first rank to begin its compilation
_CHUNK = 16 << 20  # bytes of a value in the store


class ArtifactSharing:
    """Shares the compilations of a process group: its first rank compiles for the others.

    Attributes:
        count: compilations begun so far; equal on ranks that run the same program.
    """

    by_group: ClassVar["WeakKeyDictionary[dist.ProcessGroup, ArtifactSharing]"] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        self.board = MessageBoard.of_group(group, "fsdp_flat/artifacts")
        self.is_first, self.limit = group.rank() == 0, limit_in(group, limit)
        self.count, self.hits = 0, 0
        self._compiling: ExitStack | None = None

    def begin(self) -> None:
        """Call before a graph with sharded parameters is compiled; returns when its artifacts are in the caches."""
        if self._compiling is not None:  # the same compilation
            return
        self._compiling = ExitStack()
        self._compiling.enter_context(compiling_backward_at_once())
        self.count, self.hits = self.count + 1, cache_hits()
        if self.is_first:
            self.board.post(f"{self.count}/begun")
        else:
            self._load_artifacts()

    def end(self) -> None:
        """Call when Dynamo has ended a compilation, successful or not."""
        if self._compiling is None:
            return
        self._compiling.close()
        self._compiling = None
        if self.is_first:
            self._post_artifacts()
        elif cache_hits() == self.hits:
            log.warning(
                "share_artifacts: this rank has compiled for itself, as what the first rank compiled did not fit: they "
                "differ in versions, devices, groups or shapes, or the compiler's caches are off"
            )

    def _post_artifacts(self) -> None:
        header: tuple[str, int] | None = None
        try:
            content = pickle.dumps(Artifacts.of_this_process())
            chunks = [content[at : at + _CHUNK] for at in range(0, len(content), _CHUNK)]
            for index, chunk in enumerate(chunks):
                self.board.post(f"{self.count}/{index}", chunk)
            header = hashlib.sha256(content).hexdigest(), len(chunks)
            _marker_path(header[0]).touch()
        except OSError as error:  # of the cache folder
            log.warning(
                "share_artifacts: the other ranks compile for themselves, as reading the caches failed: %s", error
            )
        self.board.post(f"{self.count}/ended", json.dumps(header))

    def _load_artifacts(self) -> None:
        for event, limit in (("begun", min(BEGIN_LIMIT, self.limit)), ("ended", self.limit)):
            message = self.board.read(f"{self.count}/{event}", limit)
            if message is None:
                log.warning("share_artifacts: the first rank has not %s compilation %d within %g s; this rank compiles "
                            "for itself", event, self.count, limit)  # fmt: skip
                return
        header = json.loads(message or b"null")
        if header is None or _marker_path(header[0]).exists():
            return
        content = b"".join(self.board.read(f"{self.count}/{index}") or b"" for index in range(header[1]))
        try:
            pickle.loads(content).load()
            _marker_path(header[0]).touch()
        except (OSError, ValueError) as error:
            log.warning("share_artifacts: this rank compiles for itself: %s", error)


def _marker_path(digest: str) -> Path:
    """Return the file that marks artifacts as loaded into a cache folder, which ranks of one host may share."""
    folder = cache_folder() / "fsdp_compile"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / digest


def share_artifacts(limit: float) -> None:
    """Let the first rank compile the next graph for all ranks, if there are others.

    Args:
        limit: seconds to wait for the first rank before this one compiles, or the timeout of all ranks' group if that
            is shorter.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None and exists(group):
        sharings = ArtifactSharing.by_group
        if group not in sharings:
            sharings[group] = ArtifactSharing(group, limit)
        call_after_compiling(_end_sharing)
        sharings[group].begin()


def _end_sharing(_: object) -> None:
    for sharing in list(ArtifactSharing.by_group.values()):
        sharing.end()
