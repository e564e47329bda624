"""`export`: full weights of a sharded model, a bucket for each unit, for engines that generate.

shard [n]  ->  cast  ->  all-gather into a bucket, 1-D bytes  ->  views of it, under the names of `model.state_dict()`

The next unit's all-gather is under way while one is read, and what was read goes before a third one starts.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm import collectives, hops
from fsdp_compile.comm.waits import state_of
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import shard_order
from fsdp_compile.core.sharding import clean_name, stored_parameters, units_used_below
from fsdp_compile.core.unit import Unit, check_idle, unit_of
from fsdp_compile.edits.writeback import refresh
from fsdp_compile.state_dict.model import model_state
from fsdp_compile.state_dict.sharded_value import full_tensor

Names = Callable[[str], str | None]


class TensorInfo(NamedTuple):
    """An exported tensor, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # of its first byte in the bucket of its unit


class ExportedUnit(dict[str, Tensor]):
    """Full tensors by name, views of `bucket`, 1-D uint8, until the next unit is asked for: then they are empty.

    On ranks that only send it has no tensors, and `bucket` is None.
    """

    def __init__(self, infos: list[TensorInfo], bucket: Any) -> None:
        super().__init__()
        self._infos = infos
        self.bucket: Tensor | None = bucket
        for name, shape, dtype, offset in () if bucket is None else infos:
            view = bucket[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self[name] = view.detach()  # without a base, which would hold the memory

    def metadata(self) -> list[TensorInfo]:
        """What the bucket has, also where that is None; bytes between tensors are padding."""
        return list(self._infos)


def export(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    names: Names | None = None,
    to: Collection[int] | None = None,
    adapters: str | None = None,
) -> Iterator[ExportedUnit]:
    """Yield the full weights of `model` unit by unit: one gather for each flat parameter, the next one under way.

    At most two units are alive. All ranks call this between steps and take the same units; forwards may run in between.
    A rank that stops early still sends what the others ask for.

    Args:
        model: sharded, eager or compiled. Names are those of its `state_dict()`, of a tied parameter the first one. Of
            quantized weights there are the plain tensors that they consist of. Buffers, ignored parameters and those
            that tensor parallelism splits come last, each as a unit of its own.
        dtype: to which parameters are cast before they are sent, but quantized ones; None: as they are stored.
        names: returns an engine's name for one of ours; None: that tensor is left out.
        to: the ranks, by number among all, that get the weights; the others send. None: all get them.
        adapters: of peft. "merge": weights with what active adapters add to them, under names of the base model;
            "only": those of adapters, under names of `adapter_model.safetensors`; None: as `state_dict()` has them.

    Raises:
        ValueError: a forward or backward is under way, parameters are summoned or on the meta device, two tensors get
            one name, or `adapters` is none of these.
        NotImplementedError: a layer is merged with its adapter by more than adding two matrices of one unit.
        RuntimeError: while units are taken, a parameter changed before it was sent; at the end, others stopped earlier.
    """
    return _exported(*_planned(model, dtype, names, adapters), to)


def metadata(
    model: nn.Module, dtype: torch.dtype | None = None, names: Names | None = None, adapters: str | None = None
) -> list[TensorInfo]:
    """What `export` of these arguments yields, in its order, without communication. Raises as that does."""
    parts, single = _planned(model, dtype, names, adapters)
    return [*(info for part in parts for info in part.infos), *single]


def _exported(parts: list["_Part"], single: dict[TensorInfo, Tensor], to: Any) -> Iterator[ExportedUnit]:
    is_left = False
    for exported in chain(_gathered(parts, to), _each(single, to)):
        if not is_left:
            try:
                yield exported
            except GeneratorExit:  # other ranks wait for what this one stores
                is_left = True
        for tensor in (*exported.values(), exported.bucket) if exported.bucket is not None else ():
            tensor.set_()  # type: ignore[call-overload]  # whoever holds it: memory goes before more is allocated
    units = {part.unit.group.name: part.unit for part in parts if part.unit.is_sharded}
    left = {unit: torch.full((), float(is_left), device=unit.device) for unit in units.values()}
    for unit, count in left.items():
        collectives.start_all_reduce(count, unit.group.name, "sum").wait()
    if any(0 < count.item() < unit.group.size for unit, count in left.items()):
        raise RuntimeError("export: some ranks stopped before its end, so their engines have a part of the weights; "
                           "take all units on all ranks")  # fmt: skip


def _each(single: dict[TensorInfo, Tensor], to: Any) -> Iterator[ExportedUnit]:
    for info, value in single.items():
        with torch.inference_mode(False), torch.no_grad():
            full = full_tensor(value).to(info.dtype, memory_format=torch.contiguous_format, copy=True)
            bucket = full.view(-1).view(torch.uint8) if _is_in(to) else None
        yield ExportedUnit([info], bucket)


def _gathered(parts: list["_Part"], to: Any) -> Iterator[ExportedUnit]:
    for index, part in enumerate(parts):
        for each in parts[index : index + 2]:
            if not each.gathers:
                each.start(to)
        yield part.finish()
        for each in parts[index + 1 : index + 3]:
            if not each.unit.is_current() or each.unit.version_counters() != each.versions:
                parts[index + 1].finish()  # which all ranks have begun to gather
                raise RuntimeError(
                    f"export: parameters of {each.unit.path} changed before they were sent, and what was sent before "
                    f"is out of date; step after the last unit, or begin again"
                )


def _is_in(to: Collection[int] | None) -> bool:
    return to is None or dist.get_rank() in to


class _Part:
    """Parameters of a unit, gathered in one bucket.

    Args:
        names: of the exported parameters, by index in the unit.
        dtype: to which they are cast; None: as they are stored.
        layers: peft's, by the index of the weight that they add to, before the cast.
    """

    def __init__(self, unit: Unit, names: dict[int, str], dtype: torch.dtype | None, layers: dict[int, Any]) -> None:
        self.unit, self.versions, self._layers = unit, unit.version_counters(), layers
        self.infos, self.gathers = list[TensorInfo](), list[Any]()
        self._flats: list[tuple[FlatParam, torch.dtype, torch.dtype]] = []  # with the dtypes of the wire and the bucket
        start = 0
        for flat, indices in unit.by_flat(range(len(unit.params))):
            if layers or not names.keys().isdisjoint(indices):
                stored = unit.compute_dtype(flat, dtype is None, dtype)
                self._flats.append((flat, flat.shard.dtype if layers else stored, stored))
                for index, shape, offset in zip(indices, flat.layout.shapes, flat.layout.offsets, strict=True):
                    if index in names:
                        self.infos.append(TensorInfo(names[index], shape, stored, start + offset * stored.itemsize))
                start += flat.layout.numel * stored.itemsize

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, to: Collection[int] | None) -> None:
        """Begin to gather; `to`: the ranks that get the values."""
        sizes = [flat.layout.numel * dtype.itemsize for flat, dtype, _ in self._flats]
        self._bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=self.unit.device) if _is_in(to) else None
        pieces = [None] * len(sizes) if self._bucket is None else self._bucket.split(sizes)
        for (flat, dtype, _), piece in zip(self._flats, pieces, strict=True):
            full = None if piece is None else piece.view(dtype)
            self.gathers.append(_start_gather(self.unit, flat.shard.detach(), dtype, full, to))

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> ExportedUnit:
        """Wait for the values; add what adapters add to them."""
        with self._flats[0][0].specs[0].waiting_for("all-gather"):
            for gather in self.gathers:
                gather.wait()
        flats = [(flat, gather.full, dtype) for (flat, _, dtype), gather in zip(self._flats, self.gathers, strict=True)]
        bucket, self._bucket, self.gathers = self._bucket, None, [None]
        if self._layers and bucket is not None:
            views = [view for flat, full, _ in flats for view in flat.views(full)]
            self.unit.show_unsharded(views, as_flats=False)  # where peft's layers look their own matrices up
            try:
                for index, layer in self._layers.items():
                    for adapter in _active(layer):
                        views[index] += layer.get_delta_weight(adapter)
            finally:
                self.unit.hide_unsharded(views)
            bucket = torch.cat([full.to(dtype).view(torch.uint8) for _, full, dtype in flats])
        return ExportedUnit(self.infos, bucket)


def _start_gather(unit: Unit, shard: Tensor, dtype: torch.dtype, full: Any, to: Collection[int] | None) -> Any:
    """Begin to gather `shard`, 1-D, cast to `dtype`, into `full`, which is None on ranks that are not in `to`."""
    shard = shard.to(unit.device, non_blocking=True)
    if not unit.is_sharded:
        if full is not None:
            full.copy_(shard)
        return collectives.Filling(full, ())
    if to is None:
        for stage in unit.stages[:-1]:
            shard = hops.gather(shard.to(dtype), stage)
        return collectives.start_all_gather(full, shard, unit.stages[-1].name)
    sent, works, group = shard.to(dtype).view(torch.uint8), [], unit.group.find()
    for index, rank in enumerate(dist.get_process_group_ranks(group)):
        if rank in to:
            slices = None if index != unit.rank else full.view(torch.uint8).chunk(unit.group.size)
            into = slices and [slices[each] for each in shard_order(unit.stages) or range(unit.group.size)]
            works.append(dist.gather(sent, into, group=group, group_dst=index, async_op=True))
    return collectives.Filling(full, works, sent, "gather", state_of(group) if sent.is_cpu else None)


# --- what is exported -------------------------------------------------------------------------------------------------


def _planned(
    model: nn.Module, dtype: torch.dtype | None, names: Names | None, adapters: str | None
) -> tuple[list[_Part], dict[TensorInfo, Tensor]]:
    """What units gather, and what else there is."""
    if adapters not in _RENAMED:
        raise ValueError(f"adapters must be 'merge', 'only' or None, not {adapters!r}")
    units = units_used_below(model)
    check_idle(units, "export")
    for unit in units:
        refresh(unit)
        if unit.flats[0].shard.is_meta:
            raise ValueError(f"export: parameter {unit.names[0]} is on the meta device; load values first")
    layers = _layers_to_merge(model) if adapters == "merge" else {}
    of_units: dict[Unit, dict[int, str]] = {}
    single: dict[TensorInfo, Tensor] = {}
    taken: set[str | int] = set()  # names, and ids of tensors
    for stored, value in model_state(model, keep_vars=True).items():
        name = _RENAMED[adapters](stored)
        name = names(name) if name and names is not None else name
        if not name or not isinstance(value, Tensor) or id(value) in taken:
            continue
        if name in taken:
            raise ValueError(f"export: {stored} and another tensor get the name {name}; let names tell them apart")
        taken |= {name, id(value)}
        unit, index = unit_of(value) or (None, 0)  # type: ignore[arg-type,assignment]  # what is no parameter has none
        if unit is not None and unit.specs[index].tensor_parallel is None:
            of_units.setdefault(unit, {})[index] = name
        else:
            is_cast = dtype and isinstance(value, nn.Parameter) and value.is_floating_point() and value.itemsize > 1
            single[TensorInfo(name, tuple(value.shape), (is_cast and dtype) or value.dtype, 0)] = value
    return [_Part(unit, those, dtype, layers.get(unit, {})) for unit, those in of_units.items()], single


_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.[^.]+")


def _of_base(name: str) -> str | None:
    is_left_out = ".original_module." in name or ".lora_" in name
    named = _ADAPTER.sub("", name).replace(".base_layer.", ".").removeprefix("base_model.model.")
    return None if is_left_out else named


def _of_adapter(name: str) -> str | None:
    named = _ADAPTER.sub(lambda found: "" if found[1] == "modules_to_save" else f".{found[1]}", name)
    return named if named != name else None


_RENAMED: dict[str | None, Names] = {None: str, "merge": _of_base, "only": _of_adapter}


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.scaling and not layer.disable_adapters]


def _layers_to_merge(model: nn.Module) -> dict[Unit, dict[int, Any]]:
    """peft's layers with active adapters, by unit and by the index of the weight that they add to."""
    layers: dict[Unit, dict[int, Any]] = {}
    for path, layer in model.named_modules():
        is_lora = hasattr(layer, "lora_A")
        if not hasattr(layer, "get_delta_weight") or (is_lora and not _active(layer)):
            continue
        weight: Any = stored_parameters(layer.get_base_layer()).get("weight")
        place = unit_of(weight) if weight is not None else None
        units = {(unit_of(each) or (None,))[0] for each in layer.parameters()}
        is_sum = is_lora and not (layer.merged or layer.lora_variant or any(layer.lora_bias.values()))
        is_sum = is_sum and place is not None and len(units) == 1 and place[1] not in layers.get(place[0], {})
        if not is_sum or place is None or not weight.is_floating_point() or weight.itemsize == 1:
            raise NotImplementedError(
                f"export: {clean_name(path)} is merged with its adapter by more than adding two matrices of one unit: "
                f"its base is tied, quantized or merged, or it is DoRA or has a bias; pass adapters='only'"
            )
        layers.setdefault(place[0], {})[place[1]] = layer
    return layers
