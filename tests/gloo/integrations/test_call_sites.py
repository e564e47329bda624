"""What torch and frameworks do with parameters of FSDP2, each in a few lines, beside FSDP2 itself.

Each call site is a function of a sharded model after one backward, and returns tensors or numbers: equal to those of
FSDP2, or refused by an error that says what to do. docs/frameworks.md says whose they are.
"""

import re
from collections.abc import Callable
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


def full(value: Any) -> Any:
    """The whole of a tensor; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, tensor: Tensor) -> Tensor:
    """A full value, distributed as a tensor is."""
    return distribute_tensor(value, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else value


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def distributed(model: nn.Module) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}


# --- norms and scaling of gradients -----------------------------------------------------------------------------------


def total_norm(model: nn.Module) -> Any:
    norm = full(get_total_norm(gradients(model)))
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return [norm, *gradients(model)]


def norm_by_mesh(model: nn.Module) -> Any:
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in gradients(model):
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    return [torch.stack([full(get_total_norm(grads)) for grads in by_mesh.values()]).norm()]


def local_norm(model: nn.Module) -> Any:
    total = sum((torch.linalg.vector_norm(local(grad)).pow(2) for grad in gradients(model)), torch.zeros(()))
    dist.all_reduce(total)
    return [total.sqrt()]


def local_maximum(model: nn.Module) -> Any:
    locals_ = [local(grad) for grad in gradients(model)]
    largest = torch.stack([each.abs().max() if each.numel() else torch.zeros(()) for each in locals_]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [largest]


def norm_by_placements(model: nn.Module) -> Any:
    first = gradients(model)[0]
    total = sum((local(grad).square().sum() for grad in gradients(model)), torch.zeros(()))
    for dim, placement in enumerate(first.placements if isinstance(first, DTensor) else ()):
        if not isinstance(placement, Replicate):
            dist.all_reduce(total, group=first.device_mesh.get_group(dim))
    return [total.sqrt()]


def scale_locally(model: nn.Module) -> Any:
    for grad in gradients(model):
        local(grad).mul_(0.5)
        (grad._local_tensor if isinstance(grad, DTensor) else grad).mul_(0.5)
    return gradients(model)


# --- loading ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_distributed(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.copy_(like(values()[name], param))


@torch.no_grad()
def copy_into_data(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(like(values()[name], param.data))


def load_distributed(model: nn.Module, assign: bool = False) -> None:
    state = {name: like(value, model.get_parameter(name)) for name, value in values().items()}
    model.load_state_dict(state, assign=assign)


def assign_distributed(model: nn.Module) -> None:
    load_distributed(model, assign=True)


def put_in_place(model: nn.Module) -> None:
    for path, module in model.named_children():
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(like(values()[f"{path}.{name}"], param)))


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


def rows_in_place(model: nn.Module) -> None:
    params = list(model.parameters())
    scope = {"__name__": "transformers.core_model_loading", "nn": nn, "DTensor": DTensor}
    exec(LOADER, scope)  # transformers' loader is known by its name
    scope["rows_in_place"](model, values())  # type: ignore[operator]  # a function
    assert all(one is other and one.is_loaded for one, other in zip(model.parameters(), params, strict=True))


def set_full(model: nn.Module) -> None:
    set_model_state_dict(model, values(), options=StateDictOptions(full_state_dict=True))


def set_from_first_rank(model: nn.Module) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values() if dist.get_rank() == 0 else {}, options=options)


# --- local values -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def save_and_restore(model: nn.Module) -> Any:
    saved = {name: param.to_local().clone() for name, param in distributed(model).items()}
    for name, param in distributed(model).items():
        param.zero_()
        param.to_local().copy_(saved[name])
    return model.parameters()


def stored_numbers(model: nn.Module) -> Any:
    total = torch.tensor(sum(local(param).numel() for param in model.parameters()))
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
    found = [local(param).data_ptr() for param in model.parameters() if local(param).numel()]
    return [len(found) == len(set(found))]


# --- full values ------------------------------------------------------------------------------------------------------


def gather_state_dict(model: nn.Module) -> Any:
    return [full(value.to("cpu")) for value in model.state_dict().values()]


def full_state_dict(model: nn.Module) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values()


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
    return model.parameters()


def sum_of_gradients(model: nn.Module) -> Any:
    weight = model[0].weight
    weight.grad = None
    whole = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    whole.register_hook(lambda grad: grad / dist.get_world_size())
    (whole * (1 + dist.get_rank())).sum().backward()
    return [weight.grad]


# --- what is asked of parameters --------------------------------------------------------------------------------------


def groups_by_mesh(model: nn.Module) -> Any:
    names = {getattr(getattr(p, "device_mesh", None), "mesh_dim_names", None) for p in model.parameters()}
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in model.parameters()}
    return [len(names), len(meshes), None in meshes]


def sharded_dimensions(model: nn.Module) -> Any:
    placements = [placement for param in distributed(model).values() for placement in param.placements]
    return [each.dim for each in placements if isinstance(each, Shard)]


def distribute_again(model: nn.Module) -> Any:
    return [like(model[0].weight, model[0].weight) is model[0].weight]


def _with_another(model: nn.Module) -> tuple[Any, Any]:
    weight = model[0].weight.detach()
    placements = [Replicate()] * (weight.device_mesh.ndim - 1) + [Shard(0)]
    return weight, distribute_tensor(values()["0.weight"], weight.device_mesh, placements)


def beside_another(model: nn.Module) -> Any:
    weight, other = _with_another(model)
    return [weight + other, weight * other]


# --- refused ----------------------------------------------------------------------------------------------------------


def another_first(model: nn.Module) -> Any:
    weight, other = _with_another(model)
    return other + weight


def add_redistributed(model: nn.Module) -> Any:
    param = model[0].weight
    update = DTensor.from_local(values()["0.weight"], param.device_mesh, [Replicate()] * param.device_mesh.ndim)
    return update.redistribute(placements=param.data.placements)


def as_dtensor_of_rows(model: nn.Module) -> Any:
    p = model[0].weight
    return DTensor.from_local(p.to_local(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


# --- all of them ------------------------------------------------------------------------------------------------------

LOADS = (copy_distributed, copy_into_data, load_distributed, assign_distributed, put_in_place, rows_in_place, set_full,
         set_from_first_rank)  # fmt: skip
SITES: dict[str, Callable[[nn.Module], Any]] = {
    each.__name__: each
    for each in (
        total_norm, norm_by_mesh, local_norm, local_maximum, norm_by_placements, scale_locally, *LOADS,
        save_and_restore, stored_numbers, addresses, same_storage, gather_state_dict, replicate_ahead, full_state_dict,
        offload_and_load, sum_of_gradients, groups_by_mesh, sharded_dimensions, distribute_again, beside_another,
    )
}  # fmt: skip
REFUSED: dict[Callable[[nn.Module], Any], str] = {  # a part of the error
    add_redistributed: "use distribute_tensor",
    as_dtensor_of_rows: "distribute_tensor",
    another_first: "call full_tensor()",
    lambda model: model[0].weight._local_tensor: "call to_local",
    lambda model: model[0].weight._spec: "read device_mesh and placements",
}


def _found(name: str, fsdp: Any, mesh: DeviceMesh | None) -> list[Any]:
    """What a site returns, or what is loaded, full."""
    model = sharded(fsdp, mesh)
    found = SITES[name](model)
    return [full(each) for each in (model.state_dict().values() if SITES[name] in LOADS else found)]


def _beside_fsdp2(rank: int, chosen: list[str], names: tuple[str, ...] = ()) -> None:
    """Compare the chosen sites; `names` of the dimensions of a mesh of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if names else None
    for name in chosen:
        found = _found(name, fsdp_compile, mesh)
        # FSDP2 does not load rows that ranks of two meshes cannot share evenly
        expected = [*values().values()] if SITES[name] in LOADS else _found(name, torch.distributed.fsdp, mesh)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")
            else:
                assert one == other, name
    for site, message in REFUSED.items() if "tp" not in names else ():
        with pytest.raises((AttributeError, ValueError), match=re.escape(message)):
            site(sharded(fsdp_compile, mesh))


OF_TWO_MESHES = ("norm_by_mesh", "gather_state_dict", "full_state_dict", *(each.__name__ for each in LOADS))


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        ("two", ()),  # uneven, and tied
        ("one", ()),  # a rank that stores all elements
        pytest.param("four", ("replicate", "shard"), marks=pytest.mark.nightly),
        pytest.param("four", ("dp", "tp"), marks=pytest.mark.nightly),  # parameters that were distributed before
    ],
)
def test_beside_fsdp2(request: pytest.FixtureRequest, world: str, mesh: tuple[str, ...]) -> None:
    """Each call site gives what it gives with FSDP2, or what was loaded, or says why not."""
    chosen = [name for name in (OF_TWO_MESHES if "tp" in mesh else SITES) if not mesh or name != "rows_in_place"]
    request.getfixturevalue(world).run(_beside_fsdp2, chosen, mesh)


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
    for one, other in zip(model[0].parameters(), own, strict=True):
        torch.testing.assert_close(full(one.grad), other)
    rest = [each.grad / 2 for each in list(reference.parameters())[2:]]
    for one, other in zip(list(model.parameters())[2:], rest, strict=True):
        torch.testing.assert_close(full(one.grad), other)
