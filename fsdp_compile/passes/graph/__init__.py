"""What passes ask of a graph.

nodes.py        what a node is to us, by its tag, and of which kind it is: a view, a matrix product, a loop
node_costs.py   operations, bytes and seconds of one node
costs.py        the same for all that a plan moves, on the hardware that the configuration names
lifetimes.py    what is alive when, and how many bytes that are
reading.py      a graph as tasks and units: what the planner sees, and the nodes that a plan moves
"""
