"""The order in which the units of a root communicate, which all ranks agree on; a rank that departs from it asks first.

Collectives of a group match by their order alone. If one rank leaves a unit out, what it runs next would meet the
unit's collective on the other ranks: they would wait for each other, or, with units of one size, use each other's
values. So the first forward, and the first backward pass, of each kind records its units, and ranks compare that once.
Later passes follow the record at no cost. A rank that is about to do something else compares that with the other ranks
before it communicates: if all of them do it, training goes on, else all raise. The longest pass becomes the record.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch.distributed as dist

from fsdp_compile.comm.comparison import Subject, compare_in_groups
from fsdp_compile.core._torch import call_after_backward, current_backward
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.checks import timeout_of_checks

_ADVICE = {
    "forward": "let forward call the same modules in the same order on all ranks",
    "backward": "let the loss depend on the same modules on all ranks: where one has nothing to compute, add 0 times "
    "the output of the module",
}
_NO_MORE = "nothing more"

Event = tuple[str, str]
"""What begins, and the path of its unit."""


class Order:
    """The order of what units communicate in one direction, "forward" or "backward".

    Attributes:
        groups: those of all units with other ranks in them, in one order on all ranks.
    """

    def __init__(self, direction: str) -> None:
        self.groups: Sequence[dist.ProcessGroup] = ()
        self._subject = Subject("order of units", f"the same order in {direction}", _NO_MORE, _ADVICE[direction])
        self._records: dict[Hashable, list[Event]] = {}
        self._record: list[Event] | None = None  # that the running pass follows
        self._at = 0  # where it is there
        self._departed: list[Event] | None = None  # all of a pass that has departed from it
        self._is_new = False

    def begin(self, kind: Hashable) -> None:
        """Begin a pass: those of one `kind` follow one record."""
        self._is_new = kind not in self._records
        self._record, self._at, self._departed = self._records.get(kind, []), 0, None
        self._kind = kind

    def next(self, what: str, unit: Unit) -> None:
        """In a pass, `unit` is about to communicate. RuntimeError if this rank departs from the others."""
        record, at = self._record, self._at
        if record is None:
            return
        event = (what, unit.path)
        if at < len(record) and record[at] == event:
            self._at = at + 1
            if self._departed is not None:
                self._departed.append(event)
        elif self._is_new:
            record.append(event)
            self._at = at + 1
        else:
            self._depart(record, event)

    def next_in_backward(self, what: str, unit: Unit) -> None:
        """As `next`, of a backward pass, which this begins if none is running."""
        if self._record is None and current_backward() != -1:
            self.begin(unit.syncs)
            call_after_backward(self.end, if_failed=self.drop)
        self.next(what, unit)

    def end(self, more: Iterable[str] = ()) -> None:
        """End the pass; compare a new record, and `more` lines. RuntimeError if ranks differ."""
        record, self._record = self._record, None
        if record is None:
            return
        if self._is_new:
            if record or more:
                self._compare([*map(" of ".join, record), *more])
            if record:
                self._records[self._kind] = record
        elif 0 < self._at < len(record):  # a forward of parameters that are summoned on one rank begins none
            self._compare([self._place(record), _NO_MORE])
        if self._departed is not None and len(self._departed) > len(record):
            self._records[self._kind] = self._departed

    def drop(self) -> None:
        """End the pass, which has failed."""
        self._record = None

    def forget(self) -> None:
        """Forget all records: the groups are others."""
        self._record = None
        self._records.clear()

    def _depart(self, record: list[Event], event: Event) -> None:
        self._compare([self._place(record), " of ".join(event)])
        self._departed = [*(record[: self._at] if self._departed is None else self._departed), event]
        if event in record[self._at :]:
            self._at = record.index(event, self._at) + 1

    def _place(self, record: list[Event]) -> str:
        return f"after the {' of '.join(record[self._at - 1])}" if self._at else "at first"

    def _compare(self, lines: list[str]) -> None:
        timeout = timeout_of_checks()
        if timeout is not None:
            text = "\n".join(lines)
            compare_in_groups([(group, text) for group in self.groups], timeout, self._subject)
