"""What `fsdp_compile.integrations.torchtitan` takes from torchtitan, and stands in for, is as it was when written."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

try:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
except ImportError as error:
    pytest.skip(f"needs torchtitan 0.3 and what it imports: {error}", allow_module_level=True)

from fsdp_compile.integrations.torchtitan import llama3, parallelize, qwen3, sharded

REPLACED = {  # functions that `parallelize` replaces or relies on -> digest of their code
    apply_fsdp_to_decoder: "50236a084d600f8c",
    disable_fsdp_gradient_division: "52b3076e26f55240",
    parallelize_llama: "db2e848ac39b762b",
    parallelize_qwen3: "d269f8f0575c4128",
}


def digest(function: Callable[..., Any]) -> str:
    """Of the code alone: neither comments nor docstrings nor line breaks count."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function)))
    if ast.get_docstring(tree.body[0]) is not None:
        del tree.body[0].body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


@pytest.mark.parametrize("function", REPLACED, ids=lambda each: each.__name__)
def test_code_that_is_replaced(function: Callable[..., Any]) -> None:
    """A release that changes how torchtitan shards fails here: read the change, follow it, and write the new digest."""
    assert digest(function) == REPLACED[function]


@pytest.mark.parametrize("function", [parallelize_llama, parallelize_qwen3], ids=lambda each: each.__name__)
def test_arguments(function: Callable[..., Any]) -> None:
    """torchtitan calls `parallelize` by the names that its own functions have."""
    ours, theirs = (set(inspect.signature(each).parameters) for each in (parallelize, function))
    assert ours == theirs - {"skip_dp"}  # for inference, by other callers than the trainer


@pytest.mark.parametrize(("module", "name"), [(llama3, "llama3_debugmodel"), (qwen3, "qwen3_debugmodel")])
def test_configs(module: Any, name: str) -> None:
    """Config functions and `model_registry` have the same specs but for `parallelize_fn`; torchtitan's stay."""
    config = getattr(module, name)()
    assert config.model_spec.parallelize_fn is parallelize
    assert module.model_registry("debugmodel").parallelize_fn is parallelize
    again = sharded(config)
    assert again is not config and again.model_spec.parallelize_fn is parallelize


def test_refused() -> None:
    """Neither configs nor specs, and models that are parallelized by functions of their own, are named."""
    with pytest.raises(TypeError, match=r"expected a Trainer\.Config, a ModelSpec or a function"):
        sharded("llama3")
    from torchtitan.models.deepseek_v3 import model_registry

    with pytest.raises(ValueError, match=r"parallelized by .*parallelize_deepseekv3"):
        sharded(model_registry("debugmodel"))
