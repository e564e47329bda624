"""Each graph says, before its first collective, which collectives it has: ranks compare that.

The text stands in the graph, so a graph that comes out of a compile cache is compared as well. Groups are numbered in
order of first appearance: under hybrid sharding their names differ from rank to rank.

Ranks that run different collectives wait for each other for ever, or read each other's parameters as their own. Each
graph's sequence of collectives, as text, is compared at its first run in a process, through the store of the process
group: no collective, so it can time out. Later runs look the text up.

For the n-th text that a rank meets in a group, under the keys `fsdp_flat/<n>/...`:

    text/<rank>    what this rank is about to run
    same/<digest>  how many ranks have come with the same text
    came           how many ranks have come; who is last knows all and gives the verdict
    verdict        the first one given counts: "" if all agree, else the error that all ranks raise
"""

import hashlib
from collections import defaultdict
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm.collectives import GROUP_ARGUMENT
from fsdp_compile.core.ops import CHECK_RANKS
from fsdp_compile.passes._torch import group_named, store_of
from fsdp_compile.passes.graph.tags import get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext


def check_ranks(context: GraphContext) -> None:
    """Put `fsdp_flat::check_ranks` before the first collective of a graph that has some; `pin_order` keeps it there."""
    graph, config = context.graph, context.config
    starts = tagged(graph, "gather", "reduce")
    if not starts:
        return
    names: list[str] = [start.args[GROUP_ARGUMENT[start.target]] for start in starts]  # type: ignore[misc,index]  # fx arguments are untyped
    groups = list(dict.fromkeys(names))
    sequence = "\n".join(_describe(start, groups.index(name)) for start, name in zip(starts, names, strict=True))
    value = _sent(starts[0])[0].meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (sequence, groups, config.check_ranks_timeout, value.device)
        node = graph.create_node("call_function", CHECK_RANKS, arguments, name="check_ranks")
    with value.fake_mode:
        node.meta["val"] = CHECK_RANKS(*node.args)


def _describe(start: fx.Node, group: int) -> str:
    values = [sent.meta["val"] for sent in _sent(start)]
    sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
    dtype = str(values[0].dtype).removeprefix("torch.")
    return f"{get_tag(start)}, {sizes} bytes of {dtype}, group {group}"


def _sent(start: fx.Node) -> list[fx.Node]:
    """What a collective sends; several, if one call launches several."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped


# --- at run time ------------------------------------------------------------------------------------------------------

_AGREED = "all ranks agree"


class Known:
    """What a group has compared.

    Attributes:
        texts: those that all ranks agree on.
        rounds: how many comparisons were begun.
    """

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.rounds = 0


_known: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()


@torch.library.impl("fsdp_flat::check_ranks", "default")
def _agree(sequence: str, groups: list[str], timeout: float, device: torch.device) -> torch.Tensor:
    for name in groups:
        group = group_named(name)
        known = _known.get(group)
        if known is None or sequence not in known.texts:
            compare(sequence, group, timeout)
    return torch.empty(0, device=device)


def compare(sequence: str, group: dist.ProcessGroup, timeout: float) -> None:
    """Wait until every rank of `group` has come with a sequence of collectives, `timeout` seconds at most.

    Ranks of other groups, under hybrid sharding, wait for the ranks that raise, and raise when their time is up.

    Raises:
        RuntimeError: on all ranks that come: they are about to run different collectives, or a rank did not come.
    """
    known = _known.setdefault(group, Known())
    known.rounds += 1
    if dist.get_backend(group) != "fake":  # whose other ranks do not exist
        verdict = _Round(group, known.rounds, sequence).verdict(timeout)
        if verdict != _AGREED:
            raise RuntimeError(verdict)
    known.texts.add(sequence)


class _Round:
    """One comparison in one group."""

    def __init__(self, group: dist.ProcessGroup, number: int, sequence: str) -> None:
        self.sequence, self.key = sequence, f"fsdp_flat/{number}"
        self.store, self.rank, self.size = store_of(group), group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)

    def verdict(self, timeout: float) -> str:
        """The words of the first rank that knows the outcome."""
        self.store.set(f"{self.key}/text/{self.rank}", self.sequence)
        digest = hashlib.sha256(self.sequence.encode()).hexdigest()
        self.store.add(f"{self.key}/same/{digest}", 1)
        if self.store.add(f"{self.key}/came", 1) == self.size:
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
        place = next(i for i in range(max(map(len, texts))) if len({tuple(text[i : i + 1]) for text in texts}) > 1)
        return (
            f"compiled graph: expected the same collectives in the same order on all ranks, found after {place} equal "
            f"ones {self._said(texts, place)}; compile the same model with the same arguments on all ranks"
        )

    def _said(self, texts: list[list[str]], place: int) -> str:
        said: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(self.global_ranks, texts, strict=True):
            said[text[place] if place < len(text) else "the end of the graph"].append(rank)
        return "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in said.items())

    def _missing(self, timeout: float) -> str:
        absent = [rank for rank in range(self.size) if not self.store.check([f"{self.key}/text/{rank}"])]
        first, *others = self.sequence.split("\n")
        return (
            f"compiled graph: expected all ranks to run it, found no sign of {_ranks(self._named(absent))} for "
            f"{timeout:g} s, while rank {self.global_ranks[self.rank]} was about to run {first} and {len(others)} more "
            f"collectives; run the same compiled model on all ranks, or raise FSDP_COMPILE_CHECK_RANKS_TIMEOUT if "
            f"compiling takes longer on some"
        )

    def _named(self, ranks: list[int]) -> list[int]:
        return [self.global_ranks[rank] for rank in ranks]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
