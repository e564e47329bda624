"""One step of a plan in SimGrid: an actor computes on each rank, and others send what its collectives send.

    python3 bench/simgrid_actors.py < case.json      prints seconds of the step, and seconds in which rank 0 waits

Runs with any Python that has SimGrid (Debian: python3-simgrid), without torch and this package. A collective is a ring
through all ranks, or as many rings as a node has ranks, each of which leaves nodes by another rank's adapter. Every
message of a ring is a flow of its own, so that steps wait for neighbors, and flows share links as the network model of
SimGrid says. bench/second_opinion.py makes the case.
"""

import json
import sys
from collections import deque

from simgrid import Actor, Engine, Link, LinkInRoute, Mailbox, NetZone, Semaphore, this_actor

CASE = json.load(sys.stdin)
RANKS, EACH = CASE["ranks"], CASE["ranks_per_node"]
NODES = RANKS // EACH
FLOPS = 1e9  # of a rank, of which computing takes as many as seconds say


def ring(number: int) -> list[int]:
    """All ranks in the order of a ring that leaves each node by the rank of this number in it."""
    return [node * EACH + (number + 1 + at) % EACH for node in range(NODES) for at in range(EACH)]


class Rank:
    """What a rank has launched, and who waits for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.launches: deque[tuple[str, float]] = deque()
        self.is_launched = Semaphore(0)
        self.done: dict[str, Semaphore] = {}

    def launch(self, name: str, nbytes: float) -> None:
        self.done[name] = Semaphore(0)
        self.launches.append((name, nbytes))
        self.is_launched.release()


def computes(rank: Rank) -> None:
    """Run the steps and tasks of the plan."""
    exposed = 0.0
    for kind, name, amount in CASE["program"]:
        if kind == "task":
            this_actor.execute(amount * FLOPS)
        elif kind == "launch":
            rank.launch(name, amount)
        else:
            begin = Engine.clock
            rank.done[name].acquire()
            rank.done[name].release()
            exposed += Engine.clock - begin
    for name in rank.done:
        begin = Engine.clock
        rank.done[name].acquire()
        rank.done[name].release()
        exposed += Engine.clock - begin
    if rank.number == 0:
        print(json.dumps({"step": Engine.clock, "exposed": exposed}))


def communicates(rank: Rank) -> None:
    """Run the launches of a rank, one after the other."""
    count = sum(kind == "launch" for kind, _, _ in CASE["program"])
    for _ in range(count):
        rank.is_launched.acquire()
        name, nbytes = rank.launches.popleft()
        this_actor.sleep_for(CASE["latency"])
        done = Semaphore(0)
        for number in range(EACH):
            Actor.create(f"{name} {number}", this_actor.get_host(), goes_round, rank.number, number, nbytes, name, done)
        for _ in range(EACH):
            done.acquire()
        rank.done[name].release()


def goes_round(rank: int, number: int, nbytes: float, name: str, done: Semaphore) -> None:
    """All steps of one ring, on one rank: it sends to the next rank what has come from the one before.

    Buffers for all steps are there at once, as NCCL's are for several: a message is on its way as soon as it can be.
    """
    order, steps = ring(number), range(RANKS - 1)
    following, sent = order[(order.index(rank) + 1) % RANKS], []
    receiving = [Mailbox.by_name(f"{name} {number} {step} {rank}").get_async() for step in steps]
    for step in steps:
        box = Mailbox.by_name(f"{name} {number} {step} {following}")
        sent.append(box.put_async(True, int(nbytes / RANKS / EACH)))
        receiving[step][0].wait()
    for each in sent:
        each.wait()
    done.release()


def build() -> None:
    """Hosts; between them a link for each direction of each rank, within its node and between nodes."""
    zone = NetZone.create_full_zone("all")
    hosts = [zone.create_host(f"rank {rank}", FLOPS) for rank in range(RANKS)]
    near: dict[tuple[int, str], Link] = {}
    far: dict[tuple[int, str], Link] = {}
    for rank in range(RANKS):
        for way in ("out", "in"):
            near[rank, way] = zone.create_link(f"near {rank} {way}", CASE["near_bandwidth"])
            near[rank, way].set_latency(CASE["near_hop"] / 2).seal()
            far[rank, way] = zone.create_link(f"far {rank} {way}", CASE["far_bandwidth"])
            far[rank, way].set_latency(CASE["far_hop"] / 2).seal()
    for one in range(RANKS):
        for other in range(RANKS):
            if one != other:
                links = near if one // EACH == other // EACH and EACH > 1 else far
                route = [LinkInRoute(links[one, "out"]), LinkInRoute(links[other, "in"])]
                zone.add_route(hosts[one].netpoint, hosts[other].netpoint, None, None, route, False)
    zone.seal()
    for number, host in enumerate(hosts):
        rank = Rank(number)
        Actor.create(f"computes {number}", host, computes, rank)
        Actor.create(f"communicates {number}", host, communicates, rank).daemonize()


SETTINGS = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")
ENGINE = Engine([sys.argv[0], *(f"--cfg={setting}" for setting in SETTINGS), "--log=xbt_cfg.thres:warning"])
build()
ENGINE.run()
