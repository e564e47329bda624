"""Which replicas train together, agreed on by threads that stand for ranks: no process group, one store."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compile.comm.membership import Generation, Member, Membership, ReplicaLostError, mark_replica_lost


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, all made at the same time."""
    results: list[Any] = [None] * len(calls)

    def keep(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=keep, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def ranks(store: dist.Store, *names: str, timeout: float = 0.5) -> list[Membership]:
    """Both ranks of each replica."""
    return [Membership(store, name, shard, 2, timeout) for name in names for shard in range(2)]


FIRST = Generation(1, (Member("a", None), Member("b", None)))


def begun(timeout: float = 0.5) -> tuple[dist.Store, list[Membership]]:
    """Replicas a and b, which have taken 5 steps."""
    store = dist.HashStore()
    members = ranks(store, "a", "b", timeout=timeout)
    assert at_once(*(lambda m=m: m.join(2, 5.0) for m in members)) == [FIRST] * 4
    return store, members


def test_training_begins_with_as_many_replicas_as_are_wanted() -> None:
    """The first generation has the replicas in the order of their names, whichever came first, on all ranks."""
    store = dist.HashStore()
    late, early = ranks(store, "a"), ranks(store, "b")
    assert at_once(*(lambda m=m: m.join(2, 5.0) for m in early + late)) == [FIRST] * 4


def test_too_few_replicas() -> None:
    """A replica that waits for others in vain says how long it did."""
    alone = ranks(dist.HashStore(), "a")
    errors = at_once(*(lambda m=m: m.join(2, 0.2) for m in alone))
    assert all(isinstance(error, TimeoutError) and "taken in within 0.2 s" in str(error) for error in errors), errors


def test_a_name_is_taken_once() -> None:
    """A replica that is started again under its old name is refused: others could take it for the lost one."""
    store, _ = begun()
    with pytest.raises(ValueError, match="a second time"):
        Membership(store, "a", 0, 2, 0.5).join(1, 1.0)


def test_all_ranks_take_a_step_or_none_does() -> None:
    """A step is taken when all ranks have voted; if one fails instead, all learn why and none takes it."""
    _, members = begun()
    assert {decision.is_taken for decision in at_once(*(lambda m=m: m.vote(FIRST, 5) for m in members))} == {True}
    *others, last = members
    decisions = at_once(*(lambda m=m: m.vote(FIRST, 6) for m in others), lambda: last.fail(FIRST, 6, "it broke"))
    assert {tuple(decision) for decision in decisions} == {(False, "rank 1 of replica b: it broke", ())}


def test_who_fails_after_all_have_voted_takes_the_step() -> None:
    """A decision stands: a rank that gives up too late learns that the step is taken."""
    _, members = begun()
    at_once(*(lambda m=m: m.vote(FIRST, 5) for m in members))
    assert members[0].fail(FIRST, 5, "too late").is_taken


def test_a_silent_rank_fails_the_step_after_the_timeout() -> None:
    """Ranks that wait for a vote give the step up, all for the same reason."""
    _, members = begun(timeout=0.3)
    decisions = at_once(*(lambda m=m: m.vote(FIRST, 5) for m in members[:3]))
    assert {decision.is_taken for decision in decisions} == {False}
    assert len({decision.reason for decision in decisions}) == 1 and "within 0.3 s" in decisions[0].reason


def test_a_known_loss_is_not_waited_for() -> None:
    """With a timeout of a minute, ranks learn within seconds that a replica is lost, and go on without it."""
    store, members = begun(timeout=60.0)
    mark_replica_lost(store, "b")
    assert {decision.reason for decision in at_once(*(lambda m=m: m.vote(FIRST, 5) for m in members[:2]))} == {
        "replica b has ended"
    }
    for member in members[:2]:
        member.announce(2, 5)
    generations = at_once(*(lambda m=m: m.next_generation(FIRST) for m in members[:2]))
    assert generations == [Generation(2, (Member("a", 5),))] * 2


def test_a_replica_without_all_its_ranks_is_left_behind() -> None:
    """One rank of b is silent: a goes on alone after the timeout, and the other rank of b raises what happened."""
    _, members = begun(timeout=0.3)
    for member in members[:3]:
        member.announce(2, 5)
    *alive, left = at_once(*(lambda m=m: m.next_generation(FIRST) for m in members[:3]))
    assert alive == [Generation(2, (Member("a", 5),))] * 2
    assert isinstance(left, ReplicaLostError) and "1 of its 2 ranks answered" in str(left)


def test_a_new_replica_joins_after_a_step_and_comes_last() -> None:
    """A replica that asks is in the next generation, after those that have the state, on its own ranks too."""
    store, members = begun()
    new = ranks(store, "A")

    def train(member: Membership) -> Generation:
        step, joining = 5, ()
        while not joining:
            joining = member.vote(FIRST, step).joining
            step += 1
        member.announce(2, 6)
        return member.next_generation(FIRST, joining)

    generations = at_once(*(lambda m=m: m.join(1, 5.0) for m in new), *(lambda m=m: train(m) for m in members))
    assert generations == [Generation(2, (Member("a", 6), Member("b", 6), Member("A", None)))] * 6


def test_a_replica_that_has_not_got_the_state_is_no_source() -> None:
    """Replicas that failed before the state was copied to them come after those that have it."""
    _, members = begun()
    for member, step in zip(members, (None, None, 7, 7), strict=True):
        member.announce(2, step)
    assert members[0].next_generation(FIRST).members == (Member("b", 7), Member("a", None))


def test_nobody_is_left_to_copy_from() -> None:
    """A new replica does not begin from nothing when all others are lost: it raises."""
    store, _ = begun()
    mark_replica_lost(store, "a")
    mark_replica_lost(store, "b")
    errors = at_once(*(lambda m=m: m.join(1, 5.0) for m in ranks(store, "c")))
    assert all("load a checkpoint" in str(error) for error in errors), errors
