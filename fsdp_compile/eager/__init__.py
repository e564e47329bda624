"""The eager runtime: all that runs outside a compiled graph.

forward.py         the forward of a sharded module, eager and traced
root.py            what units under one root share: order, and what is gathered ahead
gathered.py        one forward's full views: freed after forward, gathered again before backward, freed after it
reduce.py          gradients packed, reduced, waited for late
hooks.py           communication hooks: gradients reduced by the user's function
accumulate.py      gradients that wait for a later reduce
clip.py            the norm of all gradients, and scaling by it
inputs.py          inputs and buffers under mixed precision
torch_private.py   the private torch functions that this half needs, and the versions they were checked on
"""

from fsdp_compile.eager.forward import sharded_forward
from fsdp_compile.eager.root import Root

__all__ = ["Root", "sharded_forward"]
