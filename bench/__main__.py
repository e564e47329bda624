"""`python -m bench`: run every measurement and write its figures to `bench/results/`."""

from bench.host_overhead import main

main()
