"""What ranks expect to begin next, from what has begun: who departs asks the others before it communicates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_compile.agree import rank_order as order
from fsdp_compile.comm.waits import GroupState


def _asked(events: str) -> str:
    """Of `events`, a letter each, those that were not foretold."""
    state = GroupState(_Group())  # type: ignore[arg-type]  # stands for a process group
    return "".join(event if not state.foretold(event) else "." for event in events)


class _Group(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]  # and can be weakly referred to


def test_steps_that_repeat_ask_nothing() -> None:
    """The first step asks at each event. The same again does not, with evaluation or accumulation in between either,
    once that has been seen."""
    assert _asked("FBFBFBFB") == "FB......"
    for step in ("FB", "FBFBFBxy", "FBEEEE", "ABCABD"):
        assert _asked(step * 6)[3 * len(step) :] == "." * 3 * len(step), step


def test_a_departure_asks() -> None:
    """Whoever leaves something out, runs it twice or in another order asks at once, however long ranks were alike."""
    for step in ("FB", "FBGH", "FBFBxy"):
        alike = step * 9
        for other in {*step, "z"} - {step[0]}:
            assert _asked(alike + other)[-1] == other, (step, other)


def test_ranks_that_fail_forget() -> None:
    """After an error ranks expect nothing that they have not begun since."""
    state: Any = GroupState(_Group())  # type: ignore[arg-type]
    for event in "FBFB":
        state.foretold(event)
    state.forget()
    assert not state.foretold("F") and not state.foretold("B") and state.foretold("F")


def test_numbers_of_models() -> None:
    """Models are numbered in the order in which ranks have compared them; a model's parts share its number."""
    state = GroupState(_Group())  # type: ignore[arg-type]
    models = [[_Group(), _Group()] for _ in range(3)]
    for parts in models:
        state.number_model(parts)
    assert [[state.models[part] for part in parts] for parts in models] == [[1, 1], [2, 2], [3, 3]]


def test_a_graph_is_remembered_by_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks remember thousands of graphs that began; each step would keep a text of a line for each collective."""
    state, texts = GroupState(_Group()), list[str]()  # type: ignore[arg-type]  # stands for a process group
    monkeypatch.setattr(order, "group_named", lambda name: name)
    monkeypatch.setattr(order, "exists", lambda group: True)
    monkeypatch.setattr(order, "state_of", lambda group: state)
    monkeypatch.setattr(order, "follow", lambda pairs, *_: texts.extend(text for _, text in pairs))
    for _ in range(2):
        torch.ops.fsdp_flat.check_ranks([], "gather a\n" * 9, ["0"], 1.0, torch.device("cpu"))
    assert len(texts) == 2 and texts[0] is texts[1]
