"""Private torch names that checkpoints need. Checked on torch 2.11 and 2.13."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
