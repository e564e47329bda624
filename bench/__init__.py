"""Measurements that anyone can repeat. `python -m bench` runs them all; so far:

host_overhead.py    CPU time of a compiled step outside kernels and collectives
"""
