"""Checkpoints: folders that are complete or invisible, and what can be read from and written to them.

    directory.py       names in a folder of checkpoints: newest, published, removed
    manifest.py        sizes and checksums of what a checkpoint holds
    storage.py         writer and reader for torch.distributed.checkpoint that use both
    save_load.py       `save` and `load`
torch_private.py   the private torch names that this folder needs, and the versions they were checked on
"""

from fsdp_compile.checkpoint.directory import latest
from fsdp_compile.checkpoint.manifest import CheckpointError
from fsdp_compile.checkpoint.save_load import load, save
from fsdp_compile.checkpoint.storage import DirectoryReader, DirectoryWriter

__all__ = ["CheckpointError", "DirectoryReader", "DirectoryWriter", "latest", "load", "save"]
