"""Full weights for an engine on the emulated link: `export` beside `full_tensor()` of each of FSDP2's parameters.

One process plays rank 0 of 8. The link is that of `python -m bench link` at 0.9 for the GPT of 10.9 M parameters, whose
sharded values are float32. All take turns; seconds are those that the one thread computes, and those that it waits.

    ms        until the last tensor was read, the median over rounds
    sent      MB that the rank sends

python -m bench export [--rounds 20]
"""

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from bench.emulated import count_one_thread
from bench.link import LINK
from bench.models import WORKLOADS
from bench.report import parser
from fsdp_compile import export, fully_shard

LATENCY, BANDWIDTH = 20e-6, 327e6  # seconds a call, bytes a second


def by_unit(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    for unit in export(model, dtype):
        yield from unit.values()


def by_parameter(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    for param in model.parameters():
        full: Any = param.full_tensor()  # type: ignore[attr-defined]  # a DTensor
        yield full.to(dtype)


def main() -> None:
    """Print a row for each way and dtype."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=20)
    args = arguments.parse_args()
    count_one_thread()
    workload = WORKLOADS["gpt"]()
    ours, peer = fully_shard(workload.build()), workload.build()
    for module in (*workload.blocks(peer), peer):
        torch_fully_shard(module)
    ways = {
        (name, dtype): (weights, model, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for name, weights, model in (("export", by_unit, ours), ("full_tensor", by_parameter, peer))
    }
    LINK.configure(LATENCY, BANDWIDTH)
    took: dict[Any, list[float]] = {way: [] for way in ways}
    sent = {}
    for number in range(args.rounds + 1):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            weights, model, dtype = ways[way]
            LINK.reset()
            begin = LINK.clock()
            elements = sum(tensor.numel() for tensor in weights(model, dtype))
            took[way] += [LINK.clock() - begin] * (number > 0)
            sent[way] = sum(call.nbytes for call in LINK.calls)
            assert elements == sum(param.numel() for param in peer.parameters())
    medians = {way: statistics.median(seconds) for way, seconds in took.items()}
    for (name, dtype), seconds in medians.items():
        ratio = seconds / medians["full_tensor", dtype]
        print(f"{name:12} {dtype} {seconds * 1e3:7.1f} ms, {ratio:.2f} x, sent {sent[name, dtype] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
