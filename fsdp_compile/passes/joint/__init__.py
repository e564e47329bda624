"""Passes on forward and backward in one graph, before the partitioner splits it; `PASSES` has their order."""
