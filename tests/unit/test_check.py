"""What `check` takes for equal, for rounding and for a fault, what it names, and what it refuses."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile.compare.case import default_loss
from fsdp_compile.compare.modules import Step, first
from fsdp_compile.compare.training import Way
from fsdp_compile.compare.values import Key, differences
from fsdp_compile.compare.verdicts import Fault, Report, Row
from fsdp_compile.tools.check import Batch, check
from fsdp_compile.tools.commands.check import ways

KEY = Key("gradient", "blocks.0.weight")


def apart(found: Tensor, expected: Tensor, allowed: float = 0.0) -> Any:
    return next(iter(differences({KEY: found}, {KEY: expected}, {KEY: allowed})), None)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_equal_bits(dtype: torch.dtype) -> None:
    """Equal tensors have no difference, NaNs included; one other element is found, with both values and its place."""
    expected = torch.ones(2, 3).to(dtype)
    assert apart(expected.clone(), expected) is None
    found = expected.clone()
    found[1, 2] = 0
    assert apart(found, expected).is_fault and apart(found, expected).at == (1, 2)
    if dtype.is_floating_point:
        found[1, 2] = expected[1, 2] = float("nan")
        assert apart(found, expected) is None
        found[1, 2] = 1
        assert apart(found, expected).is_fault


def test_rounding() -> None:
    """One unit in the last place is rounding; so is what the unsharded model differs by, up to sixteen times."""
    expected = torch.ones(4)
    assert not apart(expected + torch.finfo(torch.float32).eps, expected).is_fault
    assert apart(expected + 1e-3, expected).is_fault and not apart(expected + 1e-3, expected, 1e-4).is_fault
    assert apart(-torch.zeros(4), torch.zeros(4)).error == 0.0


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("gradient", "key.bias", "query.bias"),
        ("state", "exp_avg of key.bias", "exp_avg of query.bias"),
        ("gradient of the input", "`key`", "`query`"),
    ],
)
def test_what_cancels(kind: str, name: str, other: str) -> None:
    """Gradients and moments that are zero but for rounding differ by rounding of the others of their kind, no more;
    values of another entry or dtype, and parameters, give no such unit."""
    noise, large = torch.full((3,), 1e-11), torch.tensor([0.5, 0.01])
    key, beside = Key(kind, name), Key(kind, other)

    def faults(off: float, key: Key = key, beside: Key = beside, large: Tensor = large) -> list[Key]:
        expected, found = {key: noise, beside: large}, {key: noise + off, beside: large}
        return [each.key for each in differences(found, expected, {}) if each.is_fault]

    assert faults(3e-11) == [] and faults(2e-7) == [key]
    assert faults(3e-11, large=large.double()) == [key]
    assert faults(3e-11, beside=Key("state", "step of key.bias")) == [key]
    assert faults(3e-11, Key("parameter", "a"), Key("parameter", "b")) == [Key("parameter", "a")]


@pytest.mark.parametrize(
    ("found", "expected"),
    [(None, torch.ones(2)), (torch.ones(3), torch.ones(2)), (torch.ones(2).double(), torch.ones(2))],
)
def test_what_is_not_there(found: Any, expected: Tensor) -> None:
    """A missing value, another shape and another dtype are faults, however much rounding explains."""
    assert differences({} if found is None else {KEY: found}, {KEY: expected}, {KEY: 9.0})[0].is_fault
    assert differences({KEY: expected}, {}, {})[0].is_fault


def _step(changed: Sequence[str] = (), hidden: str = "") -> Step:
    """A step of two layers, in which some values are others, and the events of a layer are not shown."""
    events = ["input of `a`", "output of `a`", "output of `b`", "gradient of the input of `b`"]
    values = {text: torch.tensor(2.0 if text in changed else 1.0) for text in [*events, "gradient of a.weight"]}
    keys = {text: Key(*text.rsplit(" of ", 1)) for text in values}
    shown = {keys[text]: values[text] for text in events if not hidden or hidden not in text}
    return Step(shown, {KEY._replace(name="a.weight"): values["gradient of a.weight"]})


@pytest.mark.parametrize(
    ("changed", "hidden", "found"),
    [
        (["output of `a`", "output of `b`", "gradient of a.weight"], "", (1, "output of `a`")),
        (["output of `a`", "output of `b`", "gradient of a.weight"], "`a`", (2, "output of `b`")),
        (["gradient of the input of `b`", "gradient of a.weight"], "", (3, "gradient of the input of `b`")),
        (["gradient of the input of `b`", "gradient of a.weight"], "`b`", (4, "gradient of a.weight")),
        ([], "`a`", None),
    ],
)
def test_what_differs_first(changed: list[str], hidden: str, found: tuple[int, str] | None) -> None:
    """In the order of the unsharded step, also by a way that does not show all modules."""
    where = first(_step(changed, hidden), _step(), {})
    assert (where and (where[0], str(where[1].key))) == found


def test_the_report_is_json() -> None:
    """Without numbers that JSON does not have."""
    fault = Fault(1, 0, differences({}, {KEY: torch.ones(2)}, {})[0])
    report = Report({"ranks": 2}, (Row("eager", 2, "differs", fault=fault), Row("step", 2, "equal")))
    found = json.loads(report.to_json())
    assert not found["holds"] and found["rows"][0]["fault"]["difference"]["error"] == "inf"
    assert "step 1, rank 0: gradient of blocks.0.weight: expected a tensor" in str(report)


def test_loss() -> None:
    """The output's own, or one that gives a last normalization gradients other than zero."""
    x = torch.randn(3, 8, requires_grad=True)
    assert default_loss({"loss": x.sum(), "logits": x}).item() == x.sum().item()
    default_loss(nn.functional.layer_norm(x, (8,))).backward()
    assert x.grad is not None and x.grad.abs().max() > 1e-3
    with pytest.raises(ValueError, match="loss: expected an output"):
        default_loss(torch.ones(2))


def test_no_backend_is_taken_for_a_misspelt_way() -> None:
    """What is refused without asking torch is none of its backends."""
    for name in torch.compiler.list_backends(exclude_tags=()):
        assert ways(f"eager,blocks:{name}") == ["eager", f"blocks:{name}"]


def test_batches() -> None:
    """Tensors, tuples, dicts and pairs are arguments of a forward."""
    x = torch.ones(1)
    assert Batch.of(x).args == Batch.of([x]).args == Batch.of(([x], {})).args == (x,)
    assert Batch.of({"x": x}).kwargs == Batch.of(((), {"x": x})).kwargs == {"x": x}
    with pytest.raises(TypeError, match="batches: expected a Batch"):
        Batch.of(3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"ways": ["eagr"]}, "ways: expected eager"),
        ({"ways": ["aot_eager:inductor"]}, "ways: expected eager"),
        ({"ranks": 0}, "ranks: expected a whole number"),
        ({"batches": []}, "batches: expected at least one"),
        ({"loss": lambda output: output.sum()}, "loss: expected something that can be pickled"),
    ],
)
def test_refusals(given: dict[str, Any], match: str) -> None:
    """Each names the argument."""
    make: Callable[[], nn.Module] = nn.Identity
    with pytest.raises(ValueError, match=match):
        check(make, **{"batches": [torch.ones(2)], **given})
    assert Way.of("step:inductor") == Way("step:inductor", "step", "inductor")
