"""How tensors are put into messages."""

import itertools

import torch

from fsdp_compile.construct.units import BUCKET_BYTES, _buckets


def test_a_bucket_is_250_mib() -> None:
    """E-SYNC-1."""
    assert BUCKET_BYTES == 250 * 1024 * 1024


def test_buckets_hold_every_tensor_once_and_no_more_than_their_size() -> None:
    """A bucket is full or the last; a tensor larger than one is alone; wide dtypes come first (E-SYNC-1)."""
    tensors = [torch.empty(n, dtype=t) for n in (1, 3, 100, 7) for t in (torch.bool, torch.float64, torch.bfloat16)]
    buckets = list(_buckets(tensors, 64))
    assert sorted(id(t) for bucket in buckets for t in bucket) == sorted(map(id, tensors))
    assert all(sum(t.nbytes for t in bucket) <= 64 or len(bucket) == 1 for bucket in buckets)
    sizes = [t.itemsize for bucket in buckets for t in bucket]
    assert sizes == sorted(sizes, reverse=True)
    pairs = itertools.pairwise(buckets)
    assert all(sum(t.nbytes for t in bucket) + following[0].nbytes > 64 for bucket, following in pairs)


def test_buckets_do_not_mix_devices() -> None:
    """One message is one tensor on one device."""
    tensors = [torch.empty(2, device=device) for device in ("cpu", "meta", "cpu")]
    assert [[t.device.type for t in bucket] for bucket in _buckets(tensors, 64)] == [["cpu", "cpu"], ["meta"]]
