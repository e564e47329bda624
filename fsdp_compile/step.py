"""`compile_step`: a whole training step as one call.

    step = compile_step(model, optimizer, loss_fn, clip_norm=1.0, accumulate=4)
    for inputs, target in loader:
        loss = step(inputs, target=target)
        schedule.step()

It runs forward, loss and backward as `torch.compile(model)` in a loop, clips by one all-reduce for each process group,
lets the optimizer update each flat shard as one parameter (optim/flat.py), and frees the gradients. Between two calls,
parameters and the optimizer are what the same loop, written out, would have left.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.config import CompileConfig, check_type
from fsdp_compile.construct.blocks import repeated_blocks
from fsdp_compile.core._torch import tree_map
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit, VersionCounters, check_idle
from fsdp_compile.eager.accumulate import drop_cleared
from fsdp_compile.fsdp_module import FSDPModule, check_options
from fsdp_compile.optim.joint import JointStep
from fsdp_compile.tensors.sharded_reductions import gradient_norm
from fsdp_compile.wrapper import FullyShardedDataParallel

# Note [Updates begin when backward has ended]
# Without clipping, a unit might be updated as soon as its own reduce has ended, beside later reduces, and gathered for
# the next forward behind its update. Both were built and measured: on the emulated link with blocks as units they hid
# 2.3, 1.2 and 0.6 of 410 ms at 0.3, 0.6 and 0.9, and on an H100 steps took up to 3 % longer. All that remains of it is
# memory: gradients of all units live when backward ends, unless `update_in_backward` is asked for. Then an operator in
# the graph updates a unit right behind its reduce (optim/joint.py), so that about one gradient lives. Backward
# takes the time of the updates, and no new collectives begin during an update.

_INDUCTOR = ("inductor", "fsdp_compile")
_FAILED = "failed while parameters were updated; load a checkpoint of model and optimizer before the next step"


def compile_step(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: Callable[..., Tensor] | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    *,
    scaler: torch.amp.GradScaler | None = None,
    prefetch: int | Literal["auto"] | None = None,
    update_in_backward: bool = False,
    regional: bool = False,
    backend: str = "fsdp_compile",
    options: dict[str, Any] | None = None,
) -> "CompiledStep":
    """Return a callable that trains `model` by one step: forward, backward, clipping, update, zero_grad.

    Updates each flat shard as one tensor if the optimizer is elementwise, one of those that
    `fsdp_compile.optim.flat_step` takes; otherwise calls `optimizer.step()`. With Inductor, torch's fused kernels run
    where they can and the optimizer leaves it open; with any other backend results are those of `optimizer.step()`, bit
    for bit. Matrices of `torch.optim.Muon` go to the ranks that compute with complete ones while other parameters are
    updated (docs/optimizers.md).

    Args:
        model: a model sharded by `fully_shard` or `FullyShardedDataParallel`, which is compiled here unless
            `model.compile()` was called; or such a model after `torch.compile`.
        optimizer: over `model.parameters()`, and maybe others; or several, each over some of them, such as Muon for
            matrices and AdamW for the rest.
        loss_fn: called with the model's output, and with the step's `target` if one is given; returns the mean loss of
            the batch, shape `()`. None: the output is the loss.
        clip_norm: the largest 2-norm of the gradients of all parameters, of the model and of the optimizer, as in
            `torch.nn.utils.clip_grad_norm_`; None: gradients are not clipped.
        accumulate: number of micro-batches into which a batch is divided. Their gradients are added up on each rank,
            and reduced once.
        scaler: scales the loss and skips steps with infinite gradients, as in a loop that uses it.
        prefetch: has no effect, warns, and will go.
        update_in_backward: updates each unit within backward as soon as its gradient is reduced, and frees the
            gradient: gradients of about one unit live at a time, instead of all. The step may take longer. An error in
            backward may come after some updates: see `CompiledStep.__call__`. docs/whole_step.md lists what is updated
            after backward even so.
        regional: compiles the sharded blocks of the model one by one, and runs what is around them eagerly: compile
            time does not grow with the number of equal blocks. Communication then follows the eager runtime's rule.
        backend: of `torch.compile`, for a model that is not compiled yet. With "fsdp_compile" and "inductor" torch's
            fused kernels run, with others the optimizer's choice.
        options: of `torch.compile`, likewise; for "fsdp_compile" fields of `CompileConfig`, which override the
            environment.

    Raises:
        TypeError: `model` was not sharded by `fully_shard`, or is inside another sharded module; or an argument has the
            wrong type.
        ValueError: an option, `clip_norm` or `accumulate` is out of range; or `update_in_backward` is
            combined with `clip_norm`, `accumulate` or `scaler`, or with an optimizer that is not elementwise; or
            `regional` is asked for where the model is compiled already, or has no sharded blocks.
    """
    called: Any = getattr(model, "_orig_mod", model)
    sharded = called.sharded_module if isinstance(called, FullyShardedDataParallel) else called
    if not isinstance(sharded, FSDPModule) or not sharded.is_root():
        raise TypeError(
            f"model: expected a model sharded by fully_shard, and not a module inside one, found "
            f"{type(sharded).__name__}; call fully_shard on the whole model"
        )
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer: expected an Optimizer, or several, found {type(each).__name__}")
    if not optimizers:
        raise ValueError("optimizer: expected one or several, found none")
    check_type("loss_fn", loss_fn, Callable | None)
    check_type("clip_norm", clip_norm, float | None)
    check_type("accumulate", accumulate, int)
    check_type("scaler", scaler, torch.amp.GradScaler | None)
    check_type("update_in_backward", update_in_backward, bool)
    check_type("regional", regional, bool)
    check_type("backend", backend, str | Callable)
    check_type("options", options, dict | None)
    if backend == "fsdp_compile":
        check_options(options)
    if prefetch is not None:
        warn_caller("compile_step: prefetch has no effect any more, and goes with the next minor version; leave it out")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm: expected a number above 0, or None, found {clip_norm!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate: expected a number of micro-batches, at least 1, found {accumulate!r}")
    if update_in_backward and (clip_norm is not None or accumulate > 1 or scaler is not None):
        given = f"clip_norm={clip_norm}, accumulate={accumulate}, scaler={scaler and type(scaler).__name__}"
        raise ValueError(
            f"update_in_backward cannot be combined with clip_norm, accumulate or scaler, which need the gradients of "
            f"all units before the first update, found {given}; leave one out"
        )
    units = units_gathered_below(sharded)
    flats = [flat for unit in units for flat in unit.flats]
    update = JointStep(optimizers, flats, backend in _INDUCTOR, update_in_backward)
    for unit in units:
        unit.set_may_update(update_in_backward)
    run: Any = model
    compiles = called is model and model._compiled_call_impl is None
    if compiles and backend == "fsdp_compile":
        options = {**vars(CompileConfig.from_environment()), **(options or {})}
    if regional:
        if not compiles:
            raise ValueError("regional: the model is compiled already; pass it as fully_shard returns it")
        blocks = [block for block in repeated_blocks(sharded) if isinstance(block, FSDPModule)]
        if not blocks:
            raise ValueError(
                "regional: the model has no repeated blocks that are units; name their class in auto_wrap_policy of "
                "fully_shard, or leave regional out"
            )
        for block in blocks:
            if block._compiled_call_impl is None:
                block.compile(backend=backend, options=options)
    elif compiles:
        run = torch.compile(model, backend=backend, options=options)
    return CompiledStep(sharded, optimizer, run, update, units, (loss_fn, clip_norm, accumulate, scaler))


class CompiledStep:
    """What `compile_step` returns: call it with a batch to train by one step.

    Attributes:
        model: the sharded model.
        optimizer: its optimizer, or several, as they were given.
    """

    def __init__(
        self,
        model: FSDPModule,
        optimizer: Optimizer | Sequence[Optimizer],
        run: Callable[..., Any],
        update: JointStep,
        units: Sequence[Unit],
        options: tuple[Callable[..., Tensor] | None, float | None, int, torch.amp.GradScaler | None],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._run, self._update, self._units = run, update, units
        self._loss_fn, self._clip_norm, self._accumulate, self._scaler = options
        self._broken: dict[Unit, VersionCounters] = {}  # after an error that may have left some units updated

    def __call__(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """One step of training on this rank's batch.

        If the step accumulates, every tensor with dimensions among the arguments, also within tuples, lists and dicts,
        is divided along dimension 0; everything else goes to every micro-batch.

        Args:
            *args: of the model.
            **kwargs: of the model.
            target: for the loss function, if not None.

        Returns:
            The loss on this rank, without a graph, shape `()`; the mean over micro-batches.

        Raises:
            RuntimeError: this is called within `no_sync`. Or an error, the cause, came while parameters were updated,
                in this call or in an earlier one, and no checkpoint of all units has been loaded since.
            ValueError: a forward or backward of the model is under way; or a tensor cannot be divided.
            Exception: what was raised before the first update, such as by the model or the loss function. Gradients of
                this step are dropped, parameters are those before it, and the next call is an ordinary step.
        """
        self._check_ready()
        batches = split_batch((args, kwargs, target), self._accumulate)
        losses = []
        try:
            for position, (own_args, own_kwargs, own_target) in enumerate(batches):
                last = position == len(batches) - 1
                with nullcontext() if last else self.model.no_sync():
                    losses.append(self._forward_and_backward(own_args, own_kwargs, own_target, last))
            self._update_parameters()
            self._zero_grad()
        except BaseException as error:
            has_updated = self._updates or bool(self._update.updated)
            if has_updated:
                self._broken = {unit: unit.version_counters() for unit in self._units if unit.trains}
            self._drop_gradients()
            if has_updated and isinstance(error, Exception):
                raise RuntimeError(f"step: this call {_FAILED}") from error
            raise
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _check_ready(self) -> None:
        """Raise an error if no step can begin."""
        check_idle(self._units, "step")
        if any(unit.version_counters() == counters for unit, counters in self._broken.items()):
            raise RuntimeError(f"step: an earlier call {_FAILED}")
        self._broken.clear()
        self._updates = False  # whether the updates of this step have begun
        self._update.updated.clear()
        for unit in self._units:
            if not unit.syncs:
                raise RuntimeError(
                    f"step: gradients of {unit} are not synchronized; call it outside of no_sync, and let "
                    f"compile_step(..., accumulate=n) accumulate gradients"
                )

    def _forward_and_backward(self, args: Any, kwargs: Any, target: Any, last: bool) -> Tensor:
        """Run forward and backward of one micro-batch, maybe the `last`; return its loss."""
        with torch.enable_grad():
            loss: Tensor = (output := self._run(*args, **kwargs))
            if self._loss_fn is not None:
                loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
            shared = loss if self._accumulate == 1 else loss / self._accumulate
            with self._update.running(loss, keeps_flat=last and self._scaler is None):
                (shared if self._scaler is None else self._scaler.scale(shared)).backward()
        return loss.detach()

    def _update_parameters(self) -> None:
        """Clip and update, unless the scaler skips it."""
        if (scaler := self._scaler) is None:
            self._clip_and_update()
            return
        optimizer: Any = SimpleNamespace(param_groups=list(self._param_groups()), step=self._clip_and_update)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    def _param_groups(self) -> Iterator[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        for optimizer in self._update.optimizers:
            yield from optimizer.param_groups

    def _zero_grad(self) -> None:
        for optimizer in self._update.optimizers:
            optimizer.zero_grad()

    def _clip_and_update(self) -> None:
        limit = self._clip_norm
        if limit is not None and not self._update.fuses:
            nn.utils.clip_grad_norm_(self._clipped_params(), limit)
            limit = None
        self._updates = True
        self._update.begin(clips=limit is not None)
        self._update.run(None if limit is None else self._clip_others(limit))

    def _clip_others(self, limit: float) -> Tensor:
        """Clip the gradients that are not of segments; return the factor for those that are, shape `()`."""
        ready = list(chain.from_iterable(self._update.ready.values()))
        updated = {id(param) for segment, _ in ready for param in segment.params}
        others = [param for param in self._clipped_params() if id(param) not in updated]
        split = [each for each, _ in ready if any(spec.tensor_parallel for spec in each.specs)]
        for segment in split:
            segment.flat.binding.show_gradient()  # its parameters are reduced over groups of their own
        whole = [(gradient, segment.specs[0]) for segment, gradient in ready if segment not in split]
        norm = gradient_norm([*others, *(param for segment in split for param in segment.params)], whole)
        nn.utils.clip_grads_with_norm_(others, limit, norm)
        return torch.clamp(limit / (norm + 1e-6), max=1.0)  # as `clip_grads_with_norm_` computes it

    def _clipped_params(self) -> list[nn.Parameter]:
        """The parameters whose gradients count: first those of the model in its order, which decides rounding."""
        return list(dict.fromkeys(chain(self.model.parameters(), *(group["params"] for group in self._param_groups()))))

    def _drop_gradients(self) -> None:
        """After a failure: forget what was accumulated and reduced in this step, on this rank."""
        self._update.drop()
        self._zero_grad()
        for flat in (flat for unit in self._units for flat in unit.flats):
            flat.reduction.flat_gradient = None
            for param in flat.params:
                param.grad = None
            drop_cleared(flat)


def split_batch(batch: Any, micro_batches: int) -> Sequence[Any]:
    """Divide each tensor of `batch` with dimensions into equal parts along dimension 0; ValueError if it cannot be."""
    if micro_batches == 1:
        return [batch]

    def cut(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim():
            if value.shape[0] % micro_batches:
                raise ValueError(
                    f"accumulate: a tensor of shape {tuple(value.shape)} cannot be divided into {micro_batches} equal "
                    f"parts along dimension 0; drop the last examples or pad the batch"
                )
            return value.chunk(micro_batches)[index]
        return value

    return [tree_map(lambda value, index=index: cut(value, index), batch) for index in range(micro_batches)]
