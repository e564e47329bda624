"""Tables of training runs, and what is predicted for each row.

tables.py          reads a table, finds model and setting of each row, and predicts it
architectures.py   which model a name and a few sizes mean
transformers.py    what a step of a transformer computes, in closed form
fit.py             least squares over constants of hardware
data/              runs that were reported, with their sources
"""
