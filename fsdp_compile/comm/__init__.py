"""Process groups, meshes, and every collective; the only folder that names one or knows a backend.

groups.py        from the arguments of `fully_shard` to the process groups of its units
collectives.py   the collectives as operators for graphs and as functions for eager code; what stands in for gloo's
flat.py          a flat parameter gathered and averaged, over one group or two; bodies of the marker operators
direct.py        the collectives that generated code calls
prefetched.py    all-gathers that were started before the forward that reads them
comparison.py    ranks compare, through the store, what they are about to run
watchdog.py      a wait that takes too long raises, and says who is missing
phases.py        work that ranks do together through code of torch, whose waits end too

Importing any of it registers the bodies of `fsdp_flat::unshard` and `fsdp_flat::reduce_grads`.
"""

from fsdp_compile.comm import flat as _  # noqa: F401  (registers the bodies)
