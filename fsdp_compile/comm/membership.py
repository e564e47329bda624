"""Which replicas train together: agreed on step by step through a store that outlives all of them.

A replica is a fixed number of ranks that together store one copy of the model. The replicas that train together are a
*generation*: it ends when one of them fails or another one joins. No rank leads. The messages of the board are:

    ready/<name>                 how many ranks of a new replica wait to join
    arrivals, arrival/<n>        how many replicas have asked to join, and the name of each
    lost/<name>                  the processes of a replica are known to have ended
    <g>/votes/<step>             how many ranks of generation g have all gradients of a step
    <g>/decision/<step>          all ranks of generation g take the step, or g has failed and none does
    <g>/here/<name>/<shard>      a rank is alive and wants to take part in generation g; at which step it is
    <g>/members                  the replicas of generation g

The first rank that writes a decision or a list of members decides it: all others read what that rank wrote.
"""

import json
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from fsdp_compile.comm.waits import MessageBoard

_TOPIC = "fsdp_flat/replicas"
_TAKEN, _FAILED = "taken", "failed"
_PAUSE = 0.01  # seconds between two looks at the board


class Member(NamedTuple):
    """A replica of a generation, and how many steps it has taken; None: it needs the state of another."""

    name: str
    step: int | None


@dataclass(frozen=True)
class Generation:
    """Replicas that train together, equal on all ranks; those that have the state come first. Ids begin with 1."""

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
        timeout: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(self, store: dist.Store, name: str, shard: int, shards: int, timeout: float) -> None:
        self._board = MessageBoard(store, _TOPIC)
        self.name, self.shard, self.shards, self.timeout = name, shard, shards, timeout

    # --- joining ------------------------------------------------------------------------------------------------------

    def join(self, at_least: int, patience: float) -> Generation:
        """Ask to join, and wait until a generation has this replica.

        Args:
            at_least: how many replicas the first generation must have. Later ones take whoever asks.
            patience: seconds to wait at most.

        Raises:
            TimeoutError: no generation has this replica.
            RuntimeError: all replicas that had the state are lost.
            ValueError: another replica has, or had, the same name.
        """
        ready = self._board.count(f"ready/{self.name}")
        if ready > self.shards:
            raise ValueError(f"name: {self.name!r} is used a second time; give each replica a name of its own")
        if ready == self.shards:
            self._board.post(f"arrival/{self._board.count('arrivals')}", self.name)
        end, latest = time.monotonic() + patience, None
        while time.monotonic() < end:
            generation_id = 1 if latest is None else latest.generation_id + 1
            if self._board.has(f"{generation_id}/members"):
                latest = self._read_generation(generation_id)
                if self.name in latest.names:
                    return latest
            elif latest is None:
                waiting = [name for name in self._read_arrivals() if not self._is_lost(name)]
                if len(waiting) >= at_least:
                    self._propose_members(1, [Member(name, None) for name in sorted(waiting)])
            elif all(map(self._is_lost, latest.names)):
                raise RuntimeError(
                    f"replica {self.name}: all replicas that have the state ({', '.join(latest.names)}) are lost; load "
                    f"a checkpoint, and begin with a new store"
                )
            else:
                time.sleep(_PAUSE)
        at = f"generation {latest.generation_id} of {', '.join(latest.names)}" if latest else f"no {at_least} replicas"
        raise TimeoutError(
            f"replica {self.name}: not taken in within {patience:g} s, found {at}; replicas join between two steps of "
            f"the others"
        )

    # --- one step -----------------------------------------------------------------------------------------------------

    def vote(self, generation: Generation, step: int) -> Decision:
        """Report that this rank has all gradients of `step`; wait until every rank of the generation has, or one has
        failed.
        """
        if self._board.count(f"{generation.generation_id}/votes/{step}") == len(generation.members) * self.shards:
            earlier = range(1, generation.generation_id + 1)
            members = {name for generation_id in earlier for name in self._read_generation(generation_id).names}
            known = [name for name in self._read_arrivals() if name not in members]
            return self._decide(generation, step, _TAKEN, [name for name in known if not self._is_lost(name)])
        key, end = f"{generation.generation_id}/decision/{step}", time.monotonic() + self.timeout
        reason = ""
        while not reason and self._board.read(key, 0.2) is None:  # seconds until a lost replica is noticed
            if lost := [name for name in generation.names if self._is_lost(name)]:
                reason = f"replica {', '.join(lost)} has ended"
            elif time.monotonic() > end:
                reason = f"not all ranks have finished backward within {self.timeout:g} s of each other"
        return self._decide(generation, step, _FAILED, reason)

    def fail(self, generation: Generation, step: int, reason: str) -> Decision:
        """Report that this rank cannot finish `step`: no rank takes it, unless all have voted already."""
        return self._decide(generation, step, _FAILED, f"rank {self.shard} of replica {self.name}: {reason}")

    def _decide(self, generation: Generation, step: int, what: str, details: list[str] | str) -> Decision:
        said = self._board.decide(f"{generation.generation_id}/decision/{step}", json.dumps([what, details]))
        what, details = json.loads(said)
        return Decision(False, str(details), ()) if what == _FAILED else Decision(True, "", tuple(details))

    # --- the next generation ------------------------------------------------------------------------------------------

    def announce(self, generation_id: int, step: int | None) -> None:
        """Report that this rank, after `step` steps, takes part in that generation; None: it has no state."""
        self._board.post(f"{generation_id}/here/{self.name}/{self.shard}", json.dumps(step))

    def next_generation(self, last: Generation, joining: tuple[str, ...] = ()) -> Generation:
        """The generation after `last`: its members of which all ranks are alive, and those that join.

        Waits for silent members until the timeout, or until they are known to be lost.

        Raises:
            ReplicaLostError: the other replicas go on without this one, or no replica has all its ranks left.
        """
        coming, end = last.generation_id + 1, time.monotonic() + self.timeout
        while not self._board.has(f"{coming}/members") and time.monotonic() <= end:
            if all(self._is_lost(name) or len(self._read_steps(name, coming)) == self.shards for name in last.names):
                break
            time.sleep(_PAUSE)
        members = []
        for name in last.names:
            steps = self._read_steps(name, coming)
            if len(steps) == self.shards and not self._is_lost(name):
                members.append(Member(name, None if None in steps else steps[0]))
        members.sort(key=lambda member: member.step is None)
        generation = self._propose_members(coming, members + [Member(name, None) for name in joining])
        if not generation.members:
            raise ReplicaLostError(
                f"replicas: none of {', '.join(last.names)} has all of its ranks left; load a checkpoint, and begin "
                f"with a new store"
            )
        if self.name not in generation.names:
            raise ReplicaLostError(
                f"replica {self.name}: {len(self._read_steps(self.name, coming))} of its {self.shards} ranks answered "
                f"within {self.timeout:g} s; the others go on without it, end its processes and start a new replica"
            )
        return generation

    def _propose_members(self, generation_id: int, members: list[Member]) -> Generation:
        self._board.decide(f"{generation_id}/members", json.dumps(members))
        return self._read_generation(generation_id)

    # --- what the board says ------------------------------------------------------------------------------------------

    def _read_text(self, key: str) -> str:
        said = self._board.read(key)
        assert said is not None
        return said.decode()

    def _read_generation(self, generation_id: int) -> Generation:
        members = json.loads(self._read_text(f"{generation_id}/members"))
        return Generation(generation_id, tuple(Member(*member) for member in members))

    def _read_arrivals(self) -> list[str]:
        return [self._read_text(f"arrival/{n + 1}") for n in range(self._board.count("arrivals", 0))]

    def _is_lost(self, name: str) -> bool:
        return self._board.has(f"lost/{name}")

    def _read_steps(self, name: str, generation_id: int) -> list[int | None]:
        """The steps that the ranks of a replica have taken, as far as they are here; None: a rank has no state."""
        keys = [f"{generation_id}/here/{name}/{shard}" for shard in range(self.shards)]
        return [json.loads(self._read_text(key)) for key in keys if self._board.has(key)]


def mark_replica_lost(store: dist.Store, name: str) -> None:
    """Report that a process of the replica `name` has ended, so that the others need not wait for its timeout.

    Call it from the process that starts replicas. All other processes of the replica must be ended too.
    """
    MessageBoard(store, _TOPIC).post(f"lost/{name}", "yes")


def store_of_generation(store: dist.Store, generation: Generation) -> dist.Store:
    """The store in which the ranks of a generation meet; no other generation sees its keys."""
    return dist.PrefixStore(f"{_TOPIC}/{generation.generation_id}/group", store)
