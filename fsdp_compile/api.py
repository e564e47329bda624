"""`fully_shard`, `explain` and `explain_plan`.

    check arguments -> choose and check units -> shard them one by one -> connect modules, units and root

All but the first is in construct/. See Note [Nothing is changed on refusal] in construct/prepare.py.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from fsdp_compile.agree.kept import Kept
from fsdp_compile.agree.rank_order import RankOrder
from fsdp_compile.agree.root_checks import RootChecks
from fsdp_compile.agree.unused_parameters import Unused
from fsdp_compile.comm.groups import GroupArgument, check_ranks_of_tree, divide, resolve_groups
from fsdp_compile.config import MEASURE, CompileConfig, check_type
from fsdp_compile.construct.arguments import (
    asks_rows,
    asks_same_bits,
    check_module,
    check_one,
    dimensions_beside,
    given_device,
    group_of,
    mesh_to_shard,
    offload_of,
    precision_of,
    resolve_strategy,
    settings_of_units,
    warn_of_fsdp1,
)
from fsdp_compile.construct.prepare import prepare_units
from fsdp_compile.construct.refusals import check_model, check_prepared
from fsdp_compile.construct.rejoin import join_divided
from fsdp_compile.construct.units import connect, make_unit
from fsdp_compile.construct.wires import WireArgument, chosen_wires, set_wires
from fsdp_compile.construct.wrap_policy import AutoWrapPolicy, choose_units, collect_ignored
from fsdp_compile.core.ops import call_before_tracing
from fsdp_compile.core.settings import InitFn, PlacementFn, Settings, full_precision_in_eval, warn_caller
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.eager.accumulate import Accumulation, check_optimizers
from fsdp_compile.eager.early_entry import EarlyEntry
from fsdp_compile.eager.error_feedback import use_error_feedback
from fsdp_compile.eager.prefetch import Prefetch
from fsdp_compile.eager.runtime import Runtime
from fsdp_compile.edits.own_writes import OwnWrites
from fsdp_compile.edits.writeback import UserEdits
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.optim.flat import step_on_flat_shards
from fsdp_compile.parameter_owner import HasShardedParameters
from fsdp_compile.state_dict.optimizer import watch_optimizers
from fsdp_compile.tested_torch import TESTED_TORCH, is_untested

if TYPE_CHECKING:
    from fsdp_compile.explain.report import Report
    from fsdp_compile.passes.cost.hardware import Hardware


LISTENERS = (RootChecks, UserEdits, Accumulation, RankOrder, Prefetch, EarlyEntry, OwnWrites, Kept, Unused)
"""What hears of the passes over a sharded model, in this order (eager/forward_pass.py)."""

Options = ParamSpec("Options")
Module = TypeVar("Module", bound=nn.Module)

# Note [What type checkers see]
# What `fully_shard` returns is an instance of the user's class and of `FSDPModule`, and Python has no type for both. To
# type checkers it is the former. Scripts use attributes and methods of their own class far more often than those of
# `FSDPModule`, whose other attributes would have to be of any type, so that no mistake in them would be found. And one
# line adds `FSDPModule`, while nothing leads back from it:
#
#     assert isinstance(model, FSDPModule)
#
# From there on mypy and pyright take `model` for an instance of both. Without that line they refuse `model.no_sync()`,
# because `torch.nn.Module` declares every other attribute as a Tensor or a Module. torch's own function is declared to
# return its `FSDPModule`, which has neither the attributes of the user's class nor a call.


class _FullyShard(Protocol[Options]):
    """The type of `fully_shard`: Note [What type checkers see]."""

    @overload
    def __call__(self, module: Module, *_: Options.args, **options: Options.kwargs) -> Module: ...
    @overload
    def __call__(self, module: Sequence[Module], *_: Options.args, **options: Options.kwargs) -> list[Module]: ...


def _typed(function: Callable[Concatenate[Any, Options], Any]) -> _FullyShard[Options]:
    return function  # type: ignore[return-value]  # the implementation of both overloads


@_typed
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    auto_wrap_policy: AutoWrapPolicy = "auto",
    reduction_order: Literal["any", "tree"] = "any",
    shards: Literal["any", "rows"] = "any",
    find_unused_parameters: bool | None = None,
    wire: WireArgument = None,
    **fsdp1: Any,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of `module` over a process group, in place; return the same object, now an `FSDPModule` too.

    Parameters keep their identity and shape and become sharded tensors: `param.to_local()`, 1-D `[n]` with n >= 0, is
    what this rank stores, and `param.full_tensor()` gathers all elements: also on one rank, which stores all of them.
    During forward and backward module code finds plain tensors of the full shape. Gradients arrive on the parameters as
    the mean over the group, sharded alike. Operators on sharded tensors that reduce or gather must run on all ranks. An
    optimizer may be made before or after this call. For type checkers the return value has the type of `module`, and
    after `assert isinstance(model, FSDPModule)` both.

    All ranks must call this with the same model and arguments, and equal initial values. It may be called once, for a
    model, or as FSDP2 is: for each block, and then for the model around them.

    Args:
        module: a module, whose parameters are on one device per unit, but for those on the meta device. These get
            memory and `module.reset_parameters()` is called on each module that owns some; if one has no such method,
            all of this call stay there, to be given memory by `model.to_empty(device=...)` and values by the script,
            before the first forward. Quantized parameters, of integer or one-byte dtypes, do not train and are never
            cast. Submodules that are sharded already keep their units. Or a list of modules that share no submodules:
            all of their parameters are one unit, which is gathered when the first of them runs, and freed with the
            root's unit.
        mesh: device mesh to shard over, 1-D; 2-D, (replicas, shards), to shard within and average over replicas. None:
            all ranks shard.
        reshard_after_forward: whether unsharded parameters are freed between forward and backward. With a number n, a
            divisor of the number of ranks that shard, each rank stores an n-th of the parameters between forward and
            backward, and backward gathers within groups of n ranks only; 1 means False, and the number of all ranks
            True. If it is not given, all are resharded but the last unit, with which backward begins. With "auto" a
            compiled step does not reshard those units whose second all-gather would make it longer, as far as its
            budget allows: ranks measure their link for that, unless one is named (`CompileConfig`).
        shard_placement_fn: is asked about every parameter and may return a `Shard` or None. The dimension has no
            effect: see Note [Which elements a rank stores].
        mp_policy: dtypes of unsharded parameters and of reduced gradients. The shards and what the optimizer sees keep
            the parameters' own dtype. Inputs of every unit are cast to `param_dtype`, unless `cast_forward_inputs` is
            False; floating outputs of `module` are cast to `output_dtype`, if it is given.
        offload_policy: with a `CPUOffloadPolicy` shards and gradients are stored, and the optimizer runs, on the CPU.
        ignored_params: parameters to leave alone: not sharded, moved or initialized. Or modules, with all below them.
        dp_mesh_dims: torch's `DataParallelMeshDims`: which dimensions of `mesh` to shard and to replicate over. If
            others have more than one rank, all parameters must be DTensors on them.
        auto_wrap_policy: which submodules become units of their own. "auto" chooses the outermost repeated blocks,
            unless submodules are sharded already; if a module around `module` is sharded later, what it chose becomes
            one unit, as in FSDP2. With None `module` is one unit; otherwise a set of module classes, or a
            `ModuleWrapPolicy`, `CustomPolicy` or callable as `torch.distributed.fsdp` takes it. A `CustomPolicy` may
            set the arguments of `FullyShardedDataParallel` for a module otherwise than for the model.
        reduction_order: with "tree" the mean of a step's gradients is a binary tree over its microbatches, the number
            of ranks times that of microbatches which `no_sync` accumulates, each a power of two; and norms and other
            sums over sharded tensors are exact. Training then ends with the same bits on 1, 2, 4, ... ranks: see
            docs/reproducibility.md for the rest of the recipe. Not with float16 and communication hooks. With "any"
            sums have the order of the fastest collective.
        shards: "rows" guarantees that each rank stores complete rows of each parameter, or raises ValueError with the
            parameter, the number of ranks and the padding that it would take. Then `param.to_local()` is
            `[rows, ...]`, torch's `compute_local_shape_and_global_offset` says which rows of the whole these are, and
            `_local_tensor` and `_spec` can be read. With "any" a shard ends within a row only where no padding of up
            to 1/512, or 1/50 if then none does, avoids that. Ranks store different numbers of rows either way.
        find_unused_parameters: whether ranks tell each other after each backward which parameters they have used, by an
            all-reduce of a byte for each, so that `.grad` stays None where no rank has. None: after the first two, and
            then only if a rank had left some out; one that first does so later gets zeros, and a warning. False: never;
            unused parameters of a unit in use get zeros. The setting of the outermost call is in force.
        wire: the format in which ranks send parameters and gradients, to send fewer bytes: "bf16", "fp8" or "int8", or
            a `Wire`, which may choose one for gathers and one for reduces. A mapping has choices by patterns of
            parameter names (the first that fits), a function returns one for each name; None: in full. Parameters of a
            unit that are sent in different ways are flat parameters of their own. See docs/wire.md.
        fsdp1: options under the names that FSDP1 has, which warn, once each, and go with the next minor version;
            `FullyShardedDataParallel` keeps them.

    Raises:
        RuntimeError: no process group is initialized, or a unit's parameters are spread over devices.
        TypeError: an argument has the wrong type.
        ValueError: an argument or a parameter cannot be sharded, or a variable in the environment has a value that
            `CompileConfig` cannot have; the message says which and what to do.

    Nothing has been changed when one of these is raised. An error that `reset_parameters` raises, or a ValueError about
    what it left, comes while units are made, and leaves a model that is sharded in part.
    """
    for name in fsdp1:
        warn_of_fsdp1(name)
    return shard_module(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        auto_wrap_policy=auto_wrap_policy,
        reduction_order=reduction_order,
        shards=shards,
        find_unused_parameters=find_unused_parameters,
        wire=wire,
        **fsdp1,
    )


def shard_module(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    process_group: GroupArgument | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    auto_wrap_policy: AutoWrapPolicy = "auto",
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_id: int | str | torch.device | None = None,
    param_init_fn: InitFn | None = None,
    sync_module_states: bool = False,
    devices_per_node: int | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    reduction_order: Literal["any", "tree"] = "any",
    shards: Literal["any", "rows"] = "any",
    find_unused_parameters: bool | None = None,
    wire: WireArgument = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    dp_mesh_dims: Any = None,
) -> FSDPModule | list[FSDPModule]:
    """As `fully_shard` and `FullyShardedDataParallel` say of their options; of two names of one, one may be given."""
    _check_environment()
    modules: Sequence[Any] = module if isinstance(module, Sequence) and not isinstance(module, nn.Module) else (module,)
    for each in modules:
        check_module(each)
    model: Any = group_of(modules) if modules is module else module
    check_type("sync_module_states", sync_module_states, bool)
    check_type("backward_prefetch", backward_prefetch, BackwardPrefetch | None)
    check_type("forward_prefetch", forward_prefetch, bool)
    check_type("limit_all_gathers", limit_all_gathers, bool)
    check_type("find_unused_parameters", find_unused_parameters, bool | None)
    mesh, beside = mesh_to_shard(mesh, dp_mesh_dims), dimensions_beside(mesh, dp_mesh_dims)
    strategy = resolve_strategy(sharding_strategy, reshard_after_forward, mesh)
    frees = "last" if sharding_strategy is None and reshard_after_forward is None else reshard_after_forward
    precision, output_dtype = precision_of(mixed_precision, mp_policy)
    same_bits, rows = asks_same_bits(reduction_order, precision, modules), asks_rows(shards)
    check_one(ignored_states=ignored_states, ignored_params=ignored_params)
    ignored = collect_ignored(model, ignored_modules, ignored_states if ignored_params is None else ignored_params)
    device = given_device(device_id)
    groups = resolve_groups(mesh, process_group, strategy, auto_wrap_policy is not None, devices_per_node)
    if same_bits:
        check_ranks_of_tree(groups)
    groups = divide(groups, frees)
    offload, pin_memory = offload_of(cpu_offload, offload_policy)
    settings = Settings(
        strategy=strategy,
        groups=groups,
        reshard_after_forward=frees,
        device=device,
        precision=precision,
        output_dtype=output_dtype,
        offload=offload,
        pin_memory=pin_memory,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        same_bits=same_bits,
        rows=rows,
        full_precision_in_eval=full_precision_in_eval(),
        find_unused_parameters=find_unused_parameters,
        param_init_fn=param_init_fn,
        sync_module_states=sync_module_states,
        shard_placement_fn=shard_placement_fn,
    )
    chosen = choose_units(model, None if modules is module else auto_wrap_policy, ignored, precision)
    of_units = settings_of_units(model, chosen, settings)
    check_model(model, of_units, ignored)
    prepared_units = prepare_units(model, of_units, ignored)
    check_prepared(model, prepared_units, beside)
    wires = chosen_wires(wire, prepared_units)
    # No argument is refused from here on, and modules change: Note [Nothing is changed on refusal].
    join_divided(model, FSDPModule)
    set_wires(wires)
    for prepared in prepared_units:
        make_unit(model, prepared, ignored, FSDPModule)
    # Joining units again would lose digits of buffers that are cast.
    is_divided = auto_wrap_policy == "auto" and len(prepared_units) > 1 and precision.buffer_dtype is None
    connect(model, ignored, Runtime(settings, is_divided, LISTENERS), HasShardedParameters)
    use_error_feedback(units_gathered_below(model))
    _prepare_process()
    return list(modules) if modules is module else model


def explain(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Callable[[int, int], Sequence[Any]] | None = None,
    *,
    world_size: int | Sequence[int],
    batch: int | Sequence[int] = 1,
    sequence: int | Sequence[int] = 2048,
    hardware: "str | Path | Hardware | None" = None,
    alternatives: bool = True,
    **options: Any,
) -> "Report":
    """Predict what a training step of `model` takes on clusters that need not exist here: seconds, bytes, tokens/s.

    This needs no other rank, no GPU and no memory for the model.

    Args:
        model: a function without arguments that makes the model, unsharded, or such a model, which stays as it is.
            What a function makes gets no memory, so it may be larger than this machine.
        example_inputs: given (batch, sequence), returns positional arguments of a forward; None: token ids, and
            targets if forward has a second argument, int64 of shape [batch, sequence].
        world_size: number of GPUs, one rank each. This and every option below may be a sequence of values; there is
            one prediction for each combination.
        batch: sequences per rank of one forward.
        sequence: tokens of a sequence.
        hardware: name of a hardware file that the package has, the path of another one, such as `fsdp-compile
            calibrate` writes, or a `Hardware`; None: "h100-80".
        alternatives: whether other settings are tried too, for `Prediction.alternatives` and `.best`.
        options: the other fields of `fsdp_compile.explain.prediction.Setting`: strategy, checkpointing, accumulation,
            precision, optimizer, clip, runtime, compiled, network, ranks_per_node, shard_size, keep, reduce_dtype,
            wire_gather, wire_reduce.

    Returns:
        A report: `str()` gives a table, `to_json()` and `to_trace()` the other forms.

    Raises:
        TypeError: an option is no field of `Setting`.
        ValueError: an option has a value that it cannot have, hardware is unknown, `model` raises an error, is on an
            accelerator or cannot be traced. Nothing that was passed in is changed.
    """
    from fsdp_compile.explain.predict import predict_step
    from fsdp_compile.explain.prediction import hardware_of, settings_of
    from fsdp_compile.explain.report import Report

    used = hardware_of(hardware)
    settings = settings_of({"world_size": world_size, "batch": batch, "sequence": sequence, **options}, used)
    return Report(tuple(predict_step(model, settings, example_inputs, hardware=used, alternatives=alternatives,
                                     shard=fully_shard)))  # fmt: skip


def explain_plan(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Any] | Callable[..., Sequence[Any]] | None,
    *,
    link: str,
    world_size: int | None = None,
    device: str | None = None,
    budget: int | None = None,
    optimizer: str | None = None,
    clip: bool = False,
    batch: int = 1,
    sequence: int = 2048,
) -> "Report":
    """Predict the plan that a compiled step of `model` would follow, without running it.

    This needs no other rank, no GPU and no kernels.

    Args:
        model: a sharded model; an unsharded one, a copy of which is sharded with `reshard_after_forward="auto"`; or a
            function that makes either. What a function makes gets no memory, so it may be larger than this machine.
        example_inputs: positional arguments of a forward, or as in `explain`. Under `torch.no_grad()` the plan is that
            of a forward alone.
        link: what connects the ranks, as in `CompileConfig`.
        world_size: number of ranks, which need not exist; None: those of the process group that is initialized.
        device: what computes, as in `CompileConfig`.
        budget: number of bytes that may live at once, or None for no limit.
        optimizer: "adamw", "adam", "momentum" or "sgd": its update follows; "muon": Muon for the matrices of repeated
            blocks, and the report ends with what these compute and exchange; None: forward and backward alone.
        clip: whether gradients are clipped by their norm before the update.
        batch: sequences per rank of one forward, unless `example_inputs` are arguments.
        sequence: tokens of each.

    Returns:
        A report: `str(report)` is a table of all collectives, the other forms are as of `explain`.

    Raises:
        PlanError: no plan fits into `budget`.
        ValueError: a name is unknown, or `world_size` is missing, or not that of a model that is sharded.
    """
    from fsdp_compile.explain.batch import batch_of
    from fsdp_compile.explain.sharded import explain_sharded  # imports Inductor
    from fsdp_compile.passes.inductor import checked

    check_type("link", link, str)
    check_type("model", model, nn.Module | Callable)
    check_type("example_inputs", example_inputs, Sequence | Callable | None)
    config = checked(CompileConfig(link=link, device=device, budget=budget))
    shard = functools.partial(fully_shard, reshard_after_forward="auto")

    def given(made: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        if isinstance(example_inputs, Sequence):
            return [*example_inputs], {}
        return batch_of(made, example_inputs, batch, sequence)

    return explain_sharded(model, shard, given, config, world_size, optimizer, clip)


def _check_environment() -> None:
    """Raise ValueError now, and not when a compiled forward is traced, if `FSDP_COMPILE_*` have impossible values."""
    try:
        config = CompileConfig.from_environment()
        if config.link not in (None, MEASURE) or any((config.disable, config.device, config.plan)):
            from fsdp_compile.passes.inductor import checked  # imports Inductor

            checked(config)
    except ValueError as error:
        raise ValueError(f"variables FSDP_COMPILE_* of the environment: {error}") from None


def _prepare_process() -> None:
    call_before_tracing(_install_passes)
    watch_optimizers()
    check_optimizers()
    step_on_flat_shards()  # behind these: it gives the step a closure
    _warn_of_untested_torch()


@functools.cache
def _warn_of_untested_torch() -> None:
    if is_untested(torch.__version__):
        warn_caller(
            f"torch {torch.__version__} is newer than {TESTED_TORCH[-1]}, the newest that this version of fsdp_compile "
            "was tested on; `fsdp-compile selfcheck` says whether it works"
        )


def _install_passes() -> None:
    """Hook the passes into Inductor, which is imported here: when a sharded model is first traced."""
    from fsdp_compile.passes.inductor import install

    install()
