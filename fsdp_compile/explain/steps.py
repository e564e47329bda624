"""Predictions of a model in many settings: it is traced a few times, and everything else is computed from that.

A model is traced for each sequence length, with and without recomputation by operator, at the two batches from which
all others follow (`work.at_batch`). World sizes, links, strategies, full checkpointing and batches cost no trace.

Alternatives to a setting have one thing changed; the best setting is searched over strategy, checkpointing and batch
together, and among those that fit it has the most tokens per second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp_compile.explain.prediction import Alternative, Prediction, Setting
from fsdp_compile.explain.pricing import Priced, price
from fsdp_compile.explain.tracing import TracedModel
from fsdp_compile.explain.work import BATCHES, NotAffine, StepWork, at_batch
from fsdp_compile.passes.cost.cluster import custom_network
from fsdp_compile.passes.cost.hardware import Hardware, device, link

LARGEST = 1 << 20  # ranks that are tried at most to make a step fit


class Model:
    """A model whose work is known in every setting."""

    def __init__(self, make_model: Callable[[], Any], example_inputs: Any = None, name: str | None = None) -> None:
        self.traced = TracedModel(make_model, example_inputs, name)
        self._points: dict[Any, tuple[StepWork, StepWork]] = {}
        self._works: dict[Any, StepWork] = {}

    def work(self, setting: Setting) -> StepWork:
        """What one forward and backward computes. ValueError if the model cannot be traced."""
        by_operator = setting.checkpointing == "selective op"
        key = (setting.sequence, by_operator, setting.compiled, setting.compiles_loss, setting.precision)
        full = (*key, setting.batch, setting.checkpointing)
        if full in self._works:
            return self._works[full]
        if key not in self._points:
            first, second = (self.traced.work(batch, *key) for batch in BATCHES)
            self._points[key] = first, second
        try:
            work = at_batch(*self._points[key], setting.batch)
        except NotAffine:
            work = self.traced.work(setting.batch, *key)
        if setting.checkpointing not in ("none", "selective op"):
            work = work.checkpointed(setting.checkpointing)
        self._works[full] = work
        return work


def predict(
    make_model: Callable[[], Any],
    settings: Sequence[Setting],
    example_inputs: Any = None,
    hardware: Mapping[str, Hardware] | None = None,
    name: str | None = None,
    alternatives: bool = True,
) -> list[Prediction]:
    """See `predict_step`, whose arguments these are."""
    used = {each.hardware: (hardware or {}).get(each.hardware) or device(each.hardware) for each in settings}
    networks = {each.network: link(each.network) for each in settings if each.network is not None}
    model = Model(make_model, example_inputs, name)

    def hardware_of(setting: Setting) -> Hardware:
        here = used[setting.hardware]
        return custom_network(networks[setting.network], here) if setting.network is not None else here

    predictions = []
    for setting in settings:
        here = hardware_of(setting)
        made = price(model.work(setting), setting, here)
        if alternatives:
            others = tuple(_alternatives(model, setting, here, made))
            made = replace(made, alternatives=others, best=_best(model, setting, here, made))
        predictions.append(made)
    return predictions


# --- alternatives -----------------------------------------------------------------------------------------------------


def _alternatives(model: Model, setting: Setting, hardware: Hardware, made: Prediction) -> Iterator[Alternative]:
    """The setting with one thing changed."""
    for checkpointing in ("none", "selective op", "full"):
        if checkpointing != setting.checkpointing:
            words = {"none": "no checkpointing", "full": "full checkpointing"}.get(checkpointing, checkpointing)
            yield _priced(model, f"checkpointing: {words}", replace(setting, checkpointing=checkpointing), hardware)
    for strategy in _strategies(setting, hardware):
        if strategy != setting.strategy:
            yield _priced(model, f"strategy: {strategy}", replace(setting, strategy=strategy), hardware)
    blocks = sum(block.count for block in model.work(setting).blocks)
    if setting.strategy in ("FULL_SHARD", "HYBRID_SHARD") and blocks > 1:
        half = blocks // 2
        words = f"keep {half} of {blocks} blocks unsharded for backward"
        yield _priced(model, words, replace(setting, keep=half), hardware)
    if setting.keep:
        yield _priced(model, "keep no block unsharded for backward", replace(setting, keep=0), hardware)
    for batch in (setting.batch // 2, setting.batch * 2):
        if batch:
            yield _priced(model, f"batch: {batch}", replace(setting, batch=batch), hardware)
    twice = 2 * setting.world_size
    yield _priced(model, f"{twice:,} ranks", replace(setting, world_size=twice), hardware)
    if made.fits is False:
        enough = _enough_ranks(model, setting, hardware)
        if enough is not None and enough != twice:
            yield _priced(model, f"{enough:,} ranks, the fewest that fit, in powers of two",
                          replace(setting, world_size=enough), hardware)  # fmt: skip


def _strategies(setting: Setting, hardware: Hardware) -> list[str]:
    """The strategies that could make sense: the hybrid ones where there are several nodes."""
    several = setting.world_size > (setting.ranks_per_node or hardware.ranks_per_node)
    return ["FULL_SHARD", "SHARD_GRAD_OP", *(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if several else [])]


def _enough_ranks(model: Model, setting: Setting, hardware: Hardware) -> int | None:
    """The smallest power of two times the number of ranks at which the step fits."""
    ranks = 2 * setting.world_size
    while ranks <= LARGEST:
        tried = replace(setting, world_size=ranks)
        if Priced.of(model.work(tried), tried, hardware).memory.fits:
            return ranks
        ranks *= 2
    return None


def _best(model: Model, setting: Setting, hardware: Hardware, made: Prediction) -> Alternative | None:
    """The setting with the most tokens per second that fits, unless that is the one that was asked for."""
    best: Alternative | None = None
    speed = made.tokens_per_second if made.fits is not False else 0.0
    for strategy in _strategies(setting, hardware):
        for checkpointing in dict.fromkeys((setting.checkpointing, "none", "selective op", "full")):
            for batch in sorted({1, 2, 4, 8, 16, setting.batch, 2 * setting.batch}):
                tried = replace(setting, strategy=strategy, checkpointing=checkpointing, batch=batch, keep=0)
                priced = Priced.of(model.work(tried), tried, hardware)
                if priced.memory.fits is False:
                    break  # a larger batch needs more
                if priced.tokens_per_second > speed * (1 + 1e-6):
                    speed = priced.tokens_per_second
                    best = _alternative(f"{strategy}, checkpointing {checkpointing}, batch {batch}", tried, priced)
    return best


def _priced(model: Model, change: str, setting: Setting, hardware: Hardware) -> Alternative:
    return _alternative(change, setting, Priced.of(model.work(setting), setting, hardware))


def _alternative(change: str, setting: Setting, priced: Priced) -> Alternative:
    return Alternative(change, setting, priced.step, priced.tokens_per_second, priced.memory.peak, priced.memory.fits)
