"""What sharded parameters are, without a process group that communicates: the room that all others build on.

layout.py         where each parameter lies in its flat buffer, and which slice each rank stores
ops.py            the marker operators of traced graphs, and the string that says how a unit is gathered and reduced
flat_collectives.py   a flat parameter gathered and averaged, over one group or two
autograd.py       between parameters and the flat shard: who gets which gradient, and when reduces are waited for
flat_param.py     a flat parameter: layout, shard and parameters bound together
unit.py           flat parameters that are gathered together, who reads them now, and what steps change about them
sharding.py       a sharded module: what it knows about itself, and how its code finds unsharded parameters
settings.py       the options of `fully_shard`, switches in the environment, warnings that point at the user's line
_torch.py         private names of torch about autograd, modules and Dynamo
"""
