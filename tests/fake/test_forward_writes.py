"""A forward that writes to its own unsharded parameters, which are a copy: refused by name where versions tell."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from models import Residual
from refusing import units
from torch import Tensor, nn

from fsdp_compile import fully_shard
from fsdp_compile.core.unit import Phase


class _Writes(Residual):
    """Changes a parameter of its own, in a context."""

    within: AbstractContextManager[None] = nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        with self.within:
            self.down.weight.mul_(2)
        return super().forward(x)


REFUSED = r"forward changed parameter 1\..* of its own unit, and the change would be lost"


def _model() -> nn.Module:
    return fully_shard(nn.Sequential(Residual(7, 9), _Writes(7, 9)), auto_wrap_policy={Residual, _Writes})


@pytest.mark.parametrize("records", [True, False])
def test_a_counted_write_is_refused(records: bool) -> None:
    """In a forward with gradients and in one without: RuntimeError with the parameter; the unit is idle then."""
    model = _model()
    model[1].within = torch.no_grad()
    with torch.set_grad_enabled(records), pytest.raises(RuntimeError, match=REFUSED):
        model(torch.randn(3, 7))
    assert {unit.phase for unit in units(model)} == {Phase.SHARDED}


def test_a_write_that_autograd_refuses() -> None:
    """Autograd's error says nothing of parameters: ours takes its place, and names it as the cause."""
    with pytest.raises(RuntimeError, match=REFUSED) as caught:
        _model()(torch.randn(3, 7))
    assert "is being modified inplace" in str(caught.value.__cause__)


def test_inference_counts_no_versions() -> None:
    """A forward in inference mode, whose tensors have no version counters, runs as any other."""
    model = fully_shard(nn.Sequential(Residual(7, 9), nn.Linear(7, 2)), auto_wrap_policy={Residual})
    with torch.inference_mode():
        assert model(torch.randn(3, 7)).shape == (3, 2)
    assert {unit.phase for unit in units(model)} == {Phase.SHARDED}
