"""State on disk: original names and shapes, from and into shards, without gathering; folders complete or invisible.

Values in sharded state dicts
    boxes.py               a rank's run of a flattened parameter as boxes of the n-D parameter; integers only
    share.py               what all values that lie alike have in common, made once
    sharded.py             the value, which torch.distributed.checkpoint writes and reads by itself
A folder of checkpoints
    directory.py           names in it: newest, published, removed
    manifest.py            sizes and checksums of what a checkpoint holds
    storage.py             writer and reader for torch.distributed.checkpoint that use both
    save_load.py           `save` and `load`
    states.py              models and optimizers as these two take them
Hugging Face's layout
    safetensors_file.py    files and folders of safetensors, at known bytes
    hugging_face.py        `save_safetensors` and `load_safetensors`
The command `fsdp-compile checkpoint`
    sources.py             any format, read one tensor at a time
    targets.py             any format, written one tensor at a time
    convert.py             from one to the other
disk.py            values of tensors as bytes, and bytes that have reached the disk
agree.py           one rank decides, or all succeed
torch_private.py   the private torch names that this folder needs, and the versions they were checked on
"""

from fsdp_compile.checkpoint.directory import latest
from fsdp_compile.checkpoint.hugging_face import load_safetensors, save_safetensors
from fsdp_compile.checkpoint.manifest import CheckpointError
from fsdp_compile.checkpoint.save_load import load, save
from fsdp_compile.checkpoint.storage import DirectoryReader, DirectoryWriter

__all__ = [
    "CheckpointError",
    "DirectoryReader",
    "DirectoryWriter",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
]
