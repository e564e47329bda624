"""Optimizers over sharded parameters.

flat_step.py   flat_step: elementwise optimizers, such as AdamW, update flat shards instead of single parameters
segments.py    the parameters of one group that lie side by side in a flat shard
program.py     what an optimizer does to each element, recorded from the optimizer itself
compiled_update.py   CompiledUpdate: one compiled kernel for each flat shard, for compile_step
update_in_backward.py   each flat shard's update in backward, so that its gradient is freed, likewise
gradient_norm.py     the norm of all gradients from those of flat shards, likewise
owners.py      by_owner: for optimizers that need complete matrices, such as Muon or SOAP; one rank updates each matrix
"""

from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.owners import ByOwner, by_owner

__all__ = ["ByOwner", "by_owner", "flat_step"]
