"""Runs a case on ranks: the sharded model beside an unsharded one that plays all ranks in turn. Where a case asks for
`reduction_order="tree"`, beside one that is sharded over one rank and has all microbatches, whose bits are equal.

mismatch = compare(rank, case, how)      None, or the first difference; a mismatch does not end the steps, so that
                                         ranks stay together and the pool lives on
"""

import copy
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from joint import JointPasses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import ModuleWrapPolicy, Wire, fully_shard
from fsdp_compile.core.sharding import units_gathered_below

from .cases import Case, Step, nodes_of
from .edits import EDITS, is_quantized
from .models import Caller, Model, Nest, build, loss_of, play_rank
from .rounded import arrived_weights, with_weights

# Relative to the largest value. Rounding differs only in the order in which ranks are summed, but grows with the steps.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
AUTOCAST = 2e-3  # where both models round the same values; Inductor leaves out casts within a kernel
# Of gradients that are sent in a format, and of parameters that they update. Losses are exact: the unsharded model
# computes with the weights that arrive at the sharded one.
REDUCED = {"bf16": 0.02, "int8": 0.05, "fp8": 0.2}
CLIP = 0.05
INVALID = "the unsharded model raises too"


class InvalidCase(Exception):
    """The unsharded model cannot run the case either."""


def compare(rank: int, case: Case, how: str) -> str | None:
    """The first difference from the unsharded model, or None, or INVALID. Raises what the sharded model raises."""
    reference, model = build(case), build(case)
    if case.order == "tree":
        alone: Any = _shard(case, reference, _alone())
        reference = alone
    run = _shard(case, model)
    if how != "eager":
        run = torch.compile(_caller(case, model), backend=JointPasses() if how == "joint" else how)
    try:
        # Torch compiles the formulas of operators of the user's own as if autocast were on in backward as well, also
        # for unsharded models: their gradients then differ from those of eager code by 4e-3.
        with torch._functorch.config.patch(backward_pass_autocast="off"):
            return Comparison(case, reference, model, run, rank, how).train()
    except InvalidCase:  # on all ranks, before the step communicates
        return INVALID


def _caller(case: Case, model: Model) -> Callable[[Tensor], Any]:
    """What is compiled."""
    callers = {"": model, "module": Caller(model), "function": lambda x: model(x)}
    return callers[case.caller]


def attempt(rank: int, case: Case, how: str) -> str | None:
    """As `compare`; what it raises, as text."""
    try:
        return compare(rank, case, how)
    except Exception:
        return traceback.format_exc()


# --- sharding ---------------------------------------------------------------------------------------------------------


def _shard(case: Case, model: Model, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Shard over all ranks as the case says, or over those of `group`."""
    options: dict[str, Any] = {
        "reduction_order": case.order,
        "process_group": group,
        "backward_prefetch": getattr(BackwardPrefetch, case.backward_prefetch, None),
        "forward_prefetch": case.forward_prefetch,
        "limit_all_gathers": case.limit_all_gathers,
        "cpu_offload": CPUOffload(offload_params=True) if case.offload else None,
        "mixed_precision": _precision(case),
        "sharding_strategy": ShardingStrategy[case.strategy],
    }
    if case.reshard and group is None:
        options |= {"reshard_after_forward": case.reshard, "sharding_strategy": None}
    if case.replicas > 1 and group is None:
        options |= {"mesh": _mesh(case.replicas), "sharding_strategy": None}
    policies: dict[str, Any] = {"units": None, "none": None, "auto": "auto"}
    if case.wrap == "policy":
        policies["policy"] = ModuleWrapPolicy({type(module) for module in model.to_shard})
    for module in model.to_shard if case.wrap == "units" else ():
        fully_shard(module, auto_wrap_policy=None, **options, **_wire(case, module))
    return fully_shard(model, auto_wrap_policy=policies[case.wrap], **options, **_wire(case, model))


def _wire(case: Case, module: nn.Module) -> dict[str, Any]:
    """The wire of the case, for the parameters of `module` that have a format."""
    if not case.wire:
        return {}
    gather, reduce, *rest = case.wire
    wire = Wire(gather or None, reduce or None, error_feedback=bool(rest))
    sent = (torch.float32, torch.bfloat16, torch.float16)
    names = {name for name, param in module.named_parameters(remove_duplicate=False) if param.dtype in sent}
    return {"wire": lambda name: wire if name in names else None}


@functools.cache
def _alone() -> dist.ProcessGroup:
    """This rank's own group."""
    return dist.new_subgroups(1)[0]


@functools.cache
def _mesh(replicas: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))


def _precision(case: Case) -> MixedPrecision | None:
    dtypes = [getattr(torch, name) if name else None for name in (case.param_dtype, case.reduce_dtype)]
    return MixedPrecision(param_dtype=dtypes[0], reduce_dtype=dtypes[1]) if any(dtypes) else None


# --- training ---------------------------------------------------------------------------------------------------------


class Comparison:
    """Trains `model`, run as `run`, beside `reference`, and keeps the first difference."""

    def __init__(
        self, case: Case, reference: Model, model: Model, run: Callable[[Tensor], Any], rank: int, how: str
    ) -> None:
        self.case, self.reference, self.model, self.run, self.rank = case, reference, model, run, rank
        self.world_size = dist.get_world_size()
        self.mismatch: str | None = None
        used = {getattr(torch, name) for name in (case.dtype, case.param_dtype, case.reduce_dtype) if name}
        used |= {getattr(torch, node.dtype) for node in nodes_of(case.nodes) if node.dtype}
        used |= {torch.bfloat16} if case.autocast and how == "inductor" else set()
        self.tolerance = max([AUTOCAST * case.autocast, *(TOLERANCES[dtype] for dtype in used)])
        self.tolerance_of_sums = max(self.tolerance, REDUCED.get(case.wire[1], 0.0) if case.wire else 0.0)
        self.has_feedback = bool(case.wire) and "with feedback" in case.wire
        self.largest: dict[str, float] = {}  # with feedback, elements of a gradient so far: what it lost comes later
        self.is_exact = case.order == "tree"
        if self.is_exact:
            self.tolerance = self.tolerance_of_sums = 0.0
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """New ones, without state."""
        self.optimizers = [self.new_optimizer(each) for each in (self.reference, self.model)]

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """For all parameters of a model, without state."""
        return _optimizer(self.case, model)

    def train(self) -> str | None:
        """Run all steps."""
        for number, step in enumerate(self.case.steps):
            self._step(step, number)
        self._check_freed()
        return self.mismatch

    def _check_freed(self) -> None:
        """After the last backward nothing is gathered, but what only ran under no_sync."""
        failed = self.run is not self.model and any(step.before == "failed backward" for step in self.case.steps)
        if failed or any(node.gate == "accumulating" for node in nodes_of(self.case.nodes)):
            return  # a compiled backward that failed leaves what it has until its graph goes
        for unit in units_gathered_below(self.model):
            buffers = [buffer for gathered in unit.awaiting_backward for buffer in gathered.buffers]
            is_left = unit.unsharded_params is not None or not all(each.is_free or each.is_shard for each in buffers)
            if is_left or unit.kept or unit.prefetched:
                self.mismatch = self.mismatch or f"at the end: {unit.path} is gathered"

    def _step(self, step: Step, number: int) -> None:
        for each in (self.reference, self.model):
            for module in each.modules():
                if isinstance(module, Nest):
                    module.gates = step.gates
        when = f"step {number}"
        if step.before:
            EDITS[step.before](self, f"{when}, {step.before}")
        expected_losses = self._play_in_order(step, number) if self.is_exact else self._play_and_average(step, number)
        losses = self._passes(step, number, self.rank, self.model, self.run, self._sync)
        for found, expected in zip(losses, expected_losses[self.rank], strict=True):
            self.check(f"{when}: loss or gradient of inputs", found, expected)
        self.check_gradients(when, self.model, self.reference)
        if step.clip:
            norms = [nn.utils.clip_grad_norm_(list(m.parameters()), CLIP) for m in (self.model, self.reference)]
            self.check(f"{when}: norm of gradients", *norms, self.tolerance_of_sums)
        for optimizer in self.optimizers:
            optimizer.step()
            if not step.keeps_grads:
                optimizer.zero_grad()
        self.check_parameters(f"{when}: after the optimizer's step")

    def _play_and_average(self, step: Step, number: int) -> list[list[Tensor]]:
        """The losses of all ranks, whose mean gradients the reference then has."""
        before = [param.grad for param in self.reference.parameters()]
        expected_losses, grads = [], []
        values = [param.detach().clone() for param in self.reference.parameters()]
        arrived = self.arrived_weights()
        for rank in range(self.world_size):
            with torch.no_grad():
                for param, value in zip(self.reference.parameters(), values, strict=True):
                    param.copy_(value)  # a forward may change parameters, on every rank alike
            expected, of_rank = self._play(step, number, rank, arrived)
            expected_losses.append(expected)
            grads.append(of_rank)
        self._average(before, grads)
        return expected_losses

    def _play_in_order(self, step: Step, number: int) -> list[list[Tensor]]:
        """The losses of all ranks, whose microbatches the reference, sharded over one rank, takes as its own."""
        reference: Any = self.reference
        losses, last = [], self.world_size - 1
        values = [param.detach().clone() for param in reference.parameters()]
        for rank in range(self.world_size):
            with torch.no_grad():
                for param, value in zip(reference.parameters(), values, strict=True):
                    param.copy_(value)
            sync = (
                (lambda syncs: nullcontext() if syncs else reference.no_sync())
                if rank == last
                else (lambda _: reference.no_sync())
            )
            try:
                losses.append(self._passes(step, number, rank, reference, reference, sync))
            except Exception:
                self.reference, self.is_exact = build(self.case), False
                self._play(step, number, rank, {})
                raise
        return losses

    def _play(
        self, step: Step, number: int, rank: int, arrived: dict[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Losses and gradients of one rank, by the unsharded model; InvalidCase if it raises.
        `arrived`: weights that it computes with in the place of its own.
        """
        precision, model = _precision(self.case), with_weights(self.reference, arrived)
        if precision is not None and precision.param_dtype is not None:
            model = copy.deepcopy(model).to(precision.param_dtype)
        for param in model.parameters():
            param.grad = None
        try:
            losses = self._passes(step, number, rank, model, model, lambda _: nullcontext())
        except Exception as error:
            raise InvalidCase(f"the unsharded model raises {type(error).__name__}: {error}") from error
        return losses, [param.grad for param in model.parameters()]

    def _average(self, before: list[Tensor | None], of_ranks: list[list[Tensor | None]]) -> None:
        """Gradients of the reference: what was there, and the mean over ranks; None where no rank has one."""
        for index, param in enumerate(self.reference.parameters()):
            grads = [grads[index] for grads in of_ranks if grads[index] is not None]
            param.grad = before[index]
            if grads:
                mean = sum(grad.to(param.dtype) for grad in grads if grad is not None) / self.world_size
                param.grad = mean if param.grad is None else param.grad + mean

    def _passes(
        self,
        step: Step,
        number: int,
        rank: int,
        model: nn.Module,
        run: Callable[[Tensor], Any],
        sync: Callable[[bool], Any],
    ) -> list[Tensor]:
        """Forwards, by `run`, and backwards of one rank's microbatches; losses and the gradients of inputs."""
        play_rank(model, rank)
        scale = 1 / self.world_size if self.is_exact and model is self.reference else 1.0
        seen: list[Tensor] = []
        for index, syncs in enumerate(step.syncs):
            for module in model.modules():
                if isinstance(module, Nest):
                    module.syncs = syncs
            batches = [self._batch(number, 2 * index + part, rank, model) for part in range(2)]
            with sync(syncs):
                seen += self._backward(step.forwards, [model if step.forwards == "mixed" else run, run], batches, scale)
            seen += [x.grad.double() / scale for x in batches if x.grad is not None]
        return seen

    def _backward(
        self, forwards: str, runs: list[Callable[[Tensor], Any]], batches: list[Tensor], scale: float
    ) -> list[Tensor]:
        with self.autocast():
            first = loss_of(runs[0](batches[0]))
            if forwards == "eval":
                with torch.no_grad():
                    runs[1](batches[1])
            losses = [first] if forwards in ("one", "eval") else [first, loss_of(runs[1](batches[1]))]
        if forwards in ("two", "mixed"):
            ((losses[0] * losses[1] + losses[1]) * scale).backward()
        else:
            for loss in reversed(losses) if forwards == "crossed" else losses:
                (loss * scale).backward()
        return [loss.detach() for loss in losses]

    def autocast(self) -> torch.autocast:
        """What is around the forwards of both models. Without its cache, which loses gradients of weights that are
        read under no_grad first: it is no part of what is compared.
        """
        return torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast, cache_enabled=False)

    def _batch(self, step: int, index: int, rank: int, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
        size = 2 + rank if self.case.uneven else 2
        x = torch.randn(size, 4, generator=generator, dtype=getattr(torch, self.case.dtype))
        if model is not self.model and self.case.param_dtype and not self.is_exact:
            x = x.to(getattr(torch, self.case.param_dtype))
        return x.requires_grad_(self.case.input_grads)

    @contextmanager
    def _sync(self, syncs: bool) -> Iterator[None]:
        model: Any = self.model
        if self.case.no_sync:
            with nullcontext() if syncs else model.no_sync():
                yield
        else:
            model.set_requires_gradient_sync(syncs)
            yield

    def example(self) -> Tensor:
        """A batch for evaluation, equal on all ranks."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(3, 4, generator=generator, dtype=getattr(torch, self.case.dtype))

    def arrived_weights(self) -> dict[str, Tensor]:
        """The weights that the sharded model computes with, if some are sent in a format."""
        return arrived_weights(self.model) if self.case.wire else {}

    def all_parameters(self) -> list[nn.Parameter]:
        """Those of the sharded model, then those of the other, without quantized ones, which nobody multiplies."""
        both = (*self.model.parameters(), *self.reference.parameters())
        return [param for param in both if not is_quantized(param)]

    def forward_alone(self) -> Tensor:
        """The loss of a forward of the sharded model, which the other model can run too."""
        self.loss_of_reference(self.reference)
        return self.forward_of_model()

    def forward_of_model(self) -> Tensor:
        """The loss of a forward of the sharded model."""
        with self.autocast():
            return loss_of(self.run(self.example()))

    def loss_of_reference(self, reference: nn.Module) -> Tensor:
        """The loss of a forward of the unsharded model, or of a copy of it; InvalidCase if it raises."""
        try:
            with self.autocast():
                return loss_of(reference(self.example()))
        except Exception as error:
            raise InvalidCase(f"the unsharded model raises {type(error).__name__}: {error}") from error

    # --- comparing ----------------------------------------------------------------------------------------------------

    def check(
        self, what: str, found: Tensor, expected: Tensor, tolerance: float | None = None, largest: float = 0.0
    ) -> None:
        """Note the first difference beyond `tolerance`, by default that of values that no reduce has rounded.

        It is a part of the largest expected element, or of `largest`, if that is more.
        """
        found, expected = (_full(each.detach()).double() for each in (found, expected))
        if self.mismatch is not None:  # on this rank: the others gather as well
            return
        if found.shape != expected.shape:
            self.mismatch = f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}"
        elif found.numel():
            apart = (found - expected).abs().max().item()
            tolerance = self.tolerance if tolerance is None else tolerance
            if not apart <= tolerance * (1 + max(largest, expected.abs().max().item())):
                self.mismatch = f"{what}: differs by {apart:.3g}, expected {expected.flatten()[:4].tolist()}"

    def check_parameters(self, when: str) -> None:
        """Parameters of both models are equal."""
        for name, mine, expected in self._pairs(self.model, self.reference):
            self.check(f"{when}: {name}", mine, expected, self.tolerance_of_sums)

    def check_gradients(self, when: str, model: nn.Module, reference: nn.Module) -> None:
        """Gradients are equal. None and zeros may stand for each other; the reference is then given what we have."""
        for name, mine, expected in self._pairs(model, reference):
            if mine.grad is not None and expected.grad is None:
                expected.grad = torch.zeros_like(expected)
            zeros = torch.zeros_like(expected)
            grad = zeros if mine.grad is None else mine.grad
            there = zeros if expected.grad is None else expected.grad
            largest = self.largest.get(name, 0.0)
            self.check(f"{when}: gradient of {name}", grad, there, self.tolerance_of_sums, largest)
            if self.has_feedback and there.numel():
                self.largest[name] = max(largest, there.double().abs().max().item())
            if mine.grad is None:
                expected.grad = None

    def _pairs(self, model: nn.Module, reference: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        ours, theirs = _parameters(model), _parameters(reference)
        if ours.keys() != theirs.keys():
            self.mismatch = self.mismatch or f"parameters {list(ours)}, expected {list(theirs)}"
        return [(name, ours[name], theirs[name]) for name in theirs]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


class Nested(torch.optim.Optimizer):
    """Its state has tensors in a list and in a dict, beside numbers."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["latest"] = [torch.zeros_like(param) for _ in range(2)]
                    state["of"] = {"mean": torch.zeros_like(param), "steps": 0}
                latest, of = state["latest"], state["of"]
                of["mean"].mul_(0.9).add_(param.grad)
                latest[of["steps"] % 2].copy_(param.grad)
                of["steps"] += 1
                param.add_(of["mean"] + 0.5 * latest[of["steps"] % 2], alpha=-group["lr"])


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    kept = model.state_dict(keep_vars=True)  # the parameters themselves, but for those that modules transpose
    params = [kept[n] if isinstance(kept[n], nn.Parameter) else param for n, param in model.named_parameters()]
    if case.optimizer == "nested":
        return Nested(params)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=0.01, eps=1e-2)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
