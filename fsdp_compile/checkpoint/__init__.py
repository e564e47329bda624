"""State on disk: original names and shapes, from and into shards, without gathering.

boxes.py      a rank's run of a flattened parameter as boxes of the n-D parameter; integers only
sharded.py    the value in a sharded state dict, which torch.distributed.checkpoint writes and reads by itself
"""
