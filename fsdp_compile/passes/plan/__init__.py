"""A plan says what a training step gathers, waits for, frees and reduces before which task. Plain numbers only.

workload.py   the planner's input: tasks and units of a step; bounds for any plan
plan.py       the plan as data and text; `verify` checks any plan; `simulate` gives its time and memory
schedule.py   `search_plan`, a list scheduler and the preferences that it is tried with; plans by fixed rules
"""
