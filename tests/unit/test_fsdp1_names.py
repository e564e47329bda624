"""Every public name of torch's `FullyShardedDataParallel` exists here under that name, or is listed with its reason."""

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_compile
from fsdp_compile import FullyShardedDataParallel

# What torch's class or module has and ours has not, or has otherwise.
LEFT_OUT: dict[str, str] = {}
DEFAULTS = {"use_orig_params": "there is no flat parameter to show, so True needs no option and False is warned of"}
OF_FSDP2 = {  # tested with the interface of `fully_shard`
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "fully_shard", "register_fsdp_forward_method", "share_comm_ctx",
}  # fmt: skip
FORWARDED = {"args", "kwargs"}  # of methods that pass all arguments on to nn.Module


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_names() -> None:
    """All that torch's class has, its settings aside, which an instance has, and all that its module exports."""
    public = {name for name in dir(TorchFSDP) if not name.startswith("_")}
    ours = set(dir(FullyShardedDataParallel))
    assert public - ours == LEFT_OUT.keys() & public
    assert set(torch.distributed.fsdp.__all__) - OF_FSDP2 <= set(fsdp_compile.__all__)


def test_arguments_of_the_constructor() -> None:
    """Arguments have torch's order and defaults, except for those listed, so that positional calls mean the same."""
    theirs, ours = _parameters(TorchFSDP.__init__), _parameters(FullyShardedDataParallel.__init__)
    assert list(theirs) == list(ours)
    differ = {name for name, parameter in theirs.items() if parameter.default != ours[name].default}
    assert differ == DEFAULTS.keys()


@pytest.mark.parametrize("name", [name for name in vars(TorchFSDP) if not name.startswith("_")])
def test_arguments_of_methods(name: str) -> None:
    """Each method takes torch's arguments, by name and by position, with torch's defaults."""
    theirs, ours = getattr(TorchFSDP, name), getattr(FullyShardedDataParallel, name)
    if not callable(theirs):
        return
    expected, found = _parameters(theirs), _parameters(ours)
    if found.keys() >= FORWARDED:
        return
    assert list(found) == list(expected)
    for key, parameter in expected.items():
        assert (found[key].kind, found[key].default) == (parameter.kind, parameter.default), key
