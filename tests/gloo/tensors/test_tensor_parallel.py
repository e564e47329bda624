"""Parameters that are DTensors on another dimension of the mesh: tensor parallelism, experts on ranks of their own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from models import seeded
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp_compile import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    compile_step,
    fully_shard,
    state_dict_type,
    summon_full_params,
)

from ..ranks import on_ranks
from ..training import executor


class Attention(nn.Module):
    """Causal, with heads of 4 channels; how many there are follows from what the projections give."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, 4)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of Llama's kind."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim)
        self.gate, self.up, self.down = nn.Linear(dim, 24), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Two blocks between an embedding and the projection to logits."""

    def __init__(self, dim: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: nn.Module, tp: DeviceMesh) -> None:
    """Torch's own plan: activations between blocks are split along the sequence, logits along the vocabulary."""
    split = Shard(1)
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(output_layouts=split),
                "norm2": SequenceParallel(),
                "gate": ColwiseParallel(input_layouts=split),
                "up": ColwiseParallel(input_layouts=split),
                "down": RowwiseParallel(output_layouts=split),
            },
        )


def batch(index: int) -> Tensor:
    return torch.randint(32, (2, 8), generator=seeded(index))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def _step_equally(whole: nn.Module, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Clip and step both, whose norms, gradients and parameters must be equal."""
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (whole, model)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=1e-5)
    for optimizer in optimizers:
        optimizer.step()
    for (name, mine), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert mine.shape == reference.shape == mine.grad.shape
        torch.testing.assert_close(mine.grad.full_tensor(), reference.grad, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(mine.full_tensor(), reference.detach(), rtol=1e-5, atol=1e-5, msg=name)
    for optimizer in optimizers:
        optimizer.zero_grad()


def _train_llama(rank: int, how: str, parts: int = 2, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (parts, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Llama()
    model = copy.deepcopy(whole)
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **options)
    fully_shard(model, mesh=mesh["dp"], **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    run = executor(model, how)
    for step in range(3):
        mean = sum(loss_of(whole(batch(10 * step + dp)), batch(10 * step + dp)) for dp in range(parts)) / parts
        mean.backward()
        tokens = batch(10 * step + mesh["dp"].get_local_rank())
        with loss_parallel():
            loss = loss_of(run(tokens), tokens)
            loss.backward()
        total = loss.full_tensor().detach()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        torch.testing.assert_close(total / parts, mean.detach(), rtol=1e-5, atol=1e-5)
        _step_equally(whole, model, optimizers)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.testing.assert_close(full, whole.state_dict(), rtol=1e-5, atol=1e-5)
    rows = model.state_dict()
    assert all(value.device_mesh.shape == (parts, 2)[: value.device_mesh.ndim] for value in rows.values())
    whole.load_state_dict({name: value.full_tensor() for name, value in rows.items()})


@pytest.mark.nightly
@on_ranks(4)
def test_fused_step() -> None:
    """A step by `compile_step` whose update reads flat gradients clips them to the norm over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Llama())
        parallelize(models[-1], mesh["tp"])
        fully_shard(models[-1], mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    step = compile_step(models[0], optimizers[0], loss_of, 0.1)
    step._run = models[0]
    for number in range(3):
        tokens = batch(10 * number + mesh["dp"].get_local_rank())
        with loss_parallel():
            step(tokens, target=tokens)
            loss_of(models[1](tokens), tokens).backward()
        nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
        optimizers[1].step()
        optimizers[1].zero_grad()
        for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-6, msg=name)


all_ways = pytest.mark.parametrize(
    "how", ["eager", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("aot_eager", "inductor"))]
)


@all_ways
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_llama(rank: int, strategy: str, how: str) -> None:
    """Losses, norms, gradients and parameters are those of one process after `parallelize_module` and `fully_shard`.

    DTensors are sharded by their local tensors, and module code finds DTensors (E-PG-14, E-PG-16). Under NO_SHARD each
    part of tensor parallelism has replicas, whose gradients are averaged.
    """
    _train_llama(rank, how, sharding_strategy=ShardingStrategy[strategy])


@all_ways
@on_ranks(2)
def test_one_data_parallel_rank(rank: int, how: str) -> None:
    """The same where tensor parallelism is all there is: DTensors become sharded tensors on a mesh of one rank too."""
    _train_llama(rank, how, 1)


# --- experts on ranks of their own ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Four experts; each rank of `group` has its part of them and gets the tokens for these from the others."""

    group: dist.ProcessGroup | None = None

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, dim, 24) / 4), nn.Parameter(torch.randn(4, 24, dim) / 5)

    def forward(self, slots: Tensor) -> Tensor:  # [expert, slot, dim]
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        if self.group is not None:
            slots = all_to_all_single_autograd(slots, None, None, self.group)
            slots = torch.cat(slots.chunk(2, 0), 1)
        result = torch.bmm(F.silu(torch.bmm(slots, up)), down)
        if self.group is not None:
            result = torch.cat(result.chunk(2, 1), 0)
            result = all_to_all_single_autograd(result, None, None, self.group)
        return result


class MixtureOfExperts(nn.Module):
    """The two best of four experts for each token."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.inp, self.router, self.experts, self.out = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 4),
            Experts(dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:  # [token, dim]
        x = torch.tanh(self.inp(x))
        gates, chosen = self.router(x).softmax(-1).topk(2)
        weight = (F.one_hot(chosen, 4) * gates.unsqueeze(-1)).sum(1)  # [token, expert]
        slots = (weight > 0).t().unsqueeze(-1) * x
        mixed = self.experts(slots.contiguous())  # torch 2.11 sends nothing else to other ranks
        return self.out(x + (weight.t().unsqueeze(-1) * mixed).sum(0))


@all_ways
@on_ranks(4)
def test_experts(rank: int, how: str) -> None:
    """Experts split over two ranks and sharded over the other two train as on one process; all else over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    whole = MixtureOfExperts()
    model = copy.deepcopy(whole)
    for name in ("up", "down"):
        weight = getattr(model.experts, name)
        setattr(model.experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])))
    model.experts.group = mesh["ep"].get_group()
    fully_shard(model.experts, mesh=mesh["dp"]).set_gradient_divide_factor(4)  # they see the tokens of four ranks
    fully_shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    run = executor(model, how)
    for step in range(3):
        inputs = torch.randn(4, 6, 16, generator=seeded(step))
        mean = sum(whole(each).square().mean() for each in inputs) / 4
        mean.backward()
        loss = run(inputs[rank]).square().mean()
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        torch.testing.assert_close(total / 4, mean.detach(), rtol=1e-5, atol=1e-5)
        _step_equally(whole, model, optimizers)


# --- everything around a step -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_around_a_step(rank: int, tmp_path: Path) -> None:
    """Meta parameters, full state dicts, accumulation, reductions, checkpoints, full parameters: all by full shapes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Llama()
    with torch.device("meta"):
        model = Llama()
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole.state_dict(), options=full)
    for name, value in get_model_state_dict(model, options=full).items():
        assert torch.equal(value, whole.state_dict()[name]), name

    # Gradients that are accumulated without communication, then reduced with those of the last backward pass.
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, whole))
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        tokens = batch(2 * index + mesh["dp"].get_local_rank())
        with loss_parallel():
            loss_of(model(tokens), tokens).backward()
        for dp in range(2):
            (loss_of(whole(batch(2 * index + dp)), batch(2 * index + dp)) / 2).backward()
    for (name, mine), each in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), each.grad, rtol=1e-5, atol=1e-5, msg=name)
        for dim in (0, -1):
            torch.testing.assert_close(mine.sum(dim), each.sum(dim), rtol=1e-5, atol=1e-5)
    optimizer.step(), reference.step()

    # Through a checkpoint into one process.
    _, states = get_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": states}, checkpoint_id=tmp_path / "dcp")
    if rank == 0:
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
        saved = torch.load(tmp_path / "whole.pt", weights_only=False)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(saved["model"][name], value, rtol=1e-5, atol=1e-5)
        average = saved["optim"]["state"]["blocks.1.down.weight"]["exp_avg"]
        expected = reference.state[whole.blocks[1].down.weight]["exp_avg"]
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-5)
    dist.barrier()
    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load({"model": (state := model.state_dict())}, checkpoint_id=tmp_path / "dcp")
    model.load_state_dict(state)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name]), name

    with summon_full_params(model):
        torch.nn.init.constant_(model.blocks[0].up.weight, 2.0)
        assert torch.equal(model.head.weight, before["head.weight"])
    assert (model.blocks[0].up.weight.full_tensor() == 2.0).all()


@on_ranks(4)
def test_refused() -> None:
    """A DTensor over ranks that parameters are sharded over too, one that no ranks split, or one with hooks, is refused
    by name; hooks that are registered afterwards are called.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 4, bias=False, device="cpu")
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"parameter weight is distributed over ranks"):
        fully_shard(linear)
    handle = linear.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"parameter weight is a DTensor with hooks"):
        fully_shard(linear, mesh=mesh["dp"])
    handle.remove()
    assert isinstance(linear.weight, DTensor)
    calls = []
    fully_shard(linear, mesh=mesh["dp"])
    linear.weight.register_post_accumulate_grad_hook(calls.append)
    linear(distribute_tensor(torch.ones(2, 4), mesh["tp"], [Replicate()])).sum().backward()
    assert calls == [linear.weight]


@on_ranks(4)
def test_values_of_state_dicts() -> None:
    """Parameters and values are on the mesh of both dimensions, and say of neither that it is replicated if it is not;
    they are gathered and loaded, as is what `distribute_tensor` makes like a parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        shapes = {"rows": (6, 3), "odd": (5, 3), "columns": (3, 4), "all": (3,), "plain": (3, 2)}
        return nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})

    def sharded(seed: int) -> Any:
        model, placements = build(seed), {"rows": Shard(0), "odd": Shard(0), "columns": Shard(1), "all": Replicate()}
        for name, placement in placements.items():
            model[name] = nn.Parameter(distribute_tensor(model[name].detach(), tp, [placement]))
        return fully_shard(model, mesh=mesh["dp"], auto_wrap_policy=None)

    model, plain = sharded(0), build(0).state_dict()
    parameters = dict(model.named_parameters())
    found = model.state_dict()
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        rows = model.state_dict()
    for name, full in plain.items():
        dimensions = 1 if name == "plain" else 2
        for value in (parameters[name], found[name], rows[name]):
            assert value.device_mesh.ndim == len(value.placements) == dimensions, name
            assert not value.placements[0].is_replicate() and torch.equal(value.full_tensor(), full), name
        assert torch.equal(found[name].to_local(), parameters[name].to_local())
    part = plain["rows"].chunk(2)[mesh.get_local_rank("tp")].chunk(2)[mesh.get_local_rank("dp")]
    assert torch.equal(rows["rows"].to_local(), part)
    assert rows["columns"].placements == (Shard(0), Shard(1))
    of_parameters = {
        name: distribute_tensor(full, parameters[name].device_mesh, parameters[name].placements)
        for name, full in plain.items()
    }
    for state in (found, rows, of_parameters):
        other = sharded(1)
        other.load_state_dict(state)
        assert all(torch.equal(param.full_tensor(), plain[name]) for name, param in other.named_parameters())


# --- DTensors on one mesh with the data-parallel dimensions -----------------------------------------------------------


class Layers(nn.Module):
    """Two linear layers and a scale, which may be used as a local tensor."""

    by_local = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        if isinstance(y, DTensor) and self.by_local:  # with a gradient that is labeled Replicate
            return DTensor.from_local(y.to_local() * self.scale.to_local(), y.device_mesh, y.placements)
        return y * self.scale


@pytest.mark.parametrize("how", ["eager", pytest.param("blocks", marks=pytest.mark.nightly), "whole"])
@pytest.mark.parametrize(
    "names", [("dp", "tp"), pytest.param(("copies", "dp"), marks=pytest.mark.nightly)], ids=["tp", "hybrid"]
)
@on_ranks(4)
def test_replicated_over_data_parallel_ranks(rank: int, names: tuple[str, str], how: str) -> None:
    """DTensors that are Replicate on the data-parallel dimensions are sharded over them, as FSDP2 does: a model that
    computes with DTensors on the whole mesh, or with local tensors of these, has the norms, gradients and parameters of
    one process, compiled too."""
    torch._dynamo.reset()  # a size that another compiled model has had would be symbolic: DTensor fails there by itself
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    whole = Layers()
    model = copy.deepcopy(whole)
    parts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)} if "tp" in names else {}
    for name, param in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        placements = [Replicate(), parts.get(name, Replicate())]
        setattr(model.get_submodule(owner), last, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    copies = None if "tp" in names else names[0]
    dims = DataParallelMeshDims(shard="dp", replicate=copies)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.set_gradient_divide_factor(1.0)  # a loss of DTensors is that of all ranks
    if how == "blocks":
        model.up.compile(backend="aot_eager", fullgraph=True)
        model.down.compile(backend="aot_eager", fullgraph=True)
    elif how == "whole":
        model.compile(backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    for step in range(2):
        model.by_local = step == 1 and "tp" not in names
        x = torch.randn(8, 4, generator=seeded(step))
        whole(x).square().mean().backward()
        split = distribute_tensor(x, mesh, [Shard(0), Replicate() if "tp" in names else Shard(0)])
        model(split).square().mean().backward()
        _step_equally(whole, model, optimizers)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.testing.assert_close(full, whole.state_dict(), rtol=1e-5, atol=1e-5)


# --- in which dtype gradients are reduced over the dimension that is not data-parallel --------------------------------


class Scaled(nn.Module):
    """A weight that all ranks have, and rows that are split over them: the gradient of the weight is partial."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


F32_IN_BF16 = ([256.9, 128.9], torch.float32, torch.bfloat16, 384.0)  # 256 + 129, rounded; 386 if summed in float32
BF16_IN_F32 = ([256.0, 1.0, 1.0, 1.0], torch.bfloat16, torch.float32, 260.0)  # 259, rounded; 256 or 258 in bfloat16
REDUCED = {  # sizes of copies, dp and tp, whether DTensors are on the whole mesh, and what is summed over tp
    "two dimensions": ((1, 2, 2), False, F32_IN_BF16),
    "hybrid": ((2, 1, 2), False, F32_IN_BF16),
    "whole mesh": ((1, 2, 2), True, F32_IN_BF16),
    "whole mesh, hybrid": ((2, 1, 2), True, F32_IN_BF16),
    "bfloat16": ((1, 1, 4), False, BF16_IN_F32),
}


@pytest.mark.parametrize(
    "how", ["eager", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("aot_eager", "blocks"))]
)
@pytest.mark.parametrize("case", REDUCED)
@on_ranks(4)
def test_reduce_dtype(case: str, how: str) -> None:
    """Gradients of what is replicated over tensor-parallel ranks are summed over them in `reduce_dtype`, and then are
    in the dtype of the computation, as those of one rank."""
    torch._dynamo.reset()
    sizes, on_whole_mesh, (parts, param_dtype, reduce_dtype, expected) = REDUCED[case]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "dp", "tp"))
    on = mesh if on_whole_mesh else mesh["tp"]
    model = nn.Sequential(Scaled())
    placements = [Replicate()] * on.ndim
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), on, placements))
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    if on_whole_mesh:
        options |= {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp", replicate="copies")}
    else:
        options["mesh"] = mesh["copies", "dp"]
    fully_shard(model, **options)
    if how == "blocks":
        model[0].compile(backend="aot_eager", fullgraph=True)
    run = executor(model, how if how == "aot_eager" else "eager")
    x = torch.full((1, 4), parts[mesh.get_local_rank("tp")])
    run(DTensor.from_local(x, on, [*placements[1:], Shard(0)])).to_local().sum().backward()
    grad = model[0].weight.grad.full_tensor()
    assert grad.tolist() == [expected] * 4, grad
