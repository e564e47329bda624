"""Which device a unit computes on; with devices by name, so that no accelerator is needed."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.construct.arguments import given_device
from fsdp_compile.construct.prepare import compute_device

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA0, CUDA1, XPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("xpu:0")
GLOO, NCCL = frozenset({"cpu", "cuda"}), frozenset({"cuda"})


def chosen(*devices: torch.device, given: torch.device | None = None, carried: frozenset[str] = GLOO) -> torch.device:
    return compute_device([(f"p{i}", device) for i, device in enumerate(devices)], given, carried)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A machine whose current device is cuda:1."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    return CUDA1


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing but CPUs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


CHOSEN = [  # devices of parameters, `device_id`, what the group carries, whether there is an accelerator -> the device
    ((CUDA1, CUDA1), None, GLOO, False, CUDA1),
    ((META, CUDA1), None, GLOO, False, CUDA1),
    ((CPU, META), None, GLOO, False, CPU),
    ((META,), None, GLOO, False, CPU),
    ((), None, GLOO, False, CPU),
    ((CPU, CPU), None, GLOO, True, CPU),  # a CPU model stays where the group takes it (E-INIT-17)
    ((META,), None, GLOO, True, CUDA1),  # all on meta: the current device, if the group carries it (E-META-3)
    ((META,), None, frozenset({"cpu"}), True, CPU),
    *((devices, CUDA1, GLOO, False, CUDA1) for devices in ((CPU,), (CPU, CUDA1), (META, CPU, CUDA1), (META,), ())),
]


@pytest.mark.parametrize(("devices", "given", "carried", "has_accelerator", "expected"), CHOSEN)
def test_which_device(
    devices: Any, given: Any, carried: Any, has_accelerator: bool, expected: Any, request: pytest.FixtureRequest
) -> None:
    """Where the parameters are, CPU included; what is on meta follows the others; what is on the CPU goes to the device
    of `device_id`. Nothing is warned of. E-INIT-12, 13, 15, 16, 17, E-GEN-1, E-META-3.
    """
    request.getfixturevalue("accelerator" if has_accelerator else "no_accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(*devices, given=given, carried=carried) == expected


def test_cpu_parameters_move_where_the_group_does_not(accelerator: torch.device) -> None:
    """A CPU model in a group for accelerators goes to the current device with a warning (E-INIT-15, E-ERR-63)."""
    with pytest.warns(UserWarning, match=r"parameter p0 is on the CPU.* to the current device, cuda:1"):
        assert chosen(CPU, carried=NCCL) == CUDA1


REFUSED = [
    ((CPU,), None, NCCL, RuntimeError, r"p0 is on the CPU.*, and there is no accelerator; use .*gloo"),  # E-ERR-56
    ((CUDA0, CPU), None, GLOO, RuntimeError, r"p1 is on the CPU, and p0 .* on cuda:0; pass device_id"),
    ((CUDA0, CUDA1), CUDA0, GLOO, RuntimeError, r"p1 is on cuda:1, and p0 .* on cuda:0; move .*to one device"),
    ((CUDA0, CPU, XPU), None, GLOO, RuntimeError, r"p2 is on xpu:0, and p0 .* on cuda:0; use one kind"),
    *(((CUDA1,), given, GLOO, ValueError, rf"p0 is on cuda:1, but device_id is {given} \(rank 3\); move it")
      for given in (CPU, CUDA0)),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "given", "carried", "error", "message"), REFUSED)
def test_devices_that_do_not_go_together(
    devices: Any, given: Any, carried: Any, error: Any, message: str, no_accelerator: None, monkeypatch: Any
) -> None:
    """The error names devices and what to do: several devices or kinds of them, a CPU beside an accelerator without
    `device_id`, a `device_id` other than the parameters' accelerator, a group that takes no CPU tensors.

    E-INIT-12, 13, 16, E-ERR-55, 56, 59, 64.
    """
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(error, match=message):
        chosen(*devices, given=given, carried=carried)


def test_forms_of_device_id(accelerator: torch.device) -> None:
    """None, an index, or a device; without index the current one, with a warning (E-INIT-14, E-ERR-60)."""
    assert given_device(None) is None
    assert given_device(0) == given_device(CUDA0) == CUDA0
    assert given_device(CPU) == given_device(torch.device("cpu:0")) == CPU
    with pytest.warns(UserWarning, match=r"device_id: cuda has no index; .*current device, cuda:1"):
        assert given_device(torch.device("cuda")) == CUDA1


def test_other_device_ids_are_refused(no_accelerator: None) -> None:
    """A wrong type, the meta device, or a device that the machine does not have (E-INIT-14)."""
    for wrong, name in ((b"cuda", "bytes"), (True, "bool"), (1.0, "float")):
        with pytest.raises(TypeError, match=f"device_id: expected an int, a torch.device or None, found {name}"):
            given_device(wrong)
    with pytest.raises(ValueError, match=r"device_id: the meta device"):
        given_device(META)
    assert given_device("cpu") == torch.device("cpu")
    for absent in (3, CUDA0, "cuda:0"):
        with pytest.raises(ValueError, match=f"device_id={absent}, but there is no accelerator; pass torch.device"):
            given_device(absent)
