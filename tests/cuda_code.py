"""CUDA code without a GPU: Inductor generates what it would for a Hopper, up to the point of building kernels.

with as_for_cuda(), kernels_not_built():       a graph that was traced on the CPU is CUDA's from its first pass after
    programs(run)                              autograd on; to be read by generated.py, not to be run

Needs triton, which generates the text of kernels; its compiler and driver are not asked.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config, select_algorithm, utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _triton
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda:0")
HOPPER = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, total_memory=80 << 30, gcnArchName="",
)  # fmt: skip


@contextmanager
def as_for_cuda(on_cuda: Callable[[FakeTensor], bool] = lambda _: True) -> Iterator[None]:
    """Inductor takes each graph for one of tensors on a GPU. Attention is products and kernels: the op is the CPU's.

    Args:
        on_cuda: whether a tensor is on the GPU.
    """
    _triton.has_triton.cache_clear()  # asked and remembered before
    with ExitStack() as stack:
        stack.callback(_triton.has_triton.cache_clear)
        for target, name, value in _HARDWARE:
            stack.enter_context(mock.patch.object(target, name, value))
        compile_for_cuda = partial(compile_fx.compile_fx, inner_compile=partial(_compile, on_cuda))
        stack.enter_context(mock.patch.object(compile_fx, "compile_fx", compile_for_cuda))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextmanager
def as_for_templates() -> Iterator[None]:
    """As `as_for_cuda`, and matrix products are Triton's templates: of each the first, as nothing can be timed."""
    choose = select_algorithm.AlgorithmSelectorCache.__call__

    def first(self: Any, name: str, choices: list[Any], *args: Any, **named: Any) -> Any:
        templates = [each for each in choices if isinstance(each, select_algorithm.TritonTemplateCaller)]
        return choose(self, name, templates[:1], *args, **named)

    with (
        as_for_cuda(),
        config.patch(max_autotune_gemm=True, max_autotune_gemm_backends="TRITON"),
        mock.patch.object(utils, "is_big_gpu", lambda *_: True),
        mock.patch.object(select_algorithm.AlgorithmSelectorCache, "__call__", first),
    ):
        yield


_HARDWARE: list[tuple[Any, str, Any]] = [  # whatever asks for it on the way to the code; torch 2.11 and 2.13
    (CudaInterface, "is_available", staticmethod(lambda: True)),
    (CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: True)),
    (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)),
    (CudaInterface, "get_device_properties", staticmethod(lambda device=None: HOPPER)),
    (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: HOPPER)),
    (torch.cuda, "get_device_properties", lambda device=None: HOPPER),
    (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    (torch.cuda, "current_device", lambda: 0),
    (_triton, "triton_hash_with_backend", lambda: "no driver"),
]


def _compile(
    on_cuda: Callable[[FakeTensor], bool], module: fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Any:
    """Inductor's compilation of one graph after autograd, whose tensors say from now on that they are on the GPU."""

    def claim(tensor: FakeTensor) -> None:
        if on_cuda(tensor):
            tensor.fake_device = CUDA

    for node in module.graph.nodes:
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: CUDA, (node.args, node.kwargs))
        tree_map_only(FakeTensor, claim, node.meta.get("val"))
    tree_map_only(FakeTensor, claim, list(inputs))
    return compile_fx.compile_fx_inner(module, inputs, **options)
