"""Where torch's compiler comes by with a graph of a sharded model, and whether anything can be learned of it."""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import SymInt, Tensor, fx

from fsdp_compile.config import AUTO, CompileConfig
from fsdp_compile.core.ops import UNSHARD, UnshardSpec, set_inductor_settings
from fsdp_compile.learning._torch import InductorWrapper, copied, fake_inputs
from fsdp_compile.learning.graphs import LearnedGraph, Learning
from fsdp_compile.passes import agreement, inductor
from fsdp_compile.passes.pipeline import GraphContext, Pass, hash_of_sources
from fsdp_compile.passes.post_grad.foreign import communicated

_BEHIND = "check_order"  # where passes know the plan that a graph follows
_NEEDED = ("read_graph", "choose_plan", "order", "pin_order", "check_order")

learned: dict[str, Learning] = {}
"""By the text of its structure, what is learned of graphs in this process."""
_begun: Counter[str] = Counter()


def install() -> None:
    """Let graphs of sharded models learn: those of plain `torch.compile`, and those of `backend="fsdp_compile"`."""
    set_inductor_settings(partial(_plain_backend, CompileConfig.from_environment()))
    inductor.compilers[1:] = [_compile_learning]


def explain() -> str:
    """What was recorded, predicted, tried and changed, and is under way, a paragraph for each structure of graphs."""
    parts = []
    for learning in learned.values():
        plan = f"a learned plan\n{learning.in_force}" if learning.in_force else "the first plan"
        config, lines = learning.config, [*learning.history, learning.under_way]
        prices = f"first priced by link {config.link}, device {config.device or learning.device.type}"
        units = f"{learning.key.count(chr(10))} units, {learning.calls} calls, {prices}"
        parts.append("\n".join([units, *lines, f"in force: {plan}"]))
    return "\n\n".join(parts) or "no graph learns"


def _compile_learning(
    traced: fx.GraphModule, inputs: Sequence[Any], passes: tuple[Pass, ...], config: CompileConfig
) -> Callable[..., Any]:
    """As `compile_with`, for `backend="fsdp_compile"`."""

    def compile(
        graph: fx.GraphModule, given: Sequence[Any], chosen: CompileConfig, note: Callable[[GraphContext], None]
    ) -> Callable[..., Any]:
        return inductor.compile_with(graph, given, _with_note(passes, note), chosen)

    found = _learning_of(traced, config) if any(each.name == _BEHIND for each in passes) else None
    if found is None:
        return inductor.compile_with(traced, inputs, passes, config)
    return _start_graph(found, traced, inputs, compile)


class _Backend(InductorWrapper):
    """What plain `torch.compile` calls with a graph of a sharded model."""

    config_of_ours: CompileConfig
    plain: Any

    def __call__(self, traced: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile a graph."""

        def compile(
            graph: fx.GraphModule, given: Sequence[Any], chosen: CompileConfig, note: Callable[[GraphContext], None]
        ) -> Any:
            passes = _with_note(inductor.PASSES, note)
            ours = inductor.graph_settings(chosen, copy.copy(self.plain), graph.graph, passes)
            return ours(graph, given, **kwargs)

        found = _learning_of(traced, self.config_of_ours)
        if found is not None:
            return _start_graph(found, traced, inputs, compile)
        plain = inductor.graph_settings(self.config_of_ours, copy.copy(self.plain), traced.graph)
        return plain(traced, inputs, **kwargs)


def _plain_backend(config: CompileConfig, backend: Any, graph: fx.Graph) -> Any:
    if not config.learn or type(backend) is not InductorWrapper:
        return inductor.graph_settings(config, backend, graph)
    ours = copy.copy(backend)
    ours.__class__ = _Backend
    ours.config_of_ours, ours.plain = config, backend
    return ours


def _with_note(passes: tuple[Pass, ...], note: Callable[[GraphContext], None]) -> tuple[Pass, ...]:
    """`passes` and one behind them that tells what they know; what is compiled does not depend on that one."""
    at = next(at for at, each in enumerate(passes, 1) if each.name == _BEHIND)
    return *passes[:at], Pass("note_plan", "post_grad", note, needs=(_BEHIND,), version="1"), *passes[at:]


def _start_graph(learning: Learning, traced: fx.GraphModule, inputs: Sequence[Any], compile: Any) -> Callable[..., Any]:
    key = hashlib.sha256(f"{_sizes_text(traced)}\n{learning.config}".encode()).hexdigest()
    graph = LearnedGraph(learning, f"{learning.key}\n{key}", copied(traced), fake_inputs(traced), compile)
    return graph.start(traced, inputs)


def _learning_of(traced: fx.GraphModule, config: CompileConfig) -> Learning | None:
    """What graphs of the structure of `traced` share; None if nothing can be learned of it."""
    device = _device_of(traced, config)
    if device is None:
        return None
    key = _structure_text(traced, config, device)
    if key not in learned:
        _begun[key] += 1
        number, kept = _begun[key], agreement.kept(f"learning/{key}") or "null"
        try:
            table = json.loads(agreement.agree(f"learning/{number}/{_digest(key)}", kept))
            known = {"link": table["link"], "device": table["device"]} if config.link == AUTO and table else {}
            found = Learning(key, inductor.for_graph(replace(config, **known), traced.graph), device, number)
            if table:
                found.begin_with(table)
        except (ValueError, TypeError, KeyError, AttributeError):
            found = Learning(key, inductor.for_graph(config, traced.graph), device, number)
        learned[key] = found
    return learned[key] if learned[key].config.link is not None else None


def _device_of(traced: fx.GraphModule, config: CompileConfig) -> torch.device | None:
    """The device that computes a graph of which something can be learned; None if nothing can.

    That is a training graph of static sizes, whose units go through the group of all ranks in one stage, and which
    communicates nothing else.
    """
    others = config.plan, config.profile, config.update
    if not config.learn or config.link is None or others != (None,) * 3 or config.share_artifacts:
        return None
    if config.record_profile or not set(_NEEDED).isdisjoint(config.disable) or not torch.is_grad_enabled():
        return None
    nodes = traced.graph.find_nodes(op="call_function", target=UNSHARD)
    specs = [spec for node in nodes if (spec := UnshardSpec.parse(node.args[-1])).is_sharded]
    groups = {spec.groups for spec in specs}
    has_one = len(groups) == 1 and len(next(iter(groups))) == 1 and not any(spec.replicas for spec in specs)
    if not has_one or agreement.board() is None or next(iter(groups))[0].size != dist.get_world_size():
        return None
    inputs = [node.meta.get("example_value") for node in traced.graph.find_nodes(op="placeholder")]
    sizes = [size for each in inputs for size in (each.shape if isinstance(each, Tensor) else [each])]
    if any(isinstance(size, SymInt) or size is None for size in sizes) or any(communicated(traced.graph)):
        return None
    device: torch.device = nodes[0].args[0].meta["example_value"].device
    return device


def _structure_text(traced: fx.GraphModule, config: CompileConfig, device: torch.device) -> str:
    """What graphs have in common that differ in the sizes of batches alone: a line for each unit, and one for the rest.

    It has nothing that depends on the rank.
    """
    units, others = list[str](), list[str]()
    for node in traced.graph.nodes:
        if node.target is UNSHARD:
            units.append(str(node.args[-1]))
        else:
            others.append(f"{node.op} {_target_name(node.target) if node.op == 'call_function' else ''}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rest = f"{name}, {dist.get_world_size()} ranks, torch {torch.__version__}, {hash_of_sources()}, {config}"
    return "\n".join([*units, _digest("\n".join([*others, rest]))])


def _target_name(target: Any) -> str:
    """Of what a node calls; a function's text has an address."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    return f"{module}.{name}" if name else torch.typename(target) if "0x" in str(target) else str(target)


def _sizes_text(traced: fx.GraphModule) -> str:
    values = (node.meta.get("example_value") for node in traced.graph.nodes)
    return " ".join(f"{each.dtype}{tuple(each.shape)}" for each in values if isinstance(each, Tensor))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
