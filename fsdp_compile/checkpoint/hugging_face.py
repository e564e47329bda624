"""`save_safetensors` and `load_safetensors`: a model, sharded or not, to and from a Hugging Face folder.

In a file of safetensors each tensor is one range of bytes, and a rank stores one range of each parameter. So every rank
writes what it stores to where it belongs, and reads what it needs from there: straight from and into the shards,
without gathering. See Note [Why files of safetensors are written in place].
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.checkpoint.safetensors_file import (
    Export,
    StoredTensor,
    TensorSpec,
    fill_up,
    read_range,
    stored_tensors,
)
from fsdp_compile.checkpoint.save_load import all_succeed
from fsdp_compile.comm.collectives import is_first, on_first_rank
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict.sharded_value import managed


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = 5_000_000_000,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and persistent buffers of `model`, sharded or not, in Hugging Face's layout.

    All ranks must call it, and each writes what it stores: to one file `model.safetensors`, or to several with an
    index, under original names and in stored dtypes. A tied parameter is written once, under its first name; the
    metadata of the files have its other names. Files of an earlier export are replaced at the end; other files in the
    folder stay.

    Args:
        model: the model, while no forward or backward is under way.
        folder: the folder to write to, which all ranks share. It is made if it does not exist.
        max_shard_size: the most bytes of a file. A larger tensor gets a file of its own.
        process_group: the ranks that call it; default: all.

    Raises:
        CheckpointError: on all ranks, if one of them could not write its part. What was in the folder stays.
        OSError: on all ranks, if the first one could not make the files or give them their names.
        ValueError: parameters are summoned; or a dtype is none that safetensors has.
    """
    _sharded_units(model, "save_safetensors")
    tensors = list(_local_tensors(model, process_group))
    tied = {name: each.spec.name for each in tensors for name in each.names[1:]}
    export = Export.of(fill_up([each.spec for each in tensors], max_shard_size), Path(folder), tied)

    def write_own() -> None:
        with export.writing() as write:
            for each in tensors:
                if each.is_written:
                    write(each.spec.name, each.local, each.first)

    try:
        on_first_rank(export.stage, process_group)
        all_succeed(write_own, f"writing {folder}", process_group)
        on_first_rank(export.commit, process_group)
    except Exception:
        if is_first(process_group):
            export.discard()
        raise


def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the parameters and persistent buffers of `model`, sharded or not, from safetensors.

    All ranks must call it. Each reads the bytes of what it stores and no others. Values are converted to the dtypes of
    the model.

    Args:
        model: the model, while no forward or backward is under way.
        folder: a file `*.safetensors`, or a folder with one such file, or with several and an index.
        strict: whether the files and the model must have the same names. Of tied parameters one name is enough.
        process_group: the ranks that call it; default: all.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: on all ranks, if a file is damaged or truncated. Or if names or shapes differ: then nothing was
            changed.
        ValueError: parameters are summoned.
    """
    units = _sharded_units(model, "load_safetensors")
    stored = on_first_rank(lambda: stored_tensors(Path(folder)), process_group)
    tensors = list(_local_tensors(model, process_group))
    all_succeed(lambda: _check(stored, tensors, strict), f"loading {folder}", process_group)
    all_succeed(lambda: _read(stored, tensors), f"loading {folder}", process_group)
    for unit in units:  # also where this rank stores nothing of what was read
        torch.autograd.graph.increment_version([flat.shard for flat in unit.flats])


class _LocalTensor(NamedTuple):
    """What this rank stores of a parameter or buffer."""

    spec: TensorSpec  # under its first name
    names: list[str]  # all names: those of tied parameters
    tensor: Tensor
    local: Tensor  # its elements, 1-D; memory of `tensor` where that is contiguous
    first: int  # index of the first of them in the flattened full tensor
    is_written: bool  # whether this rank, of those that store the same elements, is the one that writes them


def _local_tensors(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[_LocalTensor]:
    """What this rank stores of each parameter and persistent buffer; tied ones once."""
    names: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = {**module._parameters}
        own |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in own.items():
            if tensor is not None:
                names.setdefault(tensor, []).append(clean_name(f"{path}.{name}" if path else name))
    for tensor, called in names.items():
        parameter = managed(tensor) if isinstance(tensor, nn.Parameter) else None
        if parameter is None:
            local, first, is_written = tensor.detach().reshape(-1), 0, is_first(group)
        else:
            if parameter.spec.tensor_parallel is not None:
                raise ValueError(
                    f"parameter {called[0]}: expected one that is sharded over data-parallel ranks alone, found one "
                    f"that is distributed over others beside; save with torch.distributed.checkpoint, then convert"
                )
            replicas = parameter.unit.replicas  # the ranks that store the same elements
            local, first = parameter.local, parameter.spec.first
            is_written = parameter.spec.numel > 0 and (replicas is None or is_first(replicas))
        spec = TensorSpec(called[0], tensor.dtype, tuple(tensor.shape))
        yield _LocalTensor(spec, called, tensor, local, first, is_written)


def _check(stored: dict[str, StoredTensor], tensors: list[_LocalTensor], strict: bool) -> None:
    """Raise ValueError if the files do not have what the model needs."""
    wrong, shapes = [], []
    for each in tensors:
        specs = [stored[name].spec for name in each.names if name in stored]
        shapes += [f"{spec.name} of shape {spec.shape}, expected {each.spec.shape}"
                  for spec in specs if spec.shape != each.spec.shape]  # fmt: skip
        if strict and not specs:
            wrong.append(f"no {' or '.join(each.names)}")
    known = {name for each in tensors for name in each.names}
    if strict and (unknown := [name for name in stored if name not in known]):
        wrong.append(f"{', '.join(unknown)}, which the model does not have")
    if shapes:
        raise ValueError(f"found {'; '.join([*shapes, *wrong])}; make the model that the files are of")
    if wrong:
        raise ValueError(f"found {'; '.join(wrong)}; pass strict=False to load what fits by name")


@torch.no_grad()
def _read(stored: dict[str, StoredTensor], tensors: list[_LocalTensor]) -> None:
    for each in tensors:
        source = next((stored[name] for name in each.names if name in stored), None)
        if source is not None and each.local.numel():
            read_range(source, each.local, each.first)
            if not each.tensor.is_contiguous():  # then `local` is a copy
                each.tensor.detach().copy_(each.local.view(each.tensor.shape))
            torch.autograd.graph.increment_version(each.tensor)


def _sharded_units(model: nn.Module, caller: str) -> list[Unit]:
    units = list(dict.fromkeys(member[0] for param in model.parameters() if (member := unit_of(param))))
    for unit in units:
        if unit.summoned is not None:
            raise ValueError(f"{caller}: expected sharded parameters, found {unit} summoned; leave summon_full_params")
    return units
