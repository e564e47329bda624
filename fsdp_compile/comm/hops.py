"""Hops: the process groups that a gather or a reduce goes through, one after the other, and in which format.

    hop           a group by its name and size; the format in which it carries parameters, and that of gradients
    Wire          what a user asks for: the formats, and which hops have them
    start_gather, start_reduce_scatter, start_all_reduce
                  run a hop; a plain one is a collective, one with a format sends messages (formats.py):

    gather            encode  ->  all-gather                      ->  decode
    reduce-scatter    encode  ->  all-to-all                      ->  add up in float32
    all-reduce        encode  ->  all-to-all  ->  add up, encode  ->  all-gather  ->  decode

Each rank reads its own part from messages too, so that all ranks have equal values. Graph passes make the same of the
collectives that hops with formats become (passes/post_grad/messages.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.comm.formats import FORMATS, add_up, decode, encode
from fsdp_compile.comm.groups import NamedGroup


def print_hops(hops: Sequence[NamedGroup]) -> str:
    """`hops` as text: `name:size`, and where there is a format `name:size:gather:reduce`; separated by commas."""
    formats = [f":{each.gather}:{each.reduce}" if each.gather or each.reduce else "" for each in hops]
    return ",".join(f"{quote(each.name, safe='')}:{each.size}{own}" for each, own in zip(hops, formats, strict=True))


def parse_hops(text: str) -> tuple[NamedGroup, ...]:
    """The hops that `print_hops` has written."""
    fields = (hop.split(":") for hop in text.split(",") if hop)
    return tuple(NamedGroup(unquote(name), int(size), *formats) for name, size, *formats in fields)


@dataclass(frozen=True)
class Wire:
    """In which formats ranks send parameters and gradients; docs/wire.md has what each costs.

    Args:
        gather: of parameters, "bf16", "fp8" or "int8"; None: in the dtype in which they compute.
        reduce: of gradients, likewise; they are added up in float32, in the order of the ranks.
        between_nodes_only: whether only those hops have formats that cross nodes: of a two-stage gather and reduce the
            first and the last, and the average over replicas.
        error_feedback: whether what is rounded away of a gradient is added to the next one: 4 bytes for each element of
            the unsharded parameters, on each rank.

    Raises:
        TypeError: an argument has another type.
        ValueError: a format is unknown, or neither is given.
    """

    gather: str | None = None
    reduce: str | None = None
    between_nodes_only: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, format in (("gather", self.gather), ("reduce", self.reduce)):
            if format is not None and not isinstance(format, str):
                raise TypeError(f"wire: {name} must be a str or None, not a {type(format).__name__}")
            if format is not None and format not in FORMATS:
                raise ValueError(f"wire: {name} must be one of {', '.join(FORMATS)} or None, not {format!r}")
        for name in ("between_nodes_only", "error_feedback"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"wire: {name} must be a bool, not a {type(value).__name__}")
        if self.gather is None and self.reduce is None:
            raise ValueError("wire: give a format for gather, for reduce or for both, or pass wire=None")
        if self.error_feedback and (self.reduce is None or self.between_nodes_only):
            raise ValueError(
                "wire: error_feedback is of a reduce that has a format in the group that shards; give reduce a format, "
                "and leave between_nodes_only False"
            )


_ATTRIBUTE = "_fsdp_wire"


def set_wire(param: nn.Parameter, wire: Wire | None) -> None:
    """Note how `param` is sent, for the flat parameter that it will be part of."""
    vars(param)[_ATTRIBUTE] = wire


def wire_of(param: nn.Parameter) -> Any:
    """The `Wire` of `param`, or None."""
    return vars(param).get(_ATTRIBUTE)


def hops_of(
    wire: Wire | None,
    stages: tuple[NamedGroup, ...],
    replicas: NamedGroup | None = None,
    full_precision: bool = False,
) -> tuple[tuple[NamedGroup, ...], NamedGroup | None]:
    """`stages`, of a gather in order, and `replicas` with the formats of `wire`, but where one rank is alone."""
    if wire is None or full_precision:
        return stages, replicas
    crossing = len(stages) - 1 if wire.between_nodes_only else len(stages)  # so many of them, the first ones
    formats: Any = {"gather": wire.gather or "", "reduce": wire.reduce or ""}
    chosen = [each._replace(**formats) if each.size > 1 else each for each in stages[:crossing]]
    if replicas is not None and replicas.size > 1:
        replicas = replicas._replace(**formats)
    return (*chosen, *stages[crossing:]), replicas


# --- running a hop ----------------------------------------------------------------------------------------------------


class Decoding(NamedTuple):
    """A tensor, 1-D, that is decoded from messages when they have arrived."""

    full: Tensor
    messages: collectives.Filling
    format: str
    ranks: int
    kind: str = "all-gather"

    def wait(self) -> None:
        """Order what follows after the messages, and decode them."""
        self.messages.wait()
        rows = self.messages.full.view(self.ranks, -1)
        numel = self.full.numel() // self.ranks
        self.full.view(self.ranks, numel).copy_(decode(rows, numel, self.format, self.full.dtype))


Gathering = collectives.Filling | Decoding


def start_gather(full: Tensor, shard: Tensor, hop: NamedGroup) -> Gathering:
    """Begin to gather `shard`, 1-D `[n]`, cast to the dtype of `full`, into `full`, 1-D `[n * hop.size]`."""
    if not hop.gather:
        return collectives.start_all_gather(full, shard, hop.name)
    message = encode(shard.to(full.dtype)[None], hop.gather)[0]
    messages = message.new_empty(len(message) * hop.size)
    return Decoding(full, collectives.start_all_gather(messages, message, hop.name), hop.gather, hop.size)


def gather(shard: Tensor, hop: NamedGroup) -> Tensor:
    """Concatenate every rank's `shard`, 1-D `[n]`, into a new 1-D tensor `[n * hop.size]` of the same dtype."""
    full = shard.new_empty(shard.numel() * hop.size)
    start_gather(full, shard, hop).wait()
    return full


def start_reduce_scatter(packed: Tensor, hop: NamedGroup, op: str) -> tuple[Tensor, Callable[[], None]]:
    """Begin to reduce `packed`, 1-D `[n * hop.size]`; return this rank's slice, 1-D `[n]`, and what completes it.
    `op`: "sum", "avg", or "tree" for a sum that is a binary tree over the ranks, where there is no format.
    """
    if not hop.reduce:
        return collectives.start_reduce_scatter(packed, hop.size, hop.name, op)
    numel = packed.numel() // hop.size
    exchange = collectives.start_exchange(encode(packed.view(hop.size, numel), hop.reduce).view(-1), hop.name)
    reduced = packed.new_empty(numel)

    def finish() -> None:
        exchange.wait()
        reduced.copy_(add_up(exchange.full.view(hop.size, -1), numel, hop.reduce, op, packed.dtype))

    return reduced, finish


def reduce_scatter(packed: Tensor, hop: NamedGroup, op: str) -> Tensor:
    """Reduce `packed`, 1-D `[n * hop.size]`; return this rank's slice, 1-D `[n]`."""
    reduced, finish = start_reduce_scatter(packed, hop, op)
    finish()
    return reduced


def start_all_reduce(full: Tensor, hop: NamedGroup, op: str) -> Callable[[], None]:
    """Begin to reduce `full`, 1-D, in place; return what completes it. `op` as for `start_reduce_scatter`."""
    if not hop.reduce and op != "tree":
        return collectives.start_all_reduce(full, hop.name, op).wait
    missing = -full.numel() % hop.size
    padded = torch.nn.functional.pad(full, (0, missing)) if missing else full
    part, wait = start_reduce_scatter(padded, hop, op)

    def finish() -> None:
        wait()
        full.copy_(gather(part, hop._replace(gather=hop.reduce))[: full.numel()])

    return finish
