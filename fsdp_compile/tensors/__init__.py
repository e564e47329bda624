"""Sharded tensors: what parameters, gradients and optimizer state are, and their rules under operators.

shard_spec.py         which elements of a sharded tensor each rank stores, as ranges, rows and chunks
as_dtensor.py         what they are to code that asks for a DTensor: type, mesh, placements
sharded_tensor.py     parameters, gradients and optimizer state as user code sees them: of the full shape
sharded_view.py       lazy views of them
unsharded_tensor.py   the same with all elements on the rank
sharded_rules.py      what operators do with sharded tensors
sharded_reductions.py the same of sums, norms and comparisons
tensor_parallel.py    parameters that are DTensors over other dimensions of the mesh
nested.py             tensors in lists, dicts and dataclasses
write_items.py        what torch.distributed.checkpoint writes of them
"""

from fsdp_compile.tensors import sharded_reductions as _  # noqa: F401  (a pickled sharded tensor names sharded_tensor.py alone)
