"""Optimizers over sharded parameters.

segments.py      runs of parameters that an optimizer updates as one tensor
flat.py          elementwise optimizers, such as AdamW, update these: all in `step`, or chosen ones for compile_step
joint.py         one or several optimizers as one step of compile_step, behind backward or within it
matrix_optimizers.py  Muon, and others that need complete matrices, by three functions
matrix_step.py   one rank computes each matrix, while others are on the way
matrix_exchange.py, owner_plan.py   how they are sent; who owns what
owners.py        by_owner: one rank updates each parameter by any optimizer, which has its state in full
"""

from fsdp_compile.optim.flat import flat_step
from fsdp_compile.optim.matrix_optimizers import MatrixOptimizer, MatrixShard
from fsdp_compile.optim.owners import ByOwner, by_owner

__all__ = ["ByOwner", "MatrixOptimizer", "MatrixShard", "by_owner", "flat_step"]
