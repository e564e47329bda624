"""Error feedback as a communication hook, for code that registers hooks; `Wire` does the same as an option.

    model = fully_shard(Net(), wire=Wire(reduce="fp8", error_feedback=True))

    model = fully_shard(Net())                                                     the hook, for FSDP's users
    model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)

Both send messages of the format "fp8" (comm/formats.py) and add them up in float32. What a wire keeps is in checkpoints
of any number of ranks; the state of the hook is a state dict of each rank.
"""

# The scales of "fp8" are powers of two, so a division by them rounds nothing, and the float32 difference between a
# value and what was sent for it is exact, unless it underflows: sent values plus residuals are the gradient plus the
# last residuals.

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.comm.formats import BLOCK, add_up, decode, encode

__all__ = ["Float8ErrorFeedback", "float8_reduce_scatter"]

_FORMAT = "fp8"


class Float8ErrorFeedback:
    """The state of `float8_reduce_scatter`: the residual of each flat parameter.

    A residual is float32, with as many elements as the unsharded flat parameter, padding included: 4 bytes for each
    trained parameter of the whole model, on every rank, from the first reduce on. Neither `explain` nor a budget counts
    it. With `error_feedback=False` there are no residuals, and rounding errors are lost.

    NaN and infinite elements arrive as such; their residuals become zero, those of other elements stay.

    Args:
        error_feedback: whether what rounding has lost is added to the next gradient.
        block_size: how many consecutive elements share a scale: 128, as in every format.

    Raises:
        ValueError: `block_size` is another number.
    """

    def __init__(self, *, error_feedback: bool = True, block_size: int = BLOCK) -> None:
        if block_size != BLOCK:
            raise ValueError(f"block_size: expected {BLOCK}, as in every wire format, found {block_size}; leave it out")
        self.error_feedback = error_feedback
        self._of_flat_params: weakref.WeakKeyDictionary[Any, _Feedback] = weakref.WeakKeyDictionary()
        self._loaded: dict[str, Tensor] = {}

    def of_flat_param(self, flat_param: object, name: str, group: dist.ProcessGroup) -> "_Feedback":
        """The state of the hook for `flat_param`, whose first parameter is called `name`, sharded over `group`."""
        if flat_param not in self._of_flat_params:
            self._of_flat_params[flat_param] = _Feedback(self, name, self._loaded.pop(name, None))
        feedback = self._of_flat_params[flat_param]
        feedback.group = group
        return feedback

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, by the name of each flat parameter's first parameter; they differ between ranks.

        Raises:
            ValueError: two models use this state, so that names are not unique.
        """
        residuals = dict(self._loaded)
        for feedback in self._of_flat_params.values():
            if feedback.residual is not None:
                if feedback.name in residuals:
                    raise ValueError(
                        f"state_dict: two flat parameters begin with {feedback.name}; give each model a "
                        f"Float8ErrorFeedback of its own"
                    )
                residuals[feedback.name] = feedback.residual
        return residuals

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the residuals that this rank has saved; those that are missing become zero.

        They belong to the same model, sharded over the same number of ranks; the next reduce checks their sizes.
        """
        self._loaded = {name: residual.detach().clone() for name, residual in state_dict.items()}
        for feedback in self._of_flat_params.values():
            feedback.residual = self._loaded.pop(feedback.name, None)


class _Feedback:
    """The residual of one flat parameter, None until its first reduce, and the group of the next reduce."""

    group: dist.ProcessGroup

    def __init__(self, shared: Float8ErrorFeedback, name: str, residual: Tensor | None) -> None:
        self.shared, self.name, self.residual = shared, name, residual

    def add_to(self, grads: Tensor) -> Tensor:
        """`grads`, 1-D, as new float32 values with the residual added."""
        if self.residual is None:
            return grads.float() if grads.dtype != torch.float32 else grads.clone()
        if self.residual.shape != grads.shape:
            raise ValueError(
                f"residual of the flat parameter of {self.name}: expected {grads.numel()} elements, found "
                f"{self.residual.numel()}; it was saved by another model or number of ranks, load an empty state_dict"
            )
        return self.residual.to(grads.device) + grads


def float8_reduce_scatter(state: Any, gradients: Tensor, output: Tensor | None = None) -> None:
    """Communication hook: average `gradients` over the ranks, sent in float8, summed and divided in float32.

    Under hybrid sharding it reduces within the shard group; the all-reduce over replicas is not compressed. The sum is
    divided by the size of the group, whatever `set_gradient_divide_factor` says. A `GradScaler` scales residuals too:
    when its scale changes, the residual of one step is added at the wrong scale.

    Args:
        state: a `Float8ErrorFeedback`, as `register_comm_hook` passes it on.
        gradients: 1-D `[n * ranks]`, of any floating-point dtype; slice r is that of rank r.
        output: 1-D `[n]`, overwritten with the mean of this rank's slice, in its own dtype. None on one rank alone,
            where nothing is sent and nothing rounded.

    Raises:
        TypeError: `state` is not such a state, or the model was not sharded by this package.
        ValueError: the unit is not sharded, or a residual is of another size. Residuals are then unchanged, as they are
            when the collective raises.
    """
    if not isinstance(state, _Feedback):
        raise TypeError(
            f"state: expected the Float8ErrorFeedback of a model that fully_shard has sharded, found a "
            f"{type(state).__name__}; call model.register_comm_hook(Float8ErrorFeedback(), float8_reduce_scatter)"
        )
    ranks = state.group.size()
    if output is None and ranks > 1:
        raise ValueError(
            f"float8_reduce_scatter: the unit of {state.name} is not sharded (NO_SHARD); shard it, or register "
            f"allreduce_hook or bf16_compress_hook"
        )
    if output is None or not gradients.numel():
        return
    numel = output.numel()
    values = state.add_to(gradients).view(ranks, numel)
    messages = encode(values, _FORMAT)
    if state.shared.error_feedback:
        values.sub_(decode(messages, numel, _FORMAT, torch.float32))
    size = [messages.shape[1]] * ranks
    received = collectives.all_to_all(messages.view(-1), size, size, state.group.group_name).view_as(messages)
    if state.shared.error_feedback:  # not before: if the collective raises, this gradient may be reduced again
        state.residual = values.view(-1).masked_fill_(~values.view(-1).isfinite(), 0.0)
    output.copy_(add_up(received, numel, _FORMAT, "avg", torch.float32))
