"""Ways in which sharded training under a compiler goes wrong without a word, seen in generated code. Each has its test.

Elsewhere, beside what they belong to:
    silent ZeRO-2: full parameters kept from forward to backward   test_passes.py: test_forward_saves_only_*
    reduce-scatters that drift to the end of backward              test_order.py: test_reduces_start_*, test_no_kernel_*
"""

from compiling import cached, pairs
from generated import Program


def _hidden(program: Program, start: int) -> bool:
    """Whether something is computed between the collective at `start` and its wait."""
    out = program.steps[start].out
    end = next(i for i, step in enumerate(program.steps) if step.is_wait and step.names[0] == out)
    return any(step.is_product or step.function in program.kernels for step in program.steps[start:end])


@pairs()
def test_a_wait_right_after_its_collective(name: str, backend: str) -> None:
    """The trap: each collective is waited for where it starts, and nothing overlaps.

    Only a graph's first gather has nothing before it, and its last reduce nothing behind.
    """
    for program in cached(name, backend):
        gathers = [i for i, step in enumerate(program.steps) if step.is_gather]
        reduces = [i for i, step in enumerate(program.steps) if step.is_reduce]
        exposed = [i for i in gathers[1:] + reduces[:-1] if not _hidden(program, i)]
        assert exposed == [], [program.steps[i].text for i in exposed]


@pairs()
def test_all_gathers_hoisted_to_the_top(name: str, backend: str) -> None:
    """The trap: all units are gathered before the first one computes, so that the whole model is in memory.

    Never are more than two gathers under way, and one more starts only when a unit was waited for.
    """
    for program in cached(name, backend):
        under_way: set[str | None] = set()
        for step in program.steps:
            if step.is_gather:
                under_way.add(step.out)
            elif step.is_wait:
                under_way.discard(step.names[0])
            assert len(under_way) <= 2, step.text
