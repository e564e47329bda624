"""What is done to a graph, in order: `fsdp_compile.passes.PASSES`, which docs/compiling.md explains."""

from fsdp_compile.passes.joint.choose_memory import choose_activations
from fsdp_compile.passes.joint.insert_collectives import insert_collectives
from fsdp_compile.passes.joint.reshard import check_saved, choose_reshard, reshard
from fsdp_compile.passes.joint.smallest_gather import smallest_gather
from fsdp_compile.passes.pipeline import Pass
from fsdp_compile.passes.post_grad.in_place_grads import pack_in_place, reuse_gathered, separate_reduces
from fsdp_compile.passes.post_grad.lower_collectives import (
    all_gather_into_buffer,
    coalesce_launches,
    reduce_scatter_by_all_to_all,
)
from fsdp_compile.passes.post_grad.order import (
    check_order,
    check_ranks,
    name_prefetched,
    order,
    pin_order,
    place_deferred_reduces,
    place_updates,
)
from fsdp_compile.passes.post_grad.plan_pass import choose_plan, read_graph, record_times, verify_plan

PASSES = (
    Pass("insert_collectives", "joint", insert_collectives),
    Pass("smallest_gather", "joint", smallest_gather, needs=("insert_collectives",)),
    Pass("choose_activations", "joint", choose_activations),
    Pass("choose_reshard", "joint", choose_reshard),
    Pass("reshard", "joint", reshard),
    Pass("check_saved", "post_grad", check_saved),
    Pass("separate_reduces", "post_grad", separate_reduces),
    Pass("pack_in_place", "post_grad", pack_in_place),
    Pass("reuse_gathered", "post_grad", reuse_gathered),
    Pass("place_deferred_reduces", "post_grad", place_deferred_reduces),
    Pass("read_graph", "post_grad", read_graph),
    Pass("choose_plan", "post_grad", choose_plan, needs=("read_graph",)),
    Pass("verify_plan", "post_grad", verify_plan, needs=("choose_plan",)),
    Pass("order", "post_grad", order, needs=("choose_plan",)),
    Pass("check_order", "post_grad", check_order, needs=("order",)),
    Pass("place_updates", "post_grad", place_updates),
    Pass("name_prefetched", "post_grad", name_prefetched, needs=("read_graph",)),
    Pass("record_times", "post_grad", record_times, needs=("read_graph",)),
    Pass("coalesce_launches", "post_grad", coalesce_launches),
    Pass("reduce_scatter_by_all_to_all", "post_grad", reduce_scatter_by_all_to_all),
    Pass("all_gather_into_buffer", "post_grad", all_gather_into_buffer),
    Pass("check_ranks", "post_grad", check_ranks),
    Pass("pin_order", "post_grad", pin_order),
)
