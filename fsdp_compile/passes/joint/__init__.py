"""Passes on forward and backward in one graph, before the partitioner splits it.

insert_collectives.py   markers become functional collectives; a unit that is called several times is gathered once
smallest_gather.py      what to gather of each parameter, so that the fewest bytes are on the wire
parameter_values.py     which values follow from one parameter alone
choose_memory.py        what becomes of each block's activations, together with which units stay unsharded
offload.py              the edit: activations that are copied to the host and back
reshard.py              which units reshard after forward, how the partitioner is told, and the check that it happened
"""
