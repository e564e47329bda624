"""Cases that failed once, each with its defect; `tests/gloo/test_fuzz.py` runs them all."""

from .cases import Case, Node, Step

CORPUS: tuple[tuple[str, Case], ...] = (
    (
        "a unit within two checkpoints, the inner one reentrant, got no gradient",
        Case(
            nodes=(
                Node(
                    kind="nest",
                    checkpoint="non-reentrant",
                    unit=True,
                    children=(Node(unit=True, checkpoint="reentrant"),),
                ),
            ),
            steps=(Step(), Step()),
        ),
    ),
)
