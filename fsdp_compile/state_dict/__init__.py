"""State of sharded models and optimizers in memory, under the names and in the shapes of the unsharded model.

sharded_value.py      the value in a sharded state dict, which torch.distributed.checkpoint writes and reads by itself
model.py              `state_dict` and `load_state_dict` of a sharded module: full, sharded or local
optimizer.py          an optimizer's state in its own state dict and by parameter names; torch's older functions for it
_torch.py             the private torch names that this folder and checkpoint/ need
"""
