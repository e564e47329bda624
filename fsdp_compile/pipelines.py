"""What torch's pipelines and losses ask of the state of a sharded module, which they take for FSDP2's."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.eager.accumulate import settle


class StateForPipelines:
    """What `torch.distributed.fsdp.fully_shard.state(module)` gives: the part of FSDP2's that is used outside of it.

    A stage of `torch.distributed.pipelining` accumulates gradients, and then asks all states around to reduce them.
    Losses that compute with the weight of a head ask for its precision. AttributeError for anything else that is read
    or set.
    """

    def __init__(self, module: Any) -> None:
        vars(self)["_module"] = module

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattr__(name)

    def __getattr__(self, name: str) -> Any:
        if name == "_module":  # of a copy that has nothing yet
            raise AttributeError(name)
        raise AttributeError(
            f"{name}: the state of a module of fsdp_compile has no such attribute, which is private to torch's "
            f"fully_shard; use the methods of FSDPModule"
        )

    @property
    def _state_ctx(self) -> "StateForPipelines":
        return self

    @property
    def all_states(self) -> list["StateForPipelines"]:
        """Those of all modules that reduce together, of which one does the work."""
        return [self]

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        settings = self._module._fsdp.settings
        dtypes = settings.precision
        return MixedPrecisionPolicy(
            dtypes.param_dtype, dtypes.reduce_dtype, settings.output_dtype, dtypes.cast_forward_inputs
        )

    _fsdp_param_groups: Sequence[Any] = ()  # each of which a stage would ask to reduce
    _fsdp_param_group = None  # the same of torch 2.11

    def _root_post_backward_final_callback(self) -> None:
        settle(self._module._fsdp_runtime.reduces_in_flight)
