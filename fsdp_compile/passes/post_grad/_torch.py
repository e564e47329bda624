"""Private names of Inductor that the passes after autograd use; checked on torch 2.11 and 2.13.

Order of nodes: `preserve_node_ordering(graph, {node: OrderedSet(earlier)})` wraps nodes in `control_deps`, which pins
their order through Inductor's scheduler. When torch moves: a wrapped matrix product gets a buffer of its own (if that
changes, `pin_order` can pin all products), and `reorder_for_peak_memory` must still leave the pinned order alone.

Lowering of operators: `register_lowering`, `fallback_handler` (the call as it is), `lowerings` (what is registered),
`V.graph` (the graph that is being lowered) and `ops` (what a loop computes). When torch moves: `V.graph` must still
have `env`, `operations`, `name_to_buffer`, `name_to_op`, `additional_buffer_deps`, `additional_star_deps` and
`never_reuse_buffers`, and the wrapper `add_import_once` and `make_buffer_free`.

Inductor's IR: `ConcatKernel`, `NonOwningLayout` and `ReinterpretView` let a kernel write into a slice of another
buffer; `NopKernel`, `FallbackKernel` and `_WaitKernel` are subclassed. When torch moves: `tests/fake/test_copies.py`,
`test_reuse.py` and `test_order.py` read generated code and fail if a gradient is copied or read too late.
"""

from typing import Any

from torch._inductor import ir as _ir
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering as preserve_node_ordering
from torch._inductor.lowering import fallback_handler as fallback_handler
from torch._inductor.lowering import lowerings as lowerings
from torch._inductor.lowering import register_lowering as register_lowering
from torch._inductor.virtualized import V as _V
from torch._inductor.virtualized import ops as _ops
from torch.utils._ordered_set import OrderedSet as OrderedSet
from torch.utils._pytree import tree_leaves as tree_leaves

ir: Any = _ir  # annotated differently in the two versions of torch
V: Any = _V
ops: Any = _ops
WaitKernel: Any = _ir._WaitKernel
