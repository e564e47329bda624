"""Waits of the host for other ranks, which end within seconds if ranks turn out to communicate different things.

Each rank notes what it begins in a group, in order. A wait that takes long writes its last notes to the group's store,
under their numbers, unless another rank has written there before:

    fsdp_flat/waits/<number>    what the first rank that waited long has begun as this group's collective of that number
    fsdp_flat/waits/round       the last comparison in which a rank waited long
    fsdp_flat/waits/error/<n>   two ranks have begun different things, for the n-th time: all that wait raise this once

So ranks that do not wait pay for a note, and a slow rank is never taken for one that does something else.

Note [What ranks foretell of each other]
Collectives of one size match whatever they are for, so nobody waits for long where ranks run different units, graphs or
models that are alike: each reads values of the other. So each rank remembers the passes and graphs that have begun in a
group, and expects what followed when it last did the same. All ranks have begun the same until now, hence expect the
same. Who does something else asks the others before it communicates, and waits; if all do it, they go on.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice, takewhile
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile.comm._torch import store_of

LONG = timedelta(seconds=2)
"""After this time a wait begins to look for a difference; then it looks again and again."""
_REMEMBERED = 4096  # of what began in a group: more than a step that repeats has
_NOTES = 8  # that a long wait writes: more than a rank may have begun beside what it waits for


class MessageBoard:
    """Messages about one topic that ranks leave in a store, each under a key. All waits end.

    Args:
        store: reached by all ranks that read or write.
        topic: the prefix of the keys.
    """

    def __init__(self, store: dist.Store, topic: str) -> None:
        self._store = dist.PrefixStore(topic, store)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, topic: str) -> "MessageBoard":
        """A board that only the ranks of `group` see."""
        return cls(store_of(group), topic)

    def post(self, key: str, message: str | bytes = "") -> None:
        """Write `message` under `key`, over what is there."""
        self._store.set(key, message)  # type: ignore[arg-type]  # bytes will do

    def has(self, key: str) -> bool:
        """Whether there is a message under `key`."""
        return self._store.check([key])

    def read(self, key: str, seconds: float | None = None) -> bytes | None:
        """The message under `key`; None if it has not come after `seconds`, or the store is gone.
        Without `seconds` the message must be there, and the store's own timeout ends the wait.
        """
        if seconds is not None:
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except (RuntimeError, LookupError):  # stores differ in what they raise when time is up
                return None
        return self._store.get(key)

    def decide(self, key: str, message: str) -> str:
        """Write `message` under `key` unless a rank has done so before; return what is there, equal on all ranks."""
        try:
            return self._store.compare_set(key, "", message).decode()
        except dist.DistError:  # the store is gone
            raise
        except RuntimeError:  # a store of Python may lack it (torch's EtcdStore), but not `add`
            if not self.has(key) and self.count(f"{key}/claims") == 1:
                self.post(key, message)
            self._store.wait([key])
            return self._store.get(key).decode()

    def meet(
        self, key: str, ranks: int, *, last: Callable[[], str], late: Callable[[], str], seconds: float,
        wait: Callable[[str, float], bytes | None] | None = None,
    ) -> str:  # fmt: skip
        """One answer for so many ranks, each of which calls this, and posts before what the others need of it.

        The last of them to come answers what `last` returns. A rank that finds no answer within `seconds` answers what
        `late` returns. The first answer counts for all. `wait`: how it waits; by default by `read`.
        """
        if self.count(f"{key}/came") == ranks:
            return self.decide(f"{key}/answer", last())
        found = (wait or self.read)(f"{key}/answer", seconds)
        return found.decode() if found is not None else self.decide(f"{key}/answer", late())

    def count(self, key: str, more: int = 1) -> int:
        """Add `more` to the number under `key`, 0 at first; return the sum."""
        return self._store.add(key, more)

    def remove(self, key: str) -> None:
        """Delete the message under `key`, if there is one."""
        self._store.delete_key(key)


class GroupState:
    """What this rank knows of one group, and what it has begun there, where waits hold up the host.

    Attributes:
        units: the paths of units by the number of elements of their flat parameters, for errors.
        senders: for each rank how to broadcast from it, if all-gathers of CPU tensors are broadcasts, else empty; None:
            nobody has asked (Note [What gloo copies]).
        rounds: how many comparisons were begun, the same number on all ranks.
        agreed: the texts of graphs on which all ranks agreed, and how notes name the graphs.
        models: of roots, and of their flat parameters, which one of those that were compared here it is, from 1.
        link: latency and bandwidth as its ranks measured them; None: nobody has asked.
        begun: how many collectives were begun here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.units: dict[int, set[str]] = defaultdict(set)
        self.senders: tuple[dist.BroadcastOptions, ...] | None = None
        self.rounds, self.agreed = 0, dict[str, str]()
        self.link: tuple[float, ...] | None = None
        self.models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._events: deque[str] = deque(maxlen=_REMEMBERED)
        self._period = 1  # how many events ago ranks last did the same
        self._group = weakref.ref(group)
        self.begun = self._errors = 0  # collectives begun here, and errors raised that the group was told
        self._last: deque[tuple[str, str | int, str | torch.Size]] = deque(maxlen=_NOTES)
        self._written: list[str] = []

    def note(self, kind: str, what: str | int, words: str | torch.Size = "") -> None:
        """Note what begins: its `kind`, and `what` it is about, or a number of elements.
        For errors also in `words`, or the shape of the sharded tensor that an operator communicates for.
        """
        self.begun += 1
        self._last.append((kind, what, words))

    def number_model(self, parts: Iterable[Any]) -> None:
        """Give the parts of a model, which ranks have compared here, its number."""
        self._numbered += 1
        self.models.update(dict.fromkeys(parts, self._numbered))

    def foretold(self, event: str) -> bool:
        """Note that `event` begins; whether all ranks expect it (Note [What ranks foretell of each other])."""
        events, period = self._events, self._period
        expected = len(events) >= period and events[-period] == event
        events.append(event)
        if not expected:
            self._period = _period(list(reversed(events)))
        return expected

    def forget(self) -> None:
        """Forget what has begun: this rank has failed, and so will the others."""
        self._events.clear()

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait for `works`. RuntimeError if one fails, or if ranks are seen to have begun different things."""
        for work in works:
            while True:
                try:
                    work.wait(LONG)
                    break
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises why it failed
                        break
                    self.check()

    def check(self) -> None:
        """In a wait that takes long, raise RuntimeError if another rank has begun something else."""
        error = self._on_board(self._post_and_compare)
        if error:
            for state in list(_states.values()):  # for ranks that wait for this one in other groups
                state.tell(error)
            self.forget()
            raise RuntimeError(error)

    def catch_up(self) -> bool:
        """Go to the comparison that others wait in, if it is a later one, as after interruptions; True if it is."""
        board = MessageBoard.of_group(self._group(), "fsdp_flat/waits")  # type: ignore[arg-type]  # a wait holds it
        if (latest := board.count("round", 0)) <= self.rounds:
            board.post("round", str(self.rounds))
            return False
        self.rounds = latest - 1
        return True

    def tell(self, error: str) -> None:
        """Let all ranks of the group whose waits take long raise `error`, which this one raises."""
        self._on_board(lambda board, _rank: board.decide(self._error_key, error))
        self._errors += 1
        self._last.clear()

    @property
    def _error_key(self) -> str:
        return f"error/{self._errors}"

    def _on_board(self, call: Callable[[MessageBoard, int], str | None]) -> str | None:
        group = self._group()
        if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
            return None
        try:
            return call(
                MessageBoard.of_group(group, "fsdp_flat/waits"), dist.get_process_group_ranks(group)[group.rank()]
            )
        except (RuntimeError, ValueError):  # the store or the group is gone, and the wait will end by that
            return None

    def _post_and_compare(self, board: MessageBoard, rank: int) -> str | None:
        if board.has(self._error_key):
            return (board.read(self._error_key) or b"").decode()
        first = self.begun - len(self._last)
        numbers = [str(first + index) for index in range(len(self._last))]
        if numbers == self._written:
            return None
        for number in set(self._written).difference(numbers):
            board.remove(number)
        self._written = numbers
        for number, (kind, what, words) in zip(numbers, self._last, strict=True):
            if isinstance(words, torch.Size):
                words = f"the {kind} that an operator needs for a sharded tensor of shape {tuple(words)}"
            mine = words or f"the {kind} of {names_of(what)}"
            key, other, theirs = board.decide(number, f"{kind} {what}\n{rank}\n{mine}").split("\n", 2)
            if key != f"{kind} {what}":
                error = (
                    f"ranks communicate different things: rank {other} began {theirs}, and rank {rank} {mine} instead; "
                    f"let all ranks run the same modules and operators in the same order, in backward as well, without "
                    f"an `if` around them that ranks decide differently"
                )
                return board.decide(self._error_key, error)
        return None


def _period(newest_first: list[str]) -> int:
    """How far back the longest repetition of the newest events lies; if there is none, all of them repeat."""
    found, longest = len(newest_first), 0
    for period, event in enumerate(newest_first):
        if period and event == newest_first[0]:
            pairs = zip(newest_first[1:32], islice(newest_first, period + 1, None), strict=False)
            length = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if length > longest:
                found, longest = period, length
    return found


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()  # it has no attributes


def state_of(group: dist.ProcessGroup) -> GroupState:
    """What this rank knows of `group`; it lives as long as the group."""
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState(group)
    return state


def names_of(what: str | int) -> str:
    """`what`, or the units that have so many elements."""
    if isinstance(what, str):
        return what
    names = sorted({name for state in _states.values() for name in state.units.get(what, ())})
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"one of {some}" if len(names) > 1 else some or f"{what} elements"
