"""Ranks compare, before the first collective of a compiled graph, which collectives they are about to run.

The pass writes the sequence of collectives into the graph, as an argument of `fsdp_flat::check_ranks`. At the first run
of a sequence in a process the operator compares it with the other ranks of each group that the graph communicates in;
later runs only look it up. Of the n-th comparison in a group its store has, under the keys `fsdp_flat/<n>/...`:

    text/<rank>    what this rank is about to run
    same/<digest>  how many ranks are about to run the same
    arrived        how many ranks take part so far; the last of them knows all sequences and gives the verdict
    verdict        the first one given counts: that all ranks agree, or the error that all of them raise
"""

import hashlib
from collections import defaultdict
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm._torch import group_named, store_of
from fsdp_compile.comm.collectives import GROUP_ARGUMENT
from fsdp_compile.core.ops import CHECK_RANKS
from fsdp_compile.passes.graph.tags import get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext

# Note [Why ranks compare before the first collective]
# Ranks that run different collectives wait for each other for ever, or read each other's parameters as their own. Which
# collectives a graph has, and in which order, depends on the model, its inputs and the plan, so it can differ by a
# mistake of the user's that no rank can see alone. Therefore each graph names its collectives, and ranks compare this
# before they run the first one.
#   - The sequence is text in the graph, so a graph that comes out of a compile cache is compared as well. Groups are
#     numbered in order of first appearance: under hybrid sharding their names differ from rank to rank, and the graph
#     must not hold the rank.
#   - The comparison goes through the store of the process group. A collective could not time out, and would itself be
#     one of the collectives that ranks run in different order.
#   - `pin_order` keeps the operator before the first collective.


def check_ranks(context: GraphContext) -> None:
    """Put `fsdp_flat::check_ranks` at the start of the graph (Note [Why ranks compare before the first collective])."""
    graph = context.graph
    starts = tagged(graph, "gather", "reduce")
    if not starts:
        return
    names: list[str] = [start.args[GROUP_ARGUMENT[start.target]] for start in starts]  # type: ignore[misc,index]  # fx arguments are untyped
    groups = list(dict.fromkeys(names))
    sequence = "\n".join(_describe(start, groups.index(name)) for start, name in zip(starts, names, strict=True))
    value = _sent(starts[0])[0].meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (sequence, groups, context.config.check_ranks_timeout, value.device)
        node = graph.create_node("call_function", CHECK_RANKS, arguments, name="check_ranks")
    with value.fake_mode:
        node.meta["val"] = CHECK_RANKS(*node.args)


def _describe(start: fx.Node, group: int) -> str:
    values = [sent.meta["val"] for sent in _sent(start)]
    sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
    dtype = str(values[0].dtype).removeprefix("torch.")
    return f"{get_tag(start)}, {sizes} bytes of {dtype}, group {group}"


def _sent(start: fx.Node) -> list[fx.Node]:
    """What a collective sends; several tensors, if one call launches several."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped


# --- at run time ------------------------------------------------------------------------------------------------------

_AGREED = "all ranks agree"


class GroupCheck:
    """The comparisons of one process group.

    Attributes:
        agreed: the sequences on which all ranks agreed.
        rounds: how many comparisons were begun, the same number on all ranks.
    """

    by_group: ClassVar["WeakKeyDictionary[dist.ProcessGroup, GroupCheck]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.agreed: set[str] = set()
        self.rounds = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "GroupCheck":
        """The one of `group`, which lives as long as the group."""
        return cls.by_group.setdefault(group, cls())

    def compare(self, sequence: str, group: dist.ProcessGroup, timeout: float) -> None:
        """Wait until every rank of `group` has come with a sequence of collectives, `timeout` seconds at most.

        Ranks of other groups, under hybrid sharding, wait for the ranks that raise, and raise when their time is up.

        Raises:
            RuntimeError: on all ranks that come: they are about to run different collectives, or a rank did not come.
        """
        self.rounds += 1
        if dist.get_backend(group) != "fake":  # whose other ranks do not exist
            verdict = _Round(group, f"fsdp_flat/{self.rounds}", sequence).verdict(timeout)
            if verdict != _AGREED:
                raise RuntimeError(verdict)
        self.agreed.add(sequence)


@torch.library.impl("fsdp_flat::check_ranks", "default")
def _check_ranks(sequence: str, groups: list[str], timeout: float, device: torch.device) -> torch.Tensor:
    for name in groups:
        group = group_named(name)
        check = GroupCheck.of(group)
        if sequence not in check.agreed:
            check.compare(sequence, group, timeout)
    return torch.empty(0, device=device)


class _Round:
    """One comparison in one group, under `key` of its store."""

    def __init__(self, group: dist.ProcessGroup, key: str, sequence: str) -> None:
        self.sequence, self.key = sequence, key
        self.store, self.rank, self.size = store_of(group), group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)

    def verdict(self, timeout: float) -> str:
        """The words of the first rank that knows the outcome."""
        self.store.set(f"{self.key}/text/{self.rank}", self.sequence)
        digest = hashlib.sha256(self.sequence.encode()).hexdigest()
        self.store.add(f"{self.key}/same/{digest}", 1)
        if self.store.add(f"{self.key}/arrived", 1) == self.size:
            same = self.store.add(f"{self.key}/same/{digest}", 0)
            return self._give(_AGREED if same == self.size else self._difference())
        try:
            self.store.wait([f"{self.key}/verdict"], timedelta(seconds=timeout))
        except RuntimeError:  # stores differ in what they raise when time is up
            return self._give(self._missing(timeout))
        return self.store.get(f"{self.key}/verdict").decode()

    def _give(self, verdict: str) -> str:
        return self.store.compare_set(f"{self.key}/verdict", "", verdict).decode()

    def _difference(self) -> str:
        texts = [self.store.get(f"{self.key}/text/{rank}").decode().split("\n") for rank in range(self.size)]
        equal = next(i for i in range(max(map(len, texts))) if len({tuple(text[i : i + 1]) for text in texts}) > 1)
        ranks_by_line: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(self.global_ranks, texts, strict=True):
            ranks_by_line[text[equal] if equal < len(text) else "the end of the graph"].append(rank)
        lines = "; ".join(f"{_name(ranks)}: {line}" for line, ranks in ranks_by_line.items())
        return (
            f"compiled graph: expected the same collectives in the same order on all ranks, found after {equal} equal "
            f"ones {lines}; compile the same model with the same arguments on all ranks"
        )

    def _missing(self, timeout: float) -> str:
        absent = [rank for rank in range(self.size) if not self.store.check([f"{self.key}/text/{rank}"])]
        first, *others = self.sequence.split("\n")
        return (
            f"compiled graph: expected all ranks to run it, found no sign of "
            f"{_name([self.global_ranks[rank] for rank in absent])} for {timeout:g} s, while rank "
            f"{self.global_ranks[self.rank]} was about to run {first} and {len(others)} more collectives; run the same "
            f"compiled model on all ranks, or raise FSDP_COMPILE_CHECK_RANKS_TIMEOUT if compiling takes longer on some"
        )


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
