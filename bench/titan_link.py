"""torchtitan's Llama debug model on the emulated link: its FSDP2 with compiled blocks beside this package.

One process plays rank 0 of 8 and counts CPU seconds. Each model is built, parallelized and initialized as torchtitan's
trainer does, from its own config; a step is a forward, a cross entropy and a backward. All take turns.

    fsdp2     torchtitan's `parallelize_llama`, which compiles each block. The next unit is gathered ahead and no reduce
              blocks the host (systems/fsdp2.py), as on a GPU, where the host runs ahead
    blocks    `fsdp_compile.integrations.torchtitan`, each block compiled, the next unit gathered ahead
    whole     the same with FSDP_COMPILE_WHOLE_MODEL=1: one graph, planned for the link that the package has measured

    exposed   ms of a step in which a wait sleeps; tokens/s from the whole step, waits included

python -m bench titan_link [--ratios 0.6 0.9] [--rounds 7]       needs torchtitan 0.3.0
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bench.emulated import WORLD, count_one_thread
from bench.link import FREE, LINK
from bench.parts import link_for
from bench.report import parser, write
from bench.systems.fsdp2 import overlap
from bench.systems.ours import measure

SYSTEMS = ("fsdp2", "blocks", "whole")
ROWS, LENGTH = 1, 256  # of tokens


class System(NamedTuple):
    """A model, and what waits for the reduces of a backward that has ended."""

    model: nn.Module
    finish: Callable[[], None]


def build(system: str) -> System:
    """torchtitan's debug model, as its trainer makes it ready: sharded and compiled by one of the systems."""
    utils: Any = import_module("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", torch.cpu  # before anything else of it is imported
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fsdp_compile.integrations.torchtitan import WHOLE, sharded

    os.environ[WHOLE] = str(int(system == "whole"))
    config = llama3_debugmodel()
    spec: Any = config.model_spec if system == "fsdp2" else sharded(config.model_spec)
    for layer in spec.model.layers:  # flex_attention does not train on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = replace(config.parallelism, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, WORLD)
    dims.build_mesh()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=replace(config.training, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=replace(config.compile, enable=True, components=["model"]),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    parts = [model.tok_embeddings, *model.layers.values(), model.norm]
    if system == "fsdp2":
        for module in model.modules():
            if isinstance(module, FSDPModule):  # torchtitan's factor is a product before the sum, unknown to gloo
                module.set_force_sum_reduction_for_comms(True)
        return System(model, overlap(model, parts))
    for part, following in pairwise(parts if system == "blocks" else ()):
        part.set_modules_to_forward_prefetch([following])
    return System(model, lambda: None)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the ones after them."""
    tokens = torch.randint(2048, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(system: System) -> tuple[float, float]:
    """Seconds of forward and backward, and of what waits sleep in them."""
    tokens, target = batch()
    LINK.reset()
    begin = LINK.clock()
    out = system.model(tokens, positions=torch.arange(LENGTH).expand(ROWS, -1).contiguous())
    F.cross_entropy(out.flatten(0, 1).float(), target.flatten()).backward()
    system.finish()
    seconds = LINK.clock() - begin
    system.model.zero_grad()
    return seconds, LINK.summary()["exposed"]


def row(models: dict[str, System], ratio: float, rounds: int) -> dict[str, Any]:
    """All systems on a link that takes `ratio` times as long as computing: medians, and of paired steps."""
    LINK.configure(0.0, FREE)
    computing = statistics.median([step(models["whole"])[0] for _ in range(4)][1:])  # the first one compiles
    latency, bandwidth = link_for(ratio, computing, LINK.summary())
    measure(f"custom:{latency},{bandwidth}", torch.device("cpu"))
    torch._dynamo.reset()
    for model in models.values():
        for _ in range(2):
            step(model)
    LINK.configure(latency, bandwidth)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(rounds):
        for name in list(models)[:: 1 if number % 2 else -1]:
            found[name].append(step(models[name]))
    seconds = {name: statistics.median(each for each, _ in those) for name, those in found.items()}
    exposed = {name: statistics.median(each for _, each in those) for name, those in found.items()}
    paired = {
        name: statistics.median(
            theirs / mine for (theirs, _), (mine, _) in zip(found["fsdp2"], found[name], strict=True)
        )
        for name in models
    }
    return {"ratio": ratio, "computing": computing, "step": seconds, "exposed": exposed, "speed": paired}


def main() -> None:
    """Print a table and write `bench/results/titan_link.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--ratios", nargs="+", type=float, default=[0.6, 0.9])
    arguments.add_argument("--rounds", type=int, default=7)
    args = arguments.parse_args()
    count_one_thread()
    models = {name: build(name) for name in SYSTEMS}
    rows = []
    for ratio in args.ratios:
        rows.append(found := row(models, ratio, args.rounds))
        print(f"communication {ratio} of computing, {found['computing'] * 1e3:.0f} ms")
        for name in models:
            tokens = ROWS * LENGTH / found["step"][name]
            print(f"    {name:8} {tokens:8.0f} tokens/s, {found['speed'][name]:.2f} times fsdp2, "
                  f"{found['exposed'][name] * 1e3:6.1f} ms exposed", flush=True)  # fmt: skip
    if not args.dry:
        write("titan_link", {"rows": rows})


if __name__ == "__main__":
    main()
