"""A rank has ended, or does something else: what the others say of each operator that waits for it."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from fsdp_compile import FullyShardedDataParallel, export, fully_shard

from ..ranks import Ranks, RanksFailed

# By operator, what its note names beside the ranks.
NAMES = {
    "norm": "all-reduce of 0.weight, shape (7, 5)",
    "norm of rows": "all-reduce of 0.weight, shape (7, 5)",
    "sum": "all-reduce of 0.bias, shape (7,)",
    "mean": "all-reduce of 0.weight",
    "max": "all-reduce of 0.weight",
    "amin of columns": "all-reduce of 0.weight",
    "any": "all-reduce of 0.weight",
    "isnan, all": "all-reduce of 0.weight",
    "equal": "all-reduce of 0.weight",
    "full_tensor": "all-gather of 1.weight, shape (3, 7)",
    "of a gradient": "all-gather of 0.weight",
    "redistribute": "all-gather of 0.weight",
    "product": "all-gather of 0.weight",
    "a view": "all-gather of 0.weight",
    "a write to a view": "all-gather of 0.weight",
    "torch's clipping": "all-reduce of 0.weight",
    "the model's clipping": "all-reduce of 0.weight",
    "GradScaler": "all-reduce of 1.bias",
    "a penalty": "all-reduce of 0.weight",
    "a gradient of what was gathered": "all-reduce of a gradient of shape (7, 5)",
    "full state dict": "all-gather of 0.weight",
    "full optimizer state": "all-gather of 0.weight",
    "sharded state dict": "all-gather of 0.weight",
    "export": "all-gather of 0.weight",
}
OPERATORS = {
    "norm": "linalg_vector_norm",
    "sum": "aten.sum",
    "product": "aten.mm",
    "torch's clipping": "_foreach_norm",
    "equal": "aten.equal",
}


def _cases(model: Any, optimizer: Any) -> dict[str, Callable[[], object]]:
    weight, bias = model[0].weight, model[0].bias
    penalty = weight.full_tensor().square().sum()
    view = weight.detach()[2:4]

    def sharded() -> object:
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model.state_dict()

    def scale() -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)

    options = StateDictOptions(full_state_dict=True)
    return {
        "norm": weight.norm,
        "norm of rows": lambda: weight.detach().norm(dim=1),
        "sum": lambda: bias.detach().sum(),
        "mean": lambda: weight.detach().mean(),
        "max": lambda: weight.detach().max(),
        "amin of columns": lambda: weight.detach().amin(0),
        "any": lambda: weight.detach().any(),
        "isnan, all": lambda: weight.detach().isnan().all(),
        "equal": lambda: torch.equal(weight, weight.detach()),
        "full_tensor": model[1].weight.full_tensor,
        "of a gradient": weight.grad.full_tensor,
        "redistribute": weight.redistribute,
        "product": lambda: weight.detach() @ torch.ones(5, 2),
        "a view": lambda: weight.detach()[1].sum(),
        "a write to a view": lambda: view.zero_(),
        "torch's clipping": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "the model's clipping": lambda: model.clip_grad_norm_(1.0),
        "GradScaler": scale,
        "a penalty": lambda: weight.square().sum(),
        "a gradient of what was gathered": penalty.backward,
        "full state dict": lambda: get_model_state_dict(model, options=options),
        "full optimizer state": lambda: get_optimizer_state_dict(model, optimizer, options=options),
        "sharded state dict": sharded,
        "export": lambda: list(export(model)),
    }


def _lose(rank: int, folder: str) -> None:
    """Rank 1 ends; rank 0 tries each operator, and writes what it is told."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    cases = _cases(model, optimizer)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    said = dict[str, tuple[float, list[str]]]()
    for name, run in cases.items():
        begin = time.monotonic()
        try:
            run()
        except RuntimeError as error:
            said[name] = time.monotonic() - begin, getattr(error, "__notes__", [])
    (Path(folder) / "said").write_text(json.dumps(said))


def test_a_rank_that_has_ended(tmp_path: Path) -> None:
    """Each operator that waits for a rank that has ended raises soon, and says what it waited for: the operator, the
    parameter and the ranks.
    """
    ranks = Ranks(2, tmp_path)
    with pytest.raises(RanksFailed, match="exit code 0"):
        ranks.run(_lose, str(tmp_path))
    said = json.loads((tmp_path / "said").read_text())
    assert said.keys() == NAMES.keys()
    for name, (seconds, notes) in said.items():
        text = "\n".join(notes)
        assert f"This was the {NAMES[name]}" in text and "among ranks 0, 1: one of them has ended" in text, (name, text)
        assert OPERATORS.get(name, "") in text and seconds < 5, (name, text, seconds)


def _differ(rank: int) -> str:
    """One rank asks for rows of a parameter, and the other one for its norm."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    model(torch.ones(2, 5)).sum().backward()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if rank == 0:
            model.state_dict()
        else:
            model[0].weight.norm()
    assert time.monotonic() - begin < 20
    return "\n".join([str(caught.value), *caught.value.__notes__])


def test_a_state_dict_on_one_rank(tmp_path: Path) -> None:
    """A sharded state dict on one rank alone waits for a gather: when another rank communicates something
    else, both raise within seconds, and each says what it does.
    """
    ranks = Ranks(2, tmp_path)
    try:
        for text in ranks.run(_differ):
            assert "ranks communicate different things" in text and "the gather that an operator needs" in text
            assert "of 0.weight" in text
    finally:
        ranks.stop()
