"""Sharded tensors as values of state dicts, and what torch.distributed.checkpoint does with them."""

import copy
import io
from typing import Any

import planning
import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.state_dict.sharded_value import ShardedValue
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.sharded_view import ShardedView, in_state


def value(rank: int = 1) -> ShardedTensor:
    """Elements 4 to 7 of 3 x 5."""
    return ShardedTensor(torch.arange(4.0, 8.0), ShardSpec(FlatSharding((3, 5), 0, 4), planning.ranks_seen_by(rank, 4)))


def test_it_is_a_dtensor_of_the_original_shape() -> None:
    """Shape, size, dtype and device are those of the original; its local elements are memory of the shard."""
    found = value()
    assert isinstance(found, DTensor)
    assert (tuple(found.shape), found.size(1), found.numel(), found.dim()) == ((3, 5), 5, 15, 2)
    assert found.dtype == torch.float32 and found.device.type == "cpu"
    shard = torch.arange(20.0)
    aliased = ShardedTensor(shard[4:8], found.spec)
    first, second = (aliased.view_of(chunk) for chunk in aliased.spec.chunks)
    assert (first.tolist(), second.tolist()) == ([[4.0]], [[5.0, 6.0, 7.0]])
    assert first.untyped_storage().nbytes() == first.nbytes, "else DCP's writer copies it, and keeps it to the end"
    second.zero_()
    assert shard[4:8].tolist() == [4.0, 0.0, 0.0, 0.0]


def test_copies() -> None:
    """`clone`, `deepcopy`, `to`, pickling and DCP's stager give a value with memory of its own; `to` of what it is
    already and `cpu` give itself."""
    shard = torch.arange(20.0)
    found = ShardedTensor(shard[4:8], value().spec)
    stager = StateDictStager()
    copies = [found.clone(), copy.deepcopy(found), stager.stage({"x": found})["x"]]
    copies += [through_file(found), found.to(torch.float64)]
    for copied in copies:
        assert type(copied) is ShardedTensor and copied.spec.sharding == found.spec.sharding
        assert copied.spec.chunks == found.spec.chunks
        assert torch.equal(copied.local.float(), found.local) and copied.local.data_ptr() != found.local.data_ptr()
    assert found.cpu() is found.to("cpu") is found


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


TURNED = (torch.Size((5, 3)), (1, 5), 0)


class Old(tuple[Any, ...]):
    """In a file it is what version 0.2 wrote for a tensor, or for a view of some shape, strides and offset."""

    def __reduce__(self) -> Any:
        return ShardedValue, tuple(self)


def test_files_of_version_0_2() -> None:
    """Values of a class that is gone are sharded tensors and views of them, on the same rank."""
    found, view = through_file([Old((torch.arange(4.0), value().spec, *more)) for more in ((), (TURNED,))])
    assert type(found) is ShardedTensor and found.local.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert type(view) is ShardedView and view.shape == (5, 3) and isinstance(view, DTensor)
    assert [view.view_of(chunk).tolist() for chunk in view.chunks] == [[[0.0]], [[1.0], [2.0], [3.0]]]


def test_views() -> None:
    """A view in a state dict is copied, staged, pickled and filled as what it is a view of: nothing is gathered."""
    turned = in_state(value().t())
    assert isinstance(turned, DTensor) and not isinstance(value().t(), DTensor)
    copies = [turned.clone(), copy.deepcopy(turned), through_file(turned), turned.to(torch.float64)]
    copies += [StateDictStager().stage({"x": turned})["x"]]
    for copied in copies:
        assert copied.geometry == TURNED and isinstance(copied, DTensor)
        copied.base.local.zero_()
    assert [turned.view_of(chunk).tolist() for chunk in turned.chunks] == [[[4.0]], [[5.0], [6.0], [7.0]]]


def test_errors_of_loading() -> None:
    """A missing name and another shape are refused by DCP before anything is read."""
    full = {"layer.0": torch.arange(15.0).view(3, 5)}
    layout = FlatParamLayout.build([("layer.0", (3, 5))], 2)
    saved = planning.save([planning.sharded(full, layout, rank) for rank in range(2)])
    found = value()
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: other"):
        planning.load(saved, [{"other": found}])
    wrong = ShardedTensor(torch.zeros(4), ShardSpec(FlatSharding((5, 3), 0, 4), planning.ranks_seen_by(1, 4)))
    with pytest.raises(ValueError, match=r"Size mismatch .*\[3, 5\].*\[5, 3\].* for layer.0"):
        planning.load(saved, [{"layer.0": wrong}])
    with pytest.raises(
        ValueError, match=r"x: expected the offsets of one of this rank's chunks, \[\(0, 4\), \(1, 0\)\]"
    ):
        found.__get_tensor_shard__(planning.MetadataIndex("x", [2, 0]))
