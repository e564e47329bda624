"""From a module to units: what `fully_shard` works out, checks and prepares before parameters are sharded.

arguments.py       one form of arguments for which FSDP1 and FSDP2 have different names
wrap_policy.py     the modules that become units of their own, and what is left alone
validate.py        what becomes of each of them; every check is made before anything is changed
devices.py         where a unit computes, and moving its tensors there
initial_values.py  memory and values for what is on the meta device; equal values on all ranks
units.py           units are made and connected with modules and the root
"""
