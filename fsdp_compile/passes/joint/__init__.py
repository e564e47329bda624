"""Passes on forward and backward in one graph, before the partitioner splits it.

insert_collectives.py   markers become functional collectives; a unit that is called several times is gathered once
reshard.py              which units reshard after forward, how the partitioner is told, and the check that it happened
"""
