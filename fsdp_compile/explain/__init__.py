"""Predictions and reports: what a step will take, compute, communicate and keep in memory.

One route: a model is traced -> work or graph -> workload -> plan (passes/plan) -> simulated -> a report.

prediction.py   settings and predictions; scheduled.py: the step and plan that a prediction is made of
trace.py        the work of an unsharded model in every setting, from a few traces; unit_work.py: that work, as numbers
predict.py      an unsharded model in many settings: work -> workload -> plan
sharded.py      a sharded model: joint graph -> workload -> plan
report.py       predictions or a plan as text, JSON, trace
calibrate.py    measure this machine, and write a hardware file

`fsdp_compile.explain`, the function, is defined in api.py, because it may shard the model first. The attribute of that
name is always the function: import from this package by `from fsdp_compile.explain.report import Report`.
"""
