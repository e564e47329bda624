"""Parameters that are tensor subclasses around other tensors: taken apart, and put together again."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compile.core.inner_params import InnerParams, put_back, take_apart


def test_what_is_taken_apart_is_put_back() -> None:
    """Under its name, in its place among others, as one parameter in all modules that share it; nothing else stays."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    weight = nn.Parameter(TwoTensor(first, second), requires_grad=False)
    for layer in model:
        layer.weight = weight
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    take_apart(model, {weight: InnerParams(weight, torch.device("cpu"))})
    assert list(model[0]._parameters) == ["_weight_a", "_weight_b", "bias"]
    put_back(model)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model[0].weight is model[1].weight and not model[0].weight.requires_grad
    assert torch.equal(model[0].weight.a, first) and torch.equal(model[0].weight.b, second)
