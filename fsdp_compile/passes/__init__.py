"""All that sees a graph, in pipeline order.

pipeline.py             Pass, the type of all passes, and the pipeline that Inductor calls
insert_collectives.py   markers become functional collectives with separate waits
merge_calls.py          before that: a unit that is called several times is gathered once and reduced once
keep.py                 which units stay gathered, where that is left open
reshard.py              gathers are recomputed in backward or saved; proof that nothing else is saved
pack_grads.py           gradients are written straight into the reduce-scatter's input: pass and Inductor lowering
reuse_gathered.py       which is the gathered buffer itself, where that is possible; overwrite.py: after all reads
order.py                the graph in the order of a plan; pin that order
  choose.py             which plan: from a file, the best by cost, or by rules.py: a unit ahead, in turns
  from_graph.py         tasks and units of a graph; liveness.py: bytes that live
  profile_tasks.py      seconds of tasks, measured while a graph runs; times.py: used for other graphs of the model
coalesce.py             what the plan launches together becomes one call
exchange.py             reduce-scatters that gloo runs become exchanges of slices
gather_into.py          all-gathers write into a buffer that the graph allocates
direct.py               generated code calls the process group itself: lowering, and what it calls
check_ranks.py          each graph names its collectives, and ranks compare that at its first run
inductor.py             the hook-up: default path and backend

Plans, on plain numbers:

workload.py             what a step computes and communicates: tasks and units
plan.py                 which unit is gathered, waited for, freed and reduced before which task; as text and JSON
simulate.py             what a plan takes, in seconds and bytes; verify.py: whether it keeps the rules of a plan
rules.py                plans without a search
schedule.py             the best plan: what to keep, within how much memory
search.py               the best one for given units to keep; launches.py: what it may launch, and from where on
bound.py                what no plan can beat
compact.py              gathers no earlier than pays

Costs, as numbers or expressions:

cost.py                 seconds of collectives and of computing; machines.py: links and devices with their figures
work.py                 what a node computes, reads and writes
pricing.py              what the nodes and collectives of one graph cost, by the configuration

Shared: tags.py, what a node is to us; views.py, what kind of node it is, and who reads it through views; text.py, a
graph printed; torch_private.py, the compiler's state.
"""

from fsdp_compile.passes.joint.choose_reshard import choose_reshard
from fsdp_compile.passes.joint.insert_collectives import insert_collectives
from fsdp_compile.passes.joint.reshard import check_saved, reshard
from fsdp_compile.passes.pipeline import Pass
from fsdp_compile.passes.post_grad.check_ranks import check_ranks
from fsdp_compile.passes.post_grad.in_place_grads import pack_in_place, reuse_gathered
from fsdp_compile.passes.post_grad.lower_collectives import (
    all_gather_into_buffer,
    coalesce_launches,
    reduce_scatter_by_all_to_all,
)
from fsdp_compile.passes.post_grad.order import check_order, order, pin_order, place_deferred_reduces
from fsdp_compile.passes.post_grad.plan_pass import choose_plan, read_graph, verify_plan
from fsdp_compile.passes.post_grad.profile_tasks import record_times

PASSES = (
    Pass("insert_collectives", "joint", insert_collectives),
    Pass("choose_reshard", "joint", choose_reshard),
    Pass("reshard", "joint", reshard),
    Pass("check_saved", "post_grad", check_saved),
    Pass("pack_in_place", "post_grad", pack_in_place),
    Pass("reuse_gathered", "post_grad", reuse_gathered),
    Pass("place_deferred_reduces", "post_grad", place_deferred_reduces),
    Pass("read_graph", "post_grad", read_graph),
    Pass("choose_plan", "post_grad", choose_plan, needs=("read_graph",)),
    Pass("verify_plan", "post_grad", verify_plan, needs=("choose_plan",)),
    Pass("order", "post_grad", order, needs=("choose_plan",)),
    Pass("check_order", "post_grad", check_order, needs=("order",)),
    Pass("record_times", "post_grad", record_times, needs=("read_graph",)),
    Pass("coalesce_launches", "post_grad", coalesce_launches),
    Pass("reduce_scatter_by_all_to_all", "post_grad", reduce_scatter_by_all_to_all),
    Pass("all_gather_into_buffer", "post_grad", all_gather_into_buffer),
    Pass("check_ranks", "post_grad", check_ranks),
    Pass("pin_order", "post_grad", pin_order),
)
