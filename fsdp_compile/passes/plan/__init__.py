"""A plan as data: what one training step gathers, waits for, frees and reduces before which task. Plain numbers only.

workload.py   what a step computes and communicates: tasks and units, the input
plan.py       the plan, as data and text; `verify`, which checks any plan; `simulate`: what a plan takes
bound.py      what no plan can be below: the smallest memory and the shortest step
beam.py       the best plan for given units to keep unsharded
search.py     `search_plan`, the planner: what to keep, and within how much memory to search; plans by fixed rules
"""
