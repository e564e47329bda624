"""Predictions and reports: what a compiled step will communicate, and what that costs.

report.py   trace a sharded model as far as its joint graph, read the workload from it, search a plan, report on it

`fsdp_compile.explain`, the function, is defined in api.py, because it may shard the model first. The attribute of that
name is always the function: import from this package by `from fsdp_compile.explain.report import Report`.
"""
