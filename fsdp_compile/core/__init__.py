"""What sharded parameters are, without a process group that communicates: the room that all others build on.

layout.py         where each parameter lies in its flat buffer, and which slice each rank stores
ops.py            the marker operators of traced graphs, and the string that says how a unit is gathered and reduced
flat_collectives.py   a flat parameter gathered and averaged, over one group or two
autograd.py       between parameters and the flat shard: who gets which gradient, and when reduces are waited for
flat_param.py     a flat parameter: layout, shard and parameters bound together
unit.py           flat parameters that are gathered together, who reads them now, and what steps change about them
shard_spec.py     which elements of a sharded tensor each rank stores, as ranges, rows and chunks
sharded_tensor.py parameters, gradients and optimizer state as user code sees them: of the full shape
unsharded_tensor.py   the same with all elements on the rank
sharded_rules.py  what operators do with sharded tensors
sharded_reductions.py the same of sums, norms and comparisons
averaging.py      the gradients of parameters that are used outside of their unit's forward
sharding.py       a sharded module: what it knows about itself, and how its code finds unsharded parameters
settings.py       the options of `fully_shard`, switches in the environment, warnings that point at the user's line
_torch.py         private names of torch about autograd, modules and Dynamo
"""

from fsdp_compile.core import sharded_reductions as _  # noqa: F401  (a pickled sharded tensor names sharded_tensor.py alone)
