"""Process groups, meshes, and every collective; the only folder that names one or knows a backend.

groups.py        from the arguments of `fully_shard` to the process groups of its units
collectives.py   the collectives as operators for graphs and as functions for eager code; what stands in for gloo's
direct.py        the collectives that generated code calls
comparison.py     messages that ranks leave for each other in a store, and comparisons by them
"""
