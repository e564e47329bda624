"""A GPT on eight ranks with wires: kept code, and what plans and predictions say of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.link import LINK
from bench.models import Workload, gpt
from fsdp_compile import Wire, explain, explain_plan, fully_shard

SMALL = dict(batch=2, context=32, layers=2, heads=4, dim=128)
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_to_all": "reduce"}


def _sharded(workload: Workload, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(workload.build(), **options)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _sent(wire: Any) -> Counter[str]:
    """Bytes that this rank sends to others in a compiled forward and backward, by what they are for."""
    workload = gpt(**SMALL)
    torch._dynamo.reset()
    run: Any = torch.compile(_sharded(workload, reshard_after_forward=True, wire=wire), fullgraph=True)
    for step in range(2):  # in the first one ranks tell each other what they have
        LINK.reset()
        run(*workload.batch(step, 0)).backward()
    sent: Counter[str] = Counter()
    for call in LINK.calls:
        sent[KINDS.get(call.kind, call.kind)] += call.nbytes  # an all-reduce is of what ranks compare
    return sent


@pytest.mark.nightly
def test_kept_code_has_the_wire(emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that compilers have kept for other formats is not taken, and that for the same formats is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    wires = (None, "bf16", "fp8", Wire("fp8", "bf16"))
    with torch._inductor.config.patch(force_disable_caches=False):
        once, again = ([_sent(wire) for wire in wires] for _ in range(2))
    assert once == again
    assert len({each["gather"] for each in once}) == len({each["reduce"] for each in once}) == 3, once


# --- what is said -----------------------------------------------------------------------------------------------------


def _report(link: str, **options: Any) -> Any:
    workload = gpt(**SMALL)
    return explain_plan(_sharded(workload, **options), workload.batch(0, 0), link=link)


def test_the_plan_prints_formats_and_bytes(emulated: None) -> None:
    """Each collective with its format and what it sends, and sums; without a wire there are no such columns."""
    found = _report("custom:1e-6,1e9", wire=Wire("fp8", "bf16"))
    assert {(each.kind, each.format) for each in found.scheduled.collectives} == {
        ("all-gather", "fp8"),
        ("reduce-scatter", "bf16"),
    }
    full = _report("custom:1e-6,1e9")
    parts = {"all-gather": 0.2521, "reduce-scatter": 0.5}
    for kind, part in parts.items():
        sent, size = (sum(getattr(each, name) for each in found.scheduled.collectives if each.kind == kind)
                      for name in ("sent", "bytes"))  # fmt: skip
        assert sent == pytest.approx(part * size, rel=1e-3)
        assert size == sum(each.bytes for each in full.scheduled.collectives if each.kind == kind)
        assert f"{size:,}" in str(found) and f"{sent:,}" in str(found)
    assert "format" in str(found) and "format" not in str(full)


def test_explain_knows_formats() -> None:
    """A predicted step on a slow link is shorter where less is sent, by how much is said; FSDP2 has no formats."""
    options = {"world_size": 8, "batch": 2, "sequence": 32, "network": "custom:1e-6,1e8", "ranks_per_node": 1}
    full, sent = (
        explain(gpt(**SMALL).build, alternatives=False, **options, **wires)
        for wires in ({}, {"wire_gather": "fp8", "wire_reduce": "bf16"})
    )
    one, other = full.predictions[0], sent.predictions[0]
    assert other.step < 0.8 * one.step  # bfloat16: two gathers in half the bytes, a reduce in as many
    assert {each.format for each in one.top} == {""}
    assert {(each.kind, each.format) for each in other.top} == {("all-gather", "fp8"), ("reduce-scatter", "bf16")}
    assert all(each.sent == pytest.approx({"fp8": 1.0078 / 2, "bf16": 1.0}[each.format] * each.bytes, rel=1e-3)
               for each in other.top)  # fmt: skip
    assert "gathers in fp8, reduces in bf16" in str(sent)
    with pytest.raises(ValueError, match="wire_gather: expected one of None, found 'fp8'"):
        explain(gpt(**SMALL).build, runtime="fsdp2", wire_gather="fp8", **options)
