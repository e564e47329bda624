"""Happens-before over a record of what streams were given: which operations race, and which memory is reused too early.

record = Record()
record.allocate("x", "compute")
record.operation("fill", "compute", writes=["x"], place="a.py:1")
record.operation("send", "side", reads=["x"], place="a.py:2")  # nothing orders `side` after `compute`
record.races == ["x: send (operation 2, in side, a.py:2) reads what fill (operation 1, in compute, a.py:1) writes ..."]

Note [Clocks]
A clock says of each stream how many of its operations are over. Every stream has one, and so has the host: an operation
is queued after all that the host has waited for. To wait is to take the maximum of two clocks. An operation is ordered
after another if the clock of its stream, when it is queued, includes the other.

Note [When memory is used again]
The caching allocator gives memory back to the stream that was current when it was allocated, as soon as the host drops
it: the next operation of that stream that allocates may write to it. That is right for uses in that stream, and for
those that it has waited for by then. `record_stream` names further streams: what these were given before the drop, or
had waited for, is over when the memory is used again. Memory of the host is not looked at when it is dropped: the
allocator of pinned memory keeps events of its own.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
Clock = dict[str, int]


class Operation(NamedTuple):
    """One thing that a stream, or the host, was given to do; `position` counts within the stream.

    `place` is the line of code that gave it, such as "reduce.py:160".
    """

    number: int
    name: str
    stream: str
    position: int
    place: str

    def __str__(self) -> str:
        return f"{self.name} (operation {self.number}, in {self.stream}, {self.place})"


@dataclass
class Memory:
    """Memory, its owner (the stream that it was allocated in, or the host), and who has used it last.

    `write` is the last write, `reads` the last read since then in each stream; `users` are those of `record_stream`.
    """

    name: str
    owner: str
    write: Operation | None = None
    reads: dict[str, Operation] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)

    def uses(self) -> Iterable[tuple[Operation, str]]:
        """The operations that may still use it, and how."""
        if self.write is not None:
            yield self.write, "writes"
        for operation in self.reads.values():
            yield operation, "reads"


class Record:
    """What streams and the host were given, in the order of the calls; `races` names what is not ordered."""

    def __init__(self) -> None:
        self.operations = 0
        self.races: list[str] = []
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.memory: dict[Hashable, Memory] = {}
        self._given_back: defaultdict[str, list[tuple[str, Operation, str]]] = defaultdict(list)

    # --- order --------------------------------------------------------------------------------------------------------

    def event(self, stream: str) -> Clock:
        """An event behind what `stream` has been given."""
        return dict(self.clocks[stream])

    def wait(self, waiting: str, event: Clock) -> None:
        """What `waiting`, a stream or the host, is given from now on comes after `event`."""
        clock = self.clocks[waiting]
        for stream, position in event.items():
            clock[stream] = max(clock.get(stream, 0), position)

    def order(self, first: str, then: str) -> None:
        """What `then` is given from now on comes after what `first` has been given."""
        self.wait(then, self.event(first))

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, key: Hashable, owner: str, name: str = "") -> None:
        """`key` is new memory, allocated in the stream `owner`, or the host's."""
        self.memory[key] = Memory(name or str(key), owner)

    def keep(self, key: Hashable, stream: str) -> None:
        """`record_stream`: what `stream` is given before `key` is given back may use it."""
        self.memory[key].users.add(stream)

    def give_back(self, key: Hashable) -> None:
        """The host drops `key` (Note [When memory is used again])."""
        memory = self.memory.pop(key, None)
        if memory is None or memory.owner == HOST:
            return
        over = dict(self.clocks[HOST])
        for user in memory.users:
            for stream, position in self.clocks[user].items():
                over[stream] = max(over.get(stream, 0), position)
        for operation, how in memory.uses():
            if operation.stream != memory.owner and operation.position > over.get(operation.stream, 0):
                self._given_back[memory.owner].append((memory.name, operation, how))

    # --- operations ---------------------------------------------------------------------------------------------------

    def operation(
        self,
        name: str,
        stream: str,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
        allocates: bool = False,
        place: str = "",
    ) -> Operation:
        """Give `stream` an operation.

        Args:
            name: for reports.
            stream: the stream that is given it; HOST: the host runs it before it goes on.
            reads, writes: the memory that it uses, allocated before.
            allocates: whether memory of `stream` was allocated just before, or by it.
            place: where it comes from, for reports.
        """
        self.wait(stream, self.clocks[HOST])
        self.operations += 1
        clock = self.clocks[stream]
        mine = Operation(self.operations, name, stream, clock.get(stream, 0) + 1, place)
        if allocates:
            for what, earlier, how in self._given_back.pop(stream, []):
                if not self._is_over(earlier, clock):
                    self.races.append(
                        f"{what}: {earlier} still {how} it when its memory may be given to {mine}: not ordered, and no "
                        f"record_stream for {earlier.stream}"
                    )
        clock[stream] = mine.position
        writes = set(writes)
        for key in set(reads) - writes:
            memory = self.memory[key]
            self._check(memory, mine, "reads", memory.write, "writes")
            memory.reads[stream] = mine
        for key in writes:
            memory = self.memory[key]
            for earlier, how in memory.uses():
                self._check(memory, mine, "writes", earlier, how)
            memory.write, memory.reads = mine, {}
        return mine

    @staticmethod
    def _is_over(operation: Operation, clock: Clock) -> bool:
        return operation.position <= clock.get(operation.stream, 0)

    def _check(self, memory: Memory, mine: Operation, how: str, earlier: Operation | None, earlier_how: str) -> None:
        if earlier is not None and not self._is_over(earlier, self.clocks[mine.stream]):
            self.races.append(f"{memory.name}: {mine} {how} what {earlier} {earlier_how}: not ordered")
