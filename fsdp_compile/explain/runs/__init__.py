"""Tables of training runs, and what is predicted for each row.

tables.py          reads a table, finds model and setting of each row, and predicts it
architectures.py   which model a name and a few sizes mean
transformers.py    what a step of a transformer computes, in closed form
fit.py             constants of a device that agree best with a table
run_table.py       a table beside its predictions, as text and JSON
data/              runs that were reported, with their sources
"""
