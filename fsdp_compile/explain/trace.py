"""The work of a model's step: forward and backward are traced, partitioned, and read node by node.

    Model.work       of a setting: any batch follows from two that are traced (work.py)
    Model.traced     one block of each kind, and what is outside of blocks
      _calls         runs a forward in which each distinct block runs once; notes its inputs, others return as it did
      _block         forward and backward of one block with these inputs, after the partitioner
      _outside       those of the model with an operator in place of each block, which only keeps the order
    Read             what nodes compute and how long values live, by passes/graph as in a plan

Blocks are traced apart from the rest, so that a model of 126 takes as long as one of two. The partitioner chooses what
is saved and recomputed; full checkpointing is added afterwards (`StepWork.checkpointed`).
"""

import copy
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
from torch.utils.flop_counter import register_flop_formula

from fsdp_compile.construct.blocks import repeated_blocks
from fsdp_compile.explain._torch import Graphs, fake_tensors, is_fake, partitioned, pytree
from fsdp_compile.explain.batch import Inputs, batch_of, loss_of
from fsdp_compile.explain.prediction import Setting
from fsdp_compile.explain.work import BATCHES, Kernels, NotAffine, StepWork, UnitWork, at_batch
from fsdp_compile.passes._torch import is_tangent
from fsdp_compile.passes.graph.lifetimes import Lifetime, inlined, last_uses_of, lifetimes, live_bytes
from fsdp_compile.passes.graph.nodes import is_product, packet_of, source_of
from fsdp_compile.passes.graph.work import SCATTERS, Work, node_work

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "amp_fp16": torch.float16}  # all others: bfloat16


# --- operators that stand for attention and for a block ---------------------------------------------------------------


@torch.library.custom_op("fsdp_explain::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Fused attention: its output, and a number for each row that backward needs. It is traced and never runs."""
    raise NotImplementedError


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    # [batch, heads, queries, width], in memory as FlashAttention returns it: [batch, queries, heads, width]
    batch, heads, queries, width = query.shape[0], query.shape[-3], query.shape[-2], value.shape[-1]
    out = query.new_empty(batch, queries, heads, width).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fsdp_explain::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. It is traced and never runs."""
    raise NotImplementedError


attention_backward.register_fake(lambda grad, query, key, value, *_: tuple(map(torch.empty_like, (query, key, value))))


def _note_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.is_causal = inputs[3]


def _attention_gradients(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    return (*attention_backward(grad, *ctx.saved_tensors, ctx.is_causal), None)


attention.register_autograd(_attention_gradients, setup_context=_note_attention)


def _attention_flops(query: Any, key: Any, *_: Any, products: int = 2, **__: Any) -> int:
    """Operations as if every token saw all others: each product is as large as queries times keys."""
    batch, heads, queries, width = query
    return products * 2 * batch * heads * queries * key[-2] * width


ATTENTION = torch.ops.fsdp_explain.attention
register_flop_formula(ATTENTION)(_attention_flops)
register_flop_formula(torch.ops.fsdp_explain.attention_backward)(
    lambda grad, query, key, *_, **__: _attention_flops(query, key, products=5)  # scores are computed again
)


@torch.library.custom_op("fsdp_explain::block", mutates_args=())
def block(given: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """A block in the graph of what is around it: a tensor of `shape`, in the dtype of `like`. It never runs."""
    raise NotImplementedError


block.register_fake(lambda given, shape, like: like.new_empty(shape))


def _note_block(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _block_gradients(ctx: Any, grad: Tensor) -> Any:
    return block(grad, list(ctx.shape), grad.new_empty(0, dtype=ctx.dtype)), None, None


block.register_autograd(_block_gradients, setup_context=_note_block)
BLOCK = torch.ops.fsdp_explain.block.default


class _WithoutValues(TorchFunctionMode):
    """Trace attention as one operator on every device, and take conditions on values of tensors to hold.

    Such conditions are checks, for example of Hugging Face's models that no batch is padded or packed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            if query.dim() == 4:
                causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
                return attention(query, key, value, causal)[0]
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
        name: of the model; None: its class's.

    Raises:
        ValueError: `model` is no module and makes none, raises an error, or has tensors on an accelerator.
    """

    def __init__(
        self, model: nn.Module | Callable[[], Any], example_inputs: Inputs | None = None, name: str | None = None
    ) -> None:
        with fake_tensors() as self.mode:
            self.model = _without_memory(model).train()
        self.name = name or type(self.model).__name__
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
        return StepWork(self.name, self.parameters, begin, units, end, setting.batch * setting.sequence)

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

        with _forwards(self.blocks, stand_in):
            torch.func.functional_call(self.model, _cast(self.model, dtype), tuple(_cast_inputs(inputs, dtype)), names)
        return calls, order

    def _outside(
        self, inputs: list[Any], names: dict[str, Any], calls: dict[Any, Call], order: list[Any], compiled: bool,
        dtype: torch.dtype,
    ) -> tuple[UnitWork, UnitWork]:  # fmt: skip
        """Trace what comes before the blocks and what comes after them."""
        inside = {id(param) for each in self.blocks for param in each.parameters()}
        state = _cast(self.model, dtype)
        blocks = {path: state.pop(path) for path, each in [*self.model.named_parameters()] if id(each) in inside}
        upcoming: list[int] = []

        def stand_in(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            at = upcoming.pop(0)
            returned = calls[order[at]].returned
            given = next(each for each in _tensors((args, kwargs)) if each.is_floating_point())
            outputs = _tensors(returned)
            alike = [each.shape == given.shape and each.dtype == given.dtype for each in outputs]
            if 0 < at < len(order) - 1 and alike == [True]:  # only the first and the last one divide the graph
                return _with_tensors(returned, [given])
            return _with_tensors(returned, (
                block(given, list(each.shape), given.new_empty(0, dtype=each.dtype))
                if each.is_floating_point() else each for each in outputs
            ))  # fmt: skip

        def run(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Any) -> tuple[Tensor]:
            upcoming[:] = range(len(order))
            tensors, by_name = given
            output = torch.func.functional_call(self.model, {**blocks, **params, **buffers}, tuple(tensors), by_name)
            return (loss_of(output),)

        with _forwards(self.blocks, stand_in):
            graphs = partitioned(run, (state, _buffers(self.model), (_cast_inputs(inputs, dtype), names)), compiled)
        outside = sum(each.numel() for each in self.model.parameters() if id(each) not in inside)
        read = Read(graphs, compiled, len(state))
        before, after = _around_blocks(graphs.forward)
        after_backward, before_backward = _around_blocks(graphs.backward)
        if not order:
            before, after, before_backward, after_backward = [], before, [], after_backward
        given = sum(each.nbytes for each in inputs if isinstance(each, Tensor))
        last = _tensors(calls[order[-1]].returned) if order else []
        passed = sum(each.nbytes for each in last if each.is_floating_point()) if order else given
        return (
            read.unit("embedding", 0, given, before, before_backward),
            read.unit("output", outside, passed, after, after_backward),
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
    read = Read(graphs, compiled, len(state))
    unit = read.unit("blocks", parameters, passed, list(graphs.forward.nodes), list(graphs.backward.nodes))
    return replace(unit, shapes=tuple(tuple(each.shape) for each in call.module.parameters()))


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
            is_attention = any(packet_of(each) is ATTENTION for each in (node, *node.all_input_nodes[:1]))
            is_other_product = is_product(node) and not is_attention
            products += is_other_product
            saved = is_attention or (is_other_product and products % 2 == 1)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _around_blocks(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes before those that stand for blocks, and those behind them; without such nodes all are before."""
    nodes = list(graph.nodes)
    ends = [at for at, node in enumerate(nodes) if node.target is BLOCK]
    return (nodes[: ends[0]], nodes[ends[-1] + 1 :]) if ends else (nodes, [])


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


class Read:
    """When values of a traced forward and backward are alive; the parameters are their first inputs.

    Args:
        graphs: what was traced.
        compiled: whether chains are fused.
        parameters: how many there are.
    """

    def __init__(self, graphs: Graphs, compiled: bool, parameters: int) -> None:
        self.compiled = compiled
        self.forward = {node: each for node, each in self._alive(graphs.forward).items() if node.op != "placeholder"}
        returned = {source_of(each) for each in _outputs(graphs.forward, 0, graphs.returned)}
        saved = {each.name: source_of(each) for each in _outputs(graphs.forward, graphs.returned)}
        self.saved = {each for each in saved.values() if each in self.forward} - returned
        gradients = {source_of(each) for each in _outputs(graphs.backward, 0, parameters)}
        gradients |= {each.all_input_nodes[0] for each in gradients if packet_of(each) in SCATTERS}  # written into
        self.backward: dict[fx.Node, Lifetime] = {}
        self.given: dict[fx.Node, Lifetime] = {}  # what forward has saved, in backward
        for node, each in self._alive(graphs.backward).items():
            origin = saved.get(node.name)
            if origin in self.saved:
                last = max(each.last, self.given[origin].last) if origin in self.given else each.last
                self.given[origin] = Lifetime(node, 0, last, self.forward[origin].size)
            elif (node.op != "placeholder" or is_tangent(node)) and node not in gradients:
                self.backward[node] = each

    def _alive(self, graph: fx.Graph) -> dict[fx.Node, Lifetime]:
        """When what a graph computes is alive, and until when its inputs are read."""
        position = {node: at for at, node in enumerate(n for n in graph.nodes if n.op == "call_function")}
        in_loops = inlined(graph, joint=False) if self.compiled else set()
        last = last_uses_of(graph, position, in_loops)
        return {
            each.node: replace(each, last=last[each.node]) if each.node.op == "placeholder" else each
            for each in lifetimes(graph, position, {}, (), stored=set(graph.nodes) - in_loops)
            if each.node is not None and each.node.target is not BLOCK
        }

    def unit(
        self, name: str, parameters: int, input_bytes: int, forward: list[fx.Node], backward: list[fx.Node]
    ) -> UnitWork:
        """The numbers of a unit's nodes in forward and in backward; `input_bytes` as in `UnitWork`."""
        inside, inside_backward = set(forward), set(backward)
        values = [node.meta.get("val") for node in forward if is_product(node)]
        columns = max((each.shape[-1] for each in values if isinstance(each, Tensor)), default=0)
        alive = [each for node, each in self.backward.items() if node in inside_backward]
        alive += [each for origin, each in self.given.items() if origin in inside]
        forward_peak, _ = _peak([each for node, each in self.forward.items() if node in inside], 0)
        backward_peak, logits = _peak(alive, columns)
        return UnitWork(
            name,
            parameters,
            kernels_of(forward, self.compiled),
            kernels_of(backward, self.compiled),
            input_bytes,
            sum(self.forward[each].size for each in self.saved & inside),
            forward_peak,
            backward_peak,
            logits,
        )


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
