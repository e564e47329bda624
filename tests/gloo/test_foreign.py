"""Graphs of other shardings: `backend="fsdp_compile"` orders their collectives or leaves them, and values stay."""

import contextlib
import io
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from joint import LOWERING, interpreted, unplanned
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fsdp_compile.passes import inductor
from fsdp_compile.passes.post_grad import foreign

from .ranks import Ranks, on_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """So many blocks of two linear layers, and a head."""

    def __init__(self, blocks: int = 2, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class Mean(torch.autograd.Function):
    """A parameter whose gradient is averaged by a functional all-reduce, as in compiled data parallelism."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return funcol.all_reduce(grad, "avg" if grad.is_cuda else "sum", dist.group.WORLD) / dist.get_world_size()


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ Mean.apply(weight)).relu()
        return x.square().mean()


class Experts(nn.Module):
    """Each rank has an expert; rows go to it and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        halves = [len(x) // dist.get_world_size()] * dist.get_world_size()
        there = funcol.all_to_all_single_autograd(x, halves, halves, dist.group.WORLD)
        back = funcol.all_to_all_single_autograd(self.expert(there).relu(), halves, halves, dist.group.WORLD)
        return back.square().mean()


class Gathered(nn.Module):
    """Products with matrices of 8 x 8 whose rows lie on two ranks; each is prepared and gathered by `gather`."""

    def __init__(self, gather: Callable[[Tensor], Tensor], numel: int = 32, count: int = 3) -> None:
        super().__init__()
        self.gather = gather
        self.weights = nn.ParameterList(torch.randn(numel) / 3 for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ self.gather(weight).float().view(8, 8)).tanh()
        return x.square().mean()


def _gather(shard: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)


class InTwoStages(torch.autograd.Function):
    """Its gradient is reduced over one group and then over another, as in hybrid sharding, and divided."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_gather_tensor(shard, 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        part = funcol.reduce_scatter_tensor(grad, "sum", 0, dist.group.WORLD)
        return funcol.all_reduce(part, "sum", dist.group.WORLD) / dist.get_world_size() ** 2


class Together(torch.autograd.Function):
    """All shards are gathered by one coalesced call, and their gradients reduced by one."""

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
        return tuple(each + 0 for each in funcol.all_gather_into_tensor_coalesced(list(shards), dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        full = [grad.contiguous() for grad in grads]
        reduced = funcol.reduce_scatter_tensor_coalesced(full, "sum", [0] * len(full), dist.group.WORLD)
        return tuple(each + 0 for each in reduced)


class Coalesced(Gathered):
    def forward(self, x: Tensor) -> Tensor:
        for weight in Together.apply(*self.weights):
            x = (x @ weight.view(8, 8)).tanh()
        return x.square().mean()


class Broadcast(Gathered):
    """The first rank's scales are sent to all others, beside the gathers."""

    def forward(self, x: Tensor) -> Tensor:
        scales = funcol.broadcast(self.weights[0].detach()[:8] + dist.get_rank(), 0, dist.group.WORLD)
        return super().forward(x * scales)


class Keys(Gathered):
    """Attention to the keys of all ranks, which are gathered, as in context parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        whole = _gather(self.weights[0]).view(8, 8)
        both = torch.cat([x @ whole, x @ whole.t()], -1)
        keys, values = _gather(both).view(1, 1, -1, 16).chunk(2, -1)
        return super().forward(F.scaled_dot_product_attention(x.view(1, 1, -1, 8), keys, values).view(-1, 8))


class Written(Gathered):
    """A buffer is gathered, written to, and gathered again."""

    def __init__(self) -> None:
        super().__init__(_gather)
        self.register_buffer("scales", torch.arange(32.0) / 32 + dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        x = x @ _gather(self.scales).view(8, 8)
        self.scales.mul_(0.5)
        x = x.tanh() @ _gather(self.scales).view(8, 8)
        self.scales.add_(x.detach().mean())
        return super().forward(x)


class Pipelined(Gathered):
    """The first rank sends to the second: their graphs differ on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        if dist.get_rank() == 0:
            return super().forward(x + 0 * ops.wait_tensor(ops.isend(x, 1, 0, "0")).sum())
        return super().forward(x + ops.wait_tensor(ops.irecv(torch.empty_like(x), 0, 0, "0")))


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _simple(blocks: int = 2, width: int = 16) -> nn.Module:
    return simple_fsdp(Blocks(blocks, width), _mesh())


def _tensor_parallel(up: Any = None, down: Any = None) -> nn.Module:
    plan = {"blocks.*.up": ColwiseParallel(input_layouts=up), "blocks.*.down": RowwiseParallel(output_layouts=down)}
    return parallelize_module(Blocks(), _mesh(), plan)


def _fsdp2() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        fsdp2(block, mesh=_mesh())
    return fsdp2(model, mesh=_mesh())


def _fsdp1() -> nn.Module:
    model, wrap = Blocks(), partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    model.blocks = nn.ModuleList(map(wrap, model.blocks))
    return wrap(model)


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Blocks())


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SimpleFSDP": (_simple, "10 all-gathers of parameters, 0 reduces of gradients: ordered"),
    "gradients averaged": (Averaged, "0 all-gathers of parameters, 3 reduces of gradients: ordered"),
    "tensor parallelism": (_tensor_parallel, "left in place"),
    "experts": (Experts, "other collectives: left in place"),
}
MORE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SimpleFSDP, padded": (
        partial(_simple, blocks=1, width=9),
        "6 all-gathers of parameters, 0 reduces of gradients: ordered",
    ),
    "FSDP2": (_fsdp2, "without collectives"),
    "FSDP2, blocks compiled": (_fsdp2, "without collectives"),
    "FSDP1": (_fsdp1, "without collectives"),
    "DDP": (_ddp, "without collectives"),
    "DDP, python_reducer": (_ddp, "without collectives"),  # the graph of compiled autograd is compiled elsewhere
    "cast": (lambda: Gathered(lambda shard: _gather(shard.bfloat16())), "3 all-gathers of parameters"),
    "padded": (lambda: Gathered(lambda shard: _gather(F.pad(shard, (0, 2))), 30), "3 all-gathers of parameters"),
    "in two stages": (lambda: Gathered(InTwoStages.apply), "3 reduces of gradients: ordered"),
    "coalesced": (lambda: Coalesced(_gather), "nothing to order; 1 other collectives: left in place"),
    "broadcast": (lambda: Broadcast(_gather), "3 all-gathers of parameters, 0 reduces of gradients: ordered"),
    "sequence parallelism": (partial(_tensor_parallel, Shard(0), Shard(0)), "other collectives: left in place"),
    "keys": (lambda: Keys(_gather), "1 other collectives: left in place"),
    "a gathered buffer that is written": (Written, "all-gathers of parameters"),
    "a pipeline": (lambda: Pipelined(_gather), "it has isend, so it is left as it is"),
}


def _train(name: str, **options: Any) -> tuple[list[Tensor], str]:
    """Local parameters after three steps, and what was printed."""
    torch._dynamo.reset()
    foreign._print_once.cache_clear()
    torch.manual_seed(0)
    model = {**MODELS, **MORE}[name][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name.endswith("blocks compiled"):
        run: Any = model
        for block in model.blocks:  # type: ignore[union-attr]  # a list of modules
            block.compile(**options)
    else:
        run = torch.compile(model, **options)
    torch.manual_seed(dist.get_rank() if not name.endswith("parallelism") else 0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(3):
            run(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    local = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
    return [each.detach().clone() for each in local], said.getvalue()


def _compare(rank: int, name: str, options: dict[str, Any]) -> None:
    expected, _ = _train(name, backend="inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        found, said = _train(name, backend="fsdp_compile", options=options)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert (MODELS[name][1] in said) == (rank == 0), said


LATE = {"gradients averaged", "tensor parallelism", "SimpleFSDP", "experts"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LATE else ()) for name in MODELS]
)
def test_values_stay(two: Ranks, name: str) -> None:
    """Three steps end with the parameters that torch's own backend gives, and rank 0 says what was found."""
    two.run(_compare, name, {})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{"link": "custom:2e-5,1e9"}, {"link": "custom:2e-5,1e9", "reshard_after_forward": True}]
)
def test_planned_by_time(two: Ranks, options: dict[str, Any]) -> None:
    """So they do with a link, and where backward gathers again."""
    two.run(_compare, "SimpleFSDP", options)


def _compare_bits(rank: int, names: list[str]) -> None:
    options = {"disable": LOWERING, "reshard_after_forward": True}
    for name in names:
        by_reducer = name.endswith("python_reducer")
        settings = {"optimize_ddp": "python_reducer", "compiled_autograd": True} if by_reducer else {}
        with torch._dynamo.config.patch(settings), interpreted():
            expected, _ = _train(name, backend=unplanned)
            found, said = _train(name, backend="fsdp_compile", options=options)
        assert all(map(torch.equal, found, expected)), name
        assert ({**MODELS, **MORE}[name][1] in said) == (rank == 0), (name, said)


LATER = ("a pipeline", "in two stages")
NAMES = {
    "sharded": ["SimpleFSDP, padded", "a gathered buffer that is written"],
    "more of them": ["SimpleFSDP", "in two stages"],
    "without gathers": ["FSDP2", "FSDP2, blocks compiled", "DDP", "sequence parallelism", "a pipeline"],
}
if torch.__version__ < "2.13":  # 2.11 has no functional isend, and breaks the graph at the function in two stages
    NAMES = {which: [name for name in names if name not in LATER] for which, names in NAMES.items()}
NAMES["others"] = [name for name in {**MODELS, **MORE} if name not in (*chain.from_iterable(NAMES.values()), *LATER)]


@pytest.mark.parametrize(
    "which", [pytest.param(which, marks=() if which == "sharded" else pytest.mark.nightly) for which in NAMES]
)
def test_values_are_those_of_the_graph_as_it_was(two: Ranks, which: str) -> None:
    """Bit for bit where nothing else changes graphs, also where one rank pads what it sends; rank 0 says what was
    found, or that there is nothing to order.
    """
    two.run(_compare_bits, NAMES[which])


def _different(rank: int) -> None:
    model = _simple(4)
    del model.blocks[4 - rank :]  # type: ignore[union-attr]  # a list of modules
    with interpreted(), pytest.raises(RuntimeError, match="expected the same collectives in the same order on all"):
        torch.compile(model, backend="fsdp_compile", options={"disable": LOWERING})(torch.randn(4, 8))


def _other_collective(rank: int) -> None:
    """The ranks gather the same; between the gathers one of them reduces what the other does not."""

    def gather(shard: Tensor) -> Tensor:
        extra = funcol.all_reduce(shard.detach().sum(), "sum", dist.group.WORLD) if rank else 0
        return _gather(shard) + 0 * extra

    model = Gathered(gather, count=5)  # no graph that another test has run, which would not be compared again
    with interpreted(), pytest.raises(RuntimeError, match="expected the same collectives in the same order"):
        torch.compile(model, backend="fsdp_compile", options={"disable": LOWERING})(torch.randn(4, 8))


@pytest.mark.nightly
def test_ranks_that_differ(two: Ranks) -> None:
    """Ranks with different graphs raise before they communicate, as with this package's own sharding: of what is
    ordered, and of what is left in place beside it.
    """
    two.run(_different)
    two.run(_other_collective)


def _train_apart(rank: int, options: list[dict[str, Any]], rows: list[int]) -> str:
    """What this rank's step raises, if its gradients are not those of two ranks that are not planned."""
    found = []
    for backend, chosen in ((unplanned, {}), ("fsdp_compile", {"options": {"disable": LOWERING, **options[rank]}})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = _simple(5, 32)
        x = torch.randn(rows[rank], 8)
        try:
            with interpreted():
                torch.compile(model, backend=backend, **chosen)(x).backward()
        except RuntimeError as error:
            return str(error)
        found.append([param.grad.to_local() for param in model.parameters()])
    assert all(map(torch.equal, *found))
    return ""


@pytest.mark.nightly
def test_ranks_whose_plans_would_differ(two: Ranks) -> None:
    """Ranks with batches of other sizes follow one plan. With other links they do so too, or all of them raise."""
    assert two.run(_train_apart, [{}, {}], [4, 4096]) == ["", ""]
    assert two.run(_train_apart, [{"link": "custom:1e-5,1e9"}] * 2, [4096, 4]) == ["", ""]
    links: list[dict[str, Any]] = [{"link": "custom:1e-7,1e12"}, {"link": "custom:1e-2,1e5"}]
    first, second = two.run(_train_apart, links, [4, 4])
    assert first == second and ("same collectives in the same order" in first or not first)


def _alone(rank: int) -> list[str | None]:
    """The link of a graph that the second rank compiles later than the first one waits for it, and of one in time."""
    links: list[str | None] = []
    for late in (True, False):
        group = dist.new_group(timeout=dist.default_pg_timeout)

        def seen(gm: Any, inputs: Any) -> Any:
            links.append(inductor.for_graph(inductor.CompileConfig(link="measure"), gm.graph).link)
            return gm

        def total(x: Tensor, group: Any = group) -> Tensor:
            return funcol.all_reduce(x, "sum", group)

        if late and rank:
            time.sleep(1.5)
        inductor.SOON = 0.5 if late else 60.0
        torch.compile(total, backend=seen)(torch.ones(4))
    return links


def test_a_rank_that_compiles_later(two: Ranks) -> None:
    """Ranks measure the link of another sharding's graph. One that waits in vain for the others goes on by the rule,
    and so do they.
    """
    first, second = two.run(_alone)
    assert first == second and first[0] is None and str(first[1]).startswith("measured:")


def _cold_and_warm(rank: int, folder: str) -> None:
    """The second rank's compile cache is empty where the first one's is full."""
    before, losses = os.environ["TORCHINDUCTOR_CACHE_DIR"], []
    try:
        for time_ in range(2):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}_{time_ * rank}"
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Gathered(_gather)
            model.weights = model.weights[:2]
            torch._dynamo.utils.counters.clear()
            loss = torch.compile(model, backend="fsdp_compile")(torch.ones(4, 8))
            loss.backward()
            losses.append([loss.detach(), *(weight.grad for weight in model.weights)])
            hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
            assert hits == (time_ == 1 and rank == 0), hits
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    assert all(map(torch.equal, *losses))


@pytest.mark.nightly
def test_one_rank_has_compiled_before(two: Ranks, tmp_path: Path) -> None:
    """A rank that finds its graphs in the compile cache and one that compiles them anew train together."""
    two.run(_cold_and_warm, str(tmp_path))


@on_ranks(2)
def test_graphs_without_collectives_take_any_option() -> None:
    """Options that need a link, such as a budget, are no error for graphs in which nothing is planned."""
    for options in ({"budget": 10**9}, {"device": "cpu"}):
        torch._dynamo.reset()
        with interpreted():
            run = torch.compile(torch.sin, backend="fsdp_compile", options=options)
            assert run(torch.zeros(2)).sum() == 0
        # As `install` has them for plain `torch.compile`.
        inductor.pipelines(inductor.CompileConfig(**options), inductor.PASSES)
