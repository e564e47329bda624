"""`aot_eager` with the passes on joint graphs, for tests of values: what these passes do, bit for bit.

run = torch.compile(model, backend=JointPasses(disable=("smallest_gather",)))
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_GATHER_INTO, STARTS
from fsdp_compile.config import CompileConfig
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import MARKERS
from fsdp_compile.passes import PASSES
from fsdp_compile.passes._torch import sort
from fsdp_compile.passes.graph.nodes import is_ours
from fsdp_compile.passes.pipeline import GraphContext, enabled, run_passes


@torch.library.impl("fsdp_flat::pack_grads", "default")
def _pack_grads(grads: list[Tensor | None], layout: str) -> Tensor:
    """What Inductor lowers, and nothing but this backend runs."""
    some = next(grad for grad in grads if grad is not None)
    segments = FlatParamLayout.parse(layout).segments
    of_segments = [None if each.parameter is None else grads[each.parameter] for each in segments]
    pairs = zip(of_segments, segments, strict=True)
    return torch.cat([some.new_zeros(each.numel) if grad is None else grad.reshape(-1) for grad, each in pairs])


Collective = tuple[str, torch.dtype, int]  # kind, dtype and bytes of the full buffer


@dataclass
class JointPasses:
    """The backend, and what it has compiled.

    Attributes:
        disable: passes that are left out.
        options: other fields of the configuration.
        forward: the collectives of all forward graphs.
        backward: likewise.
        texts: the joint graphs after the passes.
    """

    disable: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    forward: list[Collective] = field(default_factory=list)
    backward: list[Collective] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=_run, bw_compiler=_run, partition_fn=self._partition)(gm, inputs)

    def _partition(self, gm: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        config = CompileConfig(disable=self.disable, **{"link": None, **self.options})
        passes = [each for each in enabled(PASSES, config) if each.stage == "joint"]
        if is_ours(gm.graph, MARKERS):
            sort(gm.graph)
            run_passes(passes, GraphContext(gm.graph, config, "joint", 0))
        gm.graph.lint()
        gm.recompile()
        self.texts.append(str(gm.graph))
        split = min_cut_rematerialization_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        self.forward += collectives_of(split[0].graph)
        self.backward += collectives_of(split[1].graph)
        return split


def collectives_of(graph: fx.Graph) -> list[Collective]:
    """What a graph puts on the wire, in order."""
    found: list[Collective] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in STARTS:
            values = [node.meta["val"], node.args[0].meta["val"]]
            kind = str(node.target).split(".")[1].removesuffix("_into_tensor").removesuffix("_tensor")
            found.append((kind, values[0].dtype, max(value.nbytes for value in values)))
    return found


def _run(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Run the graph node by node, all-gathers into buffers: torch 2.13's allocating form is unsafe on gloo.

    What gloo does not know, such as float8, is gathered as bytes.
    """
    call = gm.graph.call_function
    for gather in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
        value = gather.meta["val"]
        dtype = torch.uint8 if value.dtype.itemsize == 1 else value.dtype
        with gm.graph.inserting_before(gather):
            options = {"dtype": dtype, "device": value.device}
            buffer = call(torch.ops.aten.empty.memory_format, (list(value.shape),), options)
            if dtype != value.dtype:
                gather.update_arg(0, call(torch.ops.aten.view.dtype, (gather.args[0], dtype)))
        gather.target, gather.kwargs = ALL_GATHER_INTO, {"out": buffer}
        for wait in list(gather.users) if dtype != value.dtype else ():
            with gm.graph.inserting_after(wait):
                back = call(torch.ops.aten.view.dtype, (wait, value.dtype))
            wait.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    gm.recompile()
    return make_boxed_func(gm.forward)
