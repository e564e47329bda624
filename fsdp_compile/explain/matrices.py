"""What the matrices of Muon cost in a step: seconds of Newton-Schulz, bytes of both exchanges, what is not hidden.

    print(explain_matrices(build_model, make_muon, fully_shard, link="h100-ib400", device="h100", world_size=64))

Owners are planned as a step plans them, from shapes: no rank, memory or GPU is needed.
"""

from collections.abc import Callable
from itertools import accumulate

from torch import nn
from torch.optim import Muon, Optimizer

from fsdp_compile.construct.blocks import repeated_blocks
from fsdp_compile.explain.prediction import MatrixTimes
from fsdp_compile.explain.ranks import sharded
from fsdp_compile.optim.matrix_step import MatrixUpdates
from fsdp_compile.optim.owner_plan import LAG, OwnerPlan
from fsdp_compile.passes.cost.hardware import Hardware, Link
from fsdp_compile.passes.cost.hardware import device as device_named
from fsdp_compile.passes.cost.hardware import link as link_named
from fsdp_compile.passes.cost.roofline import launch_seconds, product_seconds


def explain_matrices(
    model: nn.Module | Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    shard: Callable[[nn.Module], nn.Module],
    *,
    link: str,
    device: str,
    world_size: int | None = None,
) -> list[tuple[OwnerPlan, MatrixTimes]]:
    """Predict the matrices' part of a step: who owns what, and what it takes, for each group of ranks.

    Args:
        model: a sharded model, one of which `shard` shards a copy, or a function that makes either, whose tensors get
            no memory.
        make_optimizer: called with the sharded model; returns the optimizer of its matrices.
        shard: such as `fully_shard`.
        link: what connects the ranks, as in `CompileConfig`.
        device: what computes, likewise.
        world_size: as in `explain_plan`.

    Raises:
        ValueError: a name is unknown, or `world_size` is missing, or not that of a model that is sharded.
    """
    with sharded(model, shard, world_size) as made:
        return costs_of_matrices(make_optimizer(made), link_named(link), device_named(device))


def muon_of(model: nn.Module) -> Muon:
    """Muon over the matrices of the repeated blocks of `model`, or of all of it. ValueError if there are none."""
    matrices = [param for block in repeated_blocks(model) for param in block.parameters() if param.dim() == 2]
    matrices = matrices or [param for param in model.parameters() if param.dim() == 2]
    if not matrices:
        raise ValueError("optimizer: muon updates matrices, and the model has none; choose another one")
    return Muon(list(dict.fromkeys(matrices)))


def costs_of_matrices(optimizer: Optimizer, link: Link, hardware: Hardware) -> list[tuple[OwnerPlan, MatrixTimes]]:
    """What a step of `optimizer` computes with complete matrices, for each group of ranks.

    Args:
        optimizer: of a sharded model, whose tensors may have no memory.
        link: what connects the ranks.
        hardware: what computes.
    """
    updates = MatrixUpdates()
    updates.prepare(optimizer, compares=False)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_muon = type(optimizer) is Muon  # which sends bfloat16; others are taken to send what they store
    width = 2 if is_muon else max((param.element_size() for param in params), default=0)
    return [(plan, _costs_of(plan, width, link, hardware)) for plan in updates.plans.values()]


def _costs_of(plan: OwnerPlan, width: int, link: Link, hardware: Hardware) -> MatrixTimes:
    """Price a plan; `width`: bytes of an element that is exchanged, each way."""
    stages, ranks = sorted(set(plan.stages)), range(plan.size)
    computing = {rank: dict.fromkeys(stages, 0.0) for rank in ranks}
    at_home = dict.fromkeys(ranks, 0.0)
    sent, received = ({stage: [0] * plan.size for stage in stages} for _ in range(2))
    per_node, far = int(hardware.ranks_per_node), 0
    for matrix, owner, stage in zip(plan.matrices, plan.owners, plan.stages, strict=True):
        seconds = product_seconds(matrix.cost, 0, min(matrix.shape[-2:]), "bfloat16", hardware)
        if all(rank == owner for rank, _ in matrix.stored):
            at_home[owner] += seconds
        else:
            computing[owner][stage] += seconds
        for rank, numel in matrix.stored:
            if rank != owner:
                sent[stage][rank] += width * numel
                received[stage][owner] += width * numel
                far += numel * (rank // per_node != owner // per_node)
    moved = [max(*sent[stage], *received[stage]) for stage in stages]
    launch = launch_seconds(plan.size, link)
    exchange = [launch + nbytes / link.bandwidth if nbytes else 0.0 for nbytes in moved]
    by_stage = [[computing[rank][stage] for rank in ranks] for stage in stages]
    loads = [at_home[rank] + sum(of_stage[rank] for of_stage in by_stage) for rank in ranks]
    end = _end([at_home[rank] for rank in ranks], by_stage, exchange)
    waiting = min(ranks, key=loads.__getitem__)  # results of the last stage are waited for by all
    return MatrixTimes(
        owners=f"{plan}, {far:,} to other nodes",
        compute=max(loads),
        exchange=sum(exchange),
        bytes=sum(moved),
        exposed=end - max(loads),
        waits=end - loads[waiting],
        waiting=waiting,
        gathered=sum(loads),
    )


def _end(at_home: list[float], compute: list[list[float]], exchange: list[float]) -> float:
    """When all ranks have updated all: stages are sent at once, and waited for behind the computing of the next ones.

    Args:
        at_home: for each rank seconds of computing with matrices that lie on it, before all else.
        compute: for each stage and rank seconds.
        exchange: seconds of each stage on its way, and on the way back.
    """
    arrive, now, link_free, back = list(accumulate(exchange)), list(at_home), sum(exchange), list[float]()
    for index, of_ranks in enumerate(compute):
        now = [max(each, arrive[index]) + more if more else each for each, more in zip(now, of_ranks, strict=True)]
        link_free = max(link_free, *now) + exchange[index]
        back.append(link_free)
        if index >= LAG:
            now = [max(each, back[index - LAG]) for each in now]
    return max(*now, *back)
