"""From a module to units: what `fully_shard` works out, checks and prepares before parameters are sharded.

blocks.py          the modules that become units of their own, and what is left alone
prepare.py         what becomes of each of them, and where it computes, before anything is changed
units.py           initial values; units are made and connected with modules and the root

arguments.py       one form of arguments for which FSDP1 and FSDP2 have different names; settings of each unit
wrap_policy.py     other choices of units, by torch's policies
refusals.py        what is refused of a model
rejoin.py          what an earlier call has divided becomes one unit
wires.py           formats in which units are sent
"""
