"""On which device a unit computes, and how its tensors get there. The CPU is treated as any other device.

Each unit decides for itself, from the devices of the parameters it manages (E-INIT-12 to 17). Parameters on the meta
device have no device yet: they follow the others.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm.collectives import backends
from fsdp_compile.core.environment import warn_caller

CPU = torch.device("cpu")


def given_device(device_id: int | str | torch.device | None) -> torch.device | None:
    """The device that the argument names, with an index unless it is the CPU (E-INIT-14).

    Raises:
        TypeError: neither an int, a torch.device nor the name of one.
        ValueError: the meta device, or an index without an accelerator to count.
    """
    if device_id is None:
        return None
    if isinstance(device_id, str):
        device_id = torch.device(device_id)
    if isinstance(device_id, bool) or not isinstance(device_id, (int, torch.device)):
        raise TypeError(f"device_id: expected an int, a torch.device or None, found {type(device_id).__name__}")
    if device_id == CPU or device_id == torch.device("cpu", 0):
        return CPU
    if device_id == torch.device("meta"):
        raise ValueError("device_id: expected a device that holds values, found meta; pass the one to compute on")
    current = _current_device()
    if current is None:
        raise ValueError(
            f"device_id: expected a device of this machine, found {device_id} and no accelerator; "
            f"pass torch.device('cpu') or nothing"
        )
    if isinstance(device_id, int):
        return torch.device(current.type, device_id)
    if device_id == torch.device(device_id.type):
        warn_caller(f"device_id: expected an index, found {device_id}; taking the current device, {current}")
        return current
    return device_id


def carried_devices(group: dist.ProcessGroup) -> frozenset[str]:
    """The device types that collectives of `group` take tensors from."""
    return frozenset(backends(group))


def compute_device(
    devices: Iterable[tuple[str, torch.device]], given: torch.device | None, carried: frozenset[str]
) -> torch.device:
    """The device that a unit computes on.

    Args:
        devices: name and device of each parameter that the unit manages; names are for messages.
        given: what `device_id` says, or None.
        carried: the device types that the unit's group communicates from.

    Raises:
        RuntimeError: the parameters are spread over devices in a way that `given` does not settle (E-INIT-12, 13).
        ValueError: they are on another device than `given` (E-INIT-16).
    """
    first: dict[torch.device, str] = {}
    for name, device in devices:
        first.setdefault(device, name)
    first.pop(torch.device("meta"), None)
    others = [device for device in first if device.type != "cpu"]
    _check_spread(first, others, given)
    if given is not None:
        if others and others[0] != given:
            raise ValueError(
                f"parameter {first[others[0]]}: expected device {given}, as device_id says, found {others[0]} on rank "
                f"{dist.get_rank()}; move it there or to the CPU, or pass its device"
            )
        return given
    if others:
        return others[0]
    if CPU in first:
        return CPU if "cpu" in carried else _instead_of_cpu(first[CPU])
    current = _current_device()
    return current if current and current.type in carried else CPU


def _check_spread(first: dict[torch.device, str], others: Sequence[torch.device], given: torch.device | None) -> None:
    """One device, or the CPU and one other that `device_id` names."""
    if len(others) > 1:
        one, other = others[:2]
        remedy = "use one kind of accelerator" if one.type != other.type else "move the unit's parameters to one device"
        raise RuntimeError(
            f"parameter {first[other]}: expected device {one}, as {first[one]} of this unit has, found {other}; "
            f"{remedy} before fully_shard"
        )
    if others and CPU in first and given is None:
        raise RuntimeError(
            f"parameter {first[CPU]}: expected device {others[0]}, as {first[others[0]]} of this unit has, found cpu; "
            f"pass device_id to move what is on the CPU"
        )


def _instead_of_cpu(name: str) -> torch.device:
    """Where to compute if parameters are on the CPU and the group cannot communicate from there."""
    device = _current_device()
    if device is None:
        raise RuntimeError(
            f"parameter {name}: expected a device that its process group communicates from, found cpu and no "
            f"accelerator; use a group with a backend for the CPU, such as gloo"
        )
    warn_caller(
        f"parameter {name}: expected a device that its process group communicates from, found cpu; moving the unit to "
        f"the current device, {device}. Pass device_id, or initialise the model there, which is faster"
    )
    return device


def _current_device() -> torch.device | None:
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else None


def move_from_cpu(params: Iterable[nn.Parameter], modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move what is on the CPU, of `params` and of the modules' own buffers, to `device` (E-INIT-15).

    Every tensor stays the object it is, so ties hold.
    """
    if device.type == "cpu":
        return
    tensors: list[Tensor] = [*params]
    for module in modules:
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.to(device)
