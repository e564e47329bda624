"""Measurements that anyone can repeat. `python -m bench` runs them all, `python -m bench NAME ...` one of them:

host_overhead.py     CPU time of a compiled step outside kernels and collectives
compile_time.py      what compiling takes, over the unsharded model
eager_peers.py       our eager runtime against FSDP2, on two gloo ranks and by host time (peers.py: models, systems)
"""
