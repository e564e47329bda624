"""All that sees a graph. `PASSES` lists what is done to it, in order; this is where each step lies.

inductor.py    `PASSES`; the two ways in: Inductor's hooks for plain `torch.compile`, and `backend="fsdp_compile"`
pipeline.py    Pass, and GraphContext: one graph, with what its passes have read and decided; graphs as text
artifacts.py   what compiling leaves behind, in a folder or on the way to other ranks
_torch.py      private names of the compiler

graph/         reading a graph: what its nodes are to us, what they cost, which tasks and units it has
joint/         forward and backward in one graph: collectives, smaller gathers, activations, which units reshard
post_grad/     each graph alone: gradients in place, reading, planning, ordering, lowering, checks, pinning
cost/          seconds of collectives and of computing: hardware, roofline, recorded profiles
plan/          plans as data, without torch: rules, search, simulation, verification

A step of training goes through

    joint       insert_collectives -> smallest_gather -> choose_activations -> choose_reshard -> reshard
                then the partitioner splits it in two
    forward     check_saved -> read_graph -> choose_plan -> verify_plan -> order -> check_order -> ... -> pin_order
    backward    the same, with separate_reduces, pack_in_place and reuse_gathered before it is read
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PASSES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_compile.passes.inductor import PASSES  # imports Inductor, seconds that plans and costs do not need

    return PASSES
