"""Optimizers over sharded parameters.

segments.py      runs of parameters that an optimizer updates as one tensor
flat.py          elementwise optimizers, such as AdamW, update these: all in `step`, or one by one for compile_step
program.py       what an optimizer does to each element, recorded from the optimizer itself, for Inductor
in_backward.py   each flat shard's update in backward, so that its gradient is freed
owners.py        by_owner: one rank updates each matrix, for optimizers such as Muon that need it complete
"""

from fsdp_compile.optim.flat import flat_step
from fsdp_compile.optim.owners import ByOwner, by_owner

__all__ = ["ByOwner", "by_owner", "flat_step"]
