"""From a module to units: what `fully_shard` works out, checks and prepares before parameters are sharded.

ignored.py      the modules and parameters that are left alone
wrap_policy.py  the modules that become units of their own
validate.py     what becomes of each of them; every check is made before anything is changed
devices.py      where a unit computes, and moving its tensors there
meta_init.py    parameters and buffers on the meta device get memory and values
broadcast.py    equal values on all ranks
"""
