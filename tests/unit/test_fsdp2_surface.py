"""Every public name of torch's FSDP2 exists here, or stands below with the reason why not."""

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as theirs

import fsdp_compile as ours

LEFT_OUT: dict[str, str] = {}  # a name of torch.distributed.fsdp, or FSDPModule.<method>: the reason
MORE_GENERAL = {
    ("fully_shard", "mp_policy"): "None stands for torch's default, a policy that changes no dtype",
    ("fully_shard", "offload_policy"): "None stands for torch's default, which does not offload",
}


def public(owner: Any) -> set[str]:
    return {name for name, value in inspect.getmembers(owner) if not name.startswith("_") and callable(value)}


def test_names() -> None:
    """What scripts import from `torch.distributed.fsdp` can be imported from `fsdp_compile`."""
    missing = [name for name in theirs.__all__ if not hasattr(ours, name) and name not in LEFT_OUT]
    assert missing == []


def test_methods() -> None:
    """A sharded module has every public method of torch's, also those that only raise."""
    missing = public(theirs.FSDPModule) - public(ours.FSDPModule)
    assert missing - {name.removeprefix("FSDPModule.") for name in LEFT_OUT} == set()


def test_class() -> None:
    """Whoever asks torch for its FSDPModules finds sharded modules; nothing that torch's class defines, private names
    included, is inherited: a new torch version that adds a method fails here until the method is written or refused."""
    assert issubclass(ours.FSDPModule, theirs.FSDPModule)
    defined = {name for name, value in vars(theirs.FSDPModule).items() if callable(value) or name == "__new__"}
    assert {"__new__", "_apply", "reshard", "set_gradient_divide_factor"} <= defined
    owners = {name: next(each for each in ours.FSDPModule.__mro__ if name in vars(each)) for name in defined}
    assert [name for name, owner in owners.items() if owner is theirs.FSDPModule] == []


@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_functions(name: str) -> None:
    """Functions take torch's arguments by the same names and positions, with the same defaults."""
    _compare(getattr(theirs, name), getattr(ours, name), name)


@pytest.mark.parametrize("name", sorted(public(theirs.FSDPModule)))
def test_method_arguments(name: str) -> None:
    """Methods take torch's arguments by the same names and positions, with the same defaults."""
    _compare(getattr(theirs.FSDPModule, name), getattr(ours.FSDPModule, name), f"FSDPModule.{name}")


def _compare(their: Any, our: Any, name: str) -> None:
    expected, found = (inspect.signature(function).parameters for function in (their, our))
    for parameter in expected.values():
        assert parameter.name in found, f"{name}: expected an argument {parameter.name}"
        mine = found[parameter.name]
        assert mine.kind == parameter.kind, f"{name}, {parameter.name}: expected {parameter.kind}, found {mine.kind}"
        if (name, parameter.name) not in MORE_GENERAL:
            assert mine.default == parameter.default, f"{name}, {parameter.name}: the default differs"
    positional = [p.name for p in expected.values() if p.kind is not p.KEYWORD_ONLY]
    assert list(found)[: len(positional)] == positional
    required = [p.name for p in found.values() if p.default is p.empty and p.name not in {*expected, "fsdp1"}]
    assert required == [], f"{name}: expected no further arguments that must be given"
