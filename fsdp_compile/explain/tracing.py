"""From a model to the work of its step: forward and backward are traced, partitioned, and read kernel by kernel.

    TracedModel      a model without memory, and which of its blocks are equal
      work           of a batch, a sequence length, a policy: one block of each kind, and what is outside of blocks
        _calls       a forward in which each distinct block runs once; its inputs are noted, others return as it did
        _block       forward and backward of one block with these inputs, after the partitioner
        _outside     those of the model with an operator in place of each block, which only keeps the order

Blocks are traced apart from the rest, so that a model of 126 takes as long as one of two. What is recomputed and saved
is what the partitioner chose; full checkpointing is added afterwards (`StepWork.checkpointed`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp_compile.construct.wrap_policy import repeated_blocks
from fsdp_compile.explain._torch import fake_tensors, is_fake, partitioned, pytree
from fsdp_compile.explain.kernels import divided, read_part, save_by_operator
from fsdp_compile.explain.work import StepWork, UnitWork

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "amp_fp16": torch.float16}  # all others: bfloat16
Inputs = Callable[..., Sequence[Any]]


# --- operators that stand for attention and for a block ---------------------------------------------------------------


@torch.library.custom_op("fsdp_explain::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Fused attention: what it returns, and a number for each row that backward needs. It is traced and never runs."""
    raise NotImplementedError


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    # [batch, heads, queries, width], in memory as FlashAttention returns it: [batch, queries, heads, width]
    batch, heads, queries, width = query.shape[0], query.shape[-3], query.shape[-2], value.shape[-1]
    out = query.new_empty(batch, queries, heads, width).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fsdp_explain::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. It is traced and never runs."""
    raise NotImplementedError


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _note_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.causal = inputs[3]


def _attention_gradients(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    return (*attention_backward(grad, *ctx.saved_tensors, ctx.causal), None)


attention.register_autograd(_attention_gradients, setup_context=_note_attention)


@torch.library.custom_op("fsdp_explain::block", mutates_args=())
def block(given: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """A block in the graph of what is around it: a tensor of `shape`, in the dtype of `like`. It never runs."""
    raise NotImplementedError


@block.register_fake
def _(given: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    return like.new_empty(shape)


def _note_block(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _block_gradients(ctx: Any, grad: Tensor) -> Any:
    return block(grad, list(ctx.shape), grad.new_empty(0, dtype=ctx.dtype)), None, None


block.register_autograd(_block_gradients, setup_context=_note_block)


class _WithoutValues(TorchFunctionMode):
    """What tensors without values need: one operator for attention, whichever the device, and conditions that hold.

    Conditions on values are checks, such as that no batch is padded or packed, which Hugging Face's models ask for.
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


@dataclass(frozen=True)
class Call:
    """How a block was called: what tracing it needs."""

    module: nn.Module
    tensors: tuple[Tensor, ...]  # among its arguments
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: tuple[Tensor, ...]
    structure: Any  # of its outputs, with the tensors_at of tensors


class TracedModel:
    """A model that has no memory.

    Args:
        make_model: makes it.
        example_inputs: as `predict_step` takes them.
        name: of the model; None: its class's.

    Raises:
        ValueError: what `make_model` makes is no module, or has memory on a device.
    """

    def __init__(
        self, make_model: Callable[[], Any], example_inputs: Inputs | None = None, name: str | None = None
    ) -> None:
        with fake_tensors() as self.mode:
            model = make_model()
            if not isinstance(model, nn.Module):
                raise ValueError(f"make_model: expected it to return a module, found {type(model).__name__}")
            for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if not is_fake(tensor):
                    raise ValueError(
                        f"make_model: expected it to make a model, whose tensors then get no memory, found {path} with "
                        f"memory on {tensor.device}; make the model inside the function"
                    )
        self.model = model.train()
        self.name = name or type(model).__name__
        self.example_inputs = example_inputs
        blocks = repeated_blocks(model)
        self.blocks = {each: path for path, each in model.named_modules() if each in set(blocks)}
        self._calls_of: dict[Any, tuple[dict[Any, Call], list[Any]]] = {}
        self._block_of: dict[Any, UnitWork] = {}
        self._outside_of: dict[Any, tuple[UnitWork, UnitWork]] = {}
        self.parameters = sum(each.numel() for each in model.parameters())

    def work(
        self, batch: int, sequence: int, by_operator: bool, compiled: bool, compiled_loss: bool, precision: str
    ) -> StepWork:
        """One forward and backward.

        Args:
            batch: sequences.
            sequence: tokens of one.
            by_operator: whether blocks are checkpointed but for attention and every second product.
            compiled: as in `Setting`.
            compiled_loss: likewise.
            precision: as in `Setting`.

        Raises:
            ValueError: the model cannot be traced.
        """
        dtype = DTYPES.get(precision, torch.bfloat16)
        try:
            with self.mode, _WithoutValues(), torch.enable_grad():
                inputs, names = self._inputs(batch, sequence)
                sizes = (batch, sequence, dtype)
                if sizes not in self._calls_of:
                    self._calls_of[sizes] = self._calls(inputs, names, dtype)
                calls, order = self._calls_of[sizes]
                for key, call in calls.items():
                    if (key, sizes, compiled, by_operator) not in self._block_of:
                        made = _block(call, compiled, by_operator, dtype)
                        self._block_of[key, sizes, compiled, by_operator] = made
                if (sizes, compiled_loss) not in self._outside_of:
                    outside = self._outside(inputs, names, calls, order, compiled_loss, dtype)
                    self._outside_of[sizes, compiled_loss] = outside
                begin, end = self._outside_of[sizes, compiled_loss]
        except (RuntimeError, TypeError, AssertionError, NotImplementedError, AttributeError, KeyError) as error:
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"make_model: expected a model that can be traced, found {text}") from error
        units = list[UnitWork]()
        for at, key in enumerate(order):
            if at and order[at - 1] == key:
                units[-1] = replace(units[-1], count=units[-1].count + 1)
            else:
                units.append(self._block_of[key, sizes, compiled, by_operator])
        return StepWork(self.name, self.parameters, begin, tuple(units), end, batch * sequence)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _inputs(self, batch: int, sequence: int) -> tuple[list[Any], dict[str, Any]]:
        """Positional arguments and arguments by name of a forward."""
        if self.example_inputs is not None:
            takes_sizes = len(inspect.signature(self.example_inputs).parameters) >= 2
            if takes_sizes:
                return list(self.example_inputs(batch, sequence)), {}
            return [_resized(each, batch, sequence) for each in self.example_inputs()], {}
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
        parameters = list(inspect.signature(self.model.forward).parameters.values())
        names = [each.name for each in parameters]
        without = {"use_cache": False} if "use_cache" in names else {}  # keys and values for generation
        if "labels" in names:
            return [ids], {"labels": torch.zeros_like(ids), **without}
        second = names[1] if len(names) > 1 else ""
        wants_targets = "target" in second or "label" in second or second == "y"
        return ([ids, torch.zeros_like(ids)] if wants_targets else [ids]), without

    def _loss(self, output: Any) -> Tensor:
        """What backward begins with."""
        for name in ("loss", "logits"):
            output = output[name] if isinstance(output, dict) and name in output else getattr(output, name, output)
        if isinstance(output, (tuple, list)):
            losses = [each for each in output if isinstance(each, Tensor) and each.dim() == 0]
            output = losses[0] if losses else output[0]
        if output.dim() == 0:
            return output
        if output.dim() < 3:
            return output.float().sum()
        logits = output.flatten(0, -2)
        return F.cross_entropy(logits.float(), torch.zeros(logits.shape[0], dtype=torch.int64))

    # --- tracing ------------------------------------------------------------------------------------------------------

    def _calls(self, inputs: list[Any], names: dict[str, Any], dtype: torch.dtype) -> tuple[dict[Any, Call], list[Any]]:
        """A call of each kind of block, and the kinds in the order in which blocks are called."""
        calls: dict[Any, Call] = {}
        order: list[Any] = []

        def around(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                key = (_kind(module), structure, tuple(map(_described, leaves)))
                order.append(key)
                if key not in calls:
                    outputs = original(*args, **kwargs)
                    calls[key] = _call(module, leaves, structure, outputs)
                call = calls[key]
                given = next(each for each in call.tensors if each.is_floating_point())
                made = [torch.empty_like(each) + 0 * given.sum() if _flows(each) else each for each in call.outputs]
                return _restored(call, made)

            return forward

        with _forwards(self.blocks, around):
            torch.func.functional_call(self.model, _cast(self.model, dtype), tuple(_cast_inputs(inputs, dtype)), names)
        return calls, order

    def _outside(
        self, inputs: list[Any], names: dict[str, Any], calls: dict[Any, Call], order: list[Any], compiled: bool,
        dtype: torch.dtype,
    ) -> tuple[UnitWork, UnitWork]:  # fmt: skip
        """What comes before the blocks and what comes after them."""
        inside = {id(param) for each in self.blocks for param in each.parameters()}
        state = _cast(self.model, dtype)
        blocks = {path: state.pop(path) for path, each in [*self.model.named_parameters()] if id(each) in inside}
        upcoming: list[int] = []

        def around(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                at = upcoming.pop(0)
                call = calls[order[at]]
                leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
                given = next(each for each in leaves if each.is_floating_point())
                alike = [each.shape == given.shape and each.dtype == given.dtype for each in call.outputs]
                if 0 < at < len(order) - 1 and alike == [True]:  # only the first and the last one divide the graph
                    return _restored(call, [given])
                made = [
                    block(given, list(each.shape), given.new_empty(0, dtype=each.dtype))
                    if each.is_floating_point() else each for each in call.outputs
                ]  # fmt: skip
                return _restored(call, made)

            return forward

        def run(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Any) -> tuple[Tensor]:
            upcoming[:] = range(len(order))
            tensors, by_name = given
            output = torch.func.functional_call(self.model, {**blocks, **params, **buffers}, tuple(tensors), by_name)
            return (self._loss(output),)

        with _forwards(self.blocks, around):
            graphs = partitioned(run, (state, _buffers(self.model), (_cast_inputs(inputs, dtype), names)), compiled)
        outside = sum(each.numel() for each in self.model.parameters() if id(each) not in inside)
        begin, end = divided(graphs, compiled, torch.ops.fsdp_explain.block.default, len(state))
        given = sum(each.nbytes for each in inputs if isinstance(each, Tensor))
        passed = sum(each.nbytes for each in calls[order[-1]].outputs if each.is_floating_point()) if order else given
        return begin.unit("embedding", 0, given), end.unit("output", outside, passed)


def _block(call: Call, compiled: bool, by_operator: bool, dtype: torch.dtype) -> UnitWork:
    """Forward and backward of one block."""
    state = _cast(call.module, dtype)
    tensors = [each.detach().requires_grad_(each.is_floating_point() and each.requires_grad) for each in call.tensors]

    def run(params: dict[str, Tensor], buffers: dict[str, Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = call.rebuild(given)
        output = torch.func.functional_call(call.module, {**params, **buffers}, args, kwargs)
        return tuple(
            each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()
        )

    graphs = partitioned(
        run, (state, _buffers(call.module), tensors), compiled, save_by_operator if by_operator else None
    )
    passed = sum(each.nbytes for each in tensors if each.requires_grad)
    part = read_part(graphs, compiled, len(state))
    return part.unit("blocks", sum(each.numel() for each in call.module.parameters()), passed)


# --- helpers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _forwards(
    modules: Iterable[nn.Module], around: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Modules have other forwards meanwhile. A `forward` that a module had of its own, beside its class, comes back."""
    own = {module: vars(module).get("forward") for module in modules}
    try:
        for module in own:
            module.forward = around(module, module.forward)
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _flows(tensor: Tensor) -> bool:
    """Whether gradients can flow through `tensor`."""
    return tensor.is_floating_point()


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Blocks of one kind compute the same: one class, one text, and parameters and buffers of equal shapes."""
    state = [*module.named_parameters(), *module.named_buffers()]
    return type(module), repr(module), tuple((name, each.shape, each.dtype) for name, each in state)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf)


def _call(module: nn.Module, leaves: list[Any], structure: Any, outputs: Any) -> Call:
    tensors_at = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def rebuild(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for at, tensor in zip(tensors_at, tensors, strict=True):
            filled[at] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return args, kwargs

    returned, shape = pytree.tree_flatten(outputs)
    tensors = tuple(each for each in returned if isinstance(each, Tensor))
    others = [None if isinstance(each, Tensor) else (each,) for each in returned]
    return Call(module, tuple(leaves[at] for at in tensors_at), rebuild, tensors, (others, shape))


def _restored(call: Call, tensors: Sequence[Tensor]) -> Any:
    """What the block returned, with other tensors."""
    others, shape = call.structure
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if each is None else each[0] for each in others], shape)


def _cast(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters in the dtype in which they are gathered."""
    return {
        path: torch.empty_like(each, dtype=dtype if each.is_floating_point() else None, device="cpu").requires_grad_(
            each.requires_grad and each.is_floating_point()
        )
        for path, each in module.named_parameters()
    }


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {path: torch.empty_like(each, device="cpu") for path, each in module.named_buffers()}


def _cast_inputs(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs]


def _resized(value: Any, batch: int, sequence: int) -> Any:
    """A tensor like `value` of another batch; token ids, of another length too."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shape = [batch, *value.shape[1:]]
    if value.dim() == 2 and not value.is_floating_point():
        shape[1] = sequence
    return torch.zeros(shape, dtype=value.dtype)
