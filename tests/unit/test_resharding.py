"""State saved on any number of ranks under any strategy is loaded on any other, and by an unsharded model.

One process plays all ranks, one after the other; torch's planners of all ranks meet in memory.
"""

from typing import Any

import planning
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, MODULES
from states import OPTIMIZERS, as_rank, assert_known, fill, shard, start
from tiers import NIGHTLY
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_compile.core.sharding import clean_names
from fsdp_compile.state_dict.optimizer import watch_state

CASES = MODELS | MODULES
STRATEGIES = ["FULL_SHARD", "neighbours", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", None]


@st.composite
def places(draw: st.DrawFn) -> tuple[str | None, int]:
    """A strategy and a number of ranks that it can have."""
    strategy = draw(st.sampled_from(STRATEGIES))
    if strategy is None:
        return None, 1
    return strategy, draw(
        st.sampled_from([4, 8] if "HYBRID" in strategy or strategy == "neighbours" else [1, 2, 3, 4, 8])
    )


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer by original names, as torch's own functions give them."""
    found, optim = get_state_dict(model, optimizer)
    return {"model": found, "optim": optim}


def assert_all_there(model: nn.Module, optim: torch.optim.Optimizer, keys: list[str]) -> None:
    """Each rank has all state of trained parameters, whatever it stores of them; torch drops that of frozen ones."""
    for param, name in clean_names(model).items():
        if param.requires_grad:
            prefix = f"optim.state.{name}."
            saved = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
            assert saved == optim.state.get(param, {}).keys(), name


@settings(max_examples=15 if NIGHTLY else 8, deadline=None)
@given(places(), places(), st.sampled_from(sorted(CASES)), st.sampled_from(sorted(OPTIMIZERS)))
def test_any_sharding_to_any_other(
    saving: tuple[str | None, int], loading: tuple[str | None, int], name: str, optimizer: str
) -> None:
    """Parameters and optimizer state arrive bit for bit, through torch's planners and torch's own state dict functions,
    under original names and shapes."""
    case, make = CASES[name], OPTIMIZERS[optimizer]
    states = []
    for rank in range(saving[1]):
        with as_rank(rank, saving[1]):
            model = shard(case, saving[0])
            optim = start(model, make)
            fill(model, optim)
            states.append(states_of(model, optim))
    saved = planning.save(states)
    torch.manual_seed(0)
    plain = case.build()
    for key, value in plain.state_dict().items():
        assert saved.metadata.state_dict_metadata[f"model.{key}"].size == value.shape
    for rank in range(loading[1]):
        with as_rank(rank, loading[1]):
            model = shard(case, loading[0])
            optim = make(model.parameters())
            watch_state(optim)  # Adagrad has state before it steps
            state = states_of(model, optim)
            planning.load(saved, [state])
            set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
            assert_known(model, optim)
            assert_all_there(model, optim, list(saved.metadata.state_dict_metadata))
