"""Sharded tensors that an earlier version of the package has pickled."""

import io
import pickle

import torch
from torch import nn

from fsdp_compile import fully_shard


def test_tensors_of_version_0_2_load() -> None:
    """Their classes lay in core/: plain pickles, and `torch.load` with and without `weights_only`."""
    param = fully_shard(nn.Linear(7, 2)).weight
    now, then = b"fsdp_compile.tensors.", b"fsdp_compile.core."
    pickled = pickle.dumps(param, protocol=2)
    assert now in pickled
    assert torch.equal(pickle.loads(pickled.replace(now, then)).to_local(), param.to_local())
    file = io.BytesIO()
    torch.save({"weight": param}, file, _use_new_zipfile_serialization=False)
    assert now in file.getvalue()
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(file.getvalue().replace(now, then)), weights_only=weights_only)
        assert torch.equal(loaded["weight"].to_local(), param.to_local())
