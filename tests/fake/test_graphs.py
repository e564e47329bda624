"""The graphs after each pass, pinned (world size 4, rank 1). Regenerate with EXPECTTEST_ACCEPT=1."""

import pytest
import torch
from compiling import printed_graphs, small
from expecttest import assert_expected_inline
from generated import kernels_not_built

from fsdp_compile import fully_shard
from fsdp_compile.passes import PASSES


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """Graph by "<which> after <pass>", of two units of one linear layer each; the first layer has a frozen bias."""
    torch._dynamo.reset()  # another module's tests may have left sizes that Dynamo takes for changing ones
    model = small()
    model[0].bias.requires_grad_(False)
    fully_shard(model, reshard_after_forward=True)
    with printed_graphs() as printed, torch._inductor.config.patch(force_disable_caches=True), kernels_not_built():
        torch.compile(model, fullgraph=True)(torch.ones(4, 3)).sum().backward()
    post_grad = [p for p in PASSES if p.stage == "post_grad"]
    which = ["joint"] * (len(PASSES) - len(post_grad)) + ["forward"] * len(post_grad) + ["backward"] * len(post_grad)
    named = {}
    for kind, text in zip(which, printed, strict=True):
        title, body = text.split("\n", 1)
        named[f"{kind} after {title.rsplit(' ', 1)[1]}"] = body
    return named


def test_passes_are_printed_with_their_names(graphs: dict[str, str]) -> None:
    """Each pass prints each graph it sees once, under its name and in pipeline order."""
    assert_expected_inline(
        "\n".join(graphs),
        """\
joint after insert_collectives
joint after smallest_gather
joint after choose_reshard
joint after reshard
forward after check_saved
forward after separate_reduces
forward after pack_in_place
forward after reuse_gathered
forward after place_deferred_reduces
forward after read_graph
forward after choose_plan
forward after verify_plan
forward after order
forward after check_order
forward after place_updates
forward after send_messages
forward after coalesce_launches
forward after reduce_scatter_by_all_to_all
forward after all_gather_into_buffer
forward after check_ranks
forward after start_reduces
forward after await_gathers
forward after pin_order
backward after check_saved
backward after separate_reduces
backward after pack_in_place
backward after reuse_gathered
backward after place_deferred_reduces
backward after read_graph
backward after choose_plan
backward after verify_plan
backward after order
backward after check_order
backward after place_updates
backward after send_messages
backward after coalesce_launches
backward after reduce_scatter_by_all_to_all
backward after all_gather_into_buffer
backward after check_ranks
backward after start_reduces
backward after await_gathers
backward after pin_order""",
    )


def test_joint_after_insert_collectives(graphs: dict[str, str]) -> None:
    """The joint graph after the pass `insert_collectives`."""
    assert_expected_inline(
        graphs["joint after insert_collectives"],
        """\
primals_1: f32[16]
primals_2: f32[16]
primals_3: f32[4, 3]
primals_4: f32[16]
tangents_1: f32[4, 2]
gather_0: f32[64] = all_gather_into_tensor(primals_1, 4, '0')  # gather 0
wait_0: f32[64] = wait_tensor(gather_0)  # wait 0
view_0: f32[15] = slice.Tensor(wait_0, 0, 0, 15)  # view 0
view: f32[5, 3] = view(view_0, [5, 3])
gather_1: f32[64] = all_gather_into_tensor(primals_2, 4, '0')  # gather 0
wait_1: f32[64] = wait_tensor(gather_1)  # wait 0
view_5: f32[5] = slice.Tensor(wait_1, 0, 0, 5)  # view 0
permute: f32[3, 5] = permute(view, [1, 0])
addmm: f32[4, 5] = addmm(view_5, primals_3, permute)
relu: f32[4, 5] = relu(addmm)
gather_2: f32[64] = all_gather_into_tensor(primals_4, 4, '0')  # gather 2
wait_2: f32[64] = wait_tensor(gather_2)  # wait 2
view_6: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2
view_7: f32[2] = slice.Tensor(wait_2, 0, 16, 18)  # view 2
view_1: f32[2, 5] = view(view_6, [2, 5])
permute_1: f32[5, 2] = permute(view_1, [1, 0])
addmm_1: f32[4, 2] = addmm(view_7, relu, permute_1)
permute_2: f32[2, 5] = permute(permute_1, [1, 0])
mm: f32[4, 5] = mm(tangents_1, permute_2)
permute_3: f32[2, 4] = permute(tangents_1, [1, 0])
mm_1: f32[2, 5] = mm(permute_3, relu)
sum_1: f32[1, 2] = sum.dim_IntList(tangents_1, [0], True)
view_2: f32[2] = view(sum_1, [2])
view_3: f32[10] = view(mm_1, [10])
pack_2: f32[64] = fsdp_flat.pack_grads([view_3, view_2], '2x5@0,2@16|64/4%16')  # pack 2
reduce_2: f32[16] = reduce_scatter_tensor(pack_2, 'avg', 4, '0')  # reduce 2
wait_reduce_2: f32[16] = wait_tensor(reduce_2)  # wait_reduce 2
le: torch.bool[4, 5] = le.Scalar(relu, 0)
full_default_2: f32[] = full([], 0.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where: f32[4, 5] = where.self(le, full_default_2, mm)
permute_6: f32[5, 4] = permute(where, [1, 0])
mm_2: f32[5, 3] = mm(permute_6, primals_3)
view_4: f32[15] = view(mm_2, [15])
pack_0: f32[64] = fsdp_flat.pack_grads([view_4], '5x3@0|64/4%16')  # pack 0
reduce_0: f32[16] = reduce_scatter_tensor(pack_0, 'avg', 4, '0')  # reduce 0
wait_reduce_0: f32[16] = wait_tensor(reduce_0)  # wait_reduce 0
return [addmm_1, wait_reduce_0, None, None, wait_reduce_2]""",
    )


def test_forward_after_pin(graphs: dict[str, str]) -> None:
    """The forward graph after the pass `pin_order`."""
    assert_expected_inline(
        graphs["forward after pin_order"],
        """\
primals_1: f32[16]
primals_2: f32[16]
primals_3: f32[4, 3]
primals_4: f32[16]
check_ranks: f32[0] = fsdp_flat.check_ranks([primals_1], <3 lines>, ['0'], 600.0, cpu)
full_0: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_0: f32[64] = control_deps([check_ranks], subgraph_gather_0, primals_1, full_0)  # gather 0, MUST_RECOMPUTE
full_1: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_1: f32[64] = control_deps([gather_0], subgraph_gather_1, primals_2, full_1)  # gather 0, MUST_RECOMPUTE
wait_0: f32[64] = control_deps([gather_1], subgraph_wait_0, gather_0, primals_1)  # wait 0, MUST_RECOMPUTE
view_0: f32[15] = slice.Tensor(wait_0, 0, 0, 15)  # view 0, MUST_RECOMPUTE
view: f32[5, 3] = reshape(view_0, [5, 3])  # MUST_RECOMPUTE
permute: f32[3, 5] = permute(view, [1, 0])  # MUST_RECOMPUTE
full_2: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_2: f32[64] = control_deps([wait_0], subgraph_gather_2, primals_4, full_2)  # gather 2, MUST_RECOMPUTE
wait_1: f32[64] = control_deps([gather_2], subgraph_wait_1, gather_1, primals_2)  # wait 0, MUST_RECOMPUTE
view_5: f32[5] = slice.Tensor(wait_1, 0, 0, 5)  # view 0, MUST_RECOMPUTE
addmm: f32[4, 5] = control_deps([wait_1], subgraph_addmm, view_5, primals_3, permute)
relu: f32[4, 5] = relu(addmm)
wait_2: f32[64] = control_deps([addmm], subgraph_wait_2, gather_2, primals_4)  # wait 2, MUST_RECOMPUTE
view_6: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2, MUST_RECOMPUTE
view_7: f32[2] = slice.Tensor(wait_2, 0, 16, 18)  # view 2, MUST_RECOMPUTE
view_1: f32[2, 5] = reshape(view_6, [2, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 2] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
addmm_1: f32[4, 2] = control_deps([wait_2], subgraph_addmm_1, view_7, relu, permute_1)
return [addmm_1, primals_1, primals_2, primals_3, primals_4, relu]""",
    )


def test_backward_after_pack_in_place(graphs: dict[str, str]) -> None:
    """The backward graph after the pass `pack_in_place`."""
    assert_expected_inline(
        graphs["backward after pack_in_place"],
        """\
primals_1: f32[16]
primals_2: f32[16]
primals_3: f32[4, 3]
primals_4: f32[16]
relu: f32[4, 5]
tangents_1: f32[4, 2]
gather_2: f32[64] = all_gather_into_tensor(primals_4, 4, '0')  # gather 2, MUST_RECOMPUTE
wait_2: f32[64] = wait_tensor(gather_2)  # wait 2, MUST_RECOMPUTE
view_6: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2, MUST_RECOMPUTE
view_1: f32[2, 5] = reshape(view_6, [2, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 2] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
permute_2: f32[2, 5] = permute(permute_1, [1, 0])  # MUST_RECOMPUTE
mm: f32[4, 5] = mm(tangents_1, permute_2)
permute_3: f32[2, 4] = permute(tangents_1, [1, 0])
mm_1: f32[2, 5] = mm(permute_3, relu)
sum_1: f32[1, 2] = sum.dim_IntList(tangents_1, [0], True)
pack_2: f32[64] = fsdp_flat.pack_grads([mm_1, sum_1], '2x5@0,2@16|64/4%16')  # pack 2
reduce_2: f32[16] = reduce_scatter_tensor(pack_2, 'avg', 4, '0')  # reduce 2, MUST_SAVE
wait_reduce_2: f32[16] = wait_tensor(reduce_2)  # wait_reduce 2, MUST_SAVE
le: torch.bool[4, 5] = le.Scalar(relu, 0)
full_default_2: f32[] = full([], 0.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where: f32[4, 5] = where.self(le, full_default_2, mm)
permute_6: f32[5, 4] = permute(where, [1, 0])
mm_2: f32[5, 3] = mm(permute_6, primals_3)
pack_0: f32[64] = fsdp_flat.pack_grads([mm_2], '5x3@0|64/4%16')  # pack 0
reduce_0: f32[16] = reduce_scatter_tensor(pack_0, 'avg', 4, '0')  # reduce 0, MUST_SAVE
wait_reduce_0: f32[16] = wait_tensor(reduce_0)  # wait_reduce 0, MUST_SAVE
return [wait_reduce_0, None, None, wait_reduce_2]""",
    )


def test_backward_after_pin(graphs: dict[str, str]) -> None:
    """The backward graph after the pass `pin_order`."""
    assert_expected_inline(
        graphs["backward after pin_order"],
        """\
primals_1: f32[16]
primals_2: f32[16]
primals_3: f32[4, 3]
primals_4: f32[16]
relu: f32[4, 5]
tangents_1: f32[4, 2]
check_ranks: f32[0] = fsdp_flat.check_ranks([primals_4], <3 lines>, ['0'], 600.0, cpu)
full_2: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_2: f32[64] = control_deps([check_ranks], subgraph_gather_2, primals_4, full_2)  # gather 2, MUST_RECOMPUTE
wait_2: f32[64] = control_deps([gather_2], subgraph_wait_2, gather_2, primals_4)  # wait 2, MUST_RECOMPUTE
view_6: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2, MUST_RECOMPUTE
view_1: f32[2, 5] = reshape(view_6, [2, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 2] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
permute_2: f32[2, 5] = permute(permute_1, [1, 0])  # MUST_RECOMPUTE
mm: f32[4, 5] = control_deps([wait_2], subgraph_mm, tangents_1, permute_2)
permute_3: f32[2, 4] = permute(tangents_1, [1, 0])
mm_1: f32[2, 5] = mm(permute_3, relu)
sum_1: f32[1, 2] = sum.dim_IntList(tangents_1, [0], True)
pack_2: f32[64] = fsdp_flat.pack_grads([mm_1, sum_1], '2x5@0,2@16|64/4%16')  # pack 2
reduce_2: f32[64] = control_deps([mm], subgraph_reduce_2, pack_2)  # reduce 2, MUST_SAVE
le: torch.bool[4, 5] = le.Scalar(relu, 0)
full_default_2: f32[] = full([], 0.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where: f32[4, 5] = where.self(le, full_default_2, mm)
permute_6: f32[5, 4] = permute(where, [1, 0])
mm_2: f32[5, 3] = mm(permute_6, primals_3)
pack_0: f32[64] = fsdp_flat.pack_grads([mm_2], '5x3@0|64/4%16')  # pack 0
reduce_0: f32[64] = control_deps([reduce_2], subgraph_reduce_0, pack_0)  # reduce 0, MUST_SAVE
wait_reduce_2: f32[64] = control_deps([reduce_0], subgraph_wait_reduce_2, reduce_2, pack_2)  # wait_reduce 2, MUST_SAVE
rows_2: f32[4, 16] = view(wait_reduce_2, [4, 16])
mean_2: f32[16] = control_deps([wait_reduce_2], subgraph_mean_2, rows_2)  # mean 2, MUST_SAVE
wait_reduce_0: f32[64] = control_deps([mean_2], subgraph_wait_reduce_0, reduce_0, pack_0)  # wait_reduce 0, MUST_SAVE
rows_0: f32[4, 16] = view(wait_reduce_0, [4, 16])
mean_0: f32[16] = control_deps([wait_reduce_0], subgraph_mean_0, rows_0)  # mean 0, MUST_SAVE
return [mean_0, None, None, mean_2]""",
    )
