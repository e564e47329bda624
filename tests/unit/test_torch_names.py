"""Every public name of torch's FSDP, by the wrapper and by `fully_shard`, exists here with torch's arguments."""

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as theirs

import fsdp_compile as ours

CLASSES = ("FullyShardedDataParallel", "FSDPModule")
OTHER_DEFAULTS = {
    ("fully_shard", "mp_policy"): "None stands for torch's default, a policy that changes no dtype",
    ("fully_shard", "offload_policy"): "None stands for torch's default, which does not offload",
    ("FullyShardedDataParallel.__init__", "use_orig_params"): "True, as there is no flat parameter to show",
}


def public(owner: Any) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def _functions() -> list[str]:
    names = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "FullyShardedDataParallel.__init__"]
    for each in CLASSES:
        owner = getattr(theirs, each)
        names += [
            f"{each}.{name}" for name in sorted(public(owner) & vars(owner).keys()) if callable(getattr(owner, name))
        ]
    return names


def test_names() -> None:
    """All that torch's module exports, and all that its classes have, also methods that only raise."""
    assert set(theirs.__all__) <= set(ours.__all__)
    for each in CLASSES:
        assert public(getattr(theirs, each)) <= public(getattr(ours, each))


def test_class() -> None:
    """Whoever asks torch for its FSDPModules finds sharded modules; nothing that torch's class defines, private names
    included, is inherited: a new torch version that adds a method fails here until the method is written or refused."""
    assert issubclass(ours.FSDPModule, theirs.FSDPModule)
    defined = {name for name, value in vars(theirs.FSDPModule).items() if callable(value) or name == "__new__"}
    assert {"__new__", "_apply", "reshard", "set_gradient_divide_factor"} <= defined
    owners = {name: next(each for each in ours.FSDPModule.__mro__ if name in vars(each)) for name in defined}
    assert [name for name, owner in owners.items() if owner is theirs.FSDPModule] == []


@pytest.mark.parametrize("name", _functions())
def test_arguments(name: str) -> None:
    """Functions take torch's arguments by the same names and positions, with the same defaults, and no further ones
    that must be given; methods that pass all of them on to `nn.Module` take them too."""
    expected, found = (inspect.signature(_at(module, name)).parameters for module in (theirs, ours))
    if found.keys() >= {"args", "kwargs"}:
        return
    for key, parameter in expected.items():
        assert found[key].kind == parameter.kind, key
        assert found[key].default == parameter.default or (name, key) in OTHER_DEFAULTS, key
    positional = [p.name for p in expected.values() if p.kind is not p.KEYWORD_ONLY]
    assert list(found)[: len(positional)] == positional
    required = [p.name for p in found.values() if p.default is p.empty and p.name not in {*expected, "fsdp1"}]
    assert required == []


def _at(module: Any, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(getattr(module, owner) if owner else module, last)
