"""Ranks leave messages for each other at a call of the same number, and all of them read one answer.

Ranks meet where a compiled graph is called, which begins with a collective: they would wait for each other there
anyway. No collective takes part: see comm/comparison.py.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from fsdp_compile.comm.comparison import limit_in
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.passes import agreement

PATIENCE = 15.0  # seconds that ranks wait for each other
_LATE = "late"


class Meeting:
    """The ranks of one model that learn together.

    Args:
        topic: what they learn about, equal on all of them.
        alone: whether other ranks of the process group do not exist.
    """

    def __init__(self, topic: str, alone: bool = False) -> None:
        self._board = None if alone else agreement.board()
        self._rank, self._size = 0, 1
        if self._board is not None:
            world = dist.group.WORLD
            assert world is not None
            self._board = MessageBoard.of_group(world, f"fsdp_flat/learning/{topic}")
            self._world, self._rank, self._size = world, world.rank(), world.size()

    def meet(self, key: str, message: str, answer: Callable[[Sequence[str]], str], patience: float) -> str | None:
        """What `answer` makes of the messages of all ranks, in their order; it is called by one of them.

        They wait for each other for `patience` seconds. None, on all ranks, if one comes too late or has a message that
        is none; on this one, if the store is gone, as it is when a rank has ended.
        """
        board = self._board
        if board is None:
            return answer([message])

        def made() -> str:
            keys = [f"{key}/from/{rank}" for rank in range(self._size)]
            messages = [(board.read(each) or b"").decode() for each in keys]
            for each in keys:
                with suppress(RuntimeError):  # a store of Python may lack it
                    board.remove(each)
            try:
                return "+" + answer(messages)
            except (ValueError, KeyError, TypeError):  # ranks that learn about other graphs
                return _LATE

        try:
            board.post(f"{key}/from/{self._rank}", message)
            limit = limit_in(self._world, patience)
            found = board.meet(key, self._size, last=made, late=lambda: _LATE, seconds=limit)
        except RuntimeError:  # what this rank communicates next says why
            return None
        return found[1:] if found != _LATE else None
