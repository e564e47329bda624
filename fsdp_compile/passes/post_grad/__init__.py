"""The passes on each graph after autograd. Importing them imports Inductor, which happens when something is compiled.

in_place_grads.py      pack_in_place, reuse_gathered: gradients are computed in the buffer that is reduced
lower_pack_grads.py    how Inductor lowers that: kernels write into slices, after all that reads the parameters there
plan_pass.py           read_graph, choose_plan, verify_plan, record_times: tasks and units with costs, a plan for them
order.py               place_deferred_reduces, order, check_order, check_ranks, pin_order: the graph in the plan's order
lower_collectives.py   coalesce_launches, reduce_scatter_by_all_to_all, all_gather_into_buffer: how each is issued
"""
