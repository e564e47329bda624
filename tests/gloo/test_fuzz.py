"""Random cases against one process that plays all ranks, and those that failed once; `make fuzz` runs more of them."""

from unittest.mock import patch

import pytest
from fuzz import rounded
from fuzz.cases import OWN_PASSES, Case, Node, Step, draw
from fuzz.corpus import CORPUS
from fuzz.run import INVALID, compare
from fuzz.shrink import shrink
from tiers import both_ways

from fsdp_compile.comm.formats import encode

from .ranks import NIGHTLY, Ranks

FIRST, NEW, SAME_BITS, SENT = 0, 10, 3, 3  # seeds


def _compare(rank: int, cases: list[tuple[str, Case]], how: str = "eager") -> list[str]:
    found = [(compare(rank, case, how), name, case) for name, case in cases]
    return [f"{name}: {mismatch}\n{case}" for mismatch, name, case in found if mismatch not in (None, INVALID)]


def test_corpus(two: Ranks) -> None:
    """Each case that showed a defect once trains as one process that plays all ranks."""
    assert two.run(_compare, list(CORPUS)) == [[], []]


def test_drawn_cases(two: Ranks) -> None:
    """So do random models, options and training loops; with `reduction_order="tree"` as one rank, bit for bit."""
    cases = [(f"seed {seed}", draw(seed)) for seed in range(FIRST, FIRST + NEW)]
    cases += [(f"seed {seed}, tree", draw(seed, order="tree")) for seed in range(FIRST + NEW, FIRST + NEW + SAME_BITS)]
    cases += [(f"seed {seed}, wires", draw(seed, wires=True)) for seed in range(FIRST, FIRST + SENT)]
    assert two.run(_compare, cases) == [[], []]


@both_ways
def test_backward_passes_of_nodes(two: Ranks, how: str) -> None:
    """Autograd functions run units in their backward, with and without gradients; a forward runs backward."""
    is_short = how != "eager" and not NIGHTLY
    nodes = {gate: (Node(kind="mlp", unit=True, gate=gate),) * (1 if is_short else 2) for gate in OWN_PASSES}
    cases = [(gate, Case(nodes=nodes[gate], width=5, steps=(Step(), Step()))) for gate in OWN_PASSES]
    lower = Case(nodes=(Node(gate="backward", dtype="float16"),), dtype="float32", autocast=True)
    cases += [("autocast", lower), ("lower", Case(nodes=nodes["backward"], wrap="none", param_dtype="bfloat16"))]
    cases = [*cases[:2], cases[-1]] if is_short else cases  # one gate of each kind
    assert two.run(_compare, cases, how) == [[], []]


def _compare_with_other_weights(rank: int, case: Case) -> str | None:
    with patch.object(rounded, "encode", lambda values, format: encode(values * 1.01, format)):
        return compare(rank, case, "eager")


def test_other_weights_than_those_that_arrive_are_found(two: Ranks) -> None:
    """Losses of a model whose weights are sent in one byte are held to rounding, and not to what the format loses."""
    case = Case(nodes=(Node(kind="mlp", unit=True),), width=5, dtype="float32", wire=("int8", ""))
    assert two.run(_compare, [("as sent", case)]) == [[], []]
    assert all("loss" in str(found) for found in two.run(_compare_with_other_weights, case))


@pytest.mark.nightly
def test_drawn_cases_with_passes(two: Ranks) -> None:
    """And so they do when compiled with the passes on joint graphs."""
    for seed in range(FIRST, FIRST + 20):
        assert two.run(_compare, [(f"seed {seed}", draw(seed, "joint"))], "joint") == [[], []]


def test_a_planted_defect_is_found_and_shrunk(two: Ranks) -> None:
    """A parameter that is 0.01 % off is seen, and the case is reduced to what shows it."""
    steps = (Step(clip=True), Step(syncs=(False, True), before="planted"))
    case = Case(nodes=(Node(kind="norm"), Node(kind="mlp", unit=True)), width=5, optimizer="adamw", steps=steps)
    found = shrink(case, lambda smaller: any(two.run(_compare, [("planted", smaller)])))
    assert found == Case(steps=(Step(before="planted"),))


def test_shrinking_keeps_what_is_needed() -> None:
    """Nodes and settings go one by one, children take the place of what held them."""
    inner = Node(kind="norm", unit=True)
    case = Case(nodes=(Node(), Node(kind="nest", children=(Node(size=7), inner))), width=5, uneven=True)
    found = shrink(case, lambda smaller: any(node.unit for node in smaller.nodes) and smaller.uneven)
    assert found == Case(nodes=(Node(unit=True),), uneven=True)
