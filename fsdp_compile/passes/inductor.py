"""Where the passes meet Inductor: `PASSES`, and two ways to run them.

torch.compile(model)                           `install` puts our pipelines into Inductor's custom-pass hooks, after
                                               the passes that are there. Nothing else in the process changes; each
                                               graph with our markers is compiled with `graph_settings`.
torch.compile(model, backend="fsdp_compile")   the same hooks and settings, for this compilation only, with a
                                               `CompileConfig`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import STARTS, compiles_as_gloo, is_first
from fsdp_compile.config import AUTO, CompileConfig, check_type
from fsdp_compile.core.ops import MARKERS, UNSHARD, UnshardSpec, set_inductor_settings
from fsdp_compile.passes._torch import (
    CustomGraphPass,
    CustomSchedulerPass,
    InductorError,
    ShortenTraceback,
    call_after_compiling,
    compile_by_inductor,
    direction,
    graph_index,
    inductor_config,
    sort,
    switched_off,
    symbols_of,
    tree_leaves,
    without_dispatch_modes,
)
from fsdp_compile.passes.artifacts import hash_of_sources, load_folder, share_artifacts
from fsdp_compile.passes.cost.hardware import device, link, measured_text
from fsdp_compile.passes.cost.roofline import read_profile
from fsdp_compile.passes.graph.costs import hardware_at
from fsdp_compile.passes.graph.nodes import is_ours
from fsdp_compile.passes.joint import choose_memory, insert_collectives, reshard, smallest_gather
from fsdp_compile.passes.measure import NoLink, NotMeasured, measured_link, measured_speed
from fsdp_compile.passes.pipeline import GraphContext, Pass, Stage, check_passes, enabled, log, run_passes
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad import in_place_grads, lower_collectives, order, plan_pass
from fsdp_compile.passes.post_grad.foreign import Sent, communicated, reshard_after_forward, tag_collectives

PASSES = (
    Pass("insert_collectives", "joint", insert_collectives.insert_collectives),
    Pass("smallest_gather", "joint", smallest_gather.smallest_gather, needs=("insert_collectives",)),
    Pass("keep_where_forward_ends", "joint", reshard.keep_where_forward_ends, needs=("insert_collectives",)),
    Pass("choose_activations", "joint", choose_memory.choose_activations),
    Pass("choose_reshard", "joint", reshard.choose_reshard),
    Pass("reshard", "joint", reshard.reshard),
    Pass("check_saved", "post_grad", reshard.check_saved),
    Pass("separate_reduces", "post_grad", in_place_grads.separate_reduces),
    Pass("pack_in_place", "post_grad", in_place_grads.pack_in_place),
    Pass("reuse_gathered", "post_grad", in_place_grads.reuse_gathered),
    Pass("place_deferred_reduces", "post_grad", order.place_deferred_reduces),
    Pass("read_graph", "post_grad", plan_pass.read_graph),
    Pass("choose_plan", "post_grad", plan_pass.choose_plan, needs=("read_graph",)),
    Pass("verify_plan", "post_grad", plan_pass.verify_plan, needs=("choose_plan",)),
    Pass("order", "post_grad", order.order, needs=("choose_plan",)),
    Pass("check_order", "post_grad", order.check_order, needs=("order",)),
    Pass("place_updates", "post_grad", order.place_updates),
    Pass("name_prefetched", "post_grad", order.name_prefetched, needs=("read_graph",)),
    Pass("record_times", "post_grad", plan_pass.record_times, needs=("read_graph",)),
    Pass("coalesce_launches", "post_grad", lower_collectives.coalesce_launches),
    Pass("reduce_scatter_by_all_to_all", "post_grad", lower_collectives.reduce_scatter_by_all_to_all),
    Pass("all_gather_into_buffer", "post_grad", lower_collectives.all_gather_into_buffer),
    Pass("check_ranks", "post_grad", order.check_ranks),
    Pass("start_reduces", "post_grad", order.start_reduces),
    Pass("await_gathers", "post_grad", order.await_gathers),
    Pass("pin_order", "post_grad", order.pin_order),
)
"""What is done to a graph, in order, which docs/compiling.md explains."""

SOON = 60.0  # seconds that the ranks of another sharding's graph wait for each other to measure: no plan depends on it

_HOOKS: dict[str, Stage] = {"joint_custom_post_pass": "joint", "post_grad_custom_post_pass": "post_grad"}
_AFTER_FUSION = "_post_fusion_custom_pass"


def install() -> None:
    """Make plain `torch.compile` run our passes on graphs with our markers. Idempotent.

    Raises:
        ValueError: an environment variable has a value that its field of `CompileConfig` cannot have.
    """
    config = CompileConfig.from_environment()
    hooks = pipelines(config)
    for hook, pipeline in hooks.items():
        if not isinstance(getattr(inductor_config, hook), _OURS):
            setattr(inductor_config, hook, pipeline)
    set_inductor_settings(partial(graph_settings, config))
    _notice.start()


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
            return compilers[-1](gm, example_inputs, tuple(passes), config)
        except InductorError as error:
            if isinstance(error.inner_exception, Refused):  # which Inductor wraps only where its caches are off
                raise error.inner_exception from None
            raise

    return compile_graph


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
    if config.link not in (None, AUTO):
        link(config.link)
    if config.device is not None:
        device(config.device)
    if config.profile is not None:
        read_profile(config.profile)
    if config.plan is not None:
        plan_pass.plans_in_file(config.plan)
    return config


class Refused(ShortenTraceback, PlanError):
    """An option or a plan that is refused. Dynamo and Inductor pass it on as it is, which they do not do with others.

    `torch.compile` gives a backend its options with the first graph, so that is when they are checked;
    `FSDPModule.compile` and `compile_step` check them at once.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


def for_graph(config: CompileConfig, graph: fx.Graph) -> CompileConfig:
    """The configuration for a graph that Dynamo has traced: "auto" gives way to the link that its ranks measure.

    Loads artifacts too, or waits for the rank that makes them, once the link is known. A graph that communicates
    nothing has nothing to plan.

    Raises:
        Refused: nothing can be measured, and the configuration has an option that needs a link.
    """
    are_ours = is_ours(graph, MARKERS)
    sent = list((_of_units if are_ours else communicated)(graph))
    if config.link == AUTO and (sent or are_ours):
        limit = config.check_ranks_timeout if are_ours else min(config.check_ranks_timeout, SOON)
        try:
            link_here, device_here = None, None
            if config.artifacts is None and _needs_link(config, graph):  # those were compiled where there was no link
                link_here, device_here = _measured(sent, config.device, limit)
            if link_here is not None and not are_ours:
                link_here += f";={link_here.split(';')[0].partition('=')[2]}"  # for a group that nobody has seen
            config = replace(config, link=link_here, device=device_here)
        except ValueError as error:
            raise Refused(f"{error}; the ranks could not measure one") from None
    if are_ours and config.artifacts is not None:
        load_folder(config.artifacts)
    if are_ours and config.share_artifacts:
        share_artifacts(config.check_ranks_timeout)
    return config


def _of_units(graph: fx.Graph) -> Iterator[Sent]:
    """What sharded units communicate."""
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        spec, shard = UnshardSpec.parse(node.args[-1]), node.args[0].meta["example_value"]
        nbytes = spec.layout.numel * (spec.compute_dtype or shard.dtype).itemsize if spec.is_sharded else 0
        for named in (*spec.groups, *filter(None, [spec.replicas])):
            if named.size > 1:
                yield Sent(named.name, shard.device, nbytes)


def _measured(sent: Sequence[Sent], device_named: str | None, limit: float) -> tuple[str | None, str | None]:
    """Link and device as ranks have measured them; None where nothing can be measured or a device has a file."""
    largest = max(sent, key=lambda each: each.nbytes, default=None)
    if largest is None or not largest.nbytes or largest.device.type not in ("cpu", "cuda"):
        return None, None
    try:
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            figures = {name: measured_link(group_named(name), largest.device, largest.nbytes, limit)
                       for name in dict.fromkeys(each.group for each in sent)}  # fmt: skip
            return measured_text(figures), device_named or _measured_device(largest.device)
    except NotMeasured as reason:
        _log_once(str(reason), log.info if isinstance(reason, NoLink) or not is_first(None) else log.warning)
        return None, None


def _needs_link(config: CompileConfig, graph: fx.Graph) -> bool:
    """Whether something is planned: no file has the plan, or units or an option need a link beside it."""
    others = config.budget, config.device, config.profile, config.update
    if config.plan is None or config.activations not in ("keep", "recompute") or others != (None,) * 4:
        return True
    specs = (UnshardSpec.parse(node.args[-1]) for node in graph.find_nodes(op="call_function", target=UNSHARD))
    return any(spec.is_sharded and spec.reshard_after_forward is None for spec in specs)


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
def _log_once(reason: str, tell: Callable[[str], None]) -> None:
    tell(f"link='auto': collectives follow a fixed rule, as nothing was measured: {reason}")


def compile_with(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], passes: tuple[Pass, ...], config: CompileConfig
) -> Callable[..., Any]:
    """Compile by Inductor with `passes`, for this compilation only."""
    patches = {**switched_off(), **pipelines(for_graph(config, gm.graph), passes, others=True)}
    return compile_by_inductor(gm, list(example_inputs), patches)


compilers: list[Callable[..., Callable[..., Any]]] = [compile_with]  # the last one counts; a layer may add its own


def graph_settings(config: CompileConfig, backend: Any, graph: fx.Graph, passes: tuple[Pass, ...] = PASSES) -> Any:
    """What plain `torch.compile` sets in `backend` for a graph with our markers: our pipelines, where no others' stand,
    and no moves of collectives by others. From torch 2.12 on, each thread has a configuration of its own.
    """
    hooks = pipelines(for_graph(config, graph), passes)
    standing = {name: getattr(inductor_config, name) for name in hooks}
    others = {name: each for name, each in standing.items() if each is not None and not isinstance(each, _OURS)}
    backend.config = {**backend.config, **switched_off(), **hooks, **others}
    return backend


def pipelines(
    config: CompileConfig, passes: tuple[Pass, ...] = PASSES, others: bool = False
) -> dict[str, "Pipeline | AfterFusion"]:
    """Return the pass for each hook of Inductor; it first runs the pass that was registered there before."""
    chosen = enabled(passes, config)

    def previous(hook: str) -> Any:
        registered = getattr(inductor_config, hook)
        return registered.previous if isinstance(registered, _OURS) else registered

    hooks = {hook: Pipeline(chosen, stage, config, previous(hook), others) for hook, stage in _HOOKS.items()}
    return {**hooks, _AFTER_FUSION: AfterFusion(previous(_AFTER_FUSION))}


class Pipeline(CustomGraphPass):
    """Runs the passes of one stage, after `previous`, which was registered in the hook before us.

    A graph without our markers or tags is left untouched; with `others`, collectives of another sharding are planned.
    """

    def __init__(
        self, passes: Sequence[Pass], stage: Stage, config: CompileConfig, previous: Any = None, others: bool = False
    ) -> None:
        self.passes = tuple(each for each in passes if each.stage == stage)
        if config.link == AUTO:  # of a graph that nobody has seen, or that communicates nothing
            config = replace(config, link=None, device=None, budget=None, activations="keep", profile=None)
        self.stage, self.config, self.previous, self.others = stage, config, previous, others

    def __call__(self, graph: fx.Graph) -> None:
        """Edit `graph` in place."""
        for before in _as_tuple(self.previous):
            before(graph)
        config, is_planned = self.config, is_ours(graph, MARKERS)
        if not is_planned and self.others and self.stage == "joint" and config.reshard_after_forward:
            reshard_after_forward(graph)
        elif not is_planned and self.others and self.stage == "post_grad":
            in_flight = tag_collectives(graph, config.link)
            is_planned = in_flight is not None
            if config.reduces_in_flight == 1:  # counts units, and here each parameter is one
                config = replace(config, reduces_in_flight=in_flight)
        if is_planned:
            sort(graph)
            _check_settings(graph)
            try:
                run_passes(self.passes, GraphContext(graph, config, direction(), graph_index()))
            except PlanError as error:
                sizes = symbols_of(graph).values() if str(error).startswith("budget") else ()
                counted = "".join(f"; counted for {each.source} = {each.most or each.hint}" for each in sizes)
                raise Refused(f"{error}{counted}") from error
            _check_settings(graph)  # again: the joint graph has collectives from now on

    def uuid(self) -> Any | None:
        """Return the passes' part of the caches' key. See Note [What the compile caches key on].

        None switches the caches off: a previous pass, or one of the pipeline, has no key.
        """
        previous = _as_tuple(self.previous)
        others = [before.uuid() if isinstance(before, CustomGraphPass) else None for before in previous]
        keys = [each.key for each in self.passes]
        if not all(others) or not all(keys):
            return None
        as_gloo = compiles_as_gloo(dist.group.WORLD) if dist.group.WORLD is not None else None
        return (
            hash_of_sources(), torch.__version__, as_gloo, self.stage, self.others, *keys,
            self.config.deciding_code, self.config.file_contents, *others,
        )  # fmt: skip


class AfterFusion(CustomSchedulerPass):
    """Runs `after_fusion` on the scheduler's nodes, after `previous`, which was registered before us."""

    def __init__(self, previous: Any = None) -> None:
        self.previous = previous

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes sorted by their dependencies."""
        return lower_collectives.after_fusion(self.previous(nodes) if self.previous is not None else nodes)

    def uuid(self) -> Any | None:
        """Return this pass's part of the caches' key; None, which switches them off, if `previous` has none."""
        if self.previous is None:
            return hash_of_sources()
        key = self.previous.uuid() if isinstance(self.previous, CustomSchedulerPass) else None
        return (hash_of_sources(), key) if key else None


_OURS = (Pipeline, AfterFusion)

# Note [What the compile caches key on]
# Inductor and AOTAutograd store compiled graphs under a key that holds the `uuid` of each custom pass. On a hit no pass
# runs, so the key must hold everything besides the graph that passes and lowerings look at: a hash of our source files
# (our operators and lowerings decide generated code, and Inductor hashes neither), torch's version, whether the backend
# for the CPU is gloo (whose collectives are lowered differently; the fake backend stands for it, so that its entries
# serve ranks of gloo), each pass (`Pass.key`), the configuration, and the contents of the files that it names. It must
# not hold the rank: ranks that share a cache directory share entries, see Note [Graphs without a rank].


# Note [Collectives and CUDA graphs]
# A CUDA graph replays kernels without Python. torch captures what lies between operators tagged `cudagraph_unsafe`; its
# collectives are not, so they would be captured too. A replay would ignore what `compile_step` has prefetched, and read
# the buffer of the capture, which is another unit's memory by then. Where one of our operators divides the graph
# (accumulated gradients, deferred reduces), a reduce would start in one capture and be waited for in another, which
# CUDA refuses. And torch takes shards for inputs, which each replay would copy. So graphs with collectives on an
# accelerator are refused. Graphs without any (blocks compiled one by one, models on one rank) may be captured.


def _check_settings(graph: fx.Graph) -> None:
    """RuntimeError if Inductor's configuration cannot be used with our passes or with collectives.

    With only the joint half of the pipeline, steps would silently be slow; `check_saved` looks for the other half.
    torch 2.13 refuses to call collectives from C++, and torch 2.11 crashes. For CUDA graphs see
    Note [Collectives and CUDA graphs].
    """
    if not any(isinstance(each, Pipeline) for each in _as_tuple(inductor_config.post_grad_custom_post_pass)):
        raise RuntimeError(
            "torch._inductor.config.post_grad_custom_post_pass: expected the pipeline that fully_shard registered, "
            "found another pass; register yours before fully_shard (ours runs after it)"
        )
    starts = [node for node in graph.nodes if node.target in STARTS]
    devices = {leaf.device.type for node in starts for leaf in tree_leaves(node.meta["val"])}
    if inductor_config.triton.cudagraphs and devices - {"cpu"}:
        raise RuntimeError(
            "torch._inductor.config.triton.cudagraphs: expected False for a graph with collectives, found True, and a "
            "CUDA graph would replay them with the buffers of an earlier step; compile with "
            'mode="max-autotune-no-cudagraphs" or without a mode, where "reduce-overhead" and "max-autotune" set it'
        )
    if inductor_config.cpp_wrapper and starts:
        raise RuntimeError(
            "torch._inductor.config.cpp_wrapper: expected False for a graph with collectives, found True, and torch's "
            "C++ wrapper cannot call them; set it to False, and leave TORCHINDUCTOR_CPP_WRAPPER unset"
        )


def _as_tuple(previous: Any) -> tuple[Any, ...]:
    if previous is None:
        return ()
    return tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)


class CompileNotice:
    """Prints on rank 0 that a sharded model is being compiled, if that takes more than `after` seconds."""

    def __init__(self, after: float = 5.0) -> None:
        self.after = after
        self.timer: threading.Timer | None = None  # until the compilation has ended

    def start(self) -> None:
        """Call when a compilation begins."""
        if self.timer is None and (not dist.is_initialized() or dist.get_rank() == 0):
            call_after_compiling(self.end)
            text = "fsdp_compile: compiling a sharded model; later steps do not wait for this"
            self.timer = threading.Timer(self.after, lambda: print(text, file=sys.stderr))
            self.timer.daemon = True
            self.timer.start()

    def end(self, _: Any = None) -> None:
        """Call when the compilation has ended."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


_notice = CompileNotice()
