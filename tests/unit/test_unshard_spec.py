"""The string that describes an unshard says all of it, and nothing else."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compile.comm.formats import FORMATS
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import OF_ROOT, UPDATES, NamedGroup, UnshardSpec

LAYOUT = FlatParamLayout.build([("weight", (5, 3)), ("bias", (5,))], 4)
CARRIED = st.sampled_from(["", *FORMATS])
GROUPS = st.builds(NamedGroup, st.text(min_size=1, max_size=8), st.integers(1, 64), CARRIED, CARRIED)
DTYPES = st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32])
SPECS = st.builds(
    UnshardSpec,
    st.just(LAYOUT),
    st.lists(GROUPS, max_size=2).map(tuple),
    st.sampled_from([True, False, None]),
    st.none() | GROUPS,
    DTYPES,
    DTYPES,
    divisor=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    reduce_groups=st.lists(GROUPS, max_size=2).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(spec=SPECS)
def test_a_text_is_read_back(spec: UnshardSpec) -> None:
    """Whatever names groups have, `parse` gives an equal specification, whose text is the same."""
    assert UnshardSpec.parse(spec.text) == spec
    assert UnshardSpec.parse(spec.text).text == spec.text


@pytest.mark.parametrize(
    "text", ["", "5@0|16/4%16", "5@0|16/4%16 groups=0:4", "5@0|16/4%16 groups=0:4 reshard=True x=1"]
)
def test_a_malformed_text_is_quoted(text: str) -> None:
    """An error says what was read and what was expected."""
    with pytest.raises(ValueError, match="not an unshard specification; expected LAYOUT groups="):
        UnshardSpec.parse(text)


def test_what_a_text_looks_like() -> None:
    """Defaults are left out; dtypes and groups are readable."""
    spec = UnshardSpec(LAYOUT, (NamedGroup("0", 4),), True, None, torch.bfloat16, torch.float32)
    assert spec.text == "5x3@0,5@16|24/4%16 groups=0:4 reshard=True compute=bfloat16 reduce=float32"
    updating = replace(spec, updates=True, of_root=True)
    assert updating.text == spec.text + OF_ROOT + UPDATES and UnshardSpec.parse(updating.text) == updating


@pytest.mark.parametrize(("stages", "replicas", "ranks"), [((4,), None, 4), ((2, 4), None, 8), ((2, 4), 3, 24)])
def test_over_how_many_ranks_gradients_are_averaged(stages: tuple[int, ...], replicas: int | None, ranks: int) -> None:
    """Those of all stages, and of all replicas: float16 is divided by it."""
    groups = tuple(NamedGroup(str(index), size) for index, size in enumerate(stages))
    copies = None if replicas is None else NamedGroup("copies", replicas)
    assert UnshardSpec(LAYOUT, groups, True, copies).data_parallel_size == ranks
