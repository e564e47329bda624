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
    (
        "two forwards, a reentrant checkpoint in a unit: a reduce was added to before it had ended",
        Case(
            nodes=(Node(kind="nest", children=(Node(checkpoint="reentrant"),), unit=True),),
            steps=(Step(forwards="two"),),
        ),
    ),
    (
        "a module that is run in and outside of a reentrant checkpoint, two forwards: wrong with FSDP2 too",
        Case(
            nodes=(Node(), Node(unit=True, checkpoint="reentrant"), Node(same=1)),
            wrap="policy",
            steps=(Step(forwards="two"),),
        ),
    ),
    (
        "a dataclass as output of the root kept a checkpoint within from finding its parameters",
        Case(nodes=(Node(checkpoint="non-reentrant"),), out="dataclass"),
    ),
    (
        "under NO_SHARD accumulation dropped reduced gradients that were kept, where the sum was zero so far",
        Case(
            nodes=(Node(checkpoint="reentrant"), Node(checkpoint="reentrant")),
            strategy="NO_SHARD",
            steps=(Step(keeps_grads=True), Step(syncs=(False, True))),
        ),
    ),
    (
        "a unit that runs twice in one non-reentrant checkpoint was freed between the backwards of the two: setStorage",
        Case(nodes=(Node(kind="nest", checkpoint="non-reentrant", children=(Node(kind="mlp", unit=True, times=2),)),)),
    ),
    (
        "an output that is a view, changed in place, lost the hook that gathers for backward; fails with FSDP2 too",
        Case(
            nodes=(
                Node(kind="nest"),
                Node(
                    kind="nest",
                    children=(Node(kind="recurrent", checkpoint="reentrant"), Node(out="view")),
                    then="in place",
                ),
            ),
            wrap="auto",
        ),
    ),
    (
        "two forwards alive: what a recomputed forward had opened was closed by the backward of another forward",
        Case(
            nodes=(
                Node(
                    kind="nest",
                    checkpoint="non-reentrant",
                    children=(
                        Node(kind="nest", unit=True),
                        Node(kind="nest", children=(Node(checkpoint="non-reentrant"),), times=2),
                        Node(),
                    ),
                ),
            ),
            wrap="policy",
            steps=(Step(forwards="apart"),),
        ),
    ),
    (
        "a unit with frozen parameters in a reentrant checkpoint was freed while its others had no gradients: SIGSEGV",
        Case(
            nodes=(Node(kind="scale", unit=True, frozen="first", checkpoint="reentrant"),),
            steps=(Step(), Step(forwards="two")),
        ),
    ),
    (
        "a parameter without elements was thawed, which was frozen alone: its gradient could not be packed",
        Case(nodes=(Node(kind="scale", frozen="first"),), steps=(Step(before="freeze"),)),
    ),
    (
        "a unit that runs twice in two nested checkpoints, in two forwards: the backward of one ended the other's",
        Case(
            nodes=(
                Node(
                    kind="nest",
                    children=(
                        Node(kind="nest", children=(Node(unit=True, times=2),), checkpoint="non-reentrant"),
                        Node(),
                    ),
                    checkpoint="non-reentrant",
                ),
            ),
            steps=(Step(forwards="apart"),),
        ),
    ),
    (
        "a loss that was left elsewhere, before an output that nobody uses: its parameters were not there",
        Case(nodes=(Node(kind="nest", unit=True, out="tuple", aside="elsewhere"),), seed=165),
    ),
)
