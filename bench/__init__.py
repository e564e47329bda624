"""Every peer, the same work, one command: `python -m bench` (README.md beside this file says how, and why it is fair).

models.py           what is trained
systems/            who trains it
link.py             the emulated link; link_cuda.py: the same for CUDA tensors
worker.py           one rank of one system, in a process of its own
rounds.py           processes side by side, which take turns
copies.py           bytes that are copied; memory.py: bytes that are alive
parts.py            what is measured, and the bound on it
report.py           JSON, tables, traces; pictures.py: pictures
runs/               tables of training runs beside predictions
The other files are commands of their own: see __main__.py.
"""
