"""What compiled graphs of this package do otherwise than FSDP2 (Note [What graphs of this package do])."""

from dataclasses import replace

import pytest

from bench.runs.tables import case_of
from fsdp_compile.explain.predict import Priced, price
from fsdp_compile.passes.cost.hardware import device

ROW = {"model": "llama", "layers": "6", "hidden": "1024", "heads": "8", "vocab": "32000", "seq": "2048", "gpus": "8",
       "micro_batch": "2", "device": "h100-80", "precision": "bf16", "system": "compile"}  # fmt: skip


def priced(runtime: str, **options: object) -> Priced:
    case = case_of(ROW)
    case = replace(case, setting=replace(case.setting, runtime=runtime, **options))  # type: ignore[arg-type]  # as the test says
    return case.priced(replace(device("h100-80"), contention=0.0))


@pytest.mark.parametrize("options", [{}, {"checkpointing": "full"}, {"accumulation": 2}, {"keep": 2},
                                     {"strategy": "SHARD_GRAD_OP"}])  # fmt: skip
def test_beside_fsdp2(options: dict[str, object]) -> None:
    """Backward gathers the last block again, less is alive, and computing takes what it takes less the packing."""
    ours, theirs = priced("fsdp_compile", **options), priced("fsdp2", **options)
    gathers = [len([*each.scheduled.plan.of("gather")]) for each in (ours, theirs)]
    gathers_again = "strategy" not in options and "keep" not in options
    assert gathers[0] == gathers[1] + gathers_again
    assert ours.scheduled.memory(None).peak < theirs.scheduled.memory(None).peak
    computing = [sum(task.seconds for task in each.scheduled.workload.tasks) for each in (ours, theirs)]
    assert computing[0] < computing[1]
    for each in (ours, theirs):
        m = each.scheduled.memory(None)
        total = m.parameters + m.gradients + m.optimizer + m.activations + m.logits + m.gathered + m.packed + m.other
        assert total == m.peak


def test_gradients_come_to_exist_one_by_one() -> None:
    """Shards of gradients are there when they have been reduced; all the time, where an earlier pass has made them."""
    made = priced("fsdp_compile").scheduled.gradients
    assert (
        made[0] == 0 and list(made) == sorted(made) and made[-1] == pytest.approx(4 * made_parameters() / 8, rel=1e-3)
    )
    assert set(priced("fsdp_compile", accumulation=2).scheduled.gradients) == {made[-1]}


def made_parameters() -> int:
    return priced("fsdp_compile").work.parameters


def test_a_block_is_one_span_of_the_timeline() -> None:
    """Collectives may begin within a block, whose computing is shown as one span where it does not wait."""
    each = priced("fsdp_compile")
    found = price(each.work, each.setting, each.hardware)
    spans = [span for span in found.timeline if span.lane == "compute"]
    assert len({span.name for span in spans}) == len(spans) == 2 * 6 + 5
    assert found.forward + found.backward == pytest.approx(sum(span.end - span.start for span in spans[:-1]))
    assert found.memory_over_time[0][0] == 0.0
    assert max(size for _, size in found.memory_over_time) == pytest.approx(found.memory.peak, rel=1e-6)
