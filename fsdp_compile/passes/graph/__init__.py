"""What passes ask of a graph.

nodes.py       what a node is to us, by its tag, and of which kind it is: a view, a matrix product, a loop
costs.py       operations, bytes and seconds of nodes, collectives and updates, on the hardware that is named
lifetimes.py   what is alive when, and how many bytes that are
analyze.py     a graph as tasks and units: what the planner sees, and the nodes that a plan moves
choices.py     what an update costs, and how a choice is noted on nodes
"""
