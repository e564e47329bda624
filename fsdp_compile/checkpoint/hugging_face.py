"""`save_safetensors` and `load_safetensors`: a sharded model, to and from a Hugging Face folder, without gathering.

In a file of safetensors each tensor is one run of bytes, and a rank stores one run of each parameter. So every rank
writes what it holds to where it belongs, and reads what it needs from there: straight from and into the shards.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.checkpoint import safetensors_file
from fsdp_compile.checkpoint.agree import all_succeed, first_decides, is_first
from fsdp_compile.checkpoint.safetensors_file import Place, Plan, Spec, Writer
from fsdp_compile.core.lookup import clean_name
from fsdp_compile.core.unit import Unit, unit_of


class Held(NamedTuple):
    """What this rank stores of a parameter or buffer."""

    spec: Spec  # under its first name
    names: list[str]  # all names: those of tied parameters
    tensor: Tensor
    part: Tensor  # of the flattened tensor, 1-D; memory of `tensor` where that is contiguous
    first: int  # index of the part's first element
    saves: bool  # whether this rank, of those that store this part, is the one that writes it


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = 5_000_000_000,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and persistent buffers of `model`, sharded or not, in Hugging Face's layout; all ranks call.

    One file `model.safetensors`, or several and an index, under original names, in stored dtypes. A tied parameter is
    written once, under its first name; the files' metadata have its other names. Every rank writes its own parts.
    Files of an earlier export are replaced at the end; other files in the folder stay.

    Args:
        model: between steps.
        folder: where to; all ranks share it. Made if it does not exist.
        max_shard_size: bytes of a file, unless a tensor is larger by itself.
        process_group: the ranks that call it; default all.

    Raises:
        CheckpointError: on all ranks, if one of them could not write its part. What was in the folder stays.
        OSError: on all ranks, if the first one could not make the files or give them their names.
        ValueError: parameters are summoned; or a dtype is none that safetensors has.
    """
    _sharded_units(model, "save_safetensors")
    held = list(_held(model, process_group))
    tied = {name: each.spec.name for each in held for name in each.names[1:]}
    groups = safetensors_file.fill_up([each.spec for each in held], max_shard_size)
    plan = Plan.of(groups, Path(folder), tied)
    try:
        first_decides(plan.begin, process_group)
        all_succeed(lambda: _write(plan, held), f"writing {folder}", process_group)
        first_decides(plan.end, process_group)
    except Exception:
        if is_first(process_group):
            plan.abandon()
        raise


def _write(plan: Plan, held: list[Held]) -> None:
    with Writer(plan) as writer:
        for each in held:
            if each.saves:
                writer.write(each.spec.name, each.part, each.first)


def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the parameters and persistent buffers of `model`, sharded or not, from safetensors; all ranks call it.

    Each rank reads the bytes of what it stores and no others. Values are converted to the dtypes of the model.

    Args:
        model: between steps.
        folder: a file `*.safetensors`, or a folder with one or with several and an index.
        strict: whether all that the model has must be there, and all that is there must be in the model. Of tied
            parameters one name is enough.
        process_group: the ranks that call it; default all.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: on all ranks, if a file is damaged or truncated. Or if names or shapes differ: then nothing was
            changed.
        ValueError: parameters are summoned.
    """
    units = _sharded_units(model, "load_safetensors")
    places = first_decides(lambda: safetensors_file.find(Path(folder)), process_group)
    held = list(_held(model, process_group))
    all_succeed(lambda: _check(places, held, strict), f"loading {folder}", process_group)
    all_succeed(lambda: _read(places, held), f"loading {folder}", process_group)
    for unit in units:  # also where this rank stores nothing of what was read
        torch.autograd.graph.increment_version([flat.shard for flat in unit.flats])


def _check(places: dict[str, Place], held: list[Held], strict: bool) -> None:
    """Raise ValueError if the files have not what the model needs."""
    wrong, shapes = [], []
    for each in held:
        found = [places[name].spec for name in each.names if name in places]
        shapes += [f"{spec.name} of shape {spec.shape}, expected {each.spec.shape}"
                  for spec in found if spec.shape != each.spec.shape]  # fmt: skip
        if strict and not found:
            wrong.append(f"no {' or '.join(each.names)}")
    known = {name for each in held for name in each.names}
    if strict and (unknown := [name for name in places if name not in known]):
        wrong.append(f"{', '.join(unknown)}, which the model does not have")
    if shapes:
        raise ValueError(f"found {'; '.join([*shapes, *wrong])}; make the model that the files are of")
    if wrong:
        raise ValueError(f"found {'; '.join(wrong)}; pass strict=False to load what fits by name")


def _read(places: dict[str, Place], held: list[Held]) -> None:
    with torch.no_grad():
        for each in held:
            place = next((places[name] for name in each.names if name in places), None)
            if place is not None and each.part.numel():
                safetensors_file.read_run(place, each.part, each.first)
                if not each.tensor.is_contiguous():  # the part is a copy
                    each.tensor.detach().copy_(each.part.view(each.tensor.shape))
                torch.autograd.graph.increment_version(each.tensor)


def _sharded_units(model: nn.Module, what: str) -> list[Unit]:
    units = list(dict.fromkeys(found[0] for param in model.parameters() if (found := unit_of(param))))
    for unit in units:
        if unit.summoned is not None:
            raise ValueError(f"{what}: expected sharded parameters, found {unit} summoned; leave summon_full_params")
    return units


def _held(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[Held]:
    """What this rank stores of each parameter and persistent buffer, tied ones once."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in _named_tensors(model):
        names.setdefault(tensor, []).append(name)
    for tensor, found in names.items():
        shape, part, first, saves = _stored(tensor, group)
        yield Held(Spec(found[0], tensor.dtype, shape), found, tensor, part, first, saves)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the names that they have in the model without wrappers."""
    for path, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = {**module._parameters}
        own |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in own.items():
            if tensor is not None:
                yield clean_name(f"{path}.{name}" if path else name), tensor


def _stored(tensor: Tensor, group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], Tensor, int, bool]:
    """Full shape; what this rank stores, 1-D; where that begins; whether this rank writes it."""
    flat = tensor.detach().reshape(-1)
    found = unit_of(tensor) if isinstance(tensor, nn.Parameter) else None
    if found is None:
        return tuple(tensor.shape), flat, 0, is_first(group)
    unit, index = found
    home, at = unit.in_flat(index)
    record = home.layout.record(at, home.rank)
    copies = unit.replicas if unit.is_sharded else unit.group
    saves = copies is None or dist.get_rank(copies) == 0
    return home.layout.shapes[at], flat, record.first if record else 0, saves and record is not None
