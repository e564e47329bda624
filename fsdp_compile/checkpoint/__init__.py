"""State on disk: original names and shapes, from and into shards, without gathering; checkpoints complete or invisible.

directory.py           a folder of checkpoints: staged, committed and removed ones, manifests, DCP's writer and reader
entries.py             the entries of their `state`: what is saved, what is read, how it is loaded
structure.py           how nested state is written under flat names
by_rank.py             values of which each rank has its own; `PerRank`
untrusted.py           reading folders that may come from anybody: nothing in them runs, nothing outside is read
save_load.py           `save` and `load`: models, optimizers and other states
hugging_face.py        `save_safetensors` and `load_safetensors`: a model to and from files of safetensors
convert.py             the command `fsdp-compile checkpoint`: from any format to any other, tensor by tensor
"""

from fsdp_compile.checkpoint.by_rank import PerRank
from fsdp_compile.checkpoint.directory import DirectoryReader, DirectoryWriter, latest
from fsdp_compile.checkpoint.hugging_face import load_safetensors, save_safetensors
from fsdp_compile.checkpoint.save_load import load, save
from fsdp_compile.checkpoint.untrusted import CheckpointError

__all__ = [
    "CheckpointError",
    "DirectoryReader",
    "DirectoryWriter",
    "PerRank",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
]
