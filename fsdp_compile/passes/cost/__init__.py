"""Hardware files, and seconds of collectives and kernels by their figures."""
