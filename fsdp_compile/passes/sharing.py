"""The first rank compiles, and the other ranks load what it compiled: `CompileConfig.share_artifacts`.

All ranks compile the same graphs (Note [Graphs without a rank]), so what one of them put into the caches of the
compiler serves the others as well. Of the n-th compilation of a graph with sharded parameters:

    the first rank                                   every other rank
    says that it begins                              waits until the first rank has ended
    compiles forward and backward
    writes its artifacts into the store              loads them into its caches, if it does not share their folder
                                                     traces, and finds both graphs there

All waits end: when the first rank does not begin in time or does not end in time, this rank compiles. Ranks that are at
another compilation than the first rank compile for themselves (Note [Only time depends on artifacts]).
"""

import hashlib
import json
import logging
import pickle
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_compile.comm._torch import store_of
from fsdp_compile.comm.comparison import exists
from fsdp_compile.core.ops import call_before_tracing
from fsdp_compile.passes._torch import cache_folder, cache_hits, call_after_compiling, compiling_backward_at_once
from fsdp_compile.passes.artifacts import Artifacts

log = logging.getLogger("fsdp_compile")

BEGIN_LIMIT = 60.0  # seconds that a rank waits for the first rank to begin its compilation
_CHUNK = 16 << 20  # bytes of a value in the store


class ArtifactSharing:
    """The compilations of the ranks of one process group, whose first rank compiles for the others.

    Attributes:
        count: how many compilations were begun; the same number on ranks that run the same program.
    """

    by_group: ClassVar["WeakKeyDictionary[dist.ProcessGroup, ArtifactSharing]"] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        self.store, self.is_first, self.limit = store_of(group), group.rank() == 0, limit
        self.count, self.hits = 0, 0
        self._compiling: ExitStack | None = None
        self._begins_at_tracing = False

    def begin(self, at_tracing: bool = False) -> None:
        """A graph with sharded parameters is being compiled on this rank; returns when artifacts are in the caches.

        Args:
            at_tracing: whether it is called when a graph is traced, and is to be called at the next one again.
        """
        self._begins_at_tracing |= at_tracing
        if self._compiling is not None:  # the same compilation
            return
        self._compiling = ExitStack()
        self._compiling.enter_context(compiling_backward_at_once())
        self.count, self.hits = self.count + 1, cache_hits()
        if self.is_first:
            self.store.set(f"{self._key}/begun", "")
        else:
            self._load()

    def end(self) -> None:
        """Dynamo has ended a compilation, whether it failed or not."""
        if self._compiling is None:
            return
        self._compiling.close()
        self._compiling = None
        if self.is_first:
            self._write()
        elif cache_hits() == self.hits:
            log.warning(
                "share_artifacts: this rank has compiled for itself, as what the first rank compiled did not fit: they "
                "differ in versions, devices, groups or shapes, or the compiler's caches are off"
            )
        if self._begins_at_tracing:
            call_before_tracing(partial(share_artifacts, self.limit, at_tracing=True))

    @property
    def _key(self) -> str:
        return f"fsdp_flat/artifacts/{self.count}"

    def _write(self) -> None:
        header: tuple[str, int] | None = None
        try:
            content = pickle.dumps(Artifacts.of_this_process())
            digest = hashlib.sha256(content).hexdigest()
            chunks = [content[at : at + _CHUNK] for at in range(0, len(content), _CHUNK)]
            for index, chunk in enumerate(chunks):
                self.store.set(f"{self._key}/{index}", chunk)  # type: ignore[arg-type]  # bytes will do
            _mark_as_loaded(digest)
            header = digest, len(chunks)
        except OSError as error:  # of the cache folder
            log.warning(
                "share_artifacts: the other ranks compile for themselves, as reading the caches failed: %s", error
            )
        self.store.set(f"{self._key}/ended", json.dumps(header))

    def _load(self) -> None:
        for event, limit in (("begun", BEGIN_LIMIT), ("ended", self.limit)):
            try:
                self.store.wait([f"{self._key}/{event}"], timedelta(seconds=limit))
            except RuntimeError:  # time is up, or the store is gone
                log.warning("share_artifacts: the first rank has not %s compilation %d within %g s; this rank compiles "
                            "for itself", event, self.count, limit)  # fmt: skip
                return
        header = json.loads(self.store.get(f"{self._key}/ended"))
        if header is None or _is_loaded(header[0]):
            return
        digest, chunks = header
        content = b"".join(self.store.get(f"{self._key}/{index}") for index in range(chunks))
        try:
            pickle.loads(content).load()
            _mark_as_loaded(digest)
        except (OSError, ValueError) as error:
            log.warning("share_artifacts: this rank compiles for itself: %s", error)


def _marker(digest: str) -> Path:
    """A file that says that a cache folder, which ranks of one host may share, has some artifacts."""
    return cache_folder() / "fsdp_compile" / digest


def _is_loaded(digest: str) -> bool:
    return _marker(digest).exists()


def _mark_as_loaded(digest: str) -> None:
    _marker(digest).parent.mkdir(parents=True, exist_ok=True)
    _marker(digest).touch()


def share_artifacts(limit: float, at_tracing: bool = False) -> None:
    """A graph with sharded parameters is being compiled on this rank: let the first rank compile it for all.

    Nothing happens without other ranks.

    Args:
        limit: seconds that the first rank may take, after which this rank compiles for itself.
        at_tracing: see `ArtifactSharing.begin`.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None and exists(group):
        sharings = ArtifactSharing.by_group
        if group not in sharings:
            sharings[group] = ArtifactSharing(group, limit)
        call_after_compiling(_end)
        sharings[group].begin(at_tracing)


def _end(_: object) -> None:
    for sharing in list(ArtifactSharing.by_group.values()):
        sharing.end()
