"""What the benchmark computes from what it measures."""

from typing import Any

import pytest
import torch

from bench import parts
from bench.copies import copied, element_counts, moved_in
from bench.models import WORKLOADS
from bench.systems import SYSTEMS


def call(kind: str, begin: float, end: float, waits: Any = ()) -> dict[str, Any]:
    return {"kind": kind, "nbytes": 1000, "begin": begin, "end": end, "waits": list(waits), "origin": 0.0}


SEEN = {
    "calls": 2,
    "step": 12.0,
    "list": [
        call("all_gather", 0, 1, [(0, 1)]),
        call("all_gather", 1, 3),
        call("all_gather", 6, 8, [(6, 8)]),
        call("reduce_scatter", 8, 9),
        call("reduce_scatter", 9, 11, [(10, 11)]),
    ],
}


def test_the_bound_on_a_step() -> None:
    """The first gather and the last reduce cannot hide; the rest hides behind computing where that is longer."""
    long = parts.least(SEEN, {"forward": 4.0, "backward": 10.0, "step": 11.0})
    assert long == {"step": 1 + 4 + 6 + 2 + 1, "unavoidable": 3.0, "dependent": 3 + 2 + 3, "communication": 8.0}
    short = parts.least(SEEN, {"forward": 1.0, "backward": 2.0, "step": 2.0})
    assert short["step"] == 1 + 2 + 3 + 2


def test_a_link_for_a_ratio() -> None:
    """All calls of a step together take the wanted part of its computing."""
    sent = {"calls": {"0": {"all_gather": 6, "reduce_scatter": 4}}, "bytes": {"0": {"all_gather": 3_000_000}}}
    for ratio in (0.3, 0.9):
        latency, bandwidth = parts.link_for(ratio, 0.1, sent)
        assert 10 * latency + 3_000_000 / bandwidth == pytest.approx(ratio * 0.1)
    assert parts.link_for(0.6, 1e-5, sent)[1] > 0  # a launch takes less, rather than transfers nothing


def test_losses_must_agree() -> None:
    """A peer that trains something else is an error, and so is one whose loss is no number."""
    ours = [5.0, 4.0, 3.0]
    parts.check_losses({"fsdp2": [5.0, 4.001, 3.0], "unsharded": [5.0, 3.0, 2.0], "ours": ours}, bf16=False)
    for wrong in ([5.0, 4.0, 3.1], [5.0, float("nan"), 3.0]):
        with pytest.raises(RuntimeError, match="expected losses as of ours"):
            parts.check_losses({"fsdp2": wrong, "ours": ours}, bf16=False)


def test_medians_are_of_rounds() -> None:
    """A round counts by the mean of its steps, the part by the median round."""
    step = {"forward": 1.0, "backward": 2.0, "exposed": 0.0, "loss": 3.0}
    rounds = [[{**step, "step": a}, {**step, "step": b}] for a, b in ((1, 3), (9, 11), (3, 5))]
    found = parts.summarise(rounds)
    assert (found["step"], found["spread"], len(found["losses"])) == (4, [2, 10], 6)


def test_copies_of_library_calls() -> None:
    """Bytes that are written count, once; computing does not."""
    x = torch.ones(6)
    assert copied(lambda: x * 2) == 0
    assert copied(lambda: torch.cat([x, x])) == 48
    assert copied(lambda: torch.empty(6).copy_(x)) == 24
    assert copied(lambda: torch._foreach_copy_([torch.empty(6), torch.empty(6)], [x, x])) == 48
    assert copied(lambda: x.bfloat16()) == 12
    assert copied(lambda: torch.split_with_sizes_copy(x, [2, 4], out=[torch.empty(2), torch.empty(4)])) == 24


GENERATED = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), 4);
    tmp0.store(out_ptr0 + static_cast<int64_t>(x0));
}
''')
def call(args):
    assert_size_stride(primals_1, (8, ), (1, ))
    buf0 = empty_strided_cpu((16, 2), (2, 1), torch.float32)
    buf1 = reinterpret_tensor(buf0, (8, ), (1, ), 8)
    cpp_fused_0(primals_1, buf1)
    buf2 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf0, 'avg', 4, '0')
    return
"""


def test_copies_in_generated_code() -> None:
    """A kernel that stores what it loaded into what is reduced counts with the smaller of both; computing does not."""
    assert element_counts(GENERATED) == {"primals_1": 8, "buf0": 32, "buf1": 8}
    assert moved_in(GENERATED) == 4 * 8
    assert (
        moved_in(GENERATED.replace("loadu(in_ptr0", "loadu(in_ptr0").replace("tmp0.store", "(tmp0 + tmp0).store")) == 0
    )


def test_parts_name_what_exists() -> None:
    """Every part's systems and model exist, and what is disabled are passes; others have one option each."""
    from fsdp_compile.passes import PASSES

    known = {each.name for each in PASSES}
    for part in parts.PARTS.values():
        assert part.model in WORKLOADS
        for name in part.systems:
            system, _, option = name.partition(":")
            meant = (
                known | {"autocast", "float8"}
                if system == "ours_compiled"
                else {"layers", "first", "optimizer", "in_backward", "overlap", "ends"}
            )
            assert system in SYSTEMS and (not option or meant.issuperset(option.split("+")))
