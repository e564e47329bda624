"""Units are made, one by one, from what prepare.py has worked out; then modules, units and the root are connected.

make_unit      initial values, device, equality; then the parameters of one unit are sharded
connect        modules find their parameters, and the root knows its units
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.comm.groups import Groups
from fsdp_compile.construct.blocks import Ignored
from fsdp_compile.construct.prepare import (
    NamedParams,
    PreparedUnit,
    data_parallel_peers,
    meta_tensors,
    own_tensors,
    resets_parameters,
    tensor_name,
    unsent_buffers,
)
from fsdp_compile.core.flat_param import group_by_dtype
from fsdp_compile.core.inner_params import take_apart
from fsdp_compile.core.ops import inner_tensors
from fsdp_compile.core.settings import InitFn, warn_caller
from fsdp_compile.core.sharding import (
    ModuleSharding,
    add_lookups,
    clean_names,
    sharding_of,
    swap_class,
    units_gathered_below,
)
from fsdp_compile.core.unit import IGNORED, Unit, unit_of
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.tensor_parallel import with_local_parameters


class ModuleGroup(nn.Module):
    """The modules of one call of `fully_shard` with a list, as children."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)


def make_unit(model: nn.Module, prepared: PreparedUnit, ignored: Ignored, mixin: type) -> None:
    """Give one unit's tensors values, a device and equality, in this order; then shard its module or modules.

    These become instances of `mixin`.
    """
    settings = prepared.settings
    has_data = any(param.numel() for _, param in prepared.params)  # else there is nothing to communicate (E-FLAT-12)
    modules = [module for _, module in prepared.modules]
    take_apart(model, prepared.inner)
    if not prepared.stays_on_meta:
        materialize(prepared.modules, prepared.device, settings.param_init_fn, ignored)
    params = with_local_parameters(model, prepared.params, data_parallel_peers(settings))
    plain = [param for _, param in params]
    if prepared.device.type != "cpu":  # what is on the CPU moves (E-INIT-15); objects stay, so ties hold
        for tensor in (*plain, *(buffer for module in modules for buffer in module._buffers.values())):
            if tensor is not None and tensor.device.type == "cpu":
                tensor.data = tensor.data.to(prepared.device)
    if settings.sync_module_states:  # (E-SYNC-1, 3); buffers are sent once, by the first call (E-SYNC-2)
        buffers = unsent_buffers(prepared.module).values()
        broadcast([*plain, *buffers], settings.groups)
        for buffer in buffers:
            vars(buffer)["_fsdp_sent"] = True
    unit = None
    if has_data:
        kinds = group_by_dtype(params)
        sections = [part for kind in kinds for part in divide(kind, prepared.module, prepared.device)]
        unit = Unit(sections, settings, device=prepared.device, on_meta=prepared.stays_on_meta)
    is_group = isinstance(prepared.module, ModuleGroup)
    sharded = list(prepared.module.children()) if is_group else [prepared.module]
    for module in sharded:
        module.__dict__["_fsdp"] = ModuleSharding(
            settings,
            prepared.device,
            {
                f"{path}.{name}" if path else name: buffer.dtype
                for path, owner in module.named_modules()
                if owner in modules
                for name, buffer in owner._buffers.items()
                if buffer is not None and buffer.is_floating_point()
            },
            units=(unit,) if unit else (),
            shared_units=frozenset((unit,) if unit and is_group else ()),
        )
        swap_class(module, mixin)


# Note [A large unit has several flat parameters]
# In one flat parameter the first product of a block would wait until all of the block is gathered, and the first
# gradient of a block would wait for its last one: at the beginning of forward and at the end of backward nothing hides
# that. A compiled graph gathers and reduces each flat parameter by itself, where it is needed, and launches neighbours
# together where that costs nothing. So a unit is divided, in the order of registration, into parts of similar size,
# each large enough to be worth a collective. A model's own unit is also divided where other units lie between, as
# between an embedding, which forward reads first, and a head, which it reads last.
# The unit stays one: outside of graphs all of it is gathered when the module's forward begins, and the module finds its
# parameters wherever it reads them. A block that is compiled by itself waits for each flat parameter where it reads it.

_PARTS = 4  # of a unit, about


def _worth_a_collective(device: torch.device) -> int:
    """Elements that take some ten times as long to send as a collective takes to begin, on links that `device` has."""
    return 2**18 if device.type == "cpu" else 2**22


def divide(params: NamedParams, module: nn.Module, device: torch.device) -> list[NamedParams]:
    """Divide parameters of one kind of a unit, which `module` owns, into those of its flat parameters."""
    worth = _worth_a_collective(device)
    large = max(worth, sum(param.numel() for _, param in params) / _PARTS)
    position = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    sections: list[NamedParams] = [[]]
    numel = following = 0
    owner = ""
    for name, param in params:
        at, before = position.get(name, following), owner
        owner = name.rpartition(".")[0]
        is_end = numel >= large or (numel >= worth and (at > following or param.numel() >= large))
        if is_end and (owner != before or param.numel() >= worth):
            sections.append([])
            numel = 0
        sections[-1].append((name, param))
        numel += param.numel()
        following = at + 1
    if len(sections) > 1 and numel < worth:
        small = sections.pop()
        sections[-1] += small
    return sections


# --- initial values ---------------------------------------------------------------------------------------------------

#     before   weight: on meta    bias: has values    a module that owns both
#     during   weight: empty      bias: a copy        what the function that initializes the module sees
#     after    weight: values     bias: as before     the bias is untouched, whatever was done to its copy
#
# Note [Initializing without changing what has values]
# `reset_parameters` and `param_init_fn` initialize a whole module. Some of its tensors may have values that must stay:
# they were on a device from the start, or are shared with a unit that is sharded already, so that their full values no
# longer exist. While such a module is initialized it has copies of these tensors in full shape, which are dropped then.
# A tensor on the meta device cannot be given memory in place. So the function works on a new tensor, and `swap_tensors`
# then exchanges the contents of the two objects: every parameter stays the object that optimizers and other modules
# know, and a tied one is initialized in the first module that has it.


def materialize(
    modules: Sequence[tuple[str, nn.Module]], device: torch.device, init: InitFn | None, ignored: Ignored
) -> None:
    """Give all meta tensors of a unit's `modules` memory and values; nothing happens if there are none.

    Only modules that directly own meta tensors are initialized, and values that are there stay (E-META-4). `init` is
    called with tensors still on meta, also on modules that own nothing at all (E-META-2); what it puts on the CPU stays
    there. Without it tensors are made empty on `device`, and `module.reset_parameters()` is called (E-META-3); without
    that method a module, which has buffers alone then, is left as it is. What these raise is raised after a UserWarning
    that names the module.
    """
    if not any(meta_tensors(module, ignored) for _, module in modules):
        return
    for path, module in modules:
        absent = meta_tensors(module, ignored)
        if not absent and not (init and not own_tensors(module)):
            continue
        if init is None and not resets_parameters(module):
            continue  # it has buffers alone, which wait for the script
        try:
            with torch.no_grad(), _stand_ins(module, absent), _children_left_alone(module):
                if init is not None:
                    init(module)
                else:
                    for tensor in absent.values():
                        empty = torch.empty_like(tensor, device=device)
                        is_param = isinstance(tensor, nn.Parameter)
                        _turn_into(tensor, nn.Parameter(empty, tensor.requires_grad) if is_param else empty)
                    module.reset_parameters()  # type: ignore[operator]  # must_stay_on_meta has found it
        except Exception as error:
            warn_caller(
                f"module {path or 'model'} ({type(module).__name__}): initialising it failed: {error!r}; "
                f"units before it are sharded already, so make the model anew"
            )
            raise
        for name, tensor in absent.items():
            _keep_identity(path, module, name, tensor, device)


ATTRIBUTES = ("_fsdp_unit", "_fsdp_is_inner", "local", "spec", "_is_param")
"""What a parameter has while it is a unit's."""


@contextmanager
def _stand_ins(module: nn.Module, absent: dict[str, Tensor]) -> Iterator[None]:
    """Put copies in the place of tensors that have values, so that initializing the module does not change them."""
    present = {name: tensor for name, tensor in own_tensors(module).items() if name not in absent}
    for name, tensor in present.items():
        copy = tensor.detach().clone()
        if isinstance(tensor, ShardedTensor):  # another unit's, which this module shares
            copy = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
            marks = vars(tensor).items()  # that an initialiser may look at
            vars(copy).update((name, mark) for name, mark in marks if name not in ATTRIBUTES)
        _registry_of(module, name)[name] = copy
    try:
        yield
    finally:
        for name, tensor in present.items():
            _registry_of(module, name)[name] = tensor


def _registry_of(module: nn.Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else module._buffers


@contextmanager
def _children_left_alone(module: nn.Module) -> Iterator[None]:
    """Keep `module.to_empty()` from the modules below, which have values already or are initialized by themselves."""
    children = list(module.children())
    for child in children:
        vars(child)["_apply"] = lambda *_, _child=child, **__: _child
    try:
        yield
    finally:
        for child in children:
            del vars(child)["_apply"]


def _keep_identity(path: str, module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """Give `tensor`, the object that was on meta, the values that are now in its place."""
    initialized = own_tensors(module).get(name)
    what = tensor_name(path, name, tensor)
    if initialized is None or initialized.is_meta:
        left = "removed it" if initialized is None else "left it on the meta device"
        raise ValueError(f"{what}: param_init_fn {left}; call module.to_empty(device=..., recurse=False) in it")
    before, after = ((tuple(each.shape), each.dtype) for each in (tensor, initialized))
    if after != before:
        raise ValueError(f"{what}: initialising changed its shape and dtype from {before} to {after}; keep them")
    if initialized.device not in (device, torch.device("cpu")):
        raise ValueError(f"{what}: initialising put it on {initialized.device}, but the unit computes on {device}; "
                         f"pass that as device_id, or initialise there")  # fmt: skip
    if initialized is not tensor:
        if isinstance(initialized, nn.Parameter):
            initialized.requires_grad_(tensor.requires_grad)
        _turn_into(tensor, initialized)
        _registry_of(module, name)[name] = tensor


def _turn_into(tensor: Tensor, other: Tensor) -> None:
    """Make `tensor` what `other` is: a meta tensor cannot be given another device's data in place."""
    for key, value in vars(tensor).items():
        vars(other).setdefault(key, value)
    torch.utils.swap_tensors(tensor, other)


def broadcast(tensors: Iterable[Tensor], groups: Groups) -> None:
    """Copy `tensors`, of any shapes and dtypes, from the first rank of `groups` to all others, in place.

    First among replicas, so that the first rank of every shard group has the values when they go through shard groups.
    """
    plain = [inner.detach() for tensor in tensors for inner in inner_tensors(tensor) if inner.numel()]
    for group in filter(None, (groups.replicate, groups.shard)):
        for tensor in plain if group.size > 1 else ():
            message = tensor.contiguous().view(-1).view(torch.uint8)  # memory of the tensor if it is contiguous
            try:
                collectives.broadcast(message, group.find())
            except RuntimeError as error:
                error.add_note(f"This was the broadcast of {len(plain)} parameters and buffers in fully_shard.")
                raise
            if not tensor.is_contiguous():
                tensor.copy_(message.view(tensor.dtype).view(tensor.shape))


# --- connecting -------------------------------------------------------------------------------------------------------


def connect(model: Any, ignored: Ignored, runtime: Any, mixin: type) -> None:
    """Give all modules, now instances of `mixin`, look-ups of their parameters, and units the root's `runtime`."""
    roots: list[Any] = list(model.children()) if isinstance(model, ModuleGroup) else [model]
    for root in roots:
        root._fsdp.ignored_modules, root._fsdp.ignored_params = ignored.modules, ignored.params  # E-INIT-9
        for param in ignored.params:
            vars(param)[IGNORED] = True
    users: dict[Unit, list[nn.Module]] = {}
    names = clean_names(model)
    for module in model.modules():
        units = {name: unit_of(p) for name, p in module._parameters.items() if p is not None}
        managed = {name: at for name, at in units.items() if at}
        known = {lookup.name for lookup in getattr(type(module), "_fsdp_lookups", ())}
        if managed.keys() - known:
            add_lookups(module, {name: at for name, at in managed.items() if name not in known}, mixin)
        for unit, _ in managed.values():
            users.setdefault(unit, []).append(module)
    scopes: list[Any] = list(filter(sharding_of, model.modules()))
    shared = frozenset[Unit]().union(*(scope._fsdp.shared_units for scope in scopes))
    for scope in scopes:
        scope.__dict__["_fsdp_runtime"] = runtime
        scope._fsdp.is_root = scope in roots
        for unit in scope._fsdp.units:
            used_in = set(users.get(unit, []))
            if unit not in shared and not used_in <= set(scope.modules()):
                # Tied parameters are gathered once: around the innermost sharded module with all of their users.
                enclosing = [each for each in scopes if used_in <= set(each.modules())]
                innermost = min(enclosing, key=lambda each: sum(1 for _ in each.modules()))
                scope._fsdp.units = tuple(other for other in scope._fsdp.units if other is not unit)
                innermost._fsdp.units = (*innermost._fsdp.units, unit)
    for root in roots:
        root._fsdp.shared_units = shared
    for scope in scopes:
        scope._fsdp.traced_units = tuple(dict.fromkeys((*scope._fsdp.units, *scope._fsdp.shared_units)))
        scope._fsdp.units_below = tuple(units_gathered_below(scope))
        for unit in scope._fsdp.units:
            unit.reduces_in_flight, unit.of_root = runtime.reduces_in_flight, scope._fsdp.is_root
            unit.rename(names)
