"""Private names of torch about autograd, wrapper subclasses, modules and Dynamo. Checked on torch 2.11, 2.13 and 2.14.

docs/upgrading_torch.md says what to look for when torch moves.
"""

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from types import CodeType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph as backward_keeps_graph
from torch._C._autograd import _get_sequence_nr as next_node_number  # backward runs those with high numbers first
from torch._C._autograd import _unsafe_set_version_counter as set_version_counters
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._C._functorch import peek_interpreter_stack as current_transform
from torch._dynamo import compiled_autograd
from torch._dynamo.comptime import comptime as while_tracing
from torch._dynamo.eval_frame import innermost_backend, skip_code
from torch._dynamo.exc import RestartAnalysis, SkipFrame, unimplemented
from torch._dynamo.guards import install_guard
from torch._dynamo.source import NNModuleSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as permitted
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_of_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _flatten_dense_tensors as concatenate_flattened
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes  # an active fake mode too
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_compile.comm._torch import in_backward

__all__ = [
    "FakeTensor",
    "StridedShard",
    "TrainingState",
    "allowed_in_regions",
    "allreduce_hook",
    "backward_keeps_graph",
    "bf16_compress_hook",
    "concatenate_flattened",
    "current_transform",
    "fp16_compress_hook",
    "has_global_hooks",
    "in_backward",
    "local_shape_and_offset",
    "next_node_number",
    "outside_of_transforms",
    "reduce_scatter_hook",
    "set_version_counters",
    "tree_map",
    "while_tracing",
    "without_dispatch_modes",
]  # of torch, for others


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """One mesh with the dimensions of both; None if they are not named parts of one mesh."""
    if not (outer.mesh_dim_names and inner.mesh_dim_names):
        return None
    with suppress(RuntimeError):
        return DeviceMesh._concatenate([outer, inner])
    return None


def keep_size_static(tensor: Tensor) -> None:
    """Keep Dynamo from tracing `tensor`, 1-D, with a symbolic size.
    As `torch._dynamo.mark_static`, whose import takes seconds that only users of the compiler should wait.
    """
    tensor._dynamo_static_indices = {0}  # type: ignore[attr-defined]  # Dynamo's own mark, which Tensor's stub lacks


# --- Dynamo -----------------------------------------------------------------------------------------------------------


FunctionT = TypeVar("FunctionT", bound=Callable)


def never_trace(function: FunctionT) -> FunctionT:
    """Let Dynamo call `function` without compiling it, but still trace its callers.
    `torch.compiler.disable` would break the graph of a caller.
    """
    skip_code(function.__code__)
    return function


def never_compile(function: FunctionT) -> FunctionT:
    """Let Dynamo compile neither `function` nor what it calls: for functions that torch calls from C++.

    As `torch.compiler.disable`, without its microsecond where Dynamo is off. It must not be traced. See Note [Backward
    passes within a compiled function].
    """
    disabled = torch.compiler.disable(function, reason="the eager runtime of fsdp_compile")

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() in (None, False):  # as `dynamo_is_active`, without the call
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return functools.wraps(function)(never_trace(call))  # type: ignore[return-value]  # of the same type


@never_trace
def dynamo_is_active() -> bool:
    """Whether Dynamo compiles calls made from here; asked from code that it does not compile."""
    return get_eval_frame_callback() not in (None, False)


def call_with_graph(function: Callable[[torch.fx.GraphModule], None]) -> None:
    """Have Dynamo call `function` once with the graph that it traces now, before a backend gets it."""
    output = InstructionTranslator.current_tx().output
    if function not in output.register_finalizer_fns:
        output.add_graph_finalizer(function)


def _unfinished_output() -> Any:
    """Dynamo's `OutputGraph` while it traces; None if it does not, as when a backend runs the graph on fake tensors."""
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return None
    return None if output.should_exit else output


def graph_so_far() -> list[torch.fx.Node]:
    """The nodes that Dynamo has traced of the graph that it traces now, and before of those around it, as around a
    checkpointed region; none if it does not trace.
    """
    output = _unfinished_output()
    tracer = output and output.current_tracer
    nodes: list[torch.fx.Node] = []
    while tracer is not None:
        nodes = [*tracer.graph.nodes, *nodes]
        tracer = tracer.parent
    return nodes


inductor_settings: list[Callable[[torch.fx.Graph], dict[str, Any]]] = []
"""What Inductor compiles a graph of a sharded model with is what the last of these returns."""


def set_inductor(traced: torch.fx.GraphModule) -> None:
    """If Inductor gets the graph that Dynamo has traced: compile it, and its backward, with `inductor_settings`.
    They hold for this graph alone, and on the thread that compiles the backward too, which torch's own do not.
    """
    output = InstructionTranslator.current_tx().output
    around: Any = copy.copy(output.compiler_fn)  # what writes a repro if compiling fails
    backend = innermost_backend(around)
    if inductor_settings and isinstance(backend, torch._TorchCompileInductorWrapper):
        around._torchdynamo_orig_backend = ours = copy.copy(backend)
        ours.config = {**backend.config, **inductor_settings[-1](traced.graph)}
        output.compiler_fn = around if around is not backend else ours


def traced_variable(tracing: Any, name: str) -> Any:
    """Dynamo's variable for a local one of the function that it traces; `tracing`: its `ComptimeContext`."""
    return tracing.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()


def allowed_in_regions(change: Callable[..., None], of: Any, *args: Any) -> None:
    """Call `change(of, *args)`, which Dynamo then allows in a region, as a checkpointed one. It is undone in there.
    Nothing is noted of it: Dynamo would return all that the region computes, and an autograd function could read no
    view of that in its backward.
    """
    while_tracing(_begin_change)
    permitted(change, of, *args)
    while_tracing(_end_change)


def _begin_change(tracing: Any) -> None:
    variable, tracer = traced_variable(tracing, "of"), InstructionTranslator.current_tx().output.current_tracer
    if getattr(variable, "dict_vt", None) is not None:
        variable.dict_vt = None  # behind `torch.cond`, Dynamo of 2.13 and 2.14 has given this record up
    vars(tracer)["before"] = {name: noted for name, noted in vars(tracer).items() if "side_effect" in name}


def _end_change(_tracing: Any) -> None:
    tracer = vars(InstructionTranslator.current_tx().output.current_tracer)
    tracer.update(tracer["before"])


def reading_place(tracing: Any) -> tuple[CodeType, int] | None:
    """The code that Dynamo traces around a property and a function called by it, and the instruction there.
    None if it traces the property or the function alone, for code that it does not trace.
    """
    property_ = tracing._ComptimeContext__tx.parent
    reader = property_ and property_.parent
    return reader and (reader.f_code, reader.instruction_pointer)


def skip_frame(reason: str) -> NoReturn:
    """Have Dynamo leave alone the frame that it traces."""
    raise SkipFrame(reason)


def trace_again(reason: str) -> NoReturn:
    """Have Dynamo trace the frame anew."""
    raise RestartAnalysis(restart_reason=reason)


def tensor_assigned_at_break() -> Tensor | None:
    """If Dynamo ends the graph it traces now at `tensor.name = value`: the fake of `tensor`."""
    tracing = InstructionTranslator.current_tx()
    if tracing.current_instruction.opname != "STORE_ATTR" or not tracing.stack:
        return None
    fake = getattr(getattr(getattr(tracing.stack[-1], "proxy", None), "node", None), "meta", {}).get("example_value")
    return fake if isinstance(fake, FakeTensor) else None


def break_graph(reason: str) -> None:
    """If Dynamo traces: end the graph before the current instruction, which then runs eagerly."""
    try:
        InstructionTranslator.current_tx()
    except AttributeError:
        return
    unimplemented(gb_type="fsdp_compile", context="", explanation=reason, hints=[])


def traced_code_changes(attribute: str) -> bool:
    """Whether Dynamo traces, and has traced a change of a dictionary that is an object's `attribute`."""
    output = _unfinished_output()
    effects = output and output.side_effects
    for variable in effects.id_to_variable.values() if effects is not None else ():
        source: Any = variable.source
        while isinstance(source, NNModuleSource):
            source = source.base
        name = getattr(source, "member", None) or getattr(source, "index", None)  # the latter of `__dict__`
        if name in (attribute, "_fsdp" + attribute) and effects.is_modified(variable):
            return True
    return False


def call_before_runs(tracing: Any, function: Callable[[Any], bool], inside: CodeType) -> None:
    """Call `function` now and before each run of the graph that Dynamo traces, as one of its guards.

    Args:
        tracing: Dynamo's `ComptimeContext`.
        function: gets the value of the local variable `self`; returns whether the graph is still right. If it raises,
            Dynamo traces again, and raises the same.
        inside: code of a function; while Dynamo traces a call of it, nothing is done.
    """
    caller = tracing._ComptimeContext__tx.parent
    while caller is not None:
        if caller.f_code is inside:
            return
        caller = caller.parent
    variable = traced_variable(tracing, "self")
    function(variable.value)
    if variable.source is not None:  # else the graph makes the value itself
        install_guard(variable.source.make_guard(functools.partial(_guard_that_calls, function)))


def _guard_that_calls(function: Callable[[Any], bool], builder: Any, guard: Any) -> None:
    text = [f"{function.__module__}.{function.__name__}({guard.name})"]
    builder.get_guard_manager(guard).add_lambda_guard(function, text, guard.user_stack)


# --- autograd ---------------------------------------------------------------------------------------------------------


def call_after_backward(callback: Callable[[], Any], if_failed: Callable[[], Any] | None = None) -> None:
    """Call `callback` when the running backward pass has ended without error, else `if_failed`."""
    torch.autograd.Variable._execution_engine.queue_callback(_Last(callback, if_failed))


class _Last:
    """What the engine calls after a backward pass; it drops this uncalled if the pass has failed."""

    if_failed: Callable[[], Any] | None = None  # also where an exception interrupts `__init__`

    def __init__(self, callback: Callable[[], Any], if_failed: Callable[[], Any] | None) -> None:
        self.callback, self.if_failed = callback, if_failed

    @never_compile
    def __call__(self) -> None:
        try:
            self.callback()
        except BaseException:  # also one that interrupts the call itself
            self.__del__()
            raise
        finally:
            self.if_failed = None

    @never_compile
    def __del__(self) -> None:
        if self.if_failed is not None:
            self.if_failed()


def may_change_saved_tensors() -> bool:
    """Whether the forward that runs is within `torch.autograd.graph.allow_mutation_on_saved_tensors`."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def runs_compiled_autograd() -> bool:
    """Whether the running backward pass is a graph of compiled autograd."""
    return compiled_autograd.in_compiled_autograd_region


def is_exporting() -> bool:
    """Whether `torch.export` traces. While it compiles, Dynamo of torch 2.11 takes torch's own function for true."""
    return torch.compiler._is_exporting_flag


@never_trace
def records_operators() -> bool:
    """Whether `torch.jit.trace` or `make_fx` records what runs; asked from code that Dynamo does not compile."""
    mode = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_tracing_state() is not None or torch._C._get_dispatch_mode(mode) is not None


def executes_node(node: Any) -> bool:
    """Whether the running backward pass calls `node`, or computes its gradient: all of them in a `backward()`."""
    return torch._C._will_engine_execute_node(node)


def set_plain_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Let `param.grad`, plain, share memory with `grad`, whatever its dtype and device; return it (E-GRAD-2).
    Autograd refuses a gradient that does not fit its parameter, but does not look again when data is swapped.
    """
    placeholder = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    param.grad = placeholder
    placeholder.data = grad
    return placeholder


_CARRIED = "_in_backward_optimizers"


def carry_optimizers(params: Sequence[nn.Parameter]) -> bool:
    """Whether `torch.distributed.optim._apply_optimizer_in_backward` was called for any of `params`."""
    return any(map(operator.contains, map(vars, params), repeat(_CARRIED)))


def step_carried_optimizers(params: Sequence[nn.Parameter]) -> None:
    """Step the optimizers that parameters with a gradient carry, then clear it, as their hooks would."""
    for param in params:
        if param.grad is not None and _CARRIED in vars(param):
            for optimizer in vars(param)[_CARRIED]:
                optimizer.step()
            param.grad = None


# --- wrapper subclasses -----------------------------------------------------------------------------------------------

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass  # halves what an attribute of a subclass costs
new_wrapper: Any = Tensor._make_wrapper_subclass


def swap_wrapper(tensor: Tensor, wrapper: Tensor) -> None:
    """Turn `tensor` into `wrapper`, of a subclass: the same object, with its attributes and hooks.
    `torch.utils.swap_tensors` refuses tensors with weak references, which optimizers and modules may hold.
    """
    if tensor.requires_grad and tensor.is_leaf:  # autograd's node, if a graph has it, keeps what becomes `wrapper`
        get_gradient_edge(tensor).node.register_prehook(partial(_refuse, tuple(tensor.shape)))
    attributes, is_param = dict(vars(tensor)), isinstance(tensor, nn.Parameter)
    hooks, after_accumulation = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    plain, tensor.__class__ = type(tensor), type(wrapper)
    torch._C._swap_tensor_impl(tensor, wrapper)
    wrapper.__class__ = plain
    vars(tensor).update(attributes)
    if type(tensor) is not plain:
        vars(tensor)["_is_param"] = is_param
    if hooks:
        tensor._backward_hooks = hooks
    if after_accumulation:
        tensor._post_accumulate_grad_hooks = after_accumulation


def _refuse(shape: tuple[int, ...], _grads: Any) -> None:
    raise RuntimeError(
        f"backward reached a parameter of shape {shape} through a graph from before it was sharded, where its gradient "
        f"would be lost; call fully_shard before the forward"
    )


def change_wrapper(tensor: Tensor, wrapper: Tensor) -> None:
    """Give `tensor`, of a wrapper subclass, the dtype and device of `wrapper`, of the same subclass and shape.

    As an assignment to `.data` of a plain tensor, this lets autograd drop its node for `tensor`. Torch allows none
    between the meta device and others; autograd must have no node for `tensor` then.
    """
    if tensor.is_meta != wrapper.is_meta:
        return swap_wrapper(tensor, wrapper.requires_grad_(tensor.requires_grad))
    Tensor.data.__set__(tensor, wrapper)  # type: ignore[attr-defined]  # a tensor, by the stub


def register_foreach_type(kind: type[Tensor]) -> None:
    """Let optimizers and gradient clipping choose their foreach forms for tensors of class `kind`, as for DTensor."""
    for supported in (_optimizer_types, _clipping_types):
        if kind not in supported:
            supported.append(kind)


def executes_formula() -> bool:
    """Whether this thread runs a backward pass, and not what follows the accumulation of a gradient."""
    if not in_backward():
        return False
    node = torch._C._current_autograd_node()
    return node is None or node.name() != "torch::autograd::AccumulateGrad"


def gives_gradients_of_leaves(kind: type[Tensor], operands: Sequence[Any]) -> bool:
    """Whether the running autograd formula gives gradients of parameters of class `kind` and of nothing else.
    Outside of a formula, autograd adds gradients or calls hooks: no operand requires grad then.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return not any(isinstance(each, Tensor) and each.requires_grad for each in operands)
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return False  # what its author wrote may recompute something of this rank's data
    return all(to is None or type(getattr(to, "variable", None)) is kind for to, _ in node.next_functions)


# --- modules ----------------------------------------------------------------------------------------------------------


def mark_as_sharded(module: nn.Module) -> None:
    """Tell torch that `fully_shard` manages `module`: `replicate` refuses it, and leaves it alone within another."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def set_state_of_fully_shard(module: nn.Module, state: Any) -> None:
    """Let `torch.distributed.fsdp.fully_shard.state(module)` return `state`."""
    key: Any = fully_shard.__wrapped__  # type: ignore[attr-defined]  # the function that `contract` decorates
    module.__dict__.setdefault(STATE_KEY, {})[key] = state


def _flat_weights(module: Any) -> list[Tensor | None]:
    return [getattr(module, name, None) for name in module._flat_weights_names]


# What classes of sharded `nn.RNNBase` modules have: `forward` finds the parameters by their names. The list that torch
# keeps would keep full parameters until the next forward, and cuDNN would move them to memory of its own.
RNN_WITHOUT_LIST: dict[str, Any] = {
    "_flat_weights": property(_flat_weights, lambda _module, _list: None),
    "flatten_parameters": lambda _module: None,
}


# --- norms, replication and what outputs hold -------------------------------------------------------------------------


def unchanged(tensor: Tensor) -> Tensor:
    """The elements of `tensor`, as an operator's result: of a sharded one gathered, plain, with autograd's history."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return result


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The vector norm of each of `tensors`, all of one dtype and device; scalars of `dtype`."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def plain_within(tensor: Tensor) -> Tensor:
    """The tensor that transforms of `torch.func` have wrapped; a plain one itself."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def replicated_params() -> frozenset[nn.Parameter]:
    """The parameters that the DistributedDataParallel whose forward runs averages; empty outside of one."""
    around = DistributedDataParallel._get_active_ddp_module()
    return frozenset(around._module_parameters if around is not None else ())


WITHOUT_TENSORS = (int, float, complex, bool, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""What may be in an output beside tensors and has none inside."""


def node_number(tensor: Tensor) -> int:
    """The number of the node that made `tensor`; -1 without one."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()


def register_first_hook(tensor: Tensor, hook: Callable[[Any], Any]) -> "weakref.ref[Any]":
    """`tensor.register_hook(hook)`, called before the hooks that the tensor has; what dies with that of its node."""
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    if len(hooks) > 1:  # autograd reads them in the order of insertion, which `move_to_end` does not change
        others = {key: hooks.pop(key) for key in list(hooks) if key != handle.id}
        hooks.update(others)
    return weakref.ref(hooks)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of `value`, through containers that torch's pytrees know, sets and dataclasses."""
    if isinstance(value, Tensor):  # most often
        yield value
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, (set, frozenset)):
            yield from leaves_of(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_of([getattr(leaf, field.name, None) for field in fields(leaf)])
        else:
            yield leaf
