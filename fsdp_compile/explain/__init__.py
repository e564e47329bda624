"""Predictions and reports: what a step will take, compute, communicate and keep in memory.

One route: a model is traced -> work or graph -> workload -> plan (passes/plan) -> simulated -> a report.

prediction.py   what is asked of a prediction and what it says: plain data
predict.py      an unsharded model in many settings: traced a few times (trace.py, work.py)
sharded.py      the plan of a sharded model, from its joint graph
report.py       predictions or a plan, and the forms in which they are read: text.py, JSON, trace, a page (page/)
calibrate.py    measure this machine, and write a hardware file

`fsdp_compile.explain`, the function, is defined in api.py, because it may shard the model first. The attribute of that
name is always the function: import from this package by `from fsdp_compile.explain.report import Report`.
"""
