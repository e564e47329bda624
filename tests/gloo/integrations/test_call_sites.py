"""What torch and frameworks do with parameters of FSDP2, each in a few lines, beside FSDP2 itself.

Each call site is a function of a sharded model after one backward, and returns tensors or numbers: equal to those of
FSDP2, or refused by an error that says what to do. docs/frameworks.md says whose they are.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import fsdp_compile

from ..ranks import Ranks, on_ranks

WIDTHS = (7, 9, 5, 1)  # rows that ranks cannot share evenly; the last weight has one row, its bias one element


class Net(nn.Sequential):
    """A model in two units; two of its layers share a bias."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(*each) for each in pairwise(WIDTHS)), nn.Linear(WIDTHS[-1], WIDTHS[-2]))
        self[-1].bias = self[1].bias


def sharded(fsdp: Any, mesh: DeviceMesh | None = None) -> nn.Module:
    """A model, sharded and with gradients; its first layer along a dimension "tp" of the mesh, too."""
    model: nn.Module = Net()
    if mesh is not None and mesh.mesh_dim_names == ("dp", "tp"):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        mesh = mesh["dp"]
    options = {} if mesh is None else {"mesh": mesh}
    fsdp.fully_shard(model[0], **options)
    fsdp.fully_shard(model, **options)
    model(torch.randn(3, WIDTHS[0], generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
    return model


def values() -> dict[str, Tensor]:
    """Full values of each parameter, equal on all ranks."""
    return {name: torch.arange(1.0, each.numel() + 1).view(each.shape) for name, each in Net().state_dict().items()}


def shown(tensors: Iterable[Any]) -> list[Any]:
    """Full tensors, whatever they are."""
    return [each.detach().full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


# --- norms and clipping -----------------------------------------------------------------------------------------------


def total_norm(model: nn.Module) -> Any:
    norm = get_total_norm(gradients(model))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return [norm, *shown(gradients(model))]


def norm_by_mesh(model: nn.Module) -> Any:
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in gradients(model):
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [get_total_norm(grads) for grads in by_mesh.values()]
    return [torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()]


def local_norm(model: nn.Module, order: float = 2.0) -> Any:
    total = torch.zeros(())
    for grad in gradients(model):
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        total += torch.linalg.vector_norm(local, order).pow(order)
    dist.all_reduce(total)
    return [total.pow(1 / order)]


def local_maximum(model: nn.Module) -> Any:
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients(model)]
    largest = torch.stack([each.abs().max() if each.numel() else torch.zeros(()) for each in locals_]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [largest]


def norm_by_placements(model: nn.Module) -> Any:
    first = gradients(model)[0]
    total = sum(
        ((g.to_local() if isinstance(g, DTensor) else g).square().sum() for g in gradients(model)), torch.zeros(())
    )
    for dim, placement in enumerate(first.placements if isinstance(first, DTensor) else ()):
        if not isinstance(placement, Replicate):
            dist.all_reduce(total, group=first.device_mesh.get_group(dim))
    return [total.sqrt()]


def scale_locally(model: nn.Module) -> Any:
    for grad in gradients(model):
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(0.5)
    return shown(gradients(model))


def scale_local_field(model: nn.Module) -> Any:
    for grad in gradients(model):
        (grad._local_tensor if isinstance(grad, DTensor) else grad).mul_(0.5)
    return shown(gradients(model))


# --- loading ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_distributed(model: nn.Module) -> Any:
    full = values()
    for name, param in model.named_parameters():
        value = full[name]
        param.copy_(
            distribute_tensor(value, param.device_mesh, param.placements) if isinstance(param, DTensor) else value
        )
    return shown(model.state_dict().values())


@torch.no_grad()
def copy_into_data(model: nn.Module) -> Any:
    full = values()
    for name, param in model.named_parameters():
        data, value = param.data, full[name]
        data.copy_(distribute_tensor(value, data.device_mesh, data.placements) if isinstance(data, DTensor) else value)
    return shown(model.state_dict().values())


def load_distributed(model: nn.Module, assign: bool = False) -> Any:
    own = {name: model.get_parameter(name) for name in values()}
    state = {name: distribute_tensor(values()[name], p.device_mesh, p.placements) for name, p in own.items()}
    model.load_state_dict(state, assign=assign)
    return shown(model.state_dict().values())


def assign_distributed(model: nn.Module) -> Any:
    return load_distributed(model, assign=True)


def put_in_place(model: nn.Module) -> Any:
    full = values()
    for path, module in model.named_children():
        for name, param in list(module.named_parameters()):
            value = full[f"{path}.{name}"]
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            setattr(module, name, nn.Parameter(value))
    return shown(model.state_dict().values())


LOADER = """
def rows_in_place(model, full):
    for path, module in model.named_children():
        for name, param in list(module.named_parameters()):
            rank, ranks = param.device_mesh.get_local_rank(), param.device_mesh.size()
            rows = full[f"{path}.{name}"].chunk(ranks)
            mine = rows[rank] if rank < len(rows) else rows[0][:0]
            assert mine.shape == param._local_tensor.shape
            options = dict(run_check=False, shape=param.shape, stride=param.stride())
            value = nn.Parameter(DTensor.from_local(mine, param.device_mesh, param.placements, **options))
            value.is_loaded = True
            setattr(module, name, value)
"""


def rows_in_place(model: nn.Module) -> Any:
    params = list(model.parameters())
    scope = {"__name__": "transformers.core_model_loading", "nn": nn, "DTensor": DTensor}
    exec(LOADER, scope)  # transformers' loader is known by its name
    scope["rows_in_place"](model, values())  # type: ignore[operator]  # a function
    assert all(one is other and one.is_loaded for one, other in zip(model.parameters(), params, strict=True))
    return shown(model.state_dict().values())


def set_full(model: nn.Module) -> Any:
    set_model_state_dict(model, values(), options=StateDictOptions(full_state_dict=True))
    return shown(model.state_dict().values())


def set_from_first_rank(model: nn.Module) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values() if dist.get_rank() == 0 else {}, options=options)
    return shown(model.state_dict().values())


@torch.no_grad()
def copy_local_rows(model: nn.Module) -> Any:
    full = values()
    for name, param in model.named_parameters():
        if not isinstance(param.data, DTensor):
            param.data.copy_(full[name])
            continue
        mesh, placements = param.data.device_mesh, param.data.placements
        everywhere = DTensor.from_local(full[name], mesh, [Replicate()] * mesh.ndim)
        param.data.to_local().copy_(everywhere.redistribute(placements=placements).to_local())
    return shown(model.parameters())


@torch.no_grad()
def add_redistributed(model: nn.Module) -> Any:
    full = values()
    for name, param in model.named_parameters():
        update = full[name]
        if isinstance(param, DTensor):
            everywhere = [Replicate()] * param.device_mesh.ndim
            update = DTensor.from_local(update, param.device_mesh, everywhere).redistribute(placements=param.placements)
        param.add_(update)
    return shown(model.parameters())


# --- local values -----------------------------------------------------------------------------------------------------


def as_dtensor_of_rows(model: nn.Module) -> Any:
    params = [param for param in model.parameters() if isinstance(param, DTensor)]
    made = [
        DTensor.from_local(p.to_local(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()) for p in params
    ]
    return shown(made)


def as_dtensor_of_local_field(model: nn.Module) -> Any:
    weight = model[0].weight
    if isinstance(weight, DTensor):
        return shown([DTensor.from_local(weight._local_tensor, weight.device_mesh, [Shard(0)])])
    return shown([DTensor.from_local(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])])


def replicate_the_rest(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rest = [param for param in model.parameters() if not isinstance(param, DTensor)]
    return [len(rest), *shown([DTensor.from_local(param, mesh, [Replicate()]) for param in rest])]


@torch.no_grad()
def save_and_restore(model: nn.Module) -> Any:
    before = shown(model.parameters())
    saved = {name: param.to_local().clone() for name, param in model.named_parameters() if isinstance(param, DTensor)}
    for name, param in model.named_parameters():
        param.zero_()
        param.to_local().copy_(saved[name])
    return [*before, *shown(model.parameters())]


def save_with_spec(model: nn.Module) -> Any:
    specs = {param._spec for param in model.parameters() if isinstance(param, DTensor)}
    return [len(specs) > 0]


def stored_numbers(model: nn.Module) -> Any:
    stored = sum(
        param.to_local().numel() if isinstance(param, DTensor) else param.numel() for param in model.parameters()
    )
    total = torch.tensor(stored)
    dist.all_reduce(total)
    return [total]


def same_storage(model: nn.Module) -> Any:
    """Of each value of a state dict, as torchtitan asks before it copies."""
    before, now = (
        [each._local_tensor if isinstance(each, DTensor) else each for each in model.state_dict().values()]
        for _ in range(2)
    )
    return [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(before, now, strict=True)]


def addresses(model: nn.Module) -> Any:
    found = [p.to_local().data_ptr() if isinstance(p, DTensor) else p.data_ptr() for p in model.parameters()
             if not isinstance(p, DTensor) or p.to_local().numel()]  # fmt: skip
    return [len(found) == len(set(found))]


# --- full values ------------------------------------------------------------------------------------------------------


def stream_weights(model: nn.Module) -> Any:
    return [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in model.parameters()]


def gather_state_dict(model: nn.Module) -> Any:
    state = model.state_dict()
    return [value.to("cpu").full_tensor() if isinstance(value, DTensor) else value for value in state.values()]


def full_state_dict(model: nn.Module) -> Any:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [*state.values()]


def replicate_ahead(model: nn.Module) -> Any:
    begun = [value.redistribute(placements=[Replicate()] * value.device_mesh.ndim, async_op=True).to_local()
             if isinstance(value, DTensor) else value for value in model.state_dict().values()]  # fmt: skip
    return [each.wait() if hasattr(each, "wait") else each for each in begun]


def offload_and_load(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    for device in ("cpu", model[0].weight.device):
        model.to(device)
        for state in optimizer.state.values():
            state.update({key: value.to(device, non_blocking=True) for key, value in state.items()})
    optimizer.step()
    return stream_weights(model)


def sum_of_gradients(model: nn.Module) -> Any:
    weight = model[0].weight
    weight.grad = None
    full = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    full.register_hook(lambda grad: grad / dist.get_world_size())
    (full * (1 + dist.get_rank())).sum().backward()
    return shown([weight.grad])


# --- what is asked of parameters --------------------------------------------------------------------------------------


def is_sharded_at_all(model: nn.Module) -> Any:
    return [any(isinstance(param, DTensor) for param in model.parameters())]


def groups_by_mesh(model: nn.Module) -> Any:
    names = {getattr(getattr(p, "device_mesh", None), "mesh_dim_names", None) for p in model.parameters()}
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in model.parameters()}
    return [len(names), len(meshes), None in meshes]


def sharded_dimensions(model: nn.Module) -> Any:
    return [each.dim for param in model.parameters() if isinstance(param, DTensor) for each in param.placements
            if isinstance(each, Shard)]  # fmt: skip


def cast_frozen(model: nn.Module) -> Any:
    for param in model.parameters():
        if not isinstance(param, DTensor):
            param.data = param.data.to(torch.bfloat16)
    return shown(model.parameters())


def average_what_is_replicated(model: nn.Module) -> Any:
    hooked = [param for param in model.parameters() if not isinstance(param.data, DTensor)]
    return [len(hooked)]


def distribute_again(model: nn.Module) -> Any:
    weight = model[0].weight
    return [distribute_tensor(weight, weight.device_mesh, weight.placements) is weight]


def like_shards(weight: Any) -> list[Any]:
    return [Replicate()] * (weight.device_mesh.ndim - 1) + [Shard(0)]


def beside_another(model: nn.Module) -> Any:
    weight = model[0].weight.detach()
    other = distribute_tensor(values()["0.weight"], weight.device_mesh, like_shards(weight))
    return shown([weight + other, weight * other])


def another_first(model: nn.Module) -> Any:
    weight = model[0].weight.detach()
    other = distribute_tensor(values()["0.weight"], weight.device_mesh, like_shards(weight))
    return shown([other + weight])


# --- all of them ------------------------------------------------------------------------------------------------------


SITES: dict[str, Callable[[nn.Module], Any]] = {
    each.__name__: each
    for each in (
        total_norm, norm_by_mesh, local_norm, local_maximum, norm_by_placements, scale_locally, scale_local_field,
        copy_distributed, copy_into_data, load_distributed, assign_distributed, put_in_place, rows_in_place,
        set_full, set_from_first_rank, copy_local_rows, add_redistributed, as_dtensor_of_rows,
        as_dtensor_of_local_field, replicate_the_rest, save_and_restore, save_with_spec, stored_numbers, addresses,
        same_storage,
        stream_weights, gather_state_dict, replicate_ahead, full_state_dict, offload_and_load, sum_of_gradients,
        is_sharded_at_all, groups_by_mesh, sharded_dimensions, cast_frozen, average_what_is_replicated,
        distribute_again, beside_another, another_first,
    )
}  # fmt: skip
REFUSED = {  # by name, a part of the error
    "copy_local_rows": "use distribute_tensor",
    "add_redistributed": "use distribute_tensor",
    "as_dtensor_of_rows": "distribute_tensor",
    "as_dtensor_of_local_field": "call to_local",
    "save_with_spec": "read device_mesh and placements",
    "another_first": "call full_tensor()",
}
LOADS = (copy_distributed, copy_into_data, load_distributed, assign_distributed, put_in_place, rows_in_place, set_full,
         set_from_first_rank)  # fmt: skip


def _found(name: str, fsdp: Any, mesh: DeviceMesh | None) -> tuple[Any, str]:
    """What a site returns, or the text of its error."""
    model = sharded(fsdp, mesh)
    try:
        return SITES[name](model), ""
    except Exception as error:
        return None, f"{fsdp.__name__}, {type(error).__name__}: {error}"


def _beside_fsdp2(rank: int, chosen: list[str], names: tuple[str, ...] = ()) -> list[str]:
    """What is wrong at each of the chosen sites, or nothing; `names` of the dimensions of a mesh of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if names else None
    wrong = []
    for name in chosen:
        found, error = _found(name, fsdp_compile, mesh)
        if name in REFUSED or error:
            wrong.append("" if name in REFUSED and REFUSED[name] in error else f"{name}: {error or found}")
            continue
        if SITES[name] in LOADS:  # FSDP2 does not load rows that ranks of two meshes cannot share evenly
            expected, error = [*values().values()], ""
        else:
            expected, error = _found(name, torch.distributed.fsdp, mesh)
        if not error and len(found) != len(expected):
            error = f"expected {len(expected)} values, found {len(found)}"
        pairs = () if error else zip(found, expected, strict=True)
        differing = [f"expected {other}, found {one}" for one, other in pairs if not _equal(one, other)]
        wrong.append("; ".join(f"{name}: {each}" for each in [error, *differing] if each))
    return wrong


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.shape == other.shape and torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)


LOADS_OF_TWO = [each for each in LOADS if each is not rows_in_place]
OF_TWO_MESHES = [norm_by_mesh, stream_weights, gather_state_dict, full_state_dict, is_sharded_at_all, *LOADS_OF_TWO]


@pytest.mark.parametrize(
    ("world", "chosen", "mesh"),
    [
        ("two", [*SITES], ()),  # uneven, and tied
        ("one", [*SITES], ()),  # a rank that stores all elements
        *(
            pytest.param("four", chosen, mesh, marks=pytest.mark.nightly)
            for chosen, mesh in (
                ([name for name in SITES if name != "rows_in_place"], ("replicate", "shard")),
                ([each.__name__ for each in OF_TWO_MESHES], ("dp", "tp")),  # parameters that were distributed before
            )
        ),
    ],
)
def test_beside_fsdp2(request: pytest.FixtureRequest, world: str, chosen: list[str], mesh: tuple[str, ...]) -> None:
    """Each call site gives what it gives with FSDP2, or what was loaded, or says why not."""
    for found in request.getfixturevalue(world).run(_beside_fsdp2, chosen, mesh):
        assert not any(found), "\n".join(filter(None, found))


@on_ranks(2)
def test_who_is_a_dtensor() -> None:
    """Sharded parameters, gradients and results of operators; not views, gradients under no_sync, summoned ones."""
    model = sharded(fsdp_compile)
    weight = model[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter) and type(weight) is not DTensor
    assert isinstance(weight.grad, DTensor) and isinstance(weight.detach() + 1, DTensor)
    assert not isinstance(weight[0], DTensor)
    with fsdp_compile.summon_full_params(model):
        assert not isinstance(weight, DTensor)
    assert isinstance(weight, DTensor)
    weight.grad = None
    with model.no_sync():
        model(torch.ones(1, WIDTHS[0])).sum().backward()
    assert not isinstance(weight.grad, DTensor)  # other ranks do not have its elements
    other = distribute_tensor(values()["0.weight"], weight.device_mesh, [Shard(0)]).requires_grad_()
    with torch.no_grad(), pytest.raises(ValueError, match="expected no other DTensor"):
        weight + other
    for placements in ([Shard(0)], [Partial("max")]):
        with pytest.raises(ValueError, match=r"grad_placements of 0\.weight, shape \(9, 7\)"):
            weight.full_tensor(grad_placements=placements)
    with pytest.raises(ValueError, match=r"grad_placements: 0\.weight"):
        weight.to_local(grad_placements=[Shard(0)])


def _from_pretrained(rank: int, folder: str) -> None:
    import transformers.distributed.fsdp as loader
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=36, num_attention_heads=4, num_key_value_heads=2)
    reference = LlamaForCausalLM(LlamaConfig(vocab_size=101, num_hidden_layers=2, **sizes))
    if rank == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    loader.fully_shard, before = fsdp_compile.fully_shard, loader.fully_shard
    try:
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    finally:
        loader.fully_shard = before
    stored = sum(param.to_local().numel() for param in model.parameters())
    assert stored <= 0.51 * sum(param.numel() for param in reference.parameters())
    tokens = torch.arange(20).view(2, 10)
    for each in (model, reference):
        each(input_ids=tokens, labels=tokens).loss.backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.nightly
def test_from_pretrained(two: Ranks, tmp_path: Path) -> None:
    """transformers' `from_pretrained(distributed_config=)` loads what this package shards, each rank its part."""
    pytest.importorskip("transformers", "5.20")
    pytest.importorskip("accelerate")  # which its loader asks for
    two.run(_from_pretrained, str(tmp_path))


@on_ranks(2)
def test_parameters_on_two_meshes(rank: int) -> None:
    """A unit has one mesh, and says how several are done: a module with a mesh of its own is a unit of its own."""
    whole = init_device_mesh("cpu", (2,))
    halves = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "efsdp"))["efsdp"]  # of one rank each
    model = Net()
    with pytest.raises(ValueError, match=r"parameter 0\.weight.*call fully_shard on it with that one"):
        fsdp_compile.fully_shard(model, mesh=whole, shard_placement_fn=lambda param: (Shard(0), halves))
    fsdp_compile.fully_shard(model[0], mesh=halves)
    fsdp_compile.fully_shard(model, mesh=whole)
    reference = Net()
    inputs = [torch.randn(3, WIDTHS[0], generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    model(inputs[rank]).square().sum().backward()
    reference(inputs[rank]).square().sum().backward()
    own = [each.grad.clone() for each in reference[0].parameters()]  # of this rank's data alone
    reference(inputs[1 - rank]).square().sum().backward()
    for one, other in zip(shown(each.grad for each in model[0].parameters()), own, strict=True):
        torch.testing.assert_close(one, other)
    rest = [each.grad / 2 for each in list(reference.parameters())[2:]]
    for one, other in zip(shown(each.grad for each in list(model.parameters())[2:]), rest, strict=True):
        torch.testing.assert_close(one, other)
