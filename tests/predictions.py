"""Predictions that are made by hand, with all fields: for tests of how they are shown, written and read."""

from dataclasses import replace

from fsdp_compile.explain.prediction import (
    Alternative,
    Collective,
    CollectiveTime,
    Constant,
    Memory,
    Prediction,
    Setting,
    TimelineSpan,
)
from fsdp_compile.explain.report import Report

GIB = 1 << 30


def prediction(world_size: int = 64, batch: int = 1, blocks: int = 8, model: str = "Llama") -> Prediction:
    """A step whose every unit is gathered one block early over a link that is slower with more ranks."""
    setting = Setting(world_size, batch, sequence=8192, hardware="h100-80")
    level, transfer, compute = "network" if world_size > 8 else "node", 4e-3 * (1 + world_size / 512), 7e-3 * batch
    timeline: list[TimelineSpan] = []
    memory: list[tuple[float, int]] = [(0.0, 22 * GIB)]
    link, clock, exposed = 0.0, 0.0, 0.0
    for direction, seconds in (("forward", compute), ("backward", 2 * compute)):
        order = range(blocks) if direction == "forward" else reversed(range(blocks))
        for block in order:
            late = max(0.0, link + transfer - clock)
            timeline.append(TimelineSpan(level, f"gather blocks.{block}", link, link + transfer, late))
            exposed, clock = exposed + late, max(clock, link + transfer)
            link = clock
            timeline.append(TimelineSpan("compute", f"{direction} blocks.{block}", clock, clock + seconds))
            clock += seconds
            memory.append((clock, memory[-1][1] + (3 if direction == "forward" else -3) * batch * GIB))
            if direction == "backward":
                timeline.append(TimelineSpan(level, f"reduce blocks.{block}", clock, clock + transfer, 0.0))
                link = clock + transfer
    timeline.append(TimelineSpan("compute", "update", clock, clock + 5e-3))
    peak = max(size for _, size in memory)
    forward, backward, update = blocks * compute, blocks * 2 * compute, 5e-3
    step = forward + backward + update + exposed
    sizes = {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB, "logits": 2 * GIB, "gathered": GIB,
             "packed": GIB, "other": 2 * GIB}  # fmt: skip
    found = Prediction(
        model=model,
        parameters=8_030_261_248,
        setting=setting,
        forward=forward,
        backward=backward,
        update=update,
        exposed=exposed,
        step=step,
        tokens_per_second=8192 * batch / step,
        mfu=0.41 / (1 + exposed / step),
        hfu=0.44 / (1 + exposed / step),
        collectives=(
            CollectiveTime("all-gather", level, 2 * blocks, 2 * blocks * GIB // 2, 2 * blocks * transfer, exposed),
            CollectiveTime("reduce-scatter", level, blocks, blocks * GIB // 2, blocks * transfer, 0.0),
        ),
        top=(
            Collective(
                "gather blocks.0", "all-gather", level, GIB // 2, transfer, transfer, "dependency", "", GIB // 2
            ),
        ),
        memory=Memory(
            **sizes,
            activations=peak - sum(sizes.values()),
            peak=peak,
            peak_at="the forward of blocks.7",
            capacity=int(79.6 * GIB),
        ),
        timeline=tuple(timeline),
        memory_over_time=tuple(memory),
        constants=(
            Constant("peak of bfloat16", 9.89e14, "flop/s", "data sheet", "NVIDIA H100 SXM data sheet"),
            Constant("efficiency of products", 0.72, "", "fitted", "27 reported training runs"),
            Constant("launch", 4.5e-6, "s", "measured", "calibrate on this machine"),
            Constant("bytes per second of chains", 2.6e12, "bytes/s", "assumed", "0.78 of the data sheet's 3.35e12"),
        ),
    )
    change = replace(setting, checkpointing="full")
    full = Alternative(
        "checkpoint every block", change, step + forward, 8192 * batch / (step + forward), 30 * GIB, True
    )
    double = Alternative("batch 8", replace(setting, batch=8), 2 * step, 9000.0, 90 * GIB, False)
    return replace(found, alternatives=(full, double), best=full)


def explanation() -> Report:
    """Several world sizes and two batches."""
    return Report(tuple(prediction(size, batch) for batch in (1, 2) for size in (8, 64, 512, 4096)))
