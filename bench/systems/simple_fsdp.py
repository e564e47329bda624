"""SimpleFSDP as torchtitan 0.2.2 publishes it: each parameter a DTensor, the whole model one graph.

torchtitan is installed without its dependencies: importing the package itself would start its trainer's command line,
but these files of it need torch alone. Inductor's bucketing and overlap passes are switched on by torchtitan's own
function. Its automatic one needs CUDA's cost model, so the CPU has the manual one: a bucket for each block, chosen as
the authors choose them for Llama.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import get_gpu_dram_gbps
from torch.utils.flop_counter import flop_registry

from bench.systems import Prepared, Setup
from fsdp_compile.comm.collectives import STARTS
from fsdp_compile.passes.cost.hardware import device
from fsdp_compile.passes.graph.prices import group_of, node_seconds
from fsdp_compile.passes.graph.work import attention_flops, size_of

BUCKETS, OVERLAP = "transformer_block_bucketing", "overlap"
_DISTRIBUTED = "aten_distributed_optimizations"
INDUCTOR: dict[str, Any] = {  # its passes that bucket and move collectives
    "reorder_for_compute_comm_overlap": True,
    f"{_DISTRIBUTED}.enable_overlap_scheduling": True,
    f"{_DISTRIBUTED}.collective_bucketing": True,
    f"{_DISTRIBUTED}.compute_estimator": "analytical",
    f"{_DISTRIBUTED}.pre_bucketing_fsdp_collectives": False,  # into buckets for NCCL: here one, behind which all waits
}


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
    """With its authors' passes; the option "overlap" leaves them out and switches Inductor's own on."""
    sharded = shard(model, setup)
    from torchtitan.experiments.simple_fsdp.backend import get_compile_backend_with_passes
    from torchtitan.experiments.simple_fsdp.job_config import Compile

    torch._inductor.config.reorder_for_peak_memory = False
    if setup.device.type != "cuda":
        answer_for_bandwidth()
    elif torch.__version__ < (2, 13):
        count_grouped_queries()
    config: Any = Compile(graph_passes=setup.option or ("auto_bucketing" if setup.device.type == "cuda" else BUCKETS))
    config.backend, config.enable = "inductor", True
    first, last = setup.ends
    backend = get_compile_backend_with_passes(config, True, [first, last, *setup.block_names])
    return _prepared(sharded, setup, {"backend": backend}, PlannedForLink if setup.option == OVERLAP else Prepared)


class PlannedForLink(Prepared):
    """Compiled again for each link; Inductor's overlap passes, if they are on, are told how fast it is."""

    compiled: Callable[[], Any]

    def configured(self, link: str, batch: Sequence[Tensor]) -> None:
        dist_opts: Any = torch._inductor.config.aten_distributed_optimizations
        dist_opts.custom_runtime_estimation = partial(milliseconds, link)
        torch._dynamo.reset()
        self.forward = self.compiled()
        self.forward(*batch).backward()
        self.model.zero_grad()


def ours(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """Without its authors' passes; `backend="fsdp_compile"` orders its collectives by blocks.

    The option "overlap" also switches Inductor's overlap passes on, as a user might.
    """
    compiling = {"backend": "fsdp_compile", "options": {"reshard_after_forward": True}}  # as its authors' passes do
    return _prepared(shard(model, setup), setup, compiling, PlannedForLink if setup.option == OVERLAP else Prepared)


def _prepared(sharded: nn.Module, setup: Setup, compiling: dict[str, Any], kind: type[Prepared]) -> Prepared:
    if setup.option == OVERLAP:
        answer_for_bandwidth()
        for name, value in INDUCTOR.items():
            if hasattr(torch._inductor.config, name):
                setattr(torch._inductor.config, name, value)
        dist_opts: Any = torch._inductor.config.aten_distributed_optimizations
        dist_opts.custom_runtime_estimation = partial(milliseconds, "custom:0,1e18")  # until there is a link

    def compiled() -> Any:
        return torch.compile(sharded, fullgraph=True, **compiling)

    prepared = kind(sharded, compiled(), scale=1 / setup.mesh.size())  # its gradients are sums over the ranks
    if isinstance(prepared, PlannedForLink):
        prepared.compiled = compiled
    return prepared


def milliseconds(link: str, node: fx.Node, size: int | None = None) -> float | None:
    """What Inductor's overlap pass asks for: how long a node takes, with collectives on the link of that name."""
    if node.target not in STARTS:
        return 1e3 * node_seconds(node, device("cpu"))
    latency, bandwidth = map(float, link.removeprefix("custom:").split(","))
    ranks = group_of(node).size()
    nbytes = max(size or 0, *map(size_of, (node, *node.all_input_nodes)))
    return 1e3 * (latency + nbytes * (ranks - 1) / ranks / bandwidth)
