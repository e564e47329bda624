"""The plans of five shapes of models, printed: any change of the planner that changes one shows here."""

import random
from dataclasses import replace
from itertools import groupby

from expecttest import assert_expected_inline
from workloads import blocks

from fsdp_compile.passes.plan.plan import verify
from fsdp_compile.passes.plan.schedule import search_plan
from fsdp_compile.passes.plan.workload import Workload


def _printed(workload: Workload, budget: int | None = None) -> str:
    """One line for each place, blocks by number; then what the plan takes."""
    found = search_plan(workload, budget)
    verify(workload, found.plan, budget)
    lines = []
    for at, steps in groupby(found.plan.steps, key=lambda step: step.at):
        texts = [f"{step.kind} {'+'.join(name.removeprefix('blocks.') for name in step.units)}" for step in steps]
        lines.append(f"{at:2}  {', '.join(texts)}")
    keeps = f"{len(found.keep_unsharded)} kept"
    return "\n".join([*lines, f"{found.seconds:.2f} s, gap {found.gap:.2%}, peak {found.peak}, {keeps}"]) + "\n"


def test_deep():
    """Ten equal blocks: one or two units ahead, reduced as they get ready."""
    assert_expected_inline(
        _printed(blocks(9)),
        """\
 0  gather root, gather 0, wait root
 1  gather 1, wait 0
 2  free 0, gather 2, wait 1
 3  free 1, gather 3, wait 2
 4  free 2, gather 4, wait 3
 5  free 3, gather 5, wait 4
 6  free 4, gather 6, wait 5
 7  free 5, gather 7, wait 6
 8  free 6, gather 8, wait 7
 9  free 7, wait 8
10  free 8
11  free root, gather root, gather 8, wait root
12  free root, gather 7, wait 8
13  free 8, reduce 8, gather 6, wait 7
14  free 7, reduce 7, wait_reduce 8, gather 5, wait 6
15  free 6, reduce 6, wait_reduce 7, gather 4, wait 5
16  free 5, reduce 5, wait_reduce 6, gather 3, wait 4
17  free 4, reduce 4, wait_reduce 5, gather 2, wait 3
18  free 3, reduce 3, wait_reduce 4, gather 1, wait 2
19  free 2, reduce 2, wait_reduce 3, gather 0, wait 1
20  free 1, reduce 1, wait_reduce 2, wait 0
21  free 0, reduce 0, wait_reduce 1
22  reduce root, wait_reduce 0, wait_reduce root
38.12 s, gap 0.16%, peak 477, 0 kept
""",
    )


def test_wide():
    """Two blocks that take the link longer than they compute: it is never idle."""
    assert_expected_inline(
        _printed(blocks(2, forward=0.4, keep=None)),
        """\
 0  gather root+0, gather 1, wait root+0
 2  free 0, wait 1
 4  gather 0
 5  free root
 6  free 1, reduce 1, wait 0
 7  free 0
 8  reduce 0+root, wait_reduce 1, wait_reduce 0+root
8.18 s, gap 0.49%, peak 371, 2 kept
""",
    )


def test_uneven():
    """Blocks of different sizes, within half as much again as the smallest budget."""
    assert_expected_inline(
        _printed(blocks(9, rng=random.Random(3)), budget=500),
        """\
 0  gather root, gather 0, wait root
 1  gather 1, gather 2, wait 0
 2  free 0, gather 3, wait 1
 3  free 1, gather 4, wait 2
 4  free 2, gather 5, wait 3
 5  free 3, gather 6, wait 4
 6  free 4, gather 7, wait 5
 7  free 5, gather 8, wait 6
 8  free 6, wait 7
 9  free 7, wait 8
10  free 8
11  free root, gather root, gather 8, wait root
12  free root, gather 7, wait 8
13  free 8, reduce 8, gather 6, wait 7
14  free 7, wait_reduce 8, reduce 7, gather 5, wait 6
15  free 6, wait_reduce 7, reduce 6, gather 4, wait 5
16  free 5, wait_reduce 6, reduce 5, gather 3, wait 4
17  free 4, wait_reduce 5, reduce 4, gather 2, wait 3
18  free 3, wait_reduce 4, reduce 3, gather 1, wait 2
19  free 2, wait_reduce 3, reduce 2, gather 0, wait 1
20  free 1, wait_reduce 2, reduce 1, wait 0
21  free 0, wait_reduce 1, reduce 0
22  reduce root, wait_reduce 0, wait_reduce root
41.55 s, gap 0.24%, peak 477, 0 kept
""",
    )


def test_tied():
    """The root is embedding and head: read at both ends, kept by demand, reduced last."""
    workload = blocks(3)
    units = (replace(workload.units[0], keep_unsharded=True), *workload.units[1:])
    assert_expected_inline(
        _printed(replace(workload, units=units)),
        """\
 0  gather root, gather 0, wait root
 1  gather 1, wait 0
 2  free 0, gather 2, wait 1
 3  free 1, wait 2
 4  free 2
 5  gather 2
 6  free root, gather 1, wait 2
 7  free 2, reduce 2, gather 0, wait 1
 8  free 1, reduce 1, wait_reduce 2, wait 0
 9  free 0, reduce 0, wait_reduce 1
10  reduce root, wait_reduce 0, wait_reduce root
15.80 s, gap 0.25%, peak 471, 1 kept
""",
    )


def test_hybrid():
    """All-reduces over replicas follow the reduces, on a link of their own, hidden but for the last."""
    workload = blocks(3)
    units = tuple(replace(unit, replicate=0.8) for unit in workload.units)
    assert_expected_inline(
        _printed(replace(workload, units=units)),
        """\
 0  gather root, gather 0, wait root
 1  gather 1, wait 0
 2  free 0, gather 2, wait 1
 3  free 1, wait 2
 4  free 2
 5  free root, gather root, gather 2, wait root
 6  free root, gather 1, wait 2
 7  free 2, reduce 2, gather 0, wait 1
 8  free 1, reduce 1, wait_reduce 2, wait 0
 9  free 0, reduce 0, wait_reduce 1
10  reduce root, wait_reduce 0, wait_reduce root
17.44 s, gap 5.19%, peak 471, 0 kept
""",
    )
