"""`compile_step`: a whole training step as one call.

    step = compile_step(model, optimizer, loss_fn, clip_norm=1.0, accumulate=4)
    for inputs, target in loader:
        loss = step(inputs, target=target)
        schedule.step()

forward, loss, backward    as `torch.compile(model)` and a loop would run them, once for each micro-batch
clip                       the norm of all gradients, by one all-reduce for each process group
update                     a compiled function for each flat shard (optim/compiled_update.py)
zero_grad                  gradients are freed

What is not a part of a step, such as learning rate schedules, evaluation and checkpoints, stays as it is: between two
calls parameters and the optimizer are what the same loop, written out, would have left.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.config import CompileConfig, StepUpdate, update_moves
from fsdp_compile.core._torch import tree_map
from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit, VersionCounters, check_idle
from fsdp_compile.eager.accumulate import drop_cleared
from fsdp_compile.eager.next_forward import NextForward
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.optim.compiled_update import CompiledUpdate, FlatUpdate
from fsdp_compile.optim.gradient_norm import gradient_norm
from fsdp_compile.optim.update_in_backward import UpdateInBackward, describe_partial
from fsdp_compile.wrapper import FullyShardedDataParallel

# Note [Updates begin when backward has ended]
# Without clipping the update of a unit might run as soon as its own reduce has ended, beside those that are under way.
# The last reduce is that of the unit which the next forward reads first, so R, that reduce, u, that unit's update, and
# G, its all-gather, follow each other in any case. All updates together take U. As it is, the other ones run beside G:
#
#     last reduce R | u | the other updates, beside G | forward         R + max(u + G, U)
#
# If some of them ran beside R already, this would be R + u + max(G, U - u - R): something is gained only where updates
# take longer than one all-gather, and then at most R. With blocks on the emulated link U is 1.4 ms, and G 6 ms on the
# fastest link that is measured: nothing. With layers there R is 2 of 390 ms. For this backward's graph would have to
# return gradients that nobody may read yet, and on gloo rows that are still to be added.
#
# What it costs is memory: gradients of all units live when backward ends. With `update_in_backward` an operator in the
# graph updates a unit right behind its reduce (optim/update_in_backward.py), so that about one of them lives. The graph
# returns none of these. Backward then takes what updates took; no other collectives begin in an update than those that
# are under way.

_INDUCTOR = ("inductor", "fsdp_compile")
_PREFETCHED = 2  # units that are prefetched where no plan says how many


def compile_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    *,
    scaler: torch.amp.GradScaler | None = None,
    prefetch: int | Literal["auto"] = "auto",
    update_in_backward: bool = False,
    backend: str = "fsdp_compile",
    options: dict[str, Any] | None = None,
) -> "CompiledStep":
    """A callable that trains `model` by one step: forward, backward, clipping, update, zero_grad.

    The optimizer's update is compiled too, if it is one of those that `fsdp_compile.optim.flat_step` takes; another one
    steps as it is. With Inductor its results differ from those of `optimizer.step()` by rounding; with any other
    backend they are the same bits.

    Args:
        model: what `fully_shard` or `FullyShardedDataParallel` returned, which is compiled here, unless
            `model.compile()` was called; or what `torch.compile` made of that.
        optimizer: over `model.parameters()`, and maybe others.
        loss_fn: called with the model's output, and with the step's `target` if one is given; returns the mean loss of
            the batch, shape `()`. None: the output is the loss.
        clip_norm: the largest 2-norm that the gradients of all parameters, of the model and of the optimizer, may have
            together, as in `torch.nn.utils.clip_grad_norm_`; None: gradients are not clipped.
        accumulate: into how many micro-batches a batch is divided. Their gradients are added up on each rank, and
            reduced once.
        scaler: scales the loss and skips steps with infinite gradients, as in a loop that uses it.
        prefetch: how many units are gathered for the next step's forward as soon as their update has ended, the first
            ones in its order; fewer, if a plan that knows of the update finds that more bring nothing. Their memory
            lives until that forward. "auto": as many as the plan wants; two where there is none, as without a link.
        update_in_backward: whether each unit is updated within backward as soon as its gradient is reduced, which is
            freed then: the gradients of about one unit live at a time, instead of all. The step may take
            longer. An error in backward may come after some updates: see `CompiledStep.__call__`. docs/whole_step.md
            says what is updated after backward all the same.
        backend: of `torch.compile`, for a model that is not compiled yet. With "fsdp_compile" the plan knows of the
            update. That is fused with this one and "inductor", and run by the optimizer's own kernels with others.
        options: of `torch.compile`, likewise; for "fsdp_compile" fields of `CompileConfig`, in place of what the
            environment says.

    Raises:
        TypeError: `model` was not sharded by `fully_shard`, or is inside another sharded module.
        ValueError: `clip_norm` is not above 0, `accumulate` is below 1, or `prefetch` is below 0; or
            `update_in_backward` beside one of `clip_norm`, `accumulate` and `scaler`, which need the gradients of all
            units, or with an optimizer that is not elementwise.
    """
    called: Any = getattr(model, "_orig_mod", model)
    sharded = called.module if isinstance(called, FullyShardedDataParallel) else called
    if not isinstance(sharded, FSDPModule) or not sharded.is_root():
        raise TypeError(
            f"model: expected what fully_shard returned, compiled or not, and no module inside of that, found "
            f"{type(sharded).__name__}; call fully_shard on the whole model"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm: expected a number above 0, or None, found {clip_norm!r}")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a number of micro-batches, at least 1, found {accumulate!r}")
    if update_in_backward and (clip_norm is not None or accumulate > 1 or scaler is not None):
        given = f"clip_norm={clip_norm}, accumulate={accumulate}, scaler={scaler and type(scaler).__name__}"
        raise ValueError(
            f"update_in_backward: expected no clip_norm, no accumulate and no scaler beside it, as these need the "
            f"gradients of all units before an update, found {given}; leave one out"
        )
    update = CompiledUpdate(optimizer, fuses=backend in _INDUCTOR)
    units = units_gathered_below(sharded)
    flats = [flat for unit in units for flat in unit.flats]
    in_backward = UpdateInBackward(update, flats) if update_in_backward else None
    planned = StepUpdate(update_moves(_states(optimizer)), clip_norm is not None, prefetch, update_in_backward)
    for unit in units:
        unit.set_may_update(update_in_backward)
    run: Any = model
    records = False
    if called is model and model._compiled_call_impl is None:
        if backend == "fsdp_compile":
            default = CompileConfig.from_environment()
            chosen = {each.name: getattr(default, each.name) for each in fields(CompileConfig)}
            options = {**chosen, "update": planned, **(options or {})}
            records = options["record_profile"]
        run = torch.compile(model, backend=backend, options=options)
    first = _PREFETCHED if prefetch == "auto" else prefetch
    return CompiledStep(
        sharded, units, run, update, in_backward, loss_fn, clip_norm, accumulate, scaler, first, records
    )


def _states(optimizer: Optimizer) -> int:
    """How many states of its shape a parameter has, if the optimizer is elementwise; others are taken for Adam."""
    group = optimizer.param_groups[0]
    states = {torch.optim.SGD: 0, torch.optim.Adagrad: 1, torch.optim.RMSprop: 1}.get(type(optimizer), 2)
    return states + sum(bool(group.get(option)) for option in ("momentum", "centered", "amsgrad"))


class CompiledStep:
    """What `compile_step` returns. Its arguments are explained there.

    Attributes:
        model: the sharded model.
        optimizer: its optimizer.
    """

    def __init__(
        self,
        model: FSDPModule,
        units: Sequence[Unit],
        run: Callable[..., Any],
        update: CompiledUpdate,
        in_backward: UpdateInBackward | None,
        loss_fn: Callable[..., Tensor] | None,
        clip_norm: float | None,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        first: int,
        records: bool,
    ) -> None:
        self.model, self.optimizer = model, update.optimizer
        self._run, self._update, self._loss_fn = run, update, loss_fn
        self._clip_norm, self._accumulate, self._scaler = clip_norm, accumulate, scaler
        self._units, self._next_forward, self._records = units, NextForward(units, first), records
        self._flats = [flat for unit in units for flat in unit.flats]
        self._in_backward = in_backward
        self._broken: dict[Unit, VersionCounters] = {}  # after an error that has left some units updated

    def __call__(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """One step of training on this rank's batch.

        If the step accumulates, every tensor with dimensions among the arguments, also within tuples, lists and dicts,
        is divided along dimension 0; all else goes to every micro-batch.

        Args:
            args, kwargs: of the model.
            target: for the loss function, if not None.

        Returns:
            The loss on this rank, without a graph, shape `()`; the mean over micro-batches.

        Raises:
            RuntimeError: gradients are not synchronized: this is called within `no_sync`. With `update_in_backward`: an
                error has come after some updates, and is the cause; or it did in an earlier call, and not all trained
                units have been loaded from a checkpoint since then.
            ValueError: a forward or backward of the model is under way; or a tensor cannot be divided.
            Exception: what the model or the loss function raises. Gradients of this step are dropped, parameters are
                those before it, and the next call is an ordinary step.
        """
        self._check()
        batches = split_batch((args, kwargs, target), self._accumulate)
        losses = []
        try:
            for position, (own_args, own_kwargs, own_target) in enumerate(batches):
                last = position == len(batches) - 1
                with self._taking_gradients() if last else self.model.no_sync():
                    losses.append(self._backward(own_args, own_kwargs, own_target, position == 0))
            self._step()
        except BaseException as error:
            self._drop_gradients()
            self._next_forward.drop()
            if self._in_backward is not None and self._in_backward.updated:
                self._broken = {unit: unit.version_counters() for unit in self._units if unit.trains}
                if isinstance(error, Exception):
                    raise RuntimeError(
                        f"step: expected backward to end, found an error after some updates: {self._advice()}"
                    ) from error
            raise
        self.optimizer.zero_grad()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _advice(self) -> str:
        assert self._in_backward is not None
        left = describe_partial(self._in_backward.updated, self._flats)
        return f"{left}; load a checkpoint of model and optimizer before the next step"

    def _check(self) -> None:
        check_idle(self._units, "step")
        if any(unit.version_counters() == counters for unit, counters in self._broken.items()):
            raise RuntimeError(f"step: expected parameters of one step, found an earlier call failed: {self._advice()}")
        self._broken.clear()
        if self._in_backward is not None:
            self._in_backward.updated.clear()
        for unit in self._units:
            if not unit.syncs:
                raise RuntimeError(
                    f"step: expected gradients to be synchronized, found {unit} without; call it outside of no_sync, "
                    f"and let compile_step(..., accumulate=n) accumulate gradients"
                )

    @contextmanager
    def _taking_gradients(self) -> Iterator[None]:
        """Where the norm and the update are all that read gradients, parameters get none: flat ones are read."""
        reads_flat = self._scaler is None and self._update.fuses and self._update.is_elementwise()
        for flat in self._flats:
            flat.reduction.keeps_flat = reads_flat
        try:
            yield
        finally:
            for flat in self._flats:
                flat.reduction.keeps_flat = False

    def _backward(self, args: Any, kwargs: Any, target: Any, is_first: bool) -> Tensor:
        """Forward and backward of one micro-batch, maybe the first one since the update; its loss."""
        with torch.enable_grad():
            if is_first:
                self._record(len(self._flats) + 1, ends=True)
            with self._next_forward.offered() if is_first else nullcontext():
                output = self._run(*args, **kwargs)
            loss: Tensor = output
            if self._loss_fn is not None:
                loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
            shared = loss if self._accumulate == 1 else loss / self._accumulate
            with nullcontext() if self._in_backward is None else self._in_backward.running(loss):
                (shared if self._scaler is None else self._scaler.scale(shared)).backward()
        return loss.detach()

    def _step(self) -> None:
        """Clip and update."""
        self._record(0, ends=False)
        if self._scaler is None:
            self._clip_and_update()
            return
        optimizer: Any = _Scaled(self.optimizer, self._clip_and_update)
        self._scaler.unscale_(optimizer)
        self._scaler.step(optimizer)
        self._scaler.update()

    def _record(self, stretch: int, ends: bool) -> None:
        """Note the time for `TaskProfile`. Stretches: before the first update, each unit's, until the next step."""
        if self._records:
            name = f"update of {len(self._flats)} units"  # as passes/cost/roofline.py reads it
            RECORD_TIME(name, stretch, 2 * stretch + ends, self._flats[0].shard.device)

    def _clip_and_update(self) -> None:
        limit = self._clip_norm
        if limit is not None and not self._update.fuses:
            nn.utils.clip_grad_norm_(self._clipped_params(), limit)
            limit = None
        updates = self._update.begin()
        coefficient = None if limit is None else self._clip_others(updates, limit)
        self._update.step_others(updates)
        self._run_updates(updates, coefficient)

    def _clip_others(self, updates: Sequence[FlatUpdate], limit: float) -> Tensor:
        """Clip the gradients that `updates` do not read; the coefficient by which those multiply theirs."""
        for flat in set(self._flats).difference(update.flat for update in updates):
            flat.show_gradient()
        params = self._clipped_params()
        norm = gradient_norm(params, updates)
        updated = {id(param) for update in updates for param in update.params}
        nn.utils.clip_grads_with_norm_([param for param in params if id(param) not in updated], limit, norm)
        return torch.clamp(limit / (norm + 1e-6), max=1.0)  # as `clip_grads_with_norm_` computes it

    def _run_updates(self, updates: Sequence[FlatUpdate], coefficient: Tensor | None = None) -> None:
        """Update units in the order of the forward, and gather the first ones for the next one behind the others."""
        pending = {update.flat: update for update in updates}
        self._record(0, ends=True)
        stretch = 0
        for unit in self._next_forward.units:
            for flat in unit.flats:
                stretch += 1
                self._record(stretch, ends=False)
                flat_update = pending.pop(flat, None)
                if flat_update is None:
                    flat.show_gradient()  # no parameter of it is the optimizer's
                else:
                    flat_update.run(coefficient)
                self._record(stretch, ends=True)
            self._next_forward.start(unit)
        for update in pending.values():  # of another model
            update.run(coefficient)
        self._next_forward.start_next_stages()
        self._record(stretch + 1, ends=False)

    def _clipped_params(self) -> list[nn.Parameter]:
        """The parameters whose gradients count: first those of the model in its order, which decides rounding."""
        params = dict.fromkeys(self.model.parameters())
        params.update(dict.fromkeys(param for group in self.optimizer.param_groups for param in group["params"]))
        return list(params)

    def _drop_gradients(self) -> None:
        """After a failure: forget what was accumulated and reduced in this step, on this rank."""
        self.optimizer.zero_grad()
        for flat in self._flats:
            flat.reduction.flat_gradient = None
            for param in flat.params:
                param.grad = None
            drop_cleared(flat)


class _Scaled:
    """What a GradScaler sees as the optimizer: its parameters, and a step that it may skip."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        self.param_groups, self.step = optimizer.param_groups, step


def split_batch(batch: Any, micro_batches: int) -> Sequence[Any]:
    """Divide each tensor of `batch` with dimensions along dimension 0 into equal parts.

    Raises:
        ValueError: its size does not divide by `micro_batches`.
    """
    if micro_batches == 1:
        return [batch]

    def cut(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim():
            if value.shape[0] % micro_batches:
                raise ValueError(
                    f"accumulate: expected tensors whose dimension 0 divides by {micro_batches}, found "
                    f"{tuple(value.shape)}; drop the last examples or pad the batch"
                )
            return value.chunk(micro_batches)[index]
        return value

    return [tree_map(lambda value, index=index: cut(value, index), batch) for index in range(micro_batches)]
