"""Messages between ranks in a store, and comparisons by them of what ranks are about to run; no collective takes part.

The n-th comparison in a group has the topic `fsdp_flat/<n>` of the message board:

    same/<digest>    how many ranks are about to run the same
    outcome          a meeting, whose answer is that all ranks agree, that texts are needed, or the error of a rank that
                     has waited too long
    texts            only if digests differ: a meeting with what each rank is about to run. The answer is the error that
                     all of them raise

Ranks that agree need five operations of the store, whatever the length of their texts.
"""

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm._torch import timeout_of
from fsdp_compile.comm.waits import LONG, MessageBoard, state_of

_AGREED, _DIFFERENT, _AGAIN = "all ranks agree", "digests differ", "others are in a later comparison"


class Subject(NamedTuple):
    """What ranks are about to run, in the words of errors.

    Attributes:
        name: such as "compiled graph"; ranks with another name are about to run something else.
        expected: the lines of a text, such as "the same collectives".
        end: stands for a line that a shorter text lacks.
        advice: what to do about a difference.
    """

    name: str
    expected: str
    end: str
    advice: str


def timeout_of_checks() -> float | None:
    """Seconds to wait for other ranks, or None if `FSDP_COMPILE_DISABLE` names `check_ranks`."""
    if "check_ranks" in map(str.strip, os.environ.get("FSDP_COMPILE_DISABLE", "").split(",")):
        return None
    given = os.environ.get("FSDP_COMPILE_CHECK_RANKS_TIMEOUT") or "600"
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"FSDP_COMPILE_CHECK_RANKS_TIMEOUT={given} is no number of seconds") from None


def limit_in(group: dist.ProcessGroup, timeout: float) -> float:
    """Seconds to wait for other ranks of `group`: `timeout`, or the group's own if that is shorter."""
    limit = timeout_of(group)
    return timeout if limit is None else min(timeout, limit.total_seconds())


def compare(pairs: Sequence[tuple[dist.ProcessGroup, str]], timeout: float | None, subject: Subject) -> None:
    """In each group, in order, wait until every rank has come with its text, `limit_in(group, timeout)` at most.
    If ranks of one group differ, those of the groups after it raise the same error: under hybrid sharding, all ranks.
    Nothing is compared if `timeout` is None.

    Raises:
        RuntimeError: on all ranks that come: their texts or subjects differ, or a rank did not come.
    """
    rest = [(group, text) for group, text in pairs if exists(group)]
    while rest and timeout is not None:
        group, text = rest[0]
        this_round = _Round(group, f"a comparison, {subject.name}: {', '.join(text.splitlines()[:2])}")
        error = this_round.verdict(text, limit_in(group, timeout), subject)
        if error == _AGAIN:
            continue
        rest.pop(0)
        if error is not None:
            state_of(group).forget()
            for following, _ in rest:
                state_of(following).forget()
                _Round(following).board.decide("outcome/answer", error)
            raise RuntimeError(error)


def follow(pairs: Sequence[tuple[dist.ProcessGroup, str]], timeout: float | None, subject: Subject) -> None:
    """This rank begins what the texts name: `compare`, where it is not what ranks expect of each other.
    See Note [What ranks foretell of each other].
    """
    if timeout is not None:
        new = [(group, text) for group, text in pairs if not state_of(group).foretold(text)]
        compare(new, timeout, subject)


def exists(group: dist.ProcessGroup) -> bool:
    """Whether `group` has other ranks to compare with; those of the fake backend do not exist."""
    return group.size() > 1 and dist.get_backend(group) != "fake"


class _Round:
    """The next comparison in one group, for errors in `words`."""

    def __init__(self, group: dist.ProcessGroup, words: str = "") -> None:
        self._state = state_of(group)
        self._state.note("comparison", f"round {self._state.rounds + 1}", words)
        self._state.rounds += 1
        self.board = MessageBoard.of_group(group, f"fsdp_flat/{self._state.rounds}")
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)

    def verdict(self, text: str, timeout: float, subject: Subject) -> str | None:
        """None if all ranks agree, else the error that all of them raise."""
        board = self.board
        same = "same/" + hashlib.sha256(f"{subject.name}\n{text}".encode()).hexdigest()
        board.count(same)
        board.post(f"outcome/from/{self.rank}")
        outcome = board.meet(
            "outcome",
            self.size,
            last=lambda: _AGREED if board.count(same, 0) == self.size else _DIFFERENT,
            late=lambda: self._missing_ranks_text(text, timeout, subject),
            seconds=timeout,
            wait=self._wait_for_message,
        )
        if outcome == _DIFFERENT:
            return self._find_difference(text, timeout, subject)
        return None if outcome == _AGREED else outcome

    def _find_difference(self, text: str, timeout: float, subject: Subject) -> str:
        board = self.board

        def found() -> str:
            texts = [(board.read(f"texts/from/{rank}") or b"").decode().split("\n") for rank in range(self.size)]
            return self._first_difference(texts, subject)

        board.post(f"texts/from/{self.rank}", f"{subject.name}\n{text}")
        gone = f"{subject.name}: expected {subject.expected} on all ranks, found others; {subject.advice}"
        return board.meet(
            "texts", self.size, last=found, late=lambda: gone, seconds=timeout, wait=self._wait_for_message
        )

    def _wait_for_message(self, key: str, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            message = self.board.read(key, min(left, LONG.total_seconds()))
            if message is not None:
                return message
            if self._state.catch_up():
                return _AGAIN.encode()
            try:
                self._state.check()
            except RuntimeError as error:  # others wait for a collective meanwhile
                return self.board.decide(key, str(error)).encode()
        return None

    def _first_difference(self, texts: list[list[str]], subject: Subject) -> str:
        equal = next(i for i in range(max(map(len, texts))) if len({tuple(text[i : i + 1]) for text in texts}) > 1)
        ranks_by_line: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(self.global_ranks, texts, strict=True):
            line = text[equal] if equal < len(text) else subject.end
            ranks_by_line[line if equal else f"{line} ({text[1]}, ...)"].append(rank)
        lines = "; ".join(f"{in_words(ranks)}: {line}" for line, ranks in ranks_by_line.items())
        if equal:
            return (
                f"{subject.name}: expected {subject.expected} on all ranks, found after {equal - 1} equal ones "
                f"{lines}; {subject.advice}"
            )
        return (
            f"ranks: expected all of them to run the same program, found {lines}; run the same model, eager "
            f"or compiled, on all ranks"
        )

    def _missing_ranks_text(self, text: str, timeout: float, subject: Subject) -> str:
        absent = [rank for rank in range(self.size) if not self.board.has(f"outcome/from/{rank}")]
        first, *others = text.split("\n")
        return (
            f"{subject.name}: expected all ranks to run it, found no sign of "
            f"{in_words([self.global_ranks[rank] for rank in absent])} for {timeout:g} s, while rank "
            f"{self.global_ranks[self.rank]} was about to run {first} and {len(others)} more; run the same model on "
            f"all ranks, or raise FSDP_COMPILE_CHECK_RANKS_TIMEOUT if some of them come later"
        )


def in_words(ranks: list[int]) -> str:
    """Such as "rank 1" or "ranks 0, 2", for errors."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# --- values that ranks compare ----------------------------------------------------------------------------------------

_CHUNK = 1 << 20  # numbers whose places are counted at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element; wider ones as several integers


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A sum of the bits of each of `tensors`, each number times its place. Waits once for the device of all of them."""
    sums = [_sum_of_bits(each.detach().contiguous().view(-1)) for each in tensors if each.numel()]
    found = iter(torch.stack(sums).tolist() if sums else ())
    return [next(found) if each.numel() else 0 for each in tensors]


def _sum_of_bits(flat: Tensor) -> Any:
    """An int64, shape `()`."""
    bits = flat.view(_BITS.get(flat.element_size(), torch.int64)).split(_CHUNK)
    sums = [(chunk * torch.arange(1, chunk.numel() + 1, device=chunk.device)).sum() for chunk in bits]
    return sum(weight * each for weight, each in enumerate(sums, 1))
