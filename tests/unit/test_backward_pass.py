"""What is left to the end of a backward pass."""

from unittest import mock

import pytest
import torch

from fsdp_compile.core.backward_pass import BackwardPass, _running, running_backward


def test_what_is_asked_once() -> None:
    """What many units ask for the same thing happens once in a pass, at the first one's place among other requests;
    things are told apart by identity; and the next pass begins anew."""
    calls, one, other = mock.Mock(), [1], [1]
    backward = BackwardPass()
    for _ in range(2):
        for thing, call in ((one, calls.one), (one, calls.again), (other, calls.other)):
            backward.at_end_once(thing, call)
        backward.at_end(calls.last)
        backward.end()
        assert calls.mock_calls == [mock.call.one(), mock.call.other(), mock.call.last()]
        calls.reset_mock()


def test_an_end_that_does_not_come() -> None:
    """After a failure nothing that was left to the end happens, but what undoes it, in the same order."""
    calls, backward = mock.Mock(), BackwardPass()
    backward.begun.add(calls)
    backward.results[calls] = []
    backward.at_end(calls.first, if_failed=calls.undo)
    backward.at_end(calls.second)
    backward.at_end_once(calls, calls.third)
    backward.at_end(calls.fourth, if_failed=calls.undo_more)
    backward.fail()
    assert calls.mock_calls == [mock.call.undo(), mock.call.undo_more()]
    assert not backward.begun and not backward.results
    backward.at_end_once(calls, calls.third)
    backward.end()
    assert calls.mock_calls[2:] == [mock.call.third()]


def test_an_end_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception before the end begins undoes what was left to it, and no pass is left."""
    calls, value = mock.Mock(), torch.ones(1, requires_grad=True) * 2
    value.register_hook(lambda _: running_backward().at_end(calls.last, calls.undo))  # type: ignore[union-attr]
    monkeypatch.setattr("fsdp_compile.core.backward_pass._end_pass", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        value.backward()
    assert calls.mock_calls == [mock.call.undo()] and not _running
