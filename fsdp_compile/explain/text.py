"""Reports as text: a table of settings and one of them in detail, or the collectives of a plan."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fsdp_compile.explain.prediction import (
    Alternative,
    BlockChoice,
    Collective,
    Memory,
    Prediction,
    Scheduled,
    Setting,
)
from fsdp_compile.passes.plan.plan import prefetched

LEVELS = {"node": "within nodes", "network": "between nodes"}
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "packed", "other")


def as_text(predictions: Sequence[Prediction], shown: Prediction) -> str:
    """All predictions in a table, if there are several, and `shown` in detail."""
    lines = list(_detail(shown))
    if len(predictions) > 1:
        head = f"{shown.model}, {_count(shown.parameters)} parameters, in {len(predictions)} settings"
        best = "the most tokens/s per GPU that fits" if shown.fits is not False else "the first; none fits into memory"
        lines = [head, "", *_table_of_settings(predictions), "", f"In detail, {best}:", "", *lines]
    return "\n".join(lines) + "\n"


def words_of(setting: Setting) -> str:
    """A setting in a line."""
    batch = f"batch {setting.batch} of {setting.sequence:,} tokens"
    accumulation = [f"{setting.accumulation} times accumulated"] if setting.accumulation > 1 else []
    checkpointing = f"checkpointing {setting.checkpointing}"
    update = setting.optimizer + (", clipped" if setting.clip and setting.optimizer != "none" else "")
    return ", ".join([f"{setting.world_size:,} x {setting.hardware}", setting.strategy, batch, *accumulation,
                      setting.precision, checkpointing, update])  # fmt: skip


def _detail(prediction: Prediction) -> Iterator[str]:
    p = prediction
    yield f"{p.model}, {_count(p.parameters)} parameters"
    yield words_of(p.setting)
    yield ""
    sums = {"forward": p.forward, "backward": p.backward, "update": p.update, "exposed": p.exposed}
    yield f"step      {_ms(p.step)} ms = " + " + ".join(f"{name} {_ms(seconds)}" for name, seconds in sums.items())
    yield f"speed     {p.tokens_per_second:,.0f} tokens/s per GPU, MFU {p.mfu:.1%}, HFU {p.hfu:.1%}"
    yield from _memory(p.memory)
    if p.collectives:
        rows = [(str(each.kind), LEVELS[each.level], f"{each.count:,}", _gib(each.bytes), _ms(each.seconds),
                 _ms(each.exposed)) for each in p.collectives]  # fmt: skip
        yield from ("", *_table(("collectives", "links", "number", "GiB", "ms", "exposed ms"), rows, left=2))
    exposed = [each for each in p.top if each.exposed > 0]
    if exposed:
        rows = [(each.name, LEVELS[each.level], _gib(each.bytes), _ms(each.seconds), _ms(each.exposed), each.limit)
                for each in exposed]  # fmt: skip
        yield from ("", *_table(("largest", "links", "GiB", "ms", "exposed ms", "~limited by"), rows, left=2))
    if p.alternatives:
        yield from ("", *_alternatives(p))
    origins = Counter(each.origin for each in p.constants)
    if origins:
        counted = ", ".join(f"{times} {origin}" for origin, times in origins.items())
        yield from ("", f"constants {counted}; the JSON and the page list them with their sources")
    yield from ("", *(f"warning: {each}" for each in p.warnings)) if p.warnings else ()


def _memory(memory: Memory) -> Iterator[str]:
    yield f"memory    {_gib(memory.peak)} GiB at most: {_verdict(memory)}; the peak is at: {memory.peak_at}"
    sizes = [f"{part} {_gib(getattr(memory, part))}" for part in MEMORY if getattr(memory, part)]
    yield from ("          " + ", ".join(sizes[at : at + 4]) for at in range(0, len(sizes), 4))


def _verdict(memory: Memory) -> str:
    if memory.capacity is None:
        return "the capacity is not known"
    return f"{'fits' if memory.fits else 'does not fit'} into {_gib(memory.capacity)}"


def _table_of_settings(predictions: Sequence[Prediction]) -> Iterator[str]:
    def differing(setting: Setting) -> str:
        varied = [name for name in ("sequence", "strategy", "checkpointing", "precision", "hardware")
                  if len({getattr(each.setting, name) for each in predictions}) > 1]  # fmt: skip
        return ", ".join(str(getattr(setting, name)) for name in varied)

    rows = [(f"{p.setting.world_size:,}", str(p.setting.batch), _ms(p.step), f"{p.tokens_per_second:,.0f}",
             f"{p.mfu:.1%}", _ms(p.exposed), _gib(p.memory.peak), _fits(p.fits), differing(p.setting))
            for p in predictions]  # fmt: skip
    yield from _table(
        ("GPUs", "batch", "step ms", "tokens/s/GPU", "MFU", "exposed ms", "peak GiB", "memory", "~"), rows, left=0
    )


def _alternatives(prediction: Prediction) -> Iterator[str]:
    best = prediction.best
    listed = [*prediction.alternatives, *([best] if best is not None and best not in prediction.alternatives else [])]

    def row(each: Alternative) -> tuple[str, ...]:
        change = ("best: " if each == best else "") + each.change
        difference = 1e3 * (each.step - prediction.step)
        return (change, _ms(each.step), f"{difference:+,.1f}", f"{each.tokens_per_second:,.0f}", _gib(each.peak),
                _fits(each.fits))  # fmt: skip

    heads = ("alternatives", "step ms", "difference", "tokens/s/GPU", "peak GiB", "memory")
    yield from _table(heads, [row(each) for each in listed], left=1)


def _fits(fits: bool | None) -> str:
    return {True: "fits", False: "too much", None: "unknown"}[fits]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Lines of a table whose first `left` columns are text; so is a column whose head begins with "~"."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in ([head.removeprefix("~") for head in heads], *rows):
        cells = [f"{cell:<{width}}" if at < left or heads[at].startswith("~") else f"{cell:>{width}}"
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.01 or seconds == 0 else f"{1e3 * seconds:,.3f}"


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f}" if gib >= 1 or size == 0 else f"{gib:.3f}"


def _count(value: int) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,}"


# --- a plan -----------------------------------------------------------------------------------------------------------


def plan_as_text(step: Scheduled) -> str:
    """Each collective, what hides it and what limits the rest; updates, blocks, totals."""
    lines = [*_launches(step.collectives), *_of_updates(step), *_of_blocks(step.blocks), "", *_totals(step)]
    return "\n".join(lines) + "\n"


def _launches(collectives: Sequence[Collective]) -> Iterator[str]:
    name_width = max([len(each.name) for each in collectives], default=10)
    yield f"{'collective':{name_width}}  {'bytes':>14}  {'ms':>9}  {'hidden':>9}  {'exposed':>9}  limited by"
    for each in collectives:
        hidden = each.seconds - each.exposed
        times = "  ".join(f"{1e3 * seconds:9.3f}" for seconds in (each.seconds, hidden, each.exposed))
        yield f"{each.name:{name_width}}  {each.bytes:14,}  {times}  {each.limit}".rstrip()


def _of_updates(step: Scheduled) -> Iterator[str]:
    """What lies between a backward and the next forward, and the gathers that start behind it."""
    workload = step.workload
    tasks = [*enumerate(workload.tasks)][workload.end_of_backward : workload.forward]
    if tasks:
        name_width = max(len(task.name) for _, task in tasks)
        yield f"\n{'update':{name_width}}  {'ms':>9}  starts for the next forward"
    for index, task in tasks:
        started = [name for each in prefetched(workload, step.plan) if each.at == index + 1 for name in each.units]
        gathers = f"gather {' '.join(started)}" if started else ""
        yield f"{task.name:{name_width}}  {1e3 * task.seconds:9.3f}  {gathers}".rstrip()


def _of_blocks(blocks: tuple[BlockChoice, ...]) -> Iterator[str]:
    if blocks:
        name_width = max(len(each.name) for each in blocks)
        yield f"\n{'block':{name_width}}  {'activations':22}  units that stay unsharded"
        yield from (
            f"{each.name:{name_width}}  {each.activations:22}  {each.unsharded} of {each.units}" for each in blocks
        )


def _totals(step: Scheduled) -> Iterator[str]:
    seconds, computing = step.timeline.makespan, sum(task.seconds for task in step.workload.tasks)
    gap = max(0.0, seconds / step.bound - 1) if step.bound else 0.0
    repeats = ", backward, update and the next forward, which repeats" * bool(step.workload.forward)
    rest = f"computing {1e3 * computing:.3f}, the rest {1e3 * (seconds - computing):.3f}"
    yield f"step      {1e3 * seconds:.3f} ms{repeats}: {rest}"
    yield f"bound     {1e3 * step.bound:.3f} ms, a lower bound for all plans; this one takes {gap:.2%} more"
    limit = "no limit" if step.budget is None else f"{step.budget:,} bytes"
    yield f"memory    {step.timeline.peak:,} bytes at most, budget: {limit}"
