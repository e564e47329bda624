"""State of sharded models and optimizers in memory, under the names and in the shapes of the unsharded model.

sharded_value.py       values of sharded state dicts, and rows as FSDP1 has them
model.py               `state_dict` and `load_state_dict` of a sharded module: full, sharded or local
optimizer.py           state of optimizers, sharded as parameters and by their names, also for checkpoints
_torch.py              the private torch names that this folder and checkpoint/ need
"""
