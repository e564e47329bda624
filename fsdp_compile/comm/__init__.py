"""Process groups, meshes, and every collective; the only folder that names one or knows a backend.

groups.py        from the arguments of `fully_shard` to the process groups of its units
collectives.py   the collectives as operators for graphs and as functions for eager code; what stands in for gloo's
direct.py        the collectives that generated code calls
prefetched.py    all-gathers that were started before the forward that reads them
comparison.py    ranks compare, through the store, what they are about to run
"""
