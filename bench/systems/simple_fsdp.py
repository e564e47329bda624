"""SimpleFSDP as torchtitan 0.2.2 publishes it: each parameter a DTensor, the whole model one graph.

Inductor's bucketing and overlap passes are switched on by torchtitan's own function. Its automatic one needs CUDA's
cost model, so the CPU has the manual one, one bucket for each block, which both its authors' Llama uses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.systems import Prepared, Setup


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    from torchtitan.experiments.simple_fsdp.backend import get_compile_backend_with_passes
    from torchtitan.experiments.simple_fsdp.job_config import Compile
    from torchtitan.experiments.simple_fsdp.simple_fsdp import MixedPrecisionPolicy, data_parallel

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setup.bf16 else None
    sharded = data_parallel(model, setup.mesh, mode="fully_shard", mp_policy=precision)
    for name, parameter in sharded.named_parameters():  # it makes all of them trainable
        parameter.requires_grad_(name in trained)
    torch._inductor.config.reorder_for_peak_memory = False
    config: Any = Compile(graph_passes=setup.option or ("auto_bucketing" if setup.device.type == "cuda" else BUCKETS))
    config.backend, config.enable = "inductor", True
    first, last = setup.ends
    backend = get_compile_backend_with_passes(config, True, [first, last, *setup.block_names])
    compiled: Any = torch.compile(sharded, backend=backend, fullgraph=True)
    return Prepared(sharded, compiled, scale=1 / setup.mesh.size())  # its gradients are sums over the ranks


BUCKETS = "transformer_block_bucketing"
