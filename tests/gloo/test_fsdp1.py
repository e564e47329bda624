"""What a script written for torch's `FullyShardedDataParallel` reads, side by side with torch's own class."""

from typing import Any

import torch
from models import MODELS, Residual
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import FullyShardedDataParallel

from .ranks import Ranks
from .training import build

MLP = MODELS["mlp"]
POLICY = ModuleWrapPolicy({Residual})


def _both() -> list[tuple[Any, nn.Module]]:
    """Both classes, each with a model that it has wrapped: blocks with buffers below a root with parameters."""
    pairs: list[tuple[Any, nn.Module]] = []
    for kind in (TorchFSDP, FullyShardedDataParallel):
        model = build(MLP)
        for block in model.blocks:
            block.register_buffer("scale", torch.ones(2))
        cpu = torch.device("cpu")
        pairs.append((kind, kind(model, auto_wrap_policy=POLICY, device_id=cpu, use_orig_params=True)))
    return pairs


def _names_of(module: nn.Module) -> list[list[str]]:
    walks = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return [[name for name, _ in walk] for walk in walks]


def _names_everywhere(kind: Any, model: Any) -> list[Any]:
    child = model.blocks[0]
    found: list[Any] = [_names_of(model), _names_of(child), list(model.state_dict()), list(child.state_dict())]
    for recurse in (True, False):
        with kind.summon_full_params(model, recurse):
            found += [_names_of(model), _names_of(child), _names_of(model.module)]
    with kind.summon_full_params(child):
        found += [_names_of(model), _names_of(child)]
    state = model.state_dict()
    wrong = {"blocks.0.extra": state.pop("blocks.0.up.weight"), "extra": state.pop("stem.bias"), **state}
    found.append(model.load_state_dict(wrong, strict=False))
    try:
        model.load_state_dict(wrong)
    except RuntimeError as error:
        found.append(str(error))
    wrappers = kind.fsdp_modules(model)
    found.append([[each is other for each in model.modules()] for other in wrappers])
    found.append([[each.check_is_root(), isinstance(each.module, Residual)] for each in wrappers])
    return found


def _names(rank: int) -> None:
    (torch_kind, theirs), (kind, ours) = _both()
    for expected, found in zip(_names_everywhere(torch_kind, theirs), _names_everywhere(kind, ours), strict=True):
        assert found == expected, f"expected {expected}, found {found}"


def test_names(two: Ranks) -> None:
    """Parameters, buffers, modules and state dicts have the names that torch's wrapper gives them, nested wrappers
    included, within `summon_full_params` and outside; so do missing and unexpected keys."""
    two.run(_names)
