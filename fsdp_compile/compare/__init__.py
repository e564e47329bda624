"""One runner of training: `check` compares its values, `compare` its seconds and bytes, `selfcheck` both.

case.py      what is trained: model, batches, loss, optimizer, and what shards it
training.py  one rank that trains a case by a way
pool.py      processes that are such ranks
values.py    all values of a step, and by how much they may differ
modules.py   what differs first in a step, such as a module's output
alike.py     what a rank does for `check`; verdicts.py: what came out
systems.py   the systems of `compare`, and a turn of one of them
memory.py    bytes that are alive in a step
rounds.py    lets the systems take turns; comparison_report.py: what came out, as a table and JSON
"""
