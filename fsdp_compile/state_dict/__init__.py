"""State of sharded models and optimizers in memory, under the names and in the shapes of the unsharded model.

sharded_value.py       values of sharded state dicts, and rows as FSDP1 has them
model.py               `state_dict` and `load_state_dict` of a sharded module: full, sharded or local
loaded_optimizer.py    the state that an optimizer loads becomes sharded as its parameters
optimizer.py           the same by parameter names, also for checkpoints; torch's older functions for it
_torch.py              the private torch names that this folder and checkpoint/ need
"""
