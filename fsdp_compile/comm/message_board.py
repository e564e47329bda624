"""Messages that ranks leave for each other in a store, each under a key. No collective takes part, and all waits end.

Comparisons of ranks, the sharing of compilations and the membership of replicas use it.
"""

from datetime import timedelta

import torch.distributed as dist

from fsdp_compile.comm._torch import store_of


class MessageBoard:
    """The messages about one topic.

    Args:
        store: reached by all ranks that read or write.
        topic: what the keys begin with; other topics do not see them.
    """

    def __init__(self, store: dist.Store, topic: str) -> None:
        self._store = dist.PrefixStore(topic, store)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, topic: str) -> "MessageBoard":
        """One that the ranks of `group` alone see."""
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
            except RuntimeError:  # stores differ in what they raise when time is up
                return None
        return self._store.get(key)

    def decide(self, key: str, message: str) -> str:
        """Write `message` under `key` unless a rank has written there before; what it says now, equal on all ranks."""
        return self._store.compare_set(key, "", message).decode()

    def count(self, key: str, more: int = 1) -> int:
        """Add `more` to the number under `key`, 0 at first; the sum."""
        return self._store.add(key, more)
