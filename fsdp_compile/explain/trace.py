"""The work of a model's step: forward and backward are traced, partitioned, and read node by node.

    Model.work       of a setting: any batch follows from two that are traced (unit_work.py)
    Model.traced     one block of each kind, and what is outside of blocks
      _calls         runs a forward in which each distinct block runs once; notes its inputs, others return as it did
      _block         forward and backward of one block with these inputs, after the partitioner
      _outside       the same of what comes before the first block, and of what follows the last one
    unit_of          what nodes compute and how long values live, by passes/graph as in a plan

Blocks are traced apart from the rest, so that a model of 126 takes as long as one of two. The partitioner chooses what
is saved and recomputed; full checkpointing is added afterwards (`StepWork.checkpointed`).
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.construct.blocks import repeated_blocks
from fsdp_compile.explain._torch import Graphs, fake_tensors, is_fake, partitioned, pytree
from fsdp_compile.explain.batch import Inputs, batch_of, loss_of
from fsdp_compile.explain.prediction import Setting
from fsdp_compile.explain.unit_work import BATCHES, Kernels, NotAffine, StepWork, UnitWork, at_batch
from fsdp_compile.passes._torch import is_tangent
from fsdp_compile.passes.graph.lifetimes import Lifetime, inlined, last_uses_of, lifetimes, live_bytes
from fsdp_compile.passes.graph.nodes import aten, is_product, packet_of, source_of
from fsdp_compile.passes.graph.work import SCATTERS, Work, node_work

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "amp_fp16": torch.float16}  # all others: bfloat16


class _Reached(BaseException):
    """A forward has come to its first block, which is given `tensor`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _WithoutValues(TorchFunctionMode):
    """Trace attention as one operator, and take conditions on values of tensors to hold.

    Such conditions are checks, for example of Hugging Face's models that no batch is padded or packed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            if query.dim() == 4:
                causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
                if query.shape[-1] == value.shape[-1]:
                    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[0]
                return aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)[0]
        if func in (Tensor.__bool__, Tensor.item) and args[0].dtype is torch.bool:
            try:
                return func(*args)
            except RuntimeError:
                return True
        return func(*args, **kwargs)


# --- the model --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """How a block was called."""

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    returned: Any


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def _with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """`tree` with other tensors."""
    remaining = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(remaining), tree)


class Model:
    """A model without memory, and what its step computes in each setting.

    Args:
        model: a function that makes it, or a module, of which a copy is traced.
        example_inputs: given (batch, sequence), returns positional arguments; None: tokens, see `explain`.

    Raises:
        ValueError: `model` is no module and makes none, raises an error, or has tensors on an accelerator.
    """

    def __init__(self, model: nn.Module | Callable[[], Any], example_inputs: Inputs | None = None) -> None:
        with fake_tensors() as self.mode:
            self.model = _without_memory(model).train()
        self.example_inputs = example_inputs
        self.blocks = repeated_blocks(self.model)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self._known: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def work(self, setting: Setting) -> StepWork:
        """What one forward and backward computes. ValueError if the model cannot be traced."""
        key = (setting.batch, setting.sequence, setting.checkpointing, setting.compiled, setting.compiles_loss,
               setting.precision)  # fmt: skip

        def make() -> StepWork:
            try:
                first, second = (self.traced(replace(setting, batch=batch)) for batch in BATCHES)
                work: StepWork = at_batch(first, second, setting.batch)
            except NotAffine:
                work = self.traced(setting)
            return work.checkpointed(setting.checkpointing)

        return self._once(key, make)

    def traced(self, setting: Setting) -> StepWork:
        """The work of this very batch, without checkpointing of whole blocks. ValueError if it cannot be traced."""
        dtype = DTYPES.get(setting.precision, torch.bfloat16)
        sizes = (setting.batch, setting.sequence, dtype)
        how = (setting.compiled, setting.checkpointing == "selective op", dtype)
        loss = setting.compiles_loss
        try:
            with self.mode, _WithoutValues(), torch.enable_grad():
                given = batch_of(self.model, self.example_inputs, setting.batch, setting.sequence)
                calls, order = self._once(("calls", sizes), partial(self._calls, *given, dtype))
                blocks = {
                    key: self._once((key, sizes, how), partial(_block, call, *how)) for key, call in calls.items()
                }
                outside = partial(self._outside, *given, calls, order, loss, dtype)
                begin, end = self._once(("outside", sizes, loss), outside)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError, AttributeError, KeyError) as error:
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"model: expected one that can be traced, found {text}") from error
        units = tuple(replace(blocks[key], count=len([*alike])) for key, alike in groupby(order))
        return StepWork(type(self.model).__name__, self.parameters, begin, units, end, setting.batch * setting.sequence)

    def _calls(self, inputs: list[Any], names: dict[str, Any], dtype: torch.dtype) -> tuple[dict[Any, Call], list[Any]]:
        """One call of each kind of block, and the kinds in the order of all calls."""
        calls: dict[Any, Call] = {}
        order: list[Any] = []

        def stand_in(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            key = (_kind(module), structure, tuple(map(_described, leaves)))
            order.append(key)
            if key not in calls:
                calls[key] = Call(module, (args, kwargs), forward(*args, **kwargs))
            call = calls[key]
            given = next(each for each in _tensors(call.arguments) if each.is_floating_point())
            return _with_tensors(call.returned, (
                torch.empty_like(each) + 0 * given.sum() if each.is_floating_point() else each
                for each in _tensors(call.returned)
            ))  # fmt: skip

        self._forward(stand_in, _cast(self.model, dtype), (_cast_inputs(inputs, dtype), names))
        return calls, order

    def _forward(self, stand_in: Callable[..., Any], state: dict[str, Tensor], given: Any) -> Any:
        """What the model returns with this state, where `stand_in` is called in place of blocks, as by `_forwards`."""
        tensors, names = given
        with _forwards(self.blocks, stand_in):
            return torch.func.functional_call(self.model, state, tuple(tensors), names)

    def _outside(
        self, inputs: list[Any], names: dict[str, Any], calls: dict[Any, Call], order: list[Any], compiled: bool,
        dtype: torch.dtype,
    ) -> tuple[UnitWork, UnitWork]:  # fmt: skip
        """Trace what comes before the blocks and what comes after them."""
        inside = {id(param) for each in self.blocks for param in each.parameters()}
        state = _cast(self.model, dtype)
        blocks = {path: state.pop(path) for path, each in [*self.model.named_parameters()] if id(each) in inside}
        outputs = _tensors(calls[order[-1]].returned) if order else []
        handed = [each.detach().requires_grad_() for each in outputs if each.is_floating_point()]

        def begin(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Any) -> tuple[Tensor, ...]:
            def stand_in(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                raise _Reached(next(each for each in _tensors((args, kwargs)) if each.is_floating_point()))

            try:
                self._forward(stand_in, {**blocks, **params, **buffers}, given)
            except _Reached as reached:
                return (reached.tensor,)
            return ()

        def end(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Any, handed: list[Tensor]) -> Any:
            upcoming = iter(order)

            def stand_in(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                returned, is_last = calls[next(upcoming)].returned, operator.length_hint(upcoming) == 0
                floats = iter(handed)
                return _with_tensors(returned, (
                    each if not each.is_floating_point() else
                    next(floats) if is_last else torch.empty(each.shape, dtype=each.dtype)
                    for each in _tensors(returned)
                ))  # fmt: skip

            return (loss_of(self._forward(stand_in, {**blocks, **params, **buffers}, given)),)

        arguments = (state, _buffers(self.model), (_cast_inputs(inputs, dtype), names))
        outside = sum(each.numel() for each in self.model.parameters() if id(each) not in inside)
        given = sum(each.nbytes for each in inputs if isinstance(each, Tensor))
        passed = sum(each.nbytes for each in handed) if order else given
        before = partitioned(begin, arguments, compiled) if order else Graphs()
        after = partitioned(end, (*arguments, handed), compiled)
        return (
            unit_of("embedding", before, compiled, len(state), 0, given),
            unit_of("output", after, compiled, len(state), outside, passed),
        )


def _block(call: Call, compiled: bool, by_operator: bool, dtype: torch.dtype) -> UnitWork:
    state = _cast(call.module, dtype)
    tensors = [each.detach().requires_grad_(each.is_floating_point() and each.requires_grad)
               for each in _tensors(call.arguments)]  # fmt: skip

    def run(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = _with_tensors(call.arguments, given)
        output = torch.func.functional_call(call.module, {**params, **buffers}, args, kwargs)
        return tuple(each for each in _tensors(output) if each.is_floating_point())

    tag = save_by_operator if by_operator else None
    graphs = partitioned(run, (state, _buffers(call.module), tensors), compiled, tag)
    passed = sum(each.nbytes for each in tensors if each.requires_grad)
    parameters = sum(each.numel() for each in call.module.parameters())
    shapes = tuple(tuple(each.shape) for each in call.module.parameters())
    return replace(unit_of("blocks", graphs, compiled, len(state), parameters, passed), shapes=shapes)


@contextmanager
def _forwards(modules: Iterable[nn.Module], stand_in: Callable[..., Any]) -> Iterator[None]:
    """Call `stand_in(module, forward, *args, **kwargs)` in place of forwards; forwards of instances come back."""
    own = {module: vars(module).get("forward") for module in modules}
    try:
        for module in own:
            module.forward = partial(stand_in, module, module.forward)
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Blocks compute the same if their class, their `repr`, and shapes of parameters and buffers are equal."""
    state = [*module.named_parameters(), *module.named_buffers()]
    return type(module), repr(module), tuple((name, each.shape, each.dtype) for name, each in state)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf)


def _without_memory(model: nn.Module | Callable[[], Any]) -> nn.Module:
    """What `model` makes, or a copy of it, without its values; called where tensors get no memory."""
    exists = isinstance(model, nn.Module)
    try:
        made: Any = model if exists else model()
    except Exception as error:
        raise ValueError(f"model: expected a function that makes a module, but it raised {type(error).__name__}: "
                         f"{error}") from error  # fmt: skip
    if not isinstance(made, nn.Module):
        raise ValueError(f"model: expected a function that makes a module, found one that makes {type(made).__name__}")
    for name, each in [*made.named_parameters(), *made.named_buffers()]:
        if each.device.type not in ("cpu", "meta"):
            raise ValueError(f"model: expected tensors on the CPU or the meta device, found {name} on {each.device}; "
                             "leave out what moves it there")  # fmt: skip
        if not exists and not is_fake(each):
            raise ValueError(f"model: found {name} with memory of its own; make the model inside the function, where "
                             "tensors get none")  # fmt: skip
    memo: dict[int, Any] = {}
    for parameter in made.parameters() if exists else ():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in made.buffers() if exists else ():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(made, memo) if exists else made


def _cast(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters in the dtype in which they are gathered."""

    def cast(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return torch.empty_like(each, device="cpu")
        return torch.empty_like(each, dtype=dtype, device="cpu").requires_grad_(each.requires_grad)

    return {path: cast(each) for path, each in module.named_parameters()}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {path: torch.empty_like(each, device="cpu") for path, each in module.named_buffers()}


def _cast_inputs(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs]


# --- what the graphs compute and keep ---------------------------------------------------------------------------------


def save_by_operator(joint: fx.Graph) -> None:
    """Save attention and every second product, beginning with the first; recompute all else in backward."""
    backward: set[fx.Node] = set()
    products = 0
    for node in joint.nodes:
        if is_tangent(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            is_attention = any("attention" in str(packet_of(each)) for each in (node, *node.all_input_nodes[:1]))
            is_other_product = is_product(node) and not is_attention
            products += is_other_product
            saved = is_attention or (is_other_product and products % 2 == 1)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def kernels_of(nodes: Iterable[fx.Node], compiled: bool) -> Kernels:
    """The kernels of some nodes. Compiled, what lies between two products is one chain."""
    works = (node_work(node, fused=compiled) for node in nodes)
    kernels: list[Work] = []
    for is_chain, group in groupby(
        filter(lambda each: each.moved_bytes, works), lambda each: compiled and not each.flops
    ):
        parts = [*group]
        chain = Work(0, sum(each.read_bytes for each in parts), sum(each.written_bytes for each in parts))
        kernels += [chain] if is_chain else parts
    return tuple(kernels)


def unit_of(name: str, graphs: Graphs, compiled: bool, state: int, parameters: int, input_bytes: int) -> UnitWork:
    """The numbers of a traced forward and backward.

    Args:
        name: of the unit.
        graphs: what was traced.
        compiled: whether chains are fused.
        state: how many of its first inputs are parameters.
        parameters: elements of those that the unit has.
        input_bytes: as in `UnitWork`.
    """
    forward = {node: each for node, each in _alive(graphs.forward, compiled).items() if node.op != "placeholder"}
    returned = {source_of(each) for each in _outputs(graphs.forward, 0, graphs.returned)}
    origins = {each.name: source_of(each) for each in _outputs(graphs.forward, graphs.returned)}
    saved = {each for each in origins.values() if each in forward} - returned
    gradients = {source_of(each) for each in _outputs(graphs.backward, 0, state)}
    gradients |= {each.all_input_nodes[0] for each in gradients if packet_of(each) in SCATTERS}  # written into
    backward: dict[fx.Node, Lifetime] = {}  # what forward has saved, by what it saved, and what backward computes
    for node, each in _alive(graphs.backward, compiled).items():
        origin = origins.get(node.name)
        if origin in saved:
            last = max(each.last, backward[origin].last) if origin in backward else each.last
            backward[origin] = Lifetime(node, 0, last, forward[origin].size)
        elif (node.op != "placeholder" or is_tangent(node)) and node not in gradients:
            backward[node] = each
    values = [node.meta.get("val") for node in graphs.forward.nodes if is_product(node)]
    columns = max((each.shape[-1] for each in values if isinstance(each, Tensor)), default=0)
    forward_peak, _ = _peak([*forward.values()], 0)
    backward_peak, logits = _peak([*backward.values()], columns)
    kernels = kernels_of(graphs.forward.nodes, compiled), kernels_of(graphs.backward.nodes, compiled)
    saved_bytes = sum(forward[each].size for each in saved)
    return UnitWork(name, parameters, *kernels, input_bytes, saved_bytes, forward_peak, backward_peak, logits)


def _alive(graph: fx.Graph, compiled: bool) -> dict[fx.Node, Lifetime]:
    """When what a graph computes is alive, and until when its inputs are read."""
    position = {node: at for at, node in enumerate(n for n in graph.nodes if n.op == "call_function")}
    in_loops = inlined(graph, joint=False) if compiled else set()
    last = last_uses_of(graph, position, in_loops)
    return {
        each.node: replace(each, last=last[each.node]) if each.node.op == "placeholder" else each
        for each in lifetimes(graph, position, {}, (), stored=set(graph.nodes) - in_loops)
        if each.node is not None
    }


def _peak(alive: Sequence[Lifetime], columns: int) -> tuple[int, int]:
    """The most bytes that are alive at once, and how many of these are of tensors with so many columns."""
    end = max((each.last for each in alive), default=-1) + 1
    shapes = [getattr(each.node.meta.get("val"), "shape", ()) if each.node else () for each in alive]
    wide = [each for each, shape in zip(alive, shapes, strict=True) if shape and shape[-1] == columns]
    return max(zip(live_bytes(alive, end), live_bytes(wide, end), strict=True), default=(0, 0))


def _outputs(graph: fx.Graph, begin: int = 0, end: int | None = None) -> list[fx.Node]:
    """The nodes among some outputs of a graph, which may also be None; an empty graph has none."""
    outputs = graph.output_node().args[0] if len(graph.nodes) else ()
    leaves = pytree.tree_leaves(outputs, is_leaf=lambda leaf: leaf is None or isinstance(leaf, fx.Node))
    return [each for each in leaves[begin:end] if isinstance(each, fx.Node)]
