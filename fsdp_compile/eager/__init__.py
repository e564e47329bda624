"""The eager runtime: all that runs outside a compiled graph.

Construction
    groups.py          which ranks shard, which replicate, which gather again
    ignored.py         what is left alone
    devices.py         where a unit computes, and moving it there
    materialize.py     parameters on the meta device get memory and values
    broadcast.py       equal values on all ranks
Each step
    forward.py         the forward of a sharded module, eager and traced
    inputs.py          dtype and device of inputs, dtype of buffers
    root.py            what units under one root share: order, what is gathered ahead, streams
    agreement.py       what has to be equal under one root and on all ranks
    streams.py         streams and events behind one interface
    gathered.py        one forward's full views: freed after forward, gathered again before backward, freed after it
    recompute.py       a forward that backward runs again: which full views it reads
    full_buffer.py     the memory beneath them
    full_views.py      the differentiable step between shards and full views
    reduce.py          gradients packed, reduced, waited for late
    hooks.py           communication hooks: gradients reduced by the user's function
    graphs.py          what compiled backward passes leave to this runtime
    accumulate.py      gradients that wait for a later reduce
    clip.py            the norm of all gradients, and scaling by it
Between steps
    state.py           what a unit is doing, and the errors of calls at a wrong time
    writeback.py       what users did to parameters
    prologue.py        the same look before a compiled forward
    convert.py         `.to()` and the like
    full.py            full parameters and gradients from shards
    summon.py          full parameters in the place of the sharded ones
    unshard.py         gathering ahead by hand
torch_private.py   the private torch functions that this half needs, and the versions they were checked on
"""

from fsdp_compile.eager.forward import compiled_forward, sharded_forward
from fsdp_compile.eager.runtime import Runtime

__all__ = ["Runtime", "compiled_forward", "sharded_forward"]
