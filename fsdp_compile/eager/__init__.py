"""The eager runtime: all that runs outside a compiled graph.

forward.py         the forward of a sharded module, eager and traced
gathered.py        one forward's full views: freed after forward, gathered again before backward, freed after it
torch_private.py   the private torch functions that this half needs, and the versions they were checked on
"""

from fsdp_compile.eager.forward import sharded_forward

__all__ = ["sharded_forward"]
