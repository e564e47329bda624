"""Predictions of traced models: what is recomputed and saved, batches by substitution, memory as it was reported."""

import math
from dataclasses import replace

import pytest
from tiers import NIGHTLY
from torch import nn

from bench.models import Llama
from bench.runs.tables import REPORTED, predict_runs
from bench.runs.transformers import Run, Transformer, work_of
from fsdp_compile.explain.predict import predict_step
from fsdp_compile.explain.prediction import Setting
from fsdp_compile.explain.trace import Model
from fsdp_compile.explain.unit_work import BATCHES, at_batch

GIB = 2**30
SMALL = {"dim": 256, "heads": 4, "kv_heads": 2, "hidden": 512, "layers": 2, "vocab": 1000, "context": 128}
LLAMA_8B = {"layers": 32, "vocab": 128256, "context": 8192}


@pytest.fixture(scope="module")
def small() -> Model:
    return Model(lambda: Llama(**SMALL))


SETTING = Setting(8, 2, 128, hardware="h100")


@pytest.mark.nightly
def test_a_batch_by_substitution_is_a_fresh_trace(small):
    """The work of batch 5 from those of batches 2 and 3 equals, number by number, what tracing batch 5 gives."""
    setting = replace(SETTING, checkpointing="selective op")
    *points, other = (small.traced(replace(setting, batch=batch)) for batch in (*BATCHES, 5))
    assert at_batch(*points, 5) == other


def test_checkpointing_adds_a_forward_to_backward(small):
    """Full checkpointing adds exactly the forward of each block to its backward, and saves its input alone."""
    none, full = (small.work(replace(SETTING, checkpointing=each)) for each in ("none", "full"))
    (plain,), (checkpointed,) = none.blocks, full.blocks
    assert checkpointed.backward == (*plain.forward, *plain.backward) and checkpointed.saved_bytes == 0
    ran = [sum(each.flops for unit in work.units for each in unit.backward) for work in (none, full)]
    assert ran[1] - ran[0] == SMALL["layers"] * sum(each.flops for each in plain.forward)
    repeated = sum(each.full_flops for each in plain.forward)
    assert (none.recomputed_flops, full.recomputed_flops) == (0, SMALL["layers"] * repeated)
    chosen = small.work(replace(SETTING, checkpointing="selective op")).blocks[0]
    products = [each for each in chosen.backward if is_product(each)]
    # 14 gradients, and again: every second product but the last; attention is saved
    assert len(products) == 14 + 3
    assert sum(each.kind.startswith("attention") for each in chosen.backward) == 1
    assert checkpointed.saved_bytes < chosen.saved_bytes < plain.saved_bytes


def test_causal_attention_is_half(small):
    """Attention in which no token sees later ones computes half of the operations that the model has."""
    work = small.work(SETTING).blocks[0]
    attention = [each for each in (*work.forward, *work.backward) if each.kind.startswith("attention")]
    assert [each.full_flops for each in attention] == [2 * each.flops for each in attention]
    product = 2 * 2 * 4 * 128 * 128 * 64 // 2
    assert [each.flops for each in attention] == [2 * product, 5 * product]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_closed_forms_are_what_is_traced(compiled):
    """Products and attention of the closed form for tables are those of a trace; what is saved is within a tenth."""
    model = Model(lambda: Llama(**SMALL))
    traced = model.work(replace(SETTING, compiled=compiled))
    kind = {"gated": True, "rms": True, "rotary": True, "tied": False, "fused_qkv": False}
    same = Transformer("small", SMALL["layers"], 256, 4, 2, 64, 512, 1000, **kind)
    closed = work_of(same, Run(2, 128, compiled=compiled, compiled_loss=compiled))
    assert closed.parameters == traced.parameters
    for unit, other in zip(closed.units, traced.units, strict=True):
        for kernels, others in ((unit.forward, other.forward), (unit.backward, other.backward)):
            found, expected = ([each for each in some if each.flops] for some in (kernels, others))
            assert sorted(map(_sizes, found)) == sorted(map(_sizes, expected))
    assert closed.blocks[0].saved_bytes == pytest.approx(traced.blocks[0].saved_bytes, rel=0.1)


def is_product(kernel):
    return kernel.kind.endswith("product")


def _sizes(kernel):
    """A product by its operations and the bytes of its matrices, attention by its operations."""
    return (kernel.kind, kernel.flops, kernel.moved_bytes if is_product(kernel) else 0)


@pytest.mark.nightly
def test_memory_as_reported():
    """torchtitan's 8B with selective checkpointing: 77.0 GiB on 8 GPUs and 62.0 on 128, each within 5 %."""
    setting = Setting(8, 2, 8192, checkpointing="selective op", hardware="h100-96-500w", runtime="fsdp2",
                      reduce_dtype="float32")  # fmt: skip
    settings = [setting, replace(setting, world_size=128)]
    here, there = predict_step(lambda: Llama(**LLAMA_8B), settings, alternatives=False)
    assert here.parameters == 8030261248
    assert here.memory.peak / GIB == pytest.approx(77.0, rel=0.05)
    assert there.memory.peak / GIB == pytest.approx(62.0, rel=0.05)
    assert here.memory.peak_at == "output backward" and here.fits
    assert here.tokens_per_second == pytest.approx(6667, rel=0.10)
    (row,) = [each for each in predict_runs(REPORTED) if each.row["peak_gib"]]
    assert row.peak_gib == pytest.approx(77.0, rel=0.05)


def test_what_a_prediction_adds_up_to(small):
    """The step is forward, backward, update and what is exposed; memory is the sum of its parts; lanes end in time."""
    settings = [
        SETTING,
        replace(SETTING, world_size=64, strategy="HYBRID_SHARD", accumulation=3),
        replace(SETTING, world_size=16, strategy="SHARD_GRAD_OP", network="efa", precision="fp8"),
    ]
    if NIGHTLY:
        settings.append(replace(SETTING, world_size=64, strategy="NO_SHARD", checkpointing="selective 2"))
        settings.append(replace(SETTING, world_size=1))
    shallow = SMALL | {"layers": 1}
    alone = predict_step(lambda: Llama(**shallow), settings[1:], alternatives=False)
    for made in (*predict_step(lambda: Llama(**shallow), settings[:1]), *alone):
        assert made.step == pytest.approx(made.forward + made.backward + made.update + made.exposed, rel=1e-9)
        memory = made.memory
        stored = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.logits)
        assert sum(stored) + memory.gathered + memory.packed + memory.other == memory.peak
        assert max(span.end for span in made.timeline if span.lane == "compute") <= made.step * (1 + 1e-9)
        assert all(0 <= span.exposed <= span.end - span.start + 1e-12 for span in made.timeline)
        assert math.isfinite(made.mfu) and bool(made.alternatives) == (made.setting == SETTING)
        assert made.setting.world_size > 8 or {each.level for each in made.collectives} <= {"node"}
        assert sum(each.exposed for each in made.collectives) >= 0
    assert [(each.kind, each.level) for each in alone[0].collectives] == [
        ("all-gather", "node"), ("reduce-scatter", "node"), ("all-reduce", "network"),
    ]  # fmt: skip


@pytest.mark.nightly
def test_what_does_not_fit_and_what_would():
    """A quarter of 8B's layers, batch 4, does not fit on eight GPUs: alternatives say what does, and at which price."""
    model = LLAMA_8B | {"layers": 8}
    (made,) = predict_step(lambda: Llama(**model), [Setting(8, 4, 8192, hardware="h100")])
    assert made.fits is False and made.best is not None and made.best.fits
    changes = {each.change: each for each in made.alternatives}
    full = changes["checkpointing: full checkpointing"]
    assert full.fits and full.step > made.step and full.peak < made.memory.peak
    assert made.best.tokens_per_second >= max(each.tokens_per_second for each in made.alternatives if each.fits) * 0.999


MADE = nn.Linear(2, 2)


def _broken():
    raise OSError("no such model")


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: 3, "model: expected a function that makes a module, found one that makes int"),
        (lambda: MADE, "model: found weight with memory of its own; make the model inside the function"),
        (lambda: nn.Linear(3, 3), "model: expected one that can be traced, found"),
        (_broken, "model: expected a function that makes a module, but it raised OSError: no such model"),
    ],
)
def test_models_that_cannot_be_traced(make_model, message):
    """What a factory makes that is no model, has memory, or does not take tokens, is refused in words."""
    with pytest.raises(ValueError, match=message):
        predict_step(make_model, [SETTING])


def test_bad_settings():
    """Names that are unknown and numbers that make no sense are refused by their field."""
    with pytest.raises(ValueError, match="hardware: expected one of a100-40"):
        predict_step(lambda: Llama(**SMALL), [replace(SETTING, hardware="abacus")])
    with pytest.raises(ValueError, match="network: expected one of"):
        predict_step(lambda: Llama(**SMALL), [replace(SETTING, network="pigeons")])
    for fields in (
        {"world_size": -1},
        {"batch": 0},
        {"sequence": 1.5},
        {"checkpointing": "some"},
        {"precision": "int2"},
    ):
        with pytest.raises(ValueError, match=next(iter(fields))):
            replace(SETTING, **fields)


@pytest.mark.nightly
def test_hugging_face():
    """A model of Hugging Face is predicted as it is made: with its loss, and an output that is its embedding."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=128)
    (made,) = predict_step(lambda: transformers.AutoModelForCausalLM.from_config(config), [SETTING], alternatives=False)
    assert made.parameters == 500 * 64 + 128 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert [each.count for each in made.collectives if each.kind == "reduce-scatter"] == [3]
