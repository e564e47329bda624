"""What passes ask of a graph.

nodes.py     what a node is to us, by its tag; views, matrix products, loops; who reads a node
costs.py     operations and bytes of one node; bytes that are alive beside it
reading.py   a graph as tasks and units: what the planner sees, and the nodes that a plan moves
"""
