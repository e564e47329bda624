"""Work that ranks do together through code of torch which the watchdog does not see, such as saving a checkpoint.

Under the watchdog (`FSDP_COMPILE_WATCHDOG`) that code gets a process group whose collectives end after the same time.
Each rank writes into the store, when it begins and ends something on its own, what it is doing: so that the error can
say which ranks are missing, and what was the last that they did. That is four writes for a save, and no read of it
while all goes well.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from fsdp_compile.comm import watchdog
from fsdp_compile.comm._torch import store_of
from fsdp_compile.comm.collectives import backends
from fsdp_compile.comm.comparison import exists, in_words
from fsdp_compile.comm.groups import group_with_limit

_GRACE = 1.0  # seconds in which ranks whose time is up learn of each other


class _Status(NamedTuple):
    """What a rank has written last."""

    work: str = ""
    doing: str = ""
    is_busy: bool = True  # on its own; False: it waits for others
    has_raised: bool = False

    def __str__(self) -> str:
        return self.doing if self.is_busy else f"waiting after {self.doing}"


class SharedWork:
    """What the ranks of `group` (None: all) do together in a `with` block, with waits that end.

        with SharedWork("saving step 3", group) as work:
            with work.doing("writing its file"):
                ...
            dist.all_gather_object(results, mine, group=work.group)

    RuntimeError, on every rank, if an exchange between the ranks fails or takes longer than the watchdog allows: it
    names the missing ranks. Other errors pass. Without the watchdog all waits have the timeout of `group`.

    Attributes:
        group: what exchanges in the block are to use.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.name, self.group, self._status = name, group, _Status()
        given = (group or dist.group.WORLD) if watchdog.is_on() and dist.is_initialized() else None
        self._watched = given if given and exists(given) and backends(given).get("cpu") == "gloo" else None

    def __enter__(self) -> "SharedWork":
        self._write(_Status(self.name, "beginning", is_busy=False))
        if self._watched is not None:
            try:
                self.group = group_with_limit(self._watched, watchdog.seconds())
            except RuntimeError as error:
                raise RuntimeError(self._late(self._watched, error)) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        is_communication = type(error) is RuntimeError or isinstance(error, dist.DistError)  # gloo raises the former
        if error is None or not is_communication or self._status.is_busy:
            self._write(_Status())
        elif self._watched is None:
            error.add_note(f"This was {self.name}.")
        else:
            raise RuntimeError(self._late(self._watched, error)) from error

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """In the block this rank is busy with `what`; after it, also if that raises, it waits for the others."""
        self._write(_Status(self.name, what))
        try:
            yield
        finally:
            self._write(_Status(self.name, what, is_busy=False))

    def _write(self, status: _Status) -> None:
        self._status = status
        if self._watched is not None:
            group = self._watched
            watchdog.in_time(lambda: store_of(group).set(_key(group.rank()), json.dumps(status)))

    def _late(self, group: dist.ProcessGroup, error: BaseException) -> str:
        self._write(self._status._replace(has_raised=True))
        statuses: dict[int, _Status] = {}
        watchdog.in_time(lambda: statuses.update(_statuses(group, self.name)))
        if not statuses:
            said = "no answer of the store, whose process may be the one that is gone"
        else:
            others = {rank: each for rank, each in statuses.items() if each.work != self.name or each.is_busy}
            missing = others or {rank: each for rank, each in statuses.items() if not each.has_raised}
            said = "no sign of " + _by_status(missing, "last seen ") if missing else "all of them"
            if waiting := {rank: each for rank, each in statuses.items() if rank not in missing}:
                said += f"; {_by_status(waiting, '')}"
        reason = str(error).splitlines()[0].partition(": expected ")[0]
        return (
            f"{self.name}: expected all ranks within {watchdog.seconds():g} s (FSDP_COMPILE_WATCHDOG), found {said}; "
            f"look at what the others print ({reason})"
        )


def _key(rank: int) -> str:
    return f"fsdp_flat/work/{rank}"


def _statuses(group: dist.ProcessGroup, work: str) -> dict[int, _Status]:
    """What each rank has written, by its global rank, once all who wait in `work` have raised, or after a while."""
    store, end = store_of(group), time.monotonic() + _GRACE
    while True:
        statuses = {}
        for rank, global_rank in enumerate(dist.get_process_group_ranks(group)):
            written = store.get(_key(rank)) if store.check([_key(rank)]) else b"[]"
            statuses[global_rank] = _Status(*json.loads(written))
        is_known = all(each.has_raised or each.is_busy or each.work != work for each in statuses.values())
        if is_known or time.monotonic() > end:
            return statuses
        time.sleep(_GRACE / 20)


def _by_status(statuses: dict[int, _Status], seen: str) -> str:
    """Such as "rank 1, last seen writing its file; ranks 0, 2, waiting after writing its file"."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, status in statuses.items():
        ranks[f", {seen}{status}" if status.work else ""].append(rank)
    return "; ".join(f"{in_words(them)}{what}" for what, them in ranks.items())
