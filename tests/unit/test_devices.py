"""Which device a unit computes on; with devices by name, so that no accelerator is needed."""

import warnings

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


def test_parameters_decide_without_device_id(no_accelerator: None) -> None:
    """Where the parameters are, CPU included; what is on meta follows the others (E-INIT-12, 16, E-GEN-1)."""
    assert chosen(CUDA1, CUDA1) == CUDA1
    assert chosen(META, CUDA1) == CUDA1
    assert chosen(CPU, META) == CPU
    assert chosen(META) == chosen() == CPU


def test_cpu_parameters_stay_where_the_group_takes_them(accelerator: torch.device) -> None:
    """A CPU model in a group that carries CPU tensors computes on the CPU, without a warning (E-INIT-17)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(CPU, CPU) == CPU


def test_cpu_parameters_move_where_the_group_does_not(accelerator: torch.device) -> None:
    """A CPU model in a group for accelerators goes to the current device with a warning (E-INIT-15, E-ERR-63)."""
    with pytest.warns(UserWarning, match=r"parameter p0 is on the CPU.* to the current device, cuda:1"):
        assert chosen(CPU, carried=NCCL) == CUDA1


def test_cpu_parameters_nowhere_to_go(no_accelerator: None) -> None:
    """Without an accelerator such a group cannot serve: RuntimeError that names a backend which can (E-ERR-56)."""
    with pytest.raises(RuntimeError, match=r"parameter p0 is on the CPU.*, and there is no accelerator; use .*gloo"):
        chosen(CPU, carried=NCCL)


def test_meta_parameters_go_to_the_current_device(accelerator: torch.device) -> None:
    """With everything on meta: the current device, if the group carries it, else the CPU (E-META-3)."""
    assert chosen(META) == CUDA1
    assert chosen(META, carried=frozenset({"cpu"})) == CPU


def test_device_id_moves_what_is_on_the_cpu() -> None:
    """CPU plus the device of `device_id`, or CPU alone, or meta (E-INIT-13, 15)."""
    for devices in ((CPU,), (CPU, CUDA1), (META, CPU, CUDA1), (META,), ()):
        assert chosen(*devices, given=CUDA1) == CUDA1


def test_cpu_and_an_accelerator_need_device_id() -> None:
    """Without `device_id`: RuntimeError with both devices, both names and that advice (E-INIT-13, E-ERR-59)."""
    with pytest.raises(RuntimeError, match=r"parameter p1 is on the CPU, and p0 .* on cuda:0; pass device_id"):
        chosen(CUDA0, CPU)


def test_two_devices_are_refused() -> None:
    """Several devices, or two kinds of them: RuntimeError that names both (E-INIT-12, 13, E-ERR-55, 59)."""
    with pytest.raises(RuntimeError, match=r"p1 is on cuda:1, and p0 .* on cuda:0; move .*to one device"):
        chosen(CUDA0, CUDA1, given=CUDA0)
    with pytest.raises(RuntimeError, match=r"p2 is on xpu:0, and p0 .* on cuda:0; use one kind"):
        chosen(CUDA0, CPU, XPU)


@pytest.mark.parametrize("given", [CPU, CUDA0])
def test_device_id_against_the_parameters(given: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `device_id` other than the parameters' accelerator: ValueError with rank and both (E-INIT-16, E-ERR-64)."""
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(ValueError, match=rf"p0 is on cuda:1, but device_id is {given} \(rank 3\); move it"):
        chosen(CUDA1, given=given)


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
