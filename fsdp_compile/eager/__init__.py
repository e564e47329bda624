"""The eager runtime: everything that runs outside of a compiled graph, in the order of a step.

Each step
    forward.py            the forward of a sharded module, eager and traced; what is checked before a compiled one
    casting.py            inputs, outputs and buffers in mixed precision; `.to()` and the like
    runtime.py            what units below one root share: order, prefetching, streams, reduces in flight
    checks.py             what is checked of a root, by each rank alone and among ranks
    unsharded.py          the unsharded parameters of one forward: gathered, freed, gathered again in backward, freed
    streams.py            streams and events behind one interface; the memory of these parameters
    reduce.py             gradients packed and reduced, by collectives or communication hooks, and waited for late
    accumulate.py         gradient accumulation without communication
Between steps
    next_forward.py       what a whole step gathers for the forward of the next one
    writeback.py          what users did to parameters
    summon.py             full parameters in the place of the sharded ones
"""

from fsdp_compile.eager.forward import compiled_forward as compiled_forward
from fsdp_compile.eager.forward import sharded_forward as sharded_forward
from fsdp_compile.eager.runtime import Runtime as Runtime
