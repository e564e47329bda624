"""State of sharded models and optimizers in memory, under the names and in the shapes of the unsharded model.

sharded_value.py       the value in a sharded state dict, which torch.distributed.checkpoint writes and reads by itself
model.py               `state_dict` and `load_state_dict` of a sharded module: full, sharded or local
watched_optimizer.py   an optimizer's state as it enters and leaves its own state dict
optimizer.py           the same by parameter names; torch's older functions for it
saved_optimizer.py     the same for checkpoints
_torch.py              the private torch names that this folder and checkpoint/ need
"""
