"""Optimizers over sharded parameters.

owners.py   by_owner: for optimizers that need complete matrices, such as Muon or SOAP; one rank updates each matrix
"""

from fsdp_compile.optim.owners import ByOwner, by_owner

__all__ = ["ByOwner", "by_owner"]
