"""The value in a sharded state dict, and what torch.distributed.checkpoint does with it."""

import copy
import io
import math
from typing import Any

import planning
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.state_dict.sharded_value import ShardedValue
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=4)
WORLDS = st.sampled_from([1, 2, 3, 4, 8])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def filled(shapes: list[tuple[int, ...]], dtype: torch.dtype, start: int = 1) -> dict[str, Tensor]:
    """Tensors in which no two elements are equal, as far as the dtype goes."""
    full, at = {}, start
    for index, shape in enumerate(shapes):
        full[f"layer.{index}"] = torch.arange(at, at + math.prod(shape)).to(dtype).view(shape)
        at += math.prod(shape)
    return full


def layout_of(full: dict[str, Tensor], world_size: int, alignment: int) -> FlatParamLayout:
    return FlatParamLayout.build([(n, tuple(t.shape)) for n, t in full.items()], world_size, alignment)


@settings(max_examples=60)
@given(SHAPES, WORLDS, WORLDS, st.sampled_from([1, 3, 16]), DTYPES)
def test_any_world_size_to_any_other(
    shapes: list[tuple[int, ...]], saving: int, loading: int, alignment: int, dtype: torch.dtype
) -> None:
    """What `saving` ranks write under one layout, `loading` ranks read under another, bit for bit; nothing is written
    twice, and torch's own check of the plan accepts the chunks."""
    full, other = filled(shapes, dtype), filled(shapes, dtype, 1000)
    layout, target = layout_of(full, saving, alignment), layout_of(full, loading, 16)
    saved = planning.save([planning.sharded(full, layout, rank) for rank in range(saving)])
    for name, expected in full.items():
        assert saved.metadata.state_dict_metadata[name].size == expected.shape
        assert saved.metadata.state_dict_metadata[name].properties.dtype == dtype
    states = [planning.sharded(other, target, rank) for rank in range(loading)]
    planning.load(saved, states)
    for rank, state in enumerate(states):
        for name, expected in planning.sharded(full, target, rank).items():
            assert torch.equal(state[name].local, expected.local), f"{name} on rank {rank}"
    plain = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    planning.load(saved, [plain])
    assert all(torch.equal(plain[name], full[name]) for name in full)
    back = planning.save([full])
    planning.load(back, states)
    for rank, state in enumerate(states):
        for name, expected in planning.sharded(full, target, rank).items():
            assert torch.equal(state[name].local, expected.local), f"{name} on rank {rank} from plain tensors"


def value(rank: int = 1) -> ShardedValue:
    """Elements 4 to 7 of 3 x 5."""
    return ShardedValue(torch.arange(4.0, 8.0), ShardSpec(FlatSharding((3, 5), 0, 4), planning.ranks_seen_by(rank, 4)))


def test_it_is_a_dtensor_of_the_original_shape() -> None:
    """Shape, size, dtype and device are those of the original; its local elements are memory of the shard."""
    found = value()
    assert isinstance(found, DTensor)
    assert (tuple(found.shape), found.size(1), found.numel(), found.dim()) == ((3, 5), 5, 15, 2)
    assert found.dtype == torch.float32 and found.device.type == "cpu"
    shard = torch.arange(20.0)
    aliased = ShardedValue(shard[4:8], found.spec)
    first, second = (aliased.view_of(chunk) for chunk in aliased.spec.chunks)
    assert (first.tolist(), second.tolist()) == ([[4.0]], [[5.0, 6.0, 7.0]])
    second.zero_()
    assert shard[4:8].tolist() == [4.0, 0.0, 0.0, 0.0]


def test_a_chunk_has_a_storage_of_its_own_size() -> None:
    """DCP's writer copies, and keeps to the end, whatever is smaller than its storage: chunks are not."""
    for chunk in value().spec.chunks:
        view = value().view_of(chunk)
        assert view.untyped_storage().nbytes() == view.nbytes


def test_copies() -> None:
    """`clone`, `deepcopy`, `to`, pickling and DCP's stager give a value with memory of its own; `to` of what it is
    already, `detach` and `cpu` give itself."""
    shard = torch.arange(20.0)
    found = ShardedValue(shard[4:8], value().spec)
    stager = StateDictStager()
    buffer = io.BytesIO()
    torch.save(found, buffer)
    buffer.seek(0)
    copies = [found.clone(), copy.deepcopy(found), stager.stage({"x": found})["x"]]
    copies += [torch.load(buffer, weights_only=False), found.to(torch.float64)]
    for copied in copies:
        assert type(copied) is ShardedValue and copied.spec.sharding == found.spec.sharding
        assert copied.spec.chunks == found.spec.chunks
        assert torch.equal(copied.local.float(), found.local) and copied.local.data_ptr() != found.local.data_ptr()
    assert found.cpu() is found.detach() is found.to("cpu") is found


@pytest.mark.parametrize("kind", [ShardedValue, ShardedTensor])
def test_files(kind: Any) -> None:
    """`torch.load` reads both with `weights_only`, also after a mesh was made; those that share a spec still do."""
    spec = value().spec
    assert spec.mesh("cpu") is not None and spec.chunks
    buffer = io.BytesIO()
    torch.save([kind(torch.arange(4.0), spec), kind(torch.ones(4), spec)], buffer)
    buffer.seek(0)
    first, second = torch.load(buffer, weights_only=True)
    assert type(first) is kind and first.shape == (3, 5) and first.spec is second.spec
    assert (first.local.tolist(), second.local.tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0] * 4)
    assert first.spec.chunks == spec.chunks
    assert (first.spec.ranks.rank, first.spec.ranks.size) == (1, 4)


def test_copy_from_full_tensors_and_values() -> None:
    """`copy_` takes this rank's elements of a tensor in full shape, or all of another value."""
    found = value()
    found.copy_(torch.arange(15.0).view(3, 5) * 2)
    assert found.local.tolist() == [8.0, 10.0, 12.0, 14.0]
    found.copy_(value())
    assert found.local.tolist() == [4.0, 5.0, 6.0, 7.0]
    with pytest.raises(ValueError, match=r"expected shape \(3, 5\), found \(5, 3\)"):
        found.copy_(torch.zeros(5, 3))


def test_what_another_rank_has_saved() -> None:
    """It is refused with the ranks and with what to do, also where both ranks store equally many elements."""
    for kind in (ShardedValue, ShardedTensor):
        theirs = kind(torch.zeros(4), value(rank=2).spec)
        with pytest.raises(
            RuntimeError,
            match=r"copy_: expected what rank 1 of 4 stores, found what rank 2 of 4 has saved; .*full_tensor",
        ):
            value().copy_(theirs)


def test_computing_with_values() -> None:
    """What needs no other rank's elements gives values again, sharded in the same way; `numpy` is refused."""
    found = value()
    for computed, expected in (
        (found + 1, [5.0, 6.0, 7.0, 8.0]),
        (found * found, [16.0, 25.0, 36.0, 49.0]),
        (found.isnan(), [False] * 4),
        (torch.zeros_like(found), [0.0] * 4),
        (found.mul_(2), [8.0, 10.0, 12.0, 14.0]),
    ):
        assert type(computed) is ShardedValue and computed.spec is found.spec
        assert computed.local.tolist() == expected
    assert found.local.tolist() == [8.0, 10.0, 12.0, 14.0]
    for refused in (found.numpy, found.tolist):
        with pytest.raises(TypeError, match="call full_tensor"):
            refused()


def test_wrong_size() -> None:
    """Local elements that are not what the sharding says are refused."""
    with pytest.raises(ValueError, match=r"local: expected shape \(4,\) .* found \(5,\)"):
        ShardedValue(torch.zeros(5), value().spec)


def test_errors_of_loading() -> None:
    """A missing name and another shape are refused by DCP before anything is read."""
    full = filled([(3, 5)], torch.float32)
    saved = planning.save([planning.sharded(full, layout_of(full, 2, 16), rank) for rank in range(2)])
    found = value()
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: other"):
        planning.load(saved, [{"other": found}])
    wrong = ShardedValue(torch.zeros(4), ShardSpec(FlatSharding((5, 3), 0, 4), planning.ranks_seen_by(1, 4)))
    with pytest.raises(ValueError, match=r"Size mismatch .*\[3, 5\].*\[5, 3\].* for layer.0"):
        planning.load(saved, [{"layer.0": wrong}])
    with pytest.raises(
        ValueError, match=r"x: expected the offsets of one of this rank's chunks, \[\(0, 4\), \(1, 0\)\]"
    ):
        found.__get_tensor_shard__(planning.MetadataIndex("x", [2, 0]))


def test_copies_share_their_spec() -> None:
    """Chunks and descriptions are made once for all values that are sharded alike; each dtype has a description."""
    found = value()
    copies = [found.clone(), copy.deepcopy(found), found.to(torch.float64), ShardedValue(found.local, found.spec)]
    assert all(copied.spec is found.spec for copied in copies)
    assert [copied.dtype for copied in copies] == [torch.float32, torch.float32, torch.float64, torch.float32]
    assert copies[0]._spec is found._spec and copies[2]._spec.tensor_meta.dtype == torch.float64
