"""A flat parameter without a group: its shards and what is packed beside them lie alike."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import view_parameters
from fsdp_compile.tensors.shard_spec import ShardRanks
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, shards=st.integers(1, 9))
def test_all_that_is_flattened_lies_alike(shapes, shards):
    """Shards of parameters, packed gradients and full views have one layout: shards of all ranks put together are the
    packed tensors, and views of that give the tensors back; padding is zero in both (E-FLAT-19). Each parameter has
    its full shape on all ranks, and its local parts put together are its elements.
    """
    assume(any(0 not in shape for shape in shapes))  # else there is no flat parameter
    tensors = [torch.rand(shape) + 1.0 for shape in shapes]
    ranks = [
        FlatParam([(str(i), nn.Parameter(t.clone())) for i, t in enumerate(tensors)], of_rank, (), CPU)
        for of_rank in (ShardRanks("unused", shards, rank) for rank in range(shards))
    ]
    together = torch.cat([flat.shard for flat in ranks])
    packed = ranks[0].pack(tensors, torch.float32, CPU)
    assert torch.equal(packed, together)
    assert int((packed != 0).sum()) == sum(tensor.numel() for tensor in tensors)
    views = view_parameters(packed, ranks[0].layout.text)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    half, full = [tensor.half() for tensor in tensors], packed.half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # under which `cat` takes no float16
        assert torch.equal(ranks[0].pack(half, torch.float16, CPU), full)
        torch.autograd.backward(torch.ops.fsdp_flat.views(full, ranks[0].layout.text), half)
    assert torch.equal(full.grad, full)
    for index, tensor in enumerate(tensors):
        shown = [flat.params[index] for flat in ranks]
        assert all(param.shape == tensor.shape for param in shown)
        local = [param.to_local() if isinstance(param, ShardedTensor) else param.reshape(-1) for param in shown]
        assert torch.equal(torch.cat(local).detach(), tensor.reshape(-1))


def test_autograd_names_the_parameters_of_a_shard():
    """What autograd says of a shard has the names of its first three parameters, and whether there are more."""
    named = [(name, nn.Parameter(torch.ones(2))) for name in "abcd"]
    for count, text in ((3, "a, b, c"), (4, "a, b, c, ...")):
        flat = FlatParam(named[:count], ShardRanks("unused", 2, 0), (), CPU)
        assert flat.autograd_shard.grad_fn.name() == f"the shard of parameters {text}"
        named = [(name, nn.Parameter(torch.ones(2))) for name, _ in named]
