import pytest
import torch
import torch.nn.functional as F
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.passes.cost.roofline import (
    LINKS,
    Device,
    Link,
    all_reduce_seconds,
    compute_seconds,
    device,
    launch_seconds,
    link,
    transfer_seconds,
)
from fsdp_compile.passes.graph.node_costs import Work, node_work

RING = Link("ring", latency=10.0, bandwidth=4.0, source="this test", hop=1.0)
PLAIN = Device("plain", {"float32": 100.0}, bandwidth=10.0, memory=None, source="this test", efficiency=0.5)


def test_collectives_by_hand():
    """Four ranks, 64 bytes: three steps and 48 bytes each way; an all-reduce takes the ring's or the tree's time."""
    assert launch_seconds(4, RING) == 13 and transfer_seconds(64, 4, RING) == 12
    assert all_reduce_seconds(64, 4, RING) == 10 + 6 + 24  # a tree: 10 + 4 + 32
    assert all_reduce_seconds(0, 1024, RING) == 10 + 20  # a ring: 10 + 2046
    assert launch_seconds(1, RING) == all_reduce_seconds(0, 1, RING) == 10


def test_links_and_devices():
    """Each has a name, figures that are not 0, a source; others are made from text or refused with the known names."""
    for name, each in LINKS.items():
        assert each.name == name and each.latency > 0 and each.bandwidth > 0 and each.source
    made = link("custom:2e-5,1e9")
    assert (made.latency, made.bandwidth, made.hop) == (2e-5, 1e9, 0) and link(made) is made
    with pytest.raises(ValueError, match=r"link: expected one of h100-nvlink, .*cpu-gloo or custom.*found 'ethernet'"):
        link("ethernet")
    for text in ("custom:1e-5", "custom:1,2,3", "custom:a,b", "custom:-1,1", "custom:0,0", "custom:nan,1"):
        with pytest.raises(ValueError, match="expected custom:LATENCY,BANDWIDTH"):
            link(text)
    assert device("h200").bandwidth > device("h100").bandwidth
    with pytest.raises(ValueError, match="device: expected one of h100, a100, h200, cpu, found 'tpu'"):
        device("tpu")


def test_roofline():
    """Computing at 50 a second or moving at 10, whichever takes longer; bytes alone need no dtype."""
    assert compute_seconds(1000, 50, "float32", PLAIN) == 20
    assert compute_seconds(100, 50, "float32", PLAIN) == 5
    assert compute_seconds(0, 50, "int64", PLAIN) == 5
    with pytest.raises(ValueError, match=r"device plain has a figure for \(float32\), found bfloat16"):
        compute_seconds(1, 0, "bfloat16", PLAIN)


def _mlp(x, table, weight):
    """Tokens to vectors, a product, a chain of three, a product, attention, a sum over all."""
    x = F.embedding(x, table)
    hidden = (x @ weight).relu() * 2 + 1
    out = hidden @ weight.t()
    heads = out.unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads, heads).sum()


def _graph(batch, length, mode="fake"):
    given = torch.zeros(batch, length, dtype=torch.long), torch.zeros(50, 8), torch.zeros(8, 32)
    return make_fx(_mlp, tracing_mode=mode)(*given).graph


def _total(graph):
    return sum((node_work(node) for node in graph.nodes), Work())


def test_work_by_hand():
    """Products read and write all of their matrices; a chain of three reads its input and writes its result."""
    work = {str(node.target): node_work(node) for node in _graph(2, 3).nodes if node.op == "call_function"}
    assert work["aten.embedding.default"] == Work(0, 6 * 8 + 6 * 8 * 4, 6 * 8 * 4)  # not the table
    assert work["aten.relu.default"] == Work(0, 6 * 32 * 4, 0)
    assert work["aten.mul.Tensor"] == Work(0, 0, 0)
    assert work["aten.add.Tensor"] == Work(0, 0, 6 * 32 * 4)
    assert work["aten.view.default"] == work["aten.t.default"] == work["aten.unsqueeze.default"] == Work()
    assert work["aten.mm.default"] == Work(2 * 6 * 32 * 8, (6 * 32 + 32 * 8) * 4, 6 * 8 * 4)
    attention = next(found for name, found in work.items() if "attention" in name)
    assert attention.flops == 2 * 2 * 2 * 3 * 3 * 8


def test_symbolic_sizes_count_as_their_hints():
    """A graph traced with symbols for its sizes has the work of one traced with the numbers; nothing is guarded on."""
    graph = _graph(5, 7, "symbolic")
    fake_mode = next(node for node in graph.nodes if node.op == "placeholder").meta["val"].fake_mode
    guards = len(fake_mode.shape_env.guards)
    with tracing(TracingContext(fake_mode)):
        assert _total(graph) == _total(_graph(5, 7))
    assert len(fake_mode.shape_env.guards) == guards
