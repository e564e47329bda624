"""What passes ask of a graph.

nodes.py        what a node is to us, by its tag, and of which kind it is: a view, a matrix product, a loop
node_costs.py   operations and bytes of one node; bytes that are alive beside it
reading.py      a graph as tasks and units: what the planner sees, and the nodes that a plan moves
"""
