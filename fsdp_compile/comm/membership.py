"""Which replicas train together: agreed on step by step through a store that outlives all of them.

A replica is a fixed number of ranks that together store one copy of the model. The replicas that train together are a
*generation*: it ends when one of them fails, or when another one joins, and the next one begins. No rank leads. The
store has, under `fsdp_flat/replicas/`:

    ready/<name>                 how many ranks of a new replica wait to be taken in
    arrivals, arrival/<n>        how many replicas are waiting or were, and the name of each
    lost/<name>                  that the processes of a replica are known to have ended
    <g>/votes/<step>             how many ranks of generation g have all gradients of a step
    <g>/decision/<step>          that the step is taken, by all ranks, or that generation g has failed, by none
    <g>/here/<name>/<shard>      that a rank is alive and wants to take part in generation g; at which step it is
    <g>/members                  the replicas of generation g

The first rank that writes a decision or a list of members decides it: all others read what that rank wrote.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

_TAKEN, _FAILED = "taken", "failed"
_PAUSE = 0.01  # seconds between two looks at the store


class Member(NamedTuple):
    """A replica of a generation, and how many steps it has taken; None: it needs the state of one that has."""

    name: str
    step: int | None


@dataclass(frozen=True)
class Generation:
    """Replicas that train together; those that have the state come first.

    Attributes:
        generation_id: 1 is the first.
        members: the replicas, equal on all ranks.
    """

    generation_id: int
    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replicas."""
        return tuple(member.name for member in self.members)


class Decision(NamedTuple):
    """What all ranks of a generation do about a step."""

    is_taken: bool  # whether they update parameters; if not, the generation has failed
    reason: str  # why not
    joining: tuple[str, ...]  # replicas that the next generation has in addition


class ReplicaLostError(RuntimeError):
    """The other replicas go on without this one: end its processes, and start a new replica."""


class Membership:
    """How one rank takes part.

    Args:
        store: reached by all ranks of all replicas; it should live in a process that outlives them.
        name: of this rank's replica; a replica that is started again takes another name.
        shard: which rank of the replica this is.
        shards: how many ranks each replica has.
        timeout: seconds after which a rank that does not answer is taken for lost.
    """

    def __init__(self, store: dist.Store, name: str, shard: int, shards: int, timeout: float) -> None:
        self.store = dist.PrefixStore("fsdp_flat/replicas", store)
        self.name, self.shard, self.shards, self.timeout = name, shard, shards, timeout

    # --- joining ------------------------------------------------------------------------------------------------------

    def join(self, at_least: int, patience: float) -> Generation:
        """Ask to be taken in, and wait until a generation has this replica.

        Args:
            at_least: how many replicas the first generation must have. Later ones take in whoever asks.
            patience: seconds to wait at most.

        Raises:
            TimeoutError: no generation has taken this replica in.
            RuntimeError: all replicas that had the state are lost.
            ValueError: another replica has, or had, the same name.
        """
        ready = self.store.add(f"ready/{self.name}", 1)
        if ready > self.shards:
            raise ValueError(f"name: expected one that no replica has had, found {self.name!r} a second time")
        if ready == self.shards:
            self.store.set(f"arrival/{self.store.add('arrivals', 1)}", self.name)
        end, latest = time.monotonic() + patience, None
        while time.monotonic() < end:
            generation_id = 1 if latest is None else latest.generation_id + 1
            if self.store.check([f"{generation_id}/members"]):
                latest = self._members(generation_id)
                if self.name in latest.names:
                    return latest
            elif latest is None:
                waiting = [name for name in self._arrivals() if not self._is_lost(name)]
                if len(waiting) >= at_least:
                    self._propose(1, [Member(name, None) for name in sorted(waiting)])
            elif all(map(self._is_lost, latest.names)):
                raise RuntimeError(
                    f"replica {self.name}: expected one of the replicas {', '.join(latest.names)} to copy the state "
                    f"from, found all of them lost; load a checkpoint, and begin with a new store"
                )
            else:
                time.sleep(_PAUSE)
        at = f"generation {latest.generation_id} of {', '.join(latest.names)}" if latest else f"no {at_least} replicas"
        raise TimeoutError(
            f"replica {self.name}: expected to be taken in within {patience:g} s, found {at}; replicas join between "
            f"two steps of the others"
        )

    # --- one step -----------------------------------------------------------------------------------------------------

    def vote(self, generation: Generation, step: int) -> Decision:
        """This rank has all gradients of `step`: wait until every rank of the generation has, or one has failed."""
        if self.store.add(f"{generation.generation_id}/votes/{step}", 1) == len(generation.members) * self.shards:
            known = [name for name in self._arrivals() if name not in self._ever_members(generation)]
            return self._decide(generation, step, _TAKEN, [name for name in known if not self._is_lost(name)])
        key, end = f"{generation.generation_id}/decision/{step}", time.monotonic() + self.timeout
        reason = ""
        while not reason and not self._comes(key):
            if lost := self._lost_of(generation):
                reason = f"replica {', '.join(lost)} has ended"
            elif time.monotonic() > end:
                reason = f"not all ranks have finished backward within {self.timeout:g} s of each other"
        return self._decide(generation, step, _FAILED, reason)

    def fail(self, generation: Generation, step: int, reason: str) -> Decision:
        """This rank cannot finish `step`: no rank takes it, unless all have voted already."""
        return self._decide(generation, step, _FAILED, f"rank {self.shard} of replica {self.name}: {reason}")

    def _decide(self, generation: Generation, step: int, what: str, details: list[str] | str) -> Decision:
        said = json.dumps([what, details])
        said = self.store.compare_set(f"{generation.generation_id}/decision/{step}", "", said).decode()
        what, details = json.loads(said)
        if what == _FAILED:
            return Decision(False, str(details), ())
        return Decision(True, "", tuple(details))

    # --- the next generation ------------------------------------------------------------------------------------------

    def announce(self, generation_id: int, step: int | None) -> None:
        """This rank is alive, and after `step` steps it takes part in that generation; None: it has no state."""
        self.store.set(f"{generation_id}/here/{self.name}/{self.shard}", json.dumps(step))

    def next_generation(self, last: Generation, joining: tuple[str, ...] = ()) -> Generation:
        """The generation after `last`: its members of which all ranks are alive, and those that join.

        Waits for members that have not announced themselves until the timeout, or until they are known to be lost.

        Raises:
            ReplicaLostError: the other replicas go on without this one.
            RuntimeError: no replica has all its ranks left.
        """
        coming = last.generation_id + 1
        settled = self._is_settled(coming)
        self._wait(lambda: self.store.check([f"{coming}/members"]) or all(map(settled, last.names)))
        members = [Member(name, self._step_of(name, coming)) for name in last.names if self._is_here(name, coming)]
        members.sort(key=_needs_state)
        generation = self._propose(coming, members + [Member(name, None) for name in joining])
        if not generation.members:
            raise ReplicaLostError(
                f"replicas: expected all ranks of at least one of {', '.join(last.names)} to be alive, found none; "
                f"load a checkpoint, and begin with a new store"
            )
        if self.name not in generation.names:
            raise ReplicaLostError(
                f"replica {self.name}: expected all of its {self.shards} ranks to be alive, found "
                f"{self._count_here(self.name, coming)} within {self.timeout:g} s; the others go on without it, "
                f"end its processes and start a new replica"
            )
        return generation

    def _propose(self, generation_id: int, members: list[Member]) -> Generation:
        self.store.compare_set(f"{generation_id}/members", "", json.dumps(members))
        return self._members(generation_id)

    def _members(self, generation_id: int) -> Generation:
        members = json.loads(self.store.get(f"{generation_id}/members"))
        return Generation(generation_id, tuple(Member(*member) for member in members))

    # --- what the store says ------------------------------------------------------------------------------------------

    def _arrivals(self) -> list[str]:
        keys = [f"arrival/{n + 1}" for n in range(self.store.add("arrivals", 0))]
        return [self.store.get(key).decode() for key in keys]

    def _ever_members(self, last: Generation) -> set[str]:
        return {
            name for generation_id in range(1, last.generation_id + 1) for name in self._members(generation_id).names
        }

    def _is_lost(self, name: str) -> bool:
        return self.store.check([f"lost/{name}"])

    def _lost_of(self, generation: Generation) -> list[str]:
        return [name for name in generation.names if self._is_lost(name)]

    def _count_here(self, name: str, generation_id: int) -> int:
        return sum(self.store.check([f"{generation_id}/here/{name}/{shard}"]) for shard in range(self.shards))

    def _is_here(self, name: str, generation_id: int) -> bool:
        return not self._is_lost(name) and self._count_here(name, generation_id) == self.shards

    def _is_settled(self, generation_id: int) -> Callable[[str], bool]:
        return lambda name: self._is_lost(name) or self._count_here(name, generation_id) == self.shards

    def _step_of(self, name: str, generation_id: int) -> int | None:
        """How many steps a replica has taken; None if one of its ranks has no state."""
        said = [json.loads(self.store.get(f"{generation_id}/here/{name}/{shard}")) for shard in range(self.shards)]
        return None if None in said else int(said[0])

    def _comes(self, key: str) -> bool:
        """Wait for `key`, but not longer than it may take to notice that a replica is lost."""
        try:
            self.store.wait([key], timedelta(seconds=0.2))
        except RuntimeError:  # stores differ in what they raise when time is up
            return False
        return True

    def _wait(self, is_over: Callable[[], object]) -> bool:
        """Wait for the timeout at most; whether `is_over` then."""
        end = time.monotonic() + self.timeout
        while not is_over():
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE)
        return True


def mark_replica_lost(store: dist.Store, name: str) -> None:
    """Say that a process of the replica `name` has ended, so that the others need not wait for its timeout.

    For the process that starts replicas and sees them end. All other processes of the replica must be ended too.
    """
    dist.PrefixStore("fsdp_flat/replicas", store).set(f"lost/{name}", "yes")


def store_of_generation(store: dist.Store, generation: Generation) -> dist.Store:
    """The store in which the ranks of a generation find each other; no other generation sees its keys."""
    return dist.PrefixStore(f"fsdp_flat/replicas/{generation.generation_id}/group", store)


def _needs_state(member: Member) -> bool:
    return member.step is None
