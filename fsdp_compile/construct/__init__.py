"""From a module to units: what `fully_shard` works out, checks and prepares before parameters are sharded.

arguments.py       one form of arguments for which FSDP1 and FSDP2 have different names
wrap_policy.py     the modules that become units of their own, and what is left alone
prepare.py         what becomes of each of them, and where it computes; all is checked before anything is changed
units.py           initial values; units are made and connected with modules and the root
"""
