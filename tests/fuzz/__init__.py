"""Random models, options and training loops, compared with one process that plays all ranks: `python -m fuzz`."""
