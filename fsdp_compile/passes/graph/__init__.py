"""What passes read in a graph.

nodes.py       tags, and kinds of nodes: a view, a matrix product, a loop
costs.py       operations, bytes and seconds of nodes, collectives and updates, on the named hardware
lifetimes.py   when values are alive, and how many bytes that is
analyze.py     a graph as tasks and units, as the planner sees it; what its update costs; choices noted on nodes
"""
