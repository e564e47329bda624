"""A rank has ended, or does something else: what the others say of each operator that waits for it."""

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

REDUCE, GATHER = "all-reduce of 0.weight", "all-gather of 0.weight"
OPERATORS = {
    "norm": "linalg_vector_norm",
    "sum": "aten.sum",
    "product": "aten.mm",
    "torch's clipping": "_foreach_norm",
    "equal": "aten.equal",
}


def _cases(model: Any, optimizer: Any) -> dict[str, tuple[Callable[[], object], str]]:
    """By operator, what its note names beside the ranks."""
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
        "norm": (weight.norm, REDUCE + ", shape (7, 5)"),
        "norm of rows": (lambda: weight.detach().norm(dim=1), REDUCE + ", shape (7, 5)"),
        "sum": (lambda: bias.detach().sum(), "all-reduce of 0.bias, shape (7,)"),
        "mean": (lambda: weight.detach().mean(), REDUCE),
        "max": (lambda: weight.detach().max(), REDUCE),
        "amin of columns": (lambda: weight.detach().amin(0), REDUCE),
        "any": (lambda: weight.detach().any(), REDUCE),
        "isnan, all": (lambda: weight.detach().isnan().all(), REDUCE),
        "equal": (lambda: torch.equal(weight, weight.detach()), REDUCE),
        "full_tensor": (model[1].weight.full_tensor, "all-gather of 1.weight, shape (3, 7)"),
        "of a gradient": (weight.grad.full_tensor, GATHER),
        "redistribute": (weight.redistribute, GATHER),
        "product": (lambda: weight.detach() @ torch.ones(5, 2), GATHER),
        "a view": (lambda: weight.detach()[1].sum(), GATHER),
        "a write to a view": (lambda: view.zero_(), GATHER),
        "torch's clipping": (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), REDUCE),
        "the model's clipping": (lambda: model.clip_grad_norm_(1.0), REDUCE),
        "GradScaler": (scale, "all-reduce of 1.bias"),
        "a penalty": (lambda: weight.square().sum(), REDUCE),
        "a gradient of what was gathered": (penalty.backward, "all-reduce of a gradient of shape (7, 5)"),
        "full state dict": (lambda: get_model_state_dict(model, options=options), GATHER),
        "full optimizer state": (lambda: get_optimizer_state_dict(model, optimizer, options=options), GATHER),
        "sharded state dict": (sharded, GATHER),
        "export": (lambda: list(export(model)), GATHER),
    }


def _lose(rank: int) -> None:
    """Rank 1 ends; rank 0 tries each operator."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    cases = _cases(model, optimizer)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    for name, (run, named) in cases.items():
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            run()
        text, seconds = "\n".join(getattr(caught.value, "__notes__", [])), time.monotonic() - begin
        assert f"This was the {named}" in text and "among ranks 0, 1: one of them has ended" in text, (name, text)
        assert OPERATORS.get(name, "") in text and seconds < 5, (name, text, seconds)


def test_a_rank_that_has_ended(tmp_path: Path) -> None:
    """Each operator that waits for a rank that has ended raises soon, and says what it waited for: the operator, the
    parameter and the ranks.
    """
    with pytest.raises(RanksFailed, match=r"failed on ranks \[1\], did not finish on \[\][\s\S]*exit code 0"):
        Ranks(2, tmp_path).run(_lose)


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
