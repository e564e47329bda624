"""A plan as data: what one training step gathers, waits for, frees and reduces before which task. Plain numbers only.

workload.py   what a step computes and communicates: tasks and units, the input; the optimizer's update in it
plan.py       the plan, as data and text; `verify`, which checks any plan; `simulate`: what a plan takes
bound.py      what no plan can be below: the smallest memory and the shortest step
schedule.py   `search_plan`, the planner: a list scheduler and the settings that it is tried with; plans by fixed rules
memory.py     what becomes of activations, chosen together with the plan
"""
