import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from bench.links import read_rows
from fsdp_compile.passes.cost.hardware import (
    Hardware,
    Link,
    Protocol,
    device,
    devices,
    link,
    links,
    measured_text,
    read_hardware,
    reported_device,
    to_json,
)
from fsdp_compile.passes.cost.roofline import (
    all_reduce_seconds,
    attention_seconds,
    launch_seconds,
    level_of,
    product_seconds,
    transfer_seconds,
)
from fsdp_compile.passes.graph.nodes import Tag, set_tag
from fsdp_compile.passes.graph.prices import work_seconds
from fsdp_compile.passes.graph.work import Work, message_size, node_work

RING = Link("ring", latency=10.0, bandwidth=4.0, source="this test", hop=1.0)
FAR = Link("far", latency=5.0, bandwidth=1.0, source="this test", hop=2.0)
PLAIN = Hardware("plain", {"float32": 100.0}, 10.0, None, RING, FAR, product_efficiency=0.5)


def test_collectives_by_hand():
    """Four ranks, 64 bytes: three steps and 48 bytes each way; an all-reduce takes the ring's or the tree's time."""
    assert launch_seconds(4, RING) == 13 and transfer_seconds(64, 4, RING) == 12
    assert all_reduce_seconds(64, 4, RING) == 10 + 6 + 24  # a tree: 10 + 4 + 32
    assert all_reduce_seconds(0, 1024, RING) == 10 + 20  # a ring: 10 + 2046
    assert launch_seconds(1, RING) == all_reduce_seconds(0, 1, RING) == 10


def test_messages_of_wires():
    """What is sent in a format is held beside what it fills: values and scales."""
    graph = torch.fx.Graph()
    shard, start = graph.placeholder("shard"), graph.placeholder("start")
    shard.meta["val"], start.meta["val"] = torch.empty(256), torch.empty(1024)
    assert message_size(start) == 0
    for wire, expected in (("", 0), ("bf16", 2048), ("fp8", 1024 + 8)):
        set_tag(start, Tag("gather", 0, "", True, wire=wire))
        assert message_size(start) == expected, wire


def test_links_and_devices():
    """Each has a name, figures that are not 0, a source; others are made from text or refused with the known names."""
    for name, each in links().items():
        assert each.name == name and each.latency > 0 and each.bandwidth > 0 and each.source
    made = link("custom:2e-5,1e9")
    assert (made.latency, made.bandwidth, made.hop) == (2e-5, 1e9, 0) and link(made) is made
    with pytest.raises(ValueError, match=r"link: expected one of h100-nvlink, .*cpu-gloo or custom.*found 'ethernet'"):
        link("ethernet")
    several = link(measured_text({"0": (1e-5, 2e9), "fsdp.2x1": (3e-6, 4e9)}), group="fsdp.2x1")
    assert (several.latency, several.bandwidth) == (3e-6, 4e9)
    with pytest.raises(ValueError, match=r"link: expected figures for group fsdp.2x2, found those for 0, fsdp.2x1"):
        link(several.name, group="fsdp.2x2")
    slow, cpu = device("cpu:0.5"), device("cpu")
    assert slow.bandwidth == cpu.bandwidth / 2 and slow.peak["float32"] == cpu.peak["float32"] / 2
    for text in ("cpu:0", "cpu:fast", "cpu:-1", "cpu:nan"):
        with pytest.raises(ValueError, match="device: expected a speed above 0 behind cpu:"):
            device(text)
    assert device("h200").bandwidth > device("h100").bandwidth
    with pytest.raises(ValueError, match=r"device: expected one of a100-40, a100-80, b200, .*found 'tpu'"):
        device("tpu")


def test_two_levels_of_links():
    """Eight ranks on two nodes: four rings between nodes at once, hops inside and between; one node: the fast link."""
    wire = PLAIN.connect(4)
    assert level_of(8, wire, 1) == "network" and launch_seconds(8, wire) == 5 + 6 * 1 + 1 * 2
    assert transfer_seconds(64, 8, wire) == max(64 * 7 / 8 / 4, 64 / 2 / 4)
    assert transfer_seconds(64, 4, wire) == 12 and level_of(4, wire, 1) == "node"
    assert transfer_seconds(64, 2, PLAIN.connect(1)) == 32 and level_of(2, PLAIN.connect(1), 8) == "network"
    assert all_reduce_seconds(64, 8, wire) == 5 + 2 * (3 + 2) + 2 * 64 / 4  # a tree; a ring: 49


def test_links_by_size():
    """The protocol that is fastest for the size counts, and the part of the bandwidth that the ranks' own bytes reach.

    Four ranks: 10 and three hops of 1 and 48 bytes at 4 bytes a second; or 3, no hops, and half of the bandwidth.
    """
    quick = dataclasses.replace(RING, protocols=(Protocol(3.0, 0.0, 0.0, 0.5, 100.0),))
    assert launch_seconds(4, quick) == 3 and launch_seconds(4, quick) + transfer_seconds(8, 4, quick) == 3 + 6 / 2
    assert launch_seconds(4, quick) + transfer_seconds(64, 4, quick) == 13 + 48 / 4
    capped = dataclasses.replace(quick, protocols=(Protocol(3.0, 0.0, 0.0, 0.5, 1.0),))
    assert transfer_seconds(8, 4, capped) == 6
    ramped = dataclasses.replace(RING, ramp=((4.0, 0.25), (16.0, 0.75)))
    for full, part in (4, 0.25), (16, 0.25), (32, 0.5), (64, 0.75), (256, 0.75):
        assert transfer_seconds(full, 4, ramped) == pytest.approx(full * 3 / 4 / 4 / part)
    for ramp in ((4.0, 0.25), (4.0, 0.75)), ((4.0, 1.5),):
        with pytest.raises(ValueError, match="ramp: expected pairs of increasing bytes and of parts up to 1"):
            dataclasses.replace(RING, ramp=ramp)


def test_links_agree_with_the_tuner_of_nccl():
    """Of up to 256 ranks: rows that were not used to fit are off by less than 10 %, none by more than 35."""
    covered = (row for row in read_rows() if row.is_covered and row.device == "h100-80")
    rows = [row for row in covered if not row.is_fitted]
    assert len(rows) == 120 and {row.kind for row in rows} == {"all_gather", "reduce_scatter"}
    errors = [abs(row.error) for row in rows]
    assert sum(errors) / len(errors) < 0.10 and max(errors) < 0.35


def test_products_and_attention_by_hand():
    """At 50 a second, longer by the ramp, and never shorter than the bytes or a kernel; attention has its own part."""
    ramps = dataclasses.replace(PLAIN, product_ramp=10.0, attention_ramp=4.0, attention_backward=2.0)
    assert product_seconds(1000, 0, 20, "float32", ramps) == 30
    assert product_seconds(1000, 500, 20, "float32", ramps) == 50
    assert attention_seconds(100, 4, False, "float32", ramps) == 2
    assert attention_seconds(100, 4, True, "float32", ramps) == 4
    assert work_seconds(Work(read_bytes=30, written_bytes=20), dataclasses.replace(PLAIN, chain_efficiency=0.5)) == 10


def test_every_dtype_has_a_price(caplog):
    """One without a figure of its own has that of its size, else of the next larger one, else less of the largest; a
    line in the log says which, once."""
    some = dataclasses.replace(PLAIN, peak={"float32": 100.0, "bfloat16": 400.0}, float8_efficiency=0.25)
    with_float8 = dataclasses.replace(some, name="newer", peak={**some.peak, "float8": 800.0})
    for dtype, hardware, known, peak in (
        ("float16", some, "bfloat16", 400.0), ("float8_e4m3fn", some, "bfloat16", 400.0),
        ("float8_e5m2", with_float8, "float8", 800.0), ("float4_e2m1fn_x2", with_float8, "float8", 800.0),
        ("float64", some, "float32", 50.0), ("complex64", some, "float32", 50.0), ("int8", some, "bfloat16", 400.0),
        ("bool", with_float8, "float8", 800.0), ("float64", PLAIN, "float32", 50.0),
        ("bfloat16", PLAIN, "float32", 100.0),    ):  # fmt: skip
        caplog.clear()
        efficiency = 0.5 * (0.25 if known == "float8" else 1.0)
        for _ in range(2):
            assert product_seconds(1000, 0, 1, dtype, hardware) == 1000 / (peak * efficiency), dtype
            assert attention_seconds(1000, 1, False, dtype, hardware) == 1000 / peak, dtype
        said = f"device {hardware.name} has no figure for products in {dtype}: priced by that for {known}"
        assert [each.getMessage() for each in caplog.records] == [said]


def test_hardware_files(tmp_path):
    """What is written is read as it was, with the source of every number; a file that is damaged names the field."""
    path = tmp_path / "mine.json"
    for each in devices().values():
        path.write_text(to_json(each))
        assert list(read_hardware(path).figures()) == list(each.figures())
    good = json.loads(path.read_text())
    for field, value, message in [
        ("format", 2, "format: expected 1, found 2"),
        (
            "bandwidth",
            {**good["bandwidth"], "value": -1},
            "bandwidth: expected a finite number above 0, found -1",
        ),
        ("bandwidth", {**good["bandwidth"], "value": math.nan}, "bandwidth: expected a finite.*found nan"),
        ("peak", {**good["peak"], "value": {"bfloat16": 0}}, "peak of bfloat16: expected a finite number above 0"),
        ("peak", {**good["peak"], "origin": "guessed"}, "peak: expected an origin"),
        ("speed", 3, "expected fields among .*found 'speed'"),
        ("network", "carrier pigeons", "link: expected one of"),
        ("node", {**good["node"], "bandwidth": "1"}, "node, bandwidth: expected a finite"),
        ("name", 3, "name: expected text, found 3"),
        ("node", {**good["node"], "protocols": [{}]}, "node, protocols, hop: this field is missing"),
    ]:
        path.write_text(json.dumps({**good, field: value}))
        with pytest.raises(ValueError, match=message):
            read_hardware(path)
    del good["memory"]
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="memory: this field is missing"):
        device(str(path))


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


def test_work_by_hand():
    """Products read and write all of their matrices; a chain of three reads its input and writes its result."""
    work = {str(node.target): node_work(node) for node in _graph(2, 3).nodes if node.op == "call_function"}
    assert work["aten.embedding.default"] == Work(0, 6 * 8 + 6 * 8 * 4, 6 * 8 * 4)  # not the table
    assert work["aten.relu.default"] == Work(0, 6 * 32 * 4, 0)
    assert work["aten.mul.Tensor"] == Work(0, 0, 0)
    assert work["aten.add.Tensor"] == Work(0, 0, 6 * 32 * 4)
    assert work["aten.view.default"] == work["aten.t.default"] == work["aten.unsqueeze.default"] == Work(0, 0, 0)
    assert work["aten.mm.default"] == Work(2 * 6 * 32 * 8, (6 * 32 + 32 * 8) * 4, 6 * 8 * 4, "product", 32, "float32")
    attention = next(found for name, found in work.items() if "attention" in name)
    assert attention.flops == 2 * 2 * 2 * 3 * 3 * 8


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: (),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: (None, True),
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: (None, True),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operator", ATTENTION, ids=str)
def test_heads_that_share_keys_count_as_many_operations_as_queries(operator, causal):
    """Grouped-query attention multiplies each head of queries, also where keys and values have fewer heads."""

    def attention(query, key, value):
        return operator(query, key, value, *ATTENTION[operator], 0.0, causal)[0]

    def flops(heads):
        tensors = [
            torch.empty(2, each, tokens, 16, device="meta") for each, tokens in ((8, 32), (heads, 48), (heads, 48))
        ]
        nodes = make_fx(attention, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors).graph.nodes
        return [node_work(node).flops for node in nodes if node.target is operator]

    assert flops(2) == flops(8) == [2 * 2 * 8 * 32 * 48 * (16 + 16) // (1 + causal)]


def test_backward_of_attention_is_five_products():
    """Weights again, and two products for the gradients of each of the two that forward computes."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    graph = torch.fx.Graph()
    nodes = []
    for name, heads in (("grad", 8), ("query", 8), ("key", 2), ("value", 2)):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = torch.empty(2, heads, 32, 16, device="meta")
    node = graph.call_function(operator, (*nodes, None, None, None, None, 32, 32, 0.0, False, None, None))
    node.meta["val"] = tuple(each.meta["val"] for each in nodes[1:])
    assert node_work(node).flops == 5 * 2 * 2 * 8 * 32 * 32 * 16


def test_a_formula_that_fails_prices_bytes(monkeypatch, caplog):
    """Torch's formulas and those of others may refuse what their operator accepts; the graph is priced all the same."""

    def refuse(*_, **__):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, refuse)
    graph = make_fx(torch.mm)(torch.ones(4, 4), torch.ones(4, 4)).graph
    (work,) = [node_work(node) for node in graph.nodes if node.op == "call_function"]
    assert work.flops == 0 and work.moved_bytes == 3 * 64 and "shapes are incompatible" in caplog.text


@pytest.mark.parametrize(
    ("name", "gigabytes", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100-80"),
        ("NVIDIA H100", 100, "h100-96-500w"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80"),
        ("NVIDIA B200", 192, "b200"),
        ("NVIDIA GB200", 198, "gb200"),
        ("AMD Instinct MI300X", 206, "mi300x"),
    ],
)
def test_a_device_is_known_by_what_it_reports(name: str, gigabytes: int, expected: str) -> None:
    """Words of the name decide, and of GPUs that differ in memory, their memory; others are refused."""
    assert reported_device(name, gigabytes * 10**9).name == expected
    with pytest.raises(ValueError, match=r"expected one of a100-40, .* none for 'Quadro'"):
        reported_device("Quadro", 1)
