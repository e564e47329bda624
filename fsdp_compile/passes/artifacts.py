"""Compiled code for other ranks that compile the same graphs: `CompileConfig.share_artifacts`."""

import hashlib
import logging
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_compile.comm.comparison import exists, limit_in
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.passes._torch import cache_hits, call_after_compiling, compiling_backward_at_once

log = logging.getLogger("fsdp_compile")

# Note [The first rank compiles]
# All ranks compile the same graphs (Note [Graphs without a rank]), so one rank's cache entries serve the others. In the
# n-th compilation of a graph with sharded parameters
#
#     the first rank                                   every other rank
#     posts that it begins                             waits until the first rank has ended
#     compiles forward and backward
#     writes torch's cache artifacts into the store    loads them into its caches
#                                                      traces, and finds both graphs there
#
# Only time depends on them. The keys of the caches hold the graph, versions, devices and configuration: what does not
# fit is not found, and the rank compiles for itself. All waits end: if the first rank does not begin or end in time,
# this rank compiles. Libraries that the C++ backend has built are not sent: ranks of one host share its cache folder.

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
        saved = torch.compiler.save_cache_artifacts()
        content = b"" if saved is None else saved[0]
        chunks = [content[at : at + _CHUNK] for at in range(0, len(content), _CHUNK)]
        for index, chunk in enumerate(chunks):
            self.board.post(f"{self.count}/{index}", chunk)
        self.board.post(f"{self.count}/ended", f"{len(chunks)} {_processor()}")

    def _load_artifacts(self) -> None:
        for event, limit in (("begun", min(BEGIN_LIMIT, self.limit)), ("ended", self.limit)):
            message = self.board.read(f"{self.count}/{event}", limit)
            if message is None:
                log.warning("share_artifacts: the first rank has not %s compilation %d within %g s; this rank compiles "
                            "for itself", event, self.count, limit)  # fmt: skip
                return
        chunks, _, processor = (message or b"").decode().partition(" ")
        if processor == _processor() and int(chunks):
            content = b"".join(self.board.read(f"{self.count}/{index}") or b"" for index in range(int(chunks)))
            try:
                torch.compiler.load_cache_artifacts(content)
            except OSError as error:  # of the cache folder
                log.warning("share_artifacts: this rank compiles for itself: %s", error)


def _processor() -> str:
    """What C++ is generated for: instruction sets and threads, which the keys of the compiler's caches lack."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    able = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {able} {sys.version} {torch.get_num_threads()}".encode()).hexdigest()


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
