"""What passes ask of a graph.

tags.py         what a node is to us: which unit's gather, view, pack or reduce
node_kinds.py   views, matrix products, loops; who reads a node; Note [What Inductor fuses]
work.py         operations and bytes of one node
memory.py       bytes that are alive beside each node
reading.py      a graph as tasks and units: what the planner sees, and the nodes that a plan moves
printing.py     a graph as text, and the files that `FSDP_COMPILE_PRINT` asks for
"""
