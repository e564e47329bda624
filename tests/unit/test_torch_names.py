"""`fsdp-compile selfcheck --names`: the private names of torch that the `_torch.py` files use, read from them."""

import re
from pathlib import Path

import pytest
import torch

from fsdp_compile import torch_names
from fsdp_compile.tools.cli import main
from fsdp_compile.torch_names import TESTED_TORCH, check, check_all, is_untested

ROOT = Path(__file__).parents[2]


def test_this_torch_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    """All names and arguments are found, in each `_torch.py`, and the command says so."""
    assert main(["selfcheck", "--names"]) == 0
    printed = capsys.readouterr().out
    files = {path.relative_to(ROOT / "fsdp_compile").as_posix() for path in ROOT.glob("fsdp_compile/*/_torch.py")}
    assert files == set(check_all()) and all(file in printed for file in files)
    assert printed.startswith(f"torch {torch.__version__}; tested on 2.11, ") and printed.endswith("all found\n")
    assert {"torch._C._current_autograd_node", "torch.distributed.device_mesh.DeviceMesh._concatenate"} <= check_all()[
        "core/_torch.py"
    ].names


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("from torch._dynamo.eval_frame import skip_core", "line 1: torch._dynamo.eval_frame.skip_core is missing"),
        ("def f():\n    from torch._inductor.luck import x", "line 2: torch._inductor.luck.x is missing"),
        ("import torch\ntorch._C._current_graph()", "line 2: torch._C._current_graph is missing"),
        ("from torch import Tensor as T\nx = T._make_wrapper", "line 2: torch.Tensor._make_wrapper is missing"),
        ("from torch._inductor import ir as _ir\n_ir._WaitNut", "line 2: torch._inductor.ir._WaitNut is missing"),
        (
            "from torch.optim import Optimizer\ndef f(of: Optimizer):\n    return of._optimizer_step_hooks",
            "line 3: torch.optim.optimizer.Optimizer._optimizer_step_hooks is missing",
        ),
        (
            "from torch._inductor.compile_fx import compile_fx\ncompile_fx(1, 2, patches=3)",
            "line 2: compile_fx(",
        ),
        ("from torch._dynamo.eval_frame import skip_code\nskip_code()", "line 2: skip_code("),
    ],
)
def test_what_is_missing_is_reported(code: str, fault: str) -> None:
    """A name that is gone, and a function with other arguments, however the file spells them."""
    assert [each[: len(fault)] for each in check(code).faults] == [fault]


def test_the_command_fails_and_names_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something missing, the exit status is 1, and its file and line are printed."""
    monkeypatch.setattr(torch_names, "check_all", lambda: {"core/_torch.py": check("from torch import _gone")})
    assert main(["selfcheck", "--names"]) == 1
    assert re.search(r"core/_torch\.py .* 1 faults\n    line 1: torch\._gone is missing", capsys.readouterr().out)


def test_versions_are_the_same_everywhere() -> None:
    """The versions that count as tested are those of the documentation and of each `_torch.py`."""
    words = f"torch {', '.join(TESTED_TORCH[:-1])} and {TESTED_TORCH[-1]}"
    documents = ("README.md", "docs/upgrading_torch.md", "docs/stability.md")
    pages = [*(ROOT / name for name in documents), *ROOT.glob("fsdp_compile/*/_torch.py")]
    assert [page for page in pages if words not in " ".join(page.read_text().split())] == []
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in TESTED_TORCH


def test_what_counts_as_untested() -> None:
    """A newer minor version does, a newer build of a tested one, or an old one, does not."""
    assert [is_untested(f"{TESTED_TORCH[-1]}{rest}") for rest in (".0", ".9+cu130", "")] == [False] * 3
    assert not is_untested("2.12.1") and is_untested("2.99.0.dev20271124+cpu") and is_untested("3.0.0")
