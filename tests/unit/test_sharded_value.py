"""The value in a sharded state dict, and what torch.distributed.checkpoint does with it."""

import copy
import io
import math
import pickle

import planning
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.shard_spec import FlatSharding
from fsdp_compile.state_dict.sharded_value import ShardedValue, ShardSpec

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
    return ShardedValue(torch.arange(4.0, 8.0), ShardSpec(FlatSharding((3, 5), 0, 4), planning.mesh_seen_by(rank, 4)))


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


def test_copies_of_scalars() -> None:
    """A scalar stays one, also beside a parameter of shape (), and pickled values that share a spec still do."""
    spec = ShardSpec(FlatSharding((), 0, 4), planning.mesh_seen_by(0, 4), is_scalar=True)
    scalars = [ShardedValue(torch.ones(1), spec), ShardedValue(torch.zeros(1), spec)]
    first, second = pickle.loads(pickle.dumps(scalars))
    assert first.spec.is_scalar and copy.deepcopy(first).spec.is_scalar and first.spec is second.spec
    assert (first.local.item(), second.local.item()) == (1.0, 0.0)


def test_copy_from_full_tensors_and_values() -> None:
    """`copy_` takes this rank's elements of a tensor in full shape, or all of another value."""
    found = value()
    found.copy_(torch.arange(15.0).view(3, 5) * 2)
    assert found.local.tolist() == [8.0, 10.0, 12.0, 14.0]
    found.copy_(value())
    assert found.local.tolist() == [4.0, 5.0, 6.0, 7.0]
    with pytest.raises(ValueError, match=r"expected shape \(3, 5\), found \(5, 3\)"):
        found.copy_(torch.zeros(5, 3))


def test_computing_with_a_shard_is_refused() -> None:
    """Arithmetic, and copying into a plain tensor, would be wrong without a word: they say what to do instead."""
    refused = (lambda: value() + 1, lambda: value().T, lambda: value().sum(), lambda: torch.zeros(3, 5).copy_(value()))
    for compute in refused:
        with pytest.raises(
            RuntimeError, match="found a ShardedValue, of which this rank stores a shard; call full_tensor"
        ):
            compute()


def test_wrong_size() -> None:
    """Local elements that are not what the sharding says are refused."""
    with pytest.raises(ValueError, match=r"local: expected shape \(4,\) .* found \(5,\)"):
        ShardedValue(torch.zeros(5), value().spec)


@given(WORLDS, WORLDS)
def test_scalars_beside_values(saving: int, loading: int) -> None:
    """A scalar is written once, by a rank that stores some of its parameter, and read by all of those."""

    def state(rank: int, world_size: int, value: float) -> dict[str, ShardedValue]:
        sharding = FlatSharding((2, 3), 4, 8)
        local = torch.full((1 if sharding.local_range(rank)[1] else 0,), value)
        return {"step": ShardedValue(local, ShardSpec(sharding, planning.mesh_seen_by(rank, world_size), True))}

    saving, loading = max(saving, 2), max(loading, 2)
    saved = planning.save([state(rank, saving, 7.0) for rank in range(saving)])
    states = [state(rank, loading, 0.0) for rank in range(loading)]
    planning.load(saved, states)
    assert [found["step"].local.tolist() for found in states] == [[7.0], [7.0], *[[]] * (loading - 2)]
    plain = {"step": torch.zeros(())}
    planning.load(saved, [plain])
    assert plain["step"] == 7.0


def test_errors_of_loading() -> None:
    """A missing name and another shape are refused by DCP before anything is read."""
    full = filled([(3, 5)], torch.float32)
    saved = planning.save([planning.sharded(full, layout_of(full, 2, 16), rank) for rank in range(2)])
    found = value()
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: other"):
        planning.load(saved, [{"other": found}])
    wrong = ShardedValue(torch.zeros(4), ShardSpec(FlatSharding((5, 3), 0, 4), planning.mesh_seen_by(1, 4)))
    with pytest.raises(ValueError, match=r"Size mismatch .*\[3, 5\].*\[5, 3\].* for layer.0"):
        planning.load(saved, [{"layer.0": wrong}])
    with pytest.raises(
        ValueError, match=r"x: expected the offsets of one of this rank's chunks, \[\(0, 4\), \(1, 0\)\]"
    ):
        found.__get_tensor_shard__(planning.MetadataIndex("x", [2, 0]))


def test_who_writes_a_scalar() -> None:
    """The rank with the first element, alone: DCP would let the last of several ranks write all that they share."""
    sharding = FlatSharding((2, 3), 4, 8)
    offered = []
    for rank in range(3):
        local = torch.ones(1 if sharding.local_range(rank)[1] else 0)
        scalar = ShardedValue(local, ShardSpec(sharding, planning.mesh_seen_by(rank, 3), is_scalar=True))
        offered.append(len(scalar.__create_write_items__("x", None)))
    assert offered == [1, 0, 0]


def test_copies_share_their_spec() -> None:
    """Chunks and descriptions are made once for all values that are sharded alike; each dtype has a description."""
    found = value()
    copies = [found.clone(), copy.deepcopy(found), found.to(torch.float64), ShardedValue(found.local, found.spec)]
    assert all(copied.spec is found.spec for copied in copies)
    assert [copied.dtype for copied in copies] == [torch.float32, torch.float32, torch.float64, torch.float32]
    assert copies[0]._spec is found._spec and copies[2]._spec.tensor_meta.dtype == torch.float64
