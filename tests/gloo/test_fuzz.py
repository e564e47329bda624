"""Random cases against one process that plays all ranks, and those that failed once; `make fuzz` runs more of them."""

from fuzz.cases import Case, Node, Step, draw
from fuzz.corpus import CORPUS
from fuzz.run import INVALID, compare
from fuzz.shrink import shrink

from .ranks import Ranks

FIRST, NEW = 0, 60  # seeds


def _compare(rank: int, cases: list[tuple[str, Case]]) -> list[str]:
    found = [(compare(rank, case, "eager"), name, case) for name, case in cases]
    return [f"{name}: {mismatch}\n{case}" for mismatch, name, case in found if mismatch not in (None, INVALID)]


def test_corpus(two: Ranks) -> None:
    """Each case that showed a defect once trains as one process that plays all ranks."""
    assert two.run(_compare, list(CORPUS)) == [[], []]


def test_drawn_cases(two: Ranks) -> None:
    """So do random models, options and training loops."""
    assert two.run(_compare, [(f"seed {seed}", draw(seed)) for seed in range(FIRST, FIRST + NEW)]) == [[], []]


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
