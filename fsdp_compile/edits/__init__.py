"""What users change between and within steps: taken over, or refused.

writeback.py      parameters that were replaced or moved, before the next gather
own_writes.py     parameters that a forward of their own unit changes
summon.py         full parameters in the place of the sharded ones
apply.py          `module.to()` and all else that goes through `Module._apply`
"""
