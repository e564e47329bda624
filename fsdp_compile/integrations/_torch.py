"""Private names of torch that wrap modules. Checked on torch 2.11, 2.13 and 2.14.

checkpoint_wrapper, offload_wrapper    modules around one whose activations are recomputed, or kept on the CPU
apply_activation_checkpointing         puts them around the modules that a policy chooses
"""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

__all__ = ["apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]
