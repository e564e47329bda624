"""`FSDPModule`: what a sharded module can do beside what its own class does."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn

from fsdp_compile.comm.groups import separate_group
from fsdp_compile.core._torch import set_state_of_fully_shard
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import (
    ModuleSharding,
    by_original_class,
    clean_names,
    modules_below,
    original_class,
    stored_parameters,
    units_gathered_below,
    units_gathered_by,
)
from fsdp_compile.core.unit import Unit, check_idle
from fsdp_compile.eager.accumulate import check_reduced
from fsdp_compile.eager.casting import cast_buffers, computes_in_full_precision
from fsdp_compile.eager.communication_hooks import compresses, reduce_by
from fsdp_compile.eager.error_feedback import load_residuals, state_of_residuals
from fsdp_compile.eager.forward import (
    CheckParams,
    compiled_forward,
    gather_around_own_forward,
    gathering,
    hooked_call,
)
from fsdp_compile.eager.reduce import set_sync
from fsdp_compile.eager.runtime import Runtime, UnshardHandle, reshard
from fsdp_compile.edits.apply import convert
from fsdp_compile.edits.own_writes import OwnWrites
from fsdp_compile.edits.summon import summon_full_params, summoned_for_apply
from fsdp_compile.parameter_owner import HasShardedParameters
from fsdp_compile.pipelines import StateForPipelines
from fsdp_compile.reproducibility import fingerprint_of
from fsdp_compile.tensors.sharded_reductions import gradient_norm
from fsdp_compile.tensors.sharded_rules import multiply
from fsdp_compile.tensors.sharded_tensor import gradients


class FSDPModule(HasShardedParameters, CheckParams, nn.Module, torch.distributed.fsdp.FSDPModule):
    """A module that `fully_shard` was called on or chose as a unit. It is an instance of its original class as well.

    It is an instance of torch's class of that name too, for trainers that look for these; all of torch's methods are
    defined anew. Type checkers know the original class and this one where `isinstance(model, FSDPModule)` holds: Note
    [What type checkers see]. To them attributes that neither class declares are of any type.
    """

    _fsdp: ModuleSharding
    _fsdp_runtime: Runtime

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: `fully_shard` makes sharded modules of others, in classes with a `__new__` of their own."""
        raise TypeError("FSDPModule cannot be called: fully_shard(module) makes one of a module")

    summon_full_params = staticmethod(summon_full_params)

    wrap_forward = staticmethod(gathering)  # what `swap_class` makes of the original forward
    wrap_call = staticmethod(hooked_call)  # and of the original call, if there are hooks

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":  # it may be called by that name, where no code of ours runs before
            gather_around_own_forward(self)

    @staticmethod
    def on_swap(module: Any) -> None:
        """What remains when the class was swapped: buffers are cast, and a compiled call gathers around itself."""
        cast_buffers(module)
        gather_around_own_forward(module)
        gather_around_compiled(module)
        set_state_of_fully_shard(module, StateForPipelines(module))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`: from now on a call of this module runs compiled.

        The root is traced with all of its communication. A sharded module inside another one is gathered, freed and
        reduced by the eager runtime, around its compiled forward. Equal blocks share one graph. It may also be called
        before `fully_shard`.
        """
        if kwargs.get("backend") == "fsdp_compile":
            check_options(kwargs.get("options"))
        super().compile(*args, **kwargs)
        gather_around_compiled(self)

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`; with FSDP_COMPILE_FULL_PREC_IN_EVAL=1, buffers change their dtype with the mode."""
        super().train(mode)
        cast_buffers(self)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce gradients (E-ACC-1). Also usable as a decorator.

        A rank may leave out backward passes inside. All ranks must enter if the backward of a compiled forward from
        before the first `no_sync` is still to come: it reduces accumulated gradients too, on all ranks or on none.

        Raises:
            RuntimeError: this module is not the root: a module around it is sharded too.
            ValueError: a forward of this module is under way.
        """
        _check_root(self, "no_sync", RuntimeError)
        units = units_gathered_below(self)
        check_idle(units, "no_sync")
        before = [unit.syncs for unit in units]
        try:
            self.set_requires_gradient_sync(False)
            yield
        finally:
            try:
                for unit, syncs in zip(units, before, strict=True):
                    set_sync(unit, syncs)
            except BaseException:  # interrupted: once more, so that no unit stays without synchronization
                for unit, syncs in zip(units, before, strict=True):
                    set_sync(unit, syncs)
                raise

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, not those of sharded modules below, for its next eager forward.

        That forward does not gather again (E-PRE-7), unless parameters were changed since on any rank: an all-reduce of
        one number tells, unless this was called within the same forward of the root. Edits through `param.data` are not
        seen. A compiled forward gathers for itself. AssertionError within `summon_full_params`.

        Args:
            async_op: return a handle at once, whose `wait` orders what follows after the all-gather; the forward waits
                by itself. If False, wait and return None.
        """
        unsharding = self._fsdp_runtime.unshard(self._fsdp.units, computes_in_full_precision(self))
        if async_op:
            return unsharding
        unsharding.wait()
        return None

    def reshard(self) -> None:
        """Free what `unshard` gathered, and what a forward left for its backward, which then gathers again.

        ValueError while a forward or backward of this module is under way.
        """
        for unit in self._fsdp.units:
            reshard(unit)

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: free what it left, and drop gradients that were not reduced.

        A step that raised leaves the module usable; this also drops what `no_sync` accumulated before. All ranks must
        call it, on the root.
        """
        _check_root(self, "reset_iter_state", RuntimeError)
        self._fsdp_runtime.reset(self)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As `nn.Module.apply`: `fn` visits the modules below and this one, and finds all elements of parameters.

        Edits are kept as in `summon_full_params`. One sharded module is gathered at a time, with those around it.
        Modules inside a sharded one have their original class: `type(module) is nn.Linear` is true. ValueError if a
        forward or backward is under way, or parameters are summoned already.
        """
        with summoned_for_apply(self):
            return super().apply(by_original_class(fn, but=(FSDPModule,)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `.to()`, `.half()` and the like run: shards follow (E-MOD-3)."""
        return convert(self, fn, lambda: super(FSDPModule, self)._apply(fn, recurse))

    def extra_repr(self) -> str:
        """As the module's own class says, and a line for each unit that the module gathers."""
        units = [f"unit: {_describe(unit, self._fsdp)}" for unit in self._fsdp.units]
        return "\n".join(filter(None, [super().extra_repr(), *units]))

    def is_root(self) -> bool:
        """Whether no sharded module is around this one."""
        return self._fsdp.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FSDPModule"]:
        """The sharded modules among `module` and those below, in the order of `module.modules()`; or only roots."""
        modules = (each for each in module.modules() if isinstance(each, FSDPModule))
        return [each for each in modules if each.is_root() or not root_only]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of this module's parameters in place so that their norm is at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_`, which may be called instead, with checks and a norm in float32 or wider.
        There is one all-reduce for each process group; all ranks must call it. (Gradients of ignored parameters are
        this rank's own; averaging them is up to the caller.)

        Args:
            max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
            norm_type: p of the p-norm, above 0; or infinity, also as "inf".

        Returns:
            The norm before scaling, shape `()`, equal on all ranks, in the widest dtype that gradients have. 0, with a
            UserWarning, if there are no gradients.

        Raises:
            RuntimeError: this module is not the root; or gradients were summed up under `no_sync` and not reduced yet.
            ValueError: a forward or backward of this module is under way; or `norm_type` is not above 0.
        """
        _check_root(self, "clip_grad_norm_", RuntimeError)
        modules = modules_below(self)
        units = units_gathered_by(modules)
        check_idle(units, "clip_grad_norm_")
        order = float(norm_type)
        if not order > 0:
            raise ValueError(f"norm_type must be a number above 0 or 'inf', not {norm_type!r}")
        of_modules = chain.from_iterable(stored_parameters(module).values() for module in modules)
        params = list({id(param): param for param in of_modules if param is not None}.values())
        grads = gradients(params)
        if not grads:
            warn_caller("clip_grad_norm_: there are no gradients; call it after backward and before zero_grad")
            return torch.zeros((), device=self._fsdp.device)
        check_reduced(params, "run a backward pass outside no_sync before clipping")
        total = gradient_norm(params, order=order)
        if not multiply(grads, (max_norm / (total + 1e-6)).clamp(max=1.0)):
            nn.utils.clip_grads_with_norm_(params, max_norm, total)
        return total.to(functools.reduce(torch.promote_types, {grad.dtype for grad in grads}))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that are equal for equal names and bits of all parameters, on any number of ranks.

        For logs, and to compare runs. All ranks must call it, between steps: one all-reduce of integers for each
        group of ranks.
        """
        check_idle(units_gathered_below(self), "fingerprint")
        return fingerprint_of((name, param) for param, name in clean_names(self).items())

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce the gradients of all units, eager and compiled, from the next step on.

        Sharded units call `hook(state, gradients, output)` with the unit's whole gradients, 1-D `[n]` in the reduce
        dtype, and an uninitialised 1-D tensor for this rank's slice; NO_SHARD units call `hook(state, gradients)`,
        which reduces in place. The hook divides by the number of ranks itself, and may give the tensors another dtype.
        `fp16_compress_hook` and `bf16_compress_hook` of torch get the gradients as they are. Under hybrid sharding the
        hook reduces over the ranks that share a copy; the mean over copies follows it.

        If `state` has a method `of_flat_param(flat_param, name, group)`, `hook` gets what that returns in place of
        `state`: a state of each flat parameter, an object with a hash whose first parameter is called `name` in this
        module. `group` is the process group over which the hook reduces.

        Raises:
            AssertionError: this module is not the root, or a hook is registered already.
            ValueError: `hook` is not callable, reductions have an order, `reduction_order="tree"`, or a wire.
        """
        _check_root(self, "register_comm_hook", AssertionError)
        units = units_gathered_below(self)
        _check_any_order(units, "register_comm_hook")
        for flat in (flat for unit in units for flat in unit.flats if flat.wire is not None and flat.wire.reduce):
            raise ValueError(
                f"register_comm_hook: the gradient of parameter {flat.names[0]} is sent as {flat.wire}, and a hook "
                f"would send it in its own way; shard the model without a wire for reduces"
            )
        for unit in units:
            if unit.comm_hook is not None:
                name = getattr(unit.comm_hook[1], "__qualname__", repr(unit.comm_hook[1]))
                raise AssertionError(f"register_comm_hook: {name} is registered already; register one hook")
        if not callable(hook):
            raise ValueError(f"hook must be callable, not a {type(hook).__name__}; pass (state, hook), in this order")
        for unit in units:
            unit.set_comm_hook((state, hook), reduce_by, compresses(hook))

    def error_feedback(self) -> dict[str, Tensor]:
        """What rounding has taken from this rank's gradients so far, by parameter: float32, in the parameters' shapes.

        Of a model with `Wire(..., error_feedback=True)`, from the first reduce on. Save it as a `checkpoint.PerRank`.
        """
        return state_of_residuals(units_gathered_below(self))

    def load_error_feedback(self, states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | None]) -> None:
        """Go on with what `error_feedback` has returned on this rank, or with a list of it for each rank that saved.

        With as many ranks as saved each has its own again, bit for bit. With another number, which needs the list, as
        `checkpoint.PerRank.of_ranks` has it, the mean over ranks stays what it was. What does not fit the parameters is
        dropped, with a warning.
        """
        units = units_gathered_below(self)
        if isinstance(states, Mapping):
            ranks = max((unit.data_parallel_size for unit in units), default=1)
            states = [states] * ranks
        load_residuals(units, states)

    # The `set_*` methods have FSDP2's names and meanings. Most are about the module's own units; with `recurse` also
    # about those of sharded modules below. What changes how gradients are reduced holds in compiled steps too: graphs
    # divide by a factor themselves, and leave reduces with hooks or in other groups to the eager runtime. The order of
    # all-gathers in a compiled step is its plan's.

    # --- gradients ----------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward passes reduce gradients, also over replicas.

        Without, each rank accumulates its own unsharded gradients, and the next reduce takes their sum. In a compiled
        model this holds for the backward passes of forwards that run from now on.
        """
        for unit in _units(self, recurse):
            set_sync(unit, requires_gradient_sync)
            if not unit.options.all_reduces and requires_gradient_sync:
                unit.set_options(all_reduces=True)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether reduced gradients are averaged over replicas under hybrid sharding.

        Without, each replica sums up its own reduced gradients and leaves `.grad` as it is; the next backward pass with
        all-reduces averages the sums. Units that are only replicated accumulate as without gradient sync. ValueError
        with `reduction_order="tree"`, which these sums do not have.
        """
        if not requires_all_reduce:
            _check_any_order(_units(self, recurse), "set_requires_all_reduce")
        for unit in _units(self, recurse):
            if unit.replicas is not None:
                deferred = unit.options.has_deferred or not requires_all_reduce
                unit.set_options(all_reduces=requires_all_reduce, has_deferred=deferred)
            elif not unit.is_sharded:
                set_sync(unit, requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by `factor`, above 0, instead of by the number of ranks.

        A compiled step divides by the factor that its forward found; it compiles again when the factor has changed.
        """
        if not isinstance(factor, int | float) or not factor > 0:
            raise ValueError(f"factor must be a number above 0, not {factor!r}")
        for unit in self._fsdp.units:
            unit.set_options(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only add, and a kernel divides, where the backend could compute the mean."""
        for unit in self._fsdp.units:
            unit.set_options(only_sums=enable)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: Any = None) -> None:
        """Call `hook(gradient)` with each reduced gradient of this module, 1-D, which it may change in place.

        Under hybrid sharding that is the mean over replicas. The hook may run collectives of its own. It is called in
        the stream of reduces, or in `stream`, which ValueError refuses under hybrid sharding.
        """
        if not callable(hook):
            raise ValueError(f"hook must be callable, not a {type(hook).__name__}")
        if stream is not None and any(unit.replicas is not None for unit in self._fsdp.units):
            raise ValueError("stream must be None under hybrid sharding, whose all-reduce has a stream of its own")
        for unit in self._fsdp.units:
            unit.set_options(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether gradients are reduced in a process group of their own. All ranks must call this."""
        for unit in _units(self, recurse):
            groups = None
            if enable and unit.is_sharded:
                groups = tuple(separate_group(stage.name) for stage in unit.stages)
            unit.set_options(reduce_groups=groups)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Choose of how many units reduces of an eager backward, and their inputs, are in flight; by default 2."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not a {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, not {max_input_buffers}")
        for unit in _units(self, recurse):
            unit.set_options(reduces_in_flight=max_input_buffers)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted for FSDP2's sake: zeros are reduced for parameters without a gradient, whatever is chosen."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for FSDP2's sake: every backward pass waits for its own reduces, and keeps nothing for the next."""

    # --- unsharded parameters -----------------------------------------------------------------------------------------

    def set_writes_own_parameters(self, writes: bool, *, recurse: bool = True) -> None:
        """Say whether forwards may change parameters of their own unit through `.data`, at any time.

        What all ranks write alike then stays, as on an unsharded model, and ranks that differ get an error. Without
        this call it does where a forward changes values in its first two calls. Costs an all-reduce of three numbers
        for each unit and forward. Compiled, a unit whose graph would write runs eagerly, without this call too.
        ValueError if not a bool.
        """
        if not isinstance(writes, bool):
            raise ValueError(f"writes must be a bool, not {writes!r}")
        for listener in self._fsdp_runtime.listeners:
            if isinstance(listener, OwnWrites):
                listener.expect(_units(self, recurse), writes)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether unsharded parameters are freed between forward and backward. ValueError if not a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool here, not {reshard_after_forward!r}")
        for unit in _units(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether an eager backward frees unsharded parameters.

        If not, the next forward reads them, unless a parameter was changed on some rank; ranks ask each other.
        """
        for unit in _units(self, recurse):
            unit.set_options(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted for FSDP2's sake: what backward does not read is not gathered again in a compiled step anyway."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module | torch.distributed.fsdp.FSDPModule]) -> None:
        """Let an eager forward of this module start the all-gathers of `modules`, once it has waited for its own."""
        chosen = _units_of(modules)
        for unit in self._fsdp.units:
            unit.set_options(prefetch_in_forward=chosen)

    def set_modules_to_backward_prefetch(
        self, modules: Sequence[nn.Module | torch.distributed.fsdp.FSDPModule]
    ) -> None:
        """Let an eager backward of this module prefetch `modules`, not the module whose forward ended before."""
        chosen = _units_of(modules)
        for unit in self._fsdp.units:
            unit.set_options(prefetch_in_backward=chosen)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the all-gathers of the next eager forward of the root wait for `event`, recorded behind the optimizer's
        step, and not for what the current stream was given after it. It holds once."""
        self._fsdp_runtime.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for FSDP2's sake: where all-gathers are allocated is up to the runtime."""

    def _get_fsdp_state(self) -> Any:
        return StateForPipelines(self)

    # --- not offered --------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises NotImplementedError: compiled and eager steps share one set of collectives."""
        raise NotImplementedError(
            "set_custom_all_gather: compiled graphs contain the package's own all-gathers; to communicate by other "
            "means, pass fully_shard a process group with another backend"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises NotImplementedError: `register_comm_hook` reduces gradients by other means."""
        raise NotImplementedError(
            "set_custom_reduce_scatter: use register_comm_hook(state, hook) on the root, which works eager and compiled"
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Raises NotImplementedError if `enable`."""
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: collectives read and write flat parameters in place, "
                "so there is no staging buffer to allocate"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted for FSDP2's sake, with one warning: collectives use memory of the caching allocator."""
        _warn_of_symmetric_memory()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a call of `module.method_name(...)` gather and free the parameters of `module` as its forward does.

    Nothing happens if `module` is not sharded, so that a script may call this in any case.

    Raises:
        ValueError: `module` has no such method.
    """
    sharded: Any = getattr(module, "module", module) if "_fsdp" not in vars(module) else module
    if not isinstance(sharded, FSDPModule):
        return
    method = getattr(sharded, method_name, None)
    if not callable(method):
        raise ValueError(f"method_name: {original_class(sharded).__name__} has no method {method_name!r}")
    if getattr(method, "__self__", None) is sharded:
        function = method.__func__
    else:
        function = functools.wraps(method)(lambda self, *args, **kwargs: method(*args, **kwargs))
    setattr(sharded, method_name, MethodType(gathering(function), sharded))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let the roots `modules`, such as the stages of a pipeline in one process, use the same streams.

    Raises:
        ValueError: one of them is not sharded.
    """
    _units_of(modules)
    for module in modules[1:]:
        module._fsdp_runtime.share_streams(modules[0]._fsdp_runtime)


def check_options(options: dict[str, Any] | None) -> None:
    """Raise TypeError or ValueError now for bad options of `backend="fsdp_compile"`, and not in the first forward."""
    from fsdp_compile.passes.inductor import config_of  # imports Inductor

    config_of({} if options is None else options)


def gather_around_compiled(module: Any) -> None:
    """Let the eager runtime gather around what `nn.Module.compile` made of `module`, if it was called."""
    if module._compiled_call_impl is not None:
        module._compiled_call_impl = functools.partial(compiled_forward, module, module._compiled_call_impl)


@functools.cache
def _warn_of_symmetric_memory() -> None:
    warn_caller(
        "set_symm_mem_for_comm has no effect: collectives read and write flat parameters in place, in memory of the "
        "caching allocator; values are the same"
    )


def _describe(unit: Unit, sharding: ModuleSharding) -> str:
    """Parameters, strategy, precision and memory of a unit, for `repr`."""
    strategy = sharding.settings.strategy.name
    if unit.is_sharded:
        strategy += f" over {unit.group.size} ranks"
    if unit.replicas is not None:
        strategy += f" in {unit.replicas.size} copies"
    stored = ", ".join(sorted({str(flat.shard.dtype).removeprefix("torch.") for flat in unit.flats}))
    precision = unit.settings.precision
    casts = {"computed": precision.param_dtype, "reduced": precision.reduce_dtype, "buffers": precision.buffer_dtype}
    dtypes = [f"{verb} in {str(dtype).removeprefix('torch.')}" for verb, dtype in casts.items() if dtype is not None]
    nbytes = sum(flat.shard.nbytes for flat in unit.flats)
    return ", ".join([f"{len(unit.params)} parameters", strategy, stored, *dtypes, f"shard of {nbytes:,} bytes"])


def _check_root(module: Any, what: str, error: type[Exception]) -> None:
    if not module._fsdp.is_root:
        raise error(f"{what}: {type(module).__name__} is inside another sharded module; call it on the root")


def _check_any_order(units: Iterable[Unit], what: str) -> None:
    if any(unit.settings.same_bits for unit in units):
        raise ValueError(f"{what}: with reduction_order='tree' gradients are added up in one order; leave it out")


def _units(module: Any, recurse: bool) -> Sequence[Unit]:
    return units_gathered_below(module) if recurse else module._fsdp.units


def _units_of(modules: Sequence[Any]) -> tuple[Unit, ...]:
    """The units of sharded modules; ValueError if one of them is not sharded."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"modules: {type(module).__name__} is not sharded; call fully_shard on it")
    return tuple(unit for module in modules for unit in module._fsdp.units)
