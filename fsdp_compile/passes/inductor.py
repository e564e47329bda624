"""How torch.compile reaches the passes: `PASSES`, with those of layers, and two ways to run them.

torch.compile(model)                           `install` puts our pipelines into Inductor's custom-pass hooks, after
                                               the passes that are there. Nothing else in the process changes; each
                                               graph with our markers is compiled with `graph_settings`.
torch.compile(model, backend="fsdp_compile")   the same hooks and settings, for this compilation only, with a
                                               `CompileConfig`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.config import MEASURE, CompileConfig, check_type
from fsdp_compile.core.ops import MARKERS, UNSHARD, UnshardSpec, set_inductor_settings
from fsdp_compile.passes._torch import (
    InductorError,
    compile_by_inductor,
    inductor_config,
    switched_off,
    without_dispatch_modes,
)
from fsdp_compile.passes.cost.hardware import device, link, measured_text
from fsdp_compile.passes.graph.nodes import is_ours
from fsdp_compile.passes.graph.prices import hardware_at
from fsdp_compile.passes.graph_checks import check_order, check_saved, check_settings
from fsdp_compile.passes.hooks import CORE_PASSES, OURS, Refused, pipelines
from fsdp_compile.passes.joint import reshard_by_cost
from fsdp_compile.passes.joint.smallest_gather import smallest_gather
from fsdp_compile.passes.measure import NoLink, measured_link, measured_speed
from fsdp_compile.passes.pipeline import Pass, enabled, log, watchers
from fsdp_compile.passes.post_grad import compiled_blocks as blocks
from fsdp_compile.passes.post_grad import plan_by_cost, updates
from fsdp_compile.passes.post_grad.check_ranks import check_ranks
from fsdp_compile.passes.post_grad.coalesce import coalesce_launches
from fsdp_compile.passes.post_grad.messages import send_messages
from fsdp_compile.passes.post_grad.plan_by_cost import plans_in_file
from fsdp_compile.passes.printed import print_graph


def placed(passes: Sequence[Pass], extra: Sequence[Pass]) -> tuple[Pass, ...]:
    """`passes` with `extra`: each in place of the pass of its name, or behind the pass that its `after` names.

    Raises:
        ValueError: there is no such pass.
    """
    names = {each.name for each in passes}
    instead = {one.name: one for one in extra if one.name in names}
    added = [one for one in extra if one.name not in names]
    if unplaced := [one for one in added if one.after not in names]:
        raise ValueError(f"passes: {unplaced[0].name!r} runs after {unplaced[0].after!r}, which does not exist")
    return tuple(
        each
        for own in passes
        for each in (instead.get(own.name, own), *(one for one in added if one.after == own.name))
    )


EXTRA_PASSES = (
    Pass("smallest_gather", "joint", smallest_gather, needs=("insert_collectives",), after="insert_collectives"),
    Pass("choose_reshard", "joint", reshard_by_cost.choose_reshard),
    Pass("check_saved", "post_grad", check_saved, after="reshard"),
    Pass("read_graph", "post_grad", plan_by_cost.read_graph),
    Pass("choose_plan", "post_grad", plan_by_cost.choose_plan, needs=("read_graph",)),
    Pass("check_order", "post_grad", check_order, needs=("order",), after="order"),
    Pass("place_updates", "post_grad", updates.place_updates, after="order"),
    Pass("send_messages", "post_grad", send_messages, after="order"),
    Pass("coalesce_launches", "post_grad", coalesce_launches, after="order"),
    Pass("check_ranks", "post_grad", check_ranks, after="all_gather_into_buffer"),
    Pass("start_reduces", "post_grad", blocks.start_reduces, after="all_gather_into_buffer"),
    Pass("await_gathers", "post_grad", blocks.await_gathers, after="all_gather_into_buffer"),
)
PASSES = placed(CORE_PASSES, EXTRA_PASSES)
"""What is done to a graph, in order, which docs/passes.md explains."""

watchers[:] = print_graph, check_settings


def install() -> None:
    """Make plain `torch.compile` run our passes on graphs with our markers. Idempotent.

    Raises:
        ValueError: an environment variable has a value that its field of `CompileConfig` cannot have.
    """
    config = CompileConfig.from_environment()
    hooks = pipelines(config, PASSES)
    for hook, pipeline in hooks.items():
        if not isinstance(getattr(inductor_config, hook), OURS):
            setattr(inductor_config, hook, pipeline)
    set_inductor_settings(partial(graph_settings, config))


def fsdp_compile_backend(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="fsdp_compile", options={...})`.

    Options are the fields of `CompileConfig`. Inductor compiles, with our passes and with its own memory-driven
    reordering switched off for this compilation.

    Raises:
        Refused: as `config_of` says; or no plan fits into the budget, or the plan of a file is of another model.
    """
    try:
        check_type("options", options, dict | None)
        compile_graph = backend(**(options or {}))
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    return compile_graph(gm, example_inputs)


def backend(
    passes: Sequence[Pass] = PASSES, **options: Any
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for `torch.compile` with passes of your own: `torch.compile(model, backend=backend(passes=...))`.

    Graphs of sharded models go through `passes`, which usually are those of `PASSES` and some others; Inductor compiles
    what comes out, as `backend="fsdp_compile"` does. Other graphs are compiled as they are.

    Args:
        passes: in the order in which they run. Those of the stage "joint" run before those of "post_grad".
        **options: fields of `CompileConfig`.

    Raises:
        TypeError: an option has a value of another type.
        ValueError: an option or the name of a pass to disable is unknown, an option has a value that it cannot have,
            two passes have one name, or a pass does not come behind those that it needs.
    """
    config = config_of(options, passes)
    check_passes(passes)

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return compile_with(gm, example_inputs, tuple(passes), config)
        except InductorError as error:
            if isinstance(error.inner_exception, Refused):  # which Inductor wraps only where its caches are off
                raise error.inner_exception from None
            raise

    return compile_graph


def check_passes(passes: Sequence[Pass]) -> None:
    """ValueError if two passes have one name, or a pass comes before one that it needs."""
    seen: set[str] = set()
    for each in passes:
        if each.name in seen:
            raise ValueError(f"passes: {each.name!r} is there twice; give each pass a name of its own")
        if missing := [name for name in each.needs if name not in seen]:
            raise ValueError(f"passes: {each.name!r} needs {missing[0]!r}, which is not among the passes before it")
        seen.add(each.name)


def config_of(options: Any, passes: Sequence[Pass] = PASSES) -> CompileConfig:
    """What `options={...}` of the backend say.

    Raises:
        TypeError: an option has a value of another type.
        ValueError: an option is unknown or has a value that it cannot have, or names what does not exist.
    """
    check_type("options", options, dict)
    known = [field.name for field in fields(CompileConfig)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"options: expected names among {', '.join(known)}, found {', '.join(map(str, unknown))}")
    return checked(CompileConfig(**options), passes)


def checked(config: CompileConfig, passes: Sequence[Pass] = PASSES) -> CompileConfig:
    """Return `config`; ValueError if a pass, a link, a device or a file that it names does not exist or is no such."""
    enabled(passes, config)
    if config.link not in (None, MEASURE):
        link(config.link)
    if config.device is not None:
        device(config.device)
    if config.plan is not None:
        plans_in_file(config.plan)
    return config


def for_graph(config: CompileConfig, graph: fx.Graph) -> CompileConfig:
    """The configuration for a graph that Dynamo has traced, with the link that its ranks measure if a search needs one.

    A search is asked for by a link, by what needs one, or by `reshard_after_forward="auto"`. A graph of a model that is
    not sharded has nothing to plan.

    Raises:
        Refused: there is no link, and the configuration has a budget.
    """
    if not is_ours(graph, MARKERS):
        return config.without_search
    if config.link == MEASURE or (config.link is None and _is_searched(graph)):
        link_here, device_here = _measured_costs(list(_of_units(graph)), config.device, config.check_ranks_timeout)
        if link_here is None and config.budget is not None:
            raise Refused(f"budget={config.budget} needs a link, and the ranks could not measure one: name it")
        config = replace(config, link=link_here, device=device_here) if link_here else config.without_search
    return config


def _is_searched(graph: fx.Graph) -> bool:
    """Whether a search decides which units stay unsharded (`reshard_after_forward="auto"`)."""
    specs = (UnshardSpec.parse(node.args[-1]) for node in graph.find_nodes(op="call_function", target=UNSHARD))
    return any(spec.is_searched for spec in specs)


class Sent(NamedTuple):
    """What a unit communicates: the name of the group, where the tensor is, and bytes of the whole tensor."""

    group: str
    device: torch.device
    nbytes: int


def _of_units(graph: fx.Graph) -> Iterator[Sent]:
    """What sharded units communicate."""
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        spec, shard = UnshardSpec.parse(node.args[-1]), node.args[0].meta["example_value"]
        nbytes = spec.layout.numel * (spec.compute_dtype or shard.dtype).itemsize if spec.is_sharded else 0
        for named in (*spec.groups, *spec.reduce_groups, *filter(None, [spec.replicas])):
            yield Sent(named.name, shard.device, nbytes)


def _measured_costs(sent: Sequence[Sent], device_named: str | None, limit: float) -> tuple[str | None, str | None]:
    """Link and device as ranks have measured them; None where nothing can be measured or a device has a file."""
    largest = max(sent, key=lambda each: each.nbytes, default=None)
    if largest is None or not largest.nbytes or largest.device.type not in ("cpu", "cuda"):
        return None, None
    try:
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            figures = {name: measured_link(group_named(name), largest.device, largest.nbytes, limit)
                       for name in dict.fromkeys(each.group for each in sent)}  # fmt: skip
            return measured_text(figures), device_named or _measured_device(largest.device)
    except NoLink as reason:
        _log_once(str(reason))
        return None, None


def _measured_device(here: torch.device) -> str | None:
    """The device of a hardware file and its speed, measured; None where there is a file for this one."""
    base, dtype = "cpu", torch.float32
    if here.type != "cpu":
        base, dtype = "h100-80", torch.bfloat16
        with suppress(ValueError):
            hardware_at(here)
            return None
    return f"{base}:{measured_speed(device(base), dtype, here):g}"


@cache
def _log_once(reason: str) -> None:
    log.info(f"collectives follow the order of blocks, as no link was measured: {reason}")


def compile_with(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], passes: tuple[Pass, ...], config: CompileConfig
) -> Callable[..., Any]:
    """Compile by Inductor with `passes`, for this compilation only."""
    patches = {**switched_off(), **pipelines(for_graph(config, gm.graph), passes)}
    return compile_by_inductor(gm, list(example_inputs), patches)


def graph_settings(config: CompileConfig, graph: fx.Graph) -> dict[str, Any]:
    """What plain `torch.compile` sets for a graph with our markers: our pipelines, where no others' stand, and no moves
    of collectives by others. From torch 2.12 on, each thread has a configuration of its own.
    """
    hooks = pipelines(for_graph(config, graph), PASSES)
    standing = {name: getattr(inductor_config, name) for name in hooks}
    others = {name: each for name, each in standing.items() if each is not None and not isinstance(each, OURS)}
    return {**switched_off(), **hooks, **others}
