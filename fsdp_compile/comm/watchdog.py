"""A wait for other ranks that takes too long raises, and says who is missing: `FSDP_COMPILE_WATCHDOG=20` (seconds).

Collectives of tensors on the CPU are waited for by the host, which then waits with a time limit. After half of it a
rank writes what it waits for, and of which ranks, into the store of the default group, under `fsdp_flat/waits/<rank>`;
when the time is up it reads what those ranks have written, and the ranks that they wait for, and raises. So with
several groups it names the rank that all wait for at the end. No other step touches the store. Collectives on CUDA are
not waited for by the host: NCCL has a watchdog of its own.
"""

import atexit
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from fsdp_compile.comm._torch import current_backward, store_of
from fsdp_compile.comm.comparison import in_words

OBJECTS = "objects"
"""What stands for the unit where ranks exchange Python objects, such as state dicts."""

_STORE_LIMIT = 2.0  # seconds until a store does not answer: the process that hosts it may be the one that is gone
_seconds: float | None = None
_half = timedelta()
_abandoned: list[dist.Work] = []
_units: dict[int, set[str]] = defaultdict(set)  # by elements of a flat parameter, the units that have one


def set_up(seconds: float | None) -> None:
    """From now on let waits take `seconds` at most; None: as long as they take."""
    global _seconds, _half
    _seconds, _half = seconds, timedelta(seconds=(seconds or 0.0) / 2)


def name_unit(numel: int, unit: str) -> None:
    """A unit with a flat parameter of `numel` elements is at the path `unit`: for collectives in compiled graphs."""
    _units[numel].add(unit)


def is_on() -> bool:
    """Whether waits have a time limit."""
    return _seconds is not None


def seconds() -> float:
    """How long a wait may take; to be asked if `is_on`."""
    assert _seconds is not None
    return _seconds


class WatchedCollective:
    """A collective on the CPU under way, to be waited for once.

    Args:
        works: its parts.
        kind: "all-gather", "reduce" or another name of it.
        group: whose ranks take part.
        numel: elements of the unsharded tensor; of a flat parameter, the unit is looked up by them.
        unit: path and class of the unit's module, if it is known.
    """

    def __init__(
        self, works: Sequence[dist.Work], kind: str, group: dist.ProcessGroup, numel: int, unit: str | None = None
    ) -> None:
        self.works, self.kind, self.group, self.numel, self.unit = works, kind, group, numel, unit

    def wait(self) -> None:
        """Wait until it has ended. RuntimeError if it fails, or the time is up: with what, and who is missing."""
        for work in self.works:
            if self._has_ended(work):
                continue
            self._write(str(self))
            if not self._has_ended(work):
                _abandoned.append(work)
                raise RuntimeError(self._late())
            self._write("")

    def _has_ended(self, work: dist.Work) -> bool:
        """Wait for half of the time; whether `work` has ended then. RuntimeError if it has failed."""
        try:
            work.wait(_half)
        except RuntimeError as error:
            if work.is_completed():
                self._write(str(self))  # for those who wait for this rank in another group
                error.add_note(f"This was the {self}.")
                raise
            return False
        return True

    def _write(self, text: str) -> None:
        waits = json.dumps([text, self._ranks() if text else []])
        in_time(lambda: _store().set(_key(dist.get_rank()), waits))

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def _late(self) -> str:
        texts: dict[int, str] = {}

        def read() -> None:
            store, unread = _store(), self._ranks()
            while unread:
                rank = unread.pop(0)
                text, ranks = json.loads(store.get(_key(rank))) if store.check([_key(rank)]) else ("", [])
                texts[rank] = text
                unread += [each for each in ranks if each not in texts and each not in unread]

        if not in_time(read):
            said = "no answer of the store, whose process may be the one that is gone"
        else:
            missing = sorted(rank for rank, text in texts.items() if not text)
            waiting: dict[str, list[int]] = defaultdict(list)
            for rank, text in texts.items():
                if text:
                    waiting[text].append(rank)
            absent = [f"no sign of {in_words(missing)}"] if missing else []
            said = "; ".join(absent + [f"{in_words(them)} in the {text}" for text, them in waiting.items()])
        return (
            f"{self}: expected all ranks within {_seconds:g} s (FSDP_COMPILE_WATCHDOG), found {said}; look at what the "
            f"others print, and run the same steps on all ranks"
        )

    def __str__(self) -> str:
        paths = [self.unit] if self.unit else sorted(_units.get(self.numel, ()))
        unit = f"one of {', '.join(paths)}" if len(paths) > 1 else "".join(paths) or f"{self.numel} elements"
        if current_backward() != -1 or self.kind == "reduce":
            return f"{self.kind} of {unit} in backward"
        return f"{self.kind} of {unit}{' in forward' if paths and self.unit != OBJECTS else ''}"


def _store() -> dist.Store:
    assert dist.group.WORLD is not None  # there are other groups
    return store_of(dist.group.WORLD)


def _key(rank: int) -> str:
    return f"fsdp_flat/waits/{rank}"


def in_time(action: Callable[[], None]) -> bool:
    """Whether `action`, with the store, ended well in `_STORE_LIMIT` seconds; else it is left to itself."""
    ended = threading.Event()

    def run() -> None:
        try:
            action()
            ended.set()
        except RuntimeError:  # the store is gone
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_LIMIT)
    return ended.is_set()


@atexit.register
def _leave() -> None:
    """End the process where gloo would hold it until the group's timeout: its threads still wait for the others."""
    if any(not work.is_completed() for work in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
