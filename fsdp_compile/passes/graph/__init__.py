"""What passes read in a graph.

nodes.py              tags, and kinds of nodes: a view, a matrix product, a loop
work.py               operations and bytes of nodes; what they take relative to each other
lifetimes.py          when values are alive, and how many bytes that is
analyze.py            a graph as tasks and units, as the planner sees it; choices noted on nodes

prices.py             seconds of nodes and collectives: what they come from, and the graph read with them
"""
