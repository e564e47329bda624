"""Systems side by side on a user's model: `fsdp-compile compare`, and the rows of `selfcheck` about speed and memory.

systems.py   the systems, and one rank of one of them that trains a model
memory.py    bytes that are alive in a step
worker.py    a process that is such a rank, and does what it is told line by line
rounds.py    starts these processes, lets the systems take turns, and gathers what they say
report.py    what came out as text, JSON, and a page with pictures
"""
