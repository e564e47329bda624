"""SimpleFSDP as torchtitan 0.2.2 publishes it: each parameter a DTensor, the whole model one graph.

torchtitan is installed without its dependencies: importing the package itself would start its trainer's command line,
but these files of it need torch alone. Inductor's bucketing and overlap passes are switched on by torchtitan's own
function. Its automatic one needs CUDA's cost model, so the CPU has the manual one: a bucket for each block, chosen as
the authors choose them for Llama.
"""

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.utils import get_gpu_dram_gbps
from torch.utils.flop_counter import flop_registry

from bench.systems import Prepared, Setup
from fsdp_compile.passes.graph.work import attention_flops

BUCKETS = "transformer_block_bucketing"


def open_package(name: str) -> None:
    """Make submodules of the package `name` importable without running its `__init__`."""
    found = importlib.util.find_spec(name)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"SimpleFSDP needs {name}, which is not installed; run `make bench`")
    bare = ModuleType(name)
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules.setdefault(name, bare)


def answer_for_bandwidth() -> None:
    """Let the manual pass start without a GPU: it asks Triton for the memory's bandwidth, and does not use it.

    Torch caches the answer, so Triton is replaced for one call only.
    """
    testing: Any = ModuleType("triton.testing")
    testing.get_dram_gbps = lambda: 100.0
    with mock.patch.dict(sys.modules, {"triton": ModuleType("triton"), "triton.testing": testing}):
        get_gpu_dram_gbps()


def count_grouped_queries() -> None:
    """Let torch 2.11 count the operations of attention whose heads share keys, as later versions do.

    Its overlap pass, which torchtitan switches on for CUDA, fails at them otherwise.
    """
    for name in ("flash", "efficient", "cudnn"):
        for suffix in ("", "_backward"):
            operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{suffix}")
            flop_registry[operator] = lambda *args, of=bool(suffix), **_: attention_flops(*args, backward=of)


def shard(model: nn.Module, setup: Setup) -> nn.Module:
    """Make each parameter a DTensor that is gathered where it is read."""
    open_package("torchtitan")
    from torchtitan.experiments.simple_fsdp.simple_fsdp import MixedPrecisionPolicy, data_parallel

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setup.bf16 else None
    sharded = data_parallel(model, setup.mesh, mode="fully_shard", mp_policy=precision)
    for name, parameter in sharded.named_parameters():  # it makes all of them trainable
        parameter.requires_grad_(name in trained)
    return sharded


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """With its authors' passes."""
    sharded = shard(model, setup)
    from torchtitan.experiments.simple_fsdp.backend import get_compile_backend_with_passes
    from torchtitan.experiments.simple_fsdp.job_config import Compile

    torch._inductor.config.reorder_for_peak_memory = False
    if setup.device.type != "cuda":
        answer_for_bandwidth()
    elif torch.__version__ < (2, 13):
        count_grouped_queries()
    config: Any = Compile(graph_passes="auto_bucketing" if setup.device.type == "cuda" else BUCKETS)
    config.backend, config.enable = "inductor", True
    first, last = setup.ends
    backend = get_compile_backend_with_passes(config, True, [first, last, *setup.block_names])
    run = torch.compile(sharded, fullgraph=True, backend=backend)
    return Prepared(sharded, run, scale=1 / setup.mesh.size())  # its gradients are sums over the ranks
