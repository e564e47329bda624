"""torch's `fully_shard`: each block, then the root.

Where collectives block the host (the emulated link on the CPU) it is helped to the overlap that it has on CUDA, by its
own means: gathers ahead are asked for, and reduce-scatters are waited for where CUDA's streams would wait. The option
`blocking` leaves it as it is. With the option `ends` what lies before the blocks and behind them are units too, the
latter unsharded between forward and backward, which is torchtitan's recipe for Llama.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bench.systems import Prepared, Setup

IN_FLIGHT = 1  # reduce-scatters beside backward: before it starts another, `fully_shard` waits for the one before


class LateReduceScatter:
    """A reduce-scatter that does not block the host, for `set_custom_reduce_scatter`.

    On CUDA the host runs ahead and only streams wait: for the last reduce-scatter before the next one, and for all
    at the end of backward.
    """

    def __init__(self) -> None:
        self.works: deque[Any] = deque()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        while len(self.works) >= IN_FLIGHT:
            self.works.popleft().wait()
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # 2.13, 2.11
        self.works.append(scatter(output_tensor, input_tensor, op=op, group=group, async_op=True))

    def finish(self) -> None:
        """Wait for all, as torch does at the end of backward."""
        while self.works:
            self.works.popleft().wait()


def eager(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setup.bf16 else MixedPrecisionPolicy()
    if setup.option == "ends":
        first, last = setup.ends
        fully_shard(model.get_submodule(first), mesh=setup.mesh, mp_policy=precision)
        ends = [model.get_submodule(name) for name in last]
        kept: Any = dict(mesh=setup.mesh, mp_policy=precision, reshard_after_forward=False)
        fully_shard(ends, **kept)
    for block in blocks:
        fully_shard(block, mesh=setup.mesh, mp_policy=precision)
    fully_shard(model, mesh=setup.mesh, mp_policy=precision)
    helped = setup.blocking and setup.option != "blocking"
    return Prepared(model, model, overlap(model, blocks) if helped else lambda: None)


def by_block(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """The blocks are compiled one by one before: what torchtitan does, and most people with it."""
    compiled: list[Any] = [torch.compile(block, fullgraph=True) for block in blocks]
    for name, block in zip(setup.block_names, compiled, strict=True):
        model.set_submodule(name, block)
    return eager(model, compiled, setup)


def overlap(model: nn.Module, blocks: Sequence[nn.Module]) -> Any:
    """Gather the next block ahead, reduce without blocking; returns what waits for the last reduces."""
    reduce_scatter = LateReduceScatter()
    units: list[Any] = [model, *blocks]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit._set_unshard_async_op(True)
        unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]  # a protocol that it fulfils
    return reduce_scatter.finish
