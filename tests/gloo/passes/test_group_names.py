"""Graphs name a process group by its form, which stands for the rank's own group when they run."""

import pytest
import torch

from ..ranks import on_ranks


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(4)
def test_a_name_stands_for_the_group_of_its_rank(rank: int, backend: str) -> None:
    """Where ranks call different groups by one name, each model still communicates in its own: gradients are means over
    its ranks, also in graphs that come out of a cache folder which the ranks share.
    """
    import torch.distributed as dist

    from fsdp_compile import fully_shard
    from fsdp_compile.comm.groups import shared_name

    torch._dynamo.reset()
    members = ([0, 1, 3], [0, 2, 3])
    groups = [dist.new_group(each) for each in members]
    own = [index for index in ((1, 0) if rank == 3 else (0, 1)) if rank in members[index]]
    names = {index: shared_name(groups[index]) for index in own}
    assert len(set(names.values())) == len(own)
    for index in sorted(own):
        torch.manual_seed(0)
        whole = torch.nn.Linear(5, 3)
        inputs = [torch.full((2, 5), 1.0 + each) for each in members[index]]
        sum(whole(each).square().mean() for each in inputs).div(3).backward()
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(5, 3), process_group=groups[index])
        run = torch.compile(model, fullgraph=True, backend=backend)
        run(inputs[members[index].index(rank)]).square().mean().backward()
        for mine, reference in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), reference.grad)
    for index in own:  # torch names groups by how many this rank is in, which is to be equal on all ranks again
        dist.destroy_process_group(groups[index])
