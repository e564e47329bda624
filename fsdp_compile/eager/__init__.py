"""The eager runtime: everything that runs outside of a compiled graph, in the order of a step.

forward.py            the forward of a sharded module, eager and traced; what is checked before a compiled one
casting.py            inputs, outputs and buffers in mixed precision; `.to()` and the like
forward_pass.py       what belongs to one forward of a root, and who hears of it: the listeners in api.py
runtime.py            what units below one root share: passes, streams, reduces in flight
unsharded.py          the unsharded parameters of one forward: gathered, freed, gathered again in backward, freed
block_reader.py       the same for a block that is compiled by itself
streams.py            streams and events behind one interface; the memory of these parameters
reduce.py             gradients packed and reduced, by collectives or communication hooks, and waited for late
accumulate.py         gradient accumulation without communication
prefetch.py           units that are gathered before a pass comes to them
"""
