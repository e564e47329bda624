"""What importing the package costs and binds, and how soon the command answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile
from fsdp_compile.checkpoint.convert import TARGETS
from fsdp_compile.tools.commands.checkpoint import FORMATS

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1])}


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(*statements: str) -> list[set[str]]:
    """Names of the modules that are loaded in a process when it has run each of `statements`."""
    script = "".join(f"{each}\nprint(json.dumps(list(sys.modules)))\n" for each in statements)
    return [set(json.loads(line)) for line in run("-c", f"import json, sys\n{script}").splitlines()]


def test_import_is_light() -> None:
    """`import fsdp_compile` loads neither Inductor nor `torch.testing`, and nothing else of torch either."""
    (loaded,) = loaded_after("import fsdp_compile")
    assert not [name for name in loaded if name.split(".")[0] == "torch"]


SHARD = """
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = fully_shard(torch.nn.Linear(3, 2))
"""
TRACE = """
torch.compile(model, backend="eager")(torch.ones(4, 3))
assert type(torch._inductor.config.joint_custom_post_pass).__name__ == "Pipeline"
"""
EXPLAIN = """
import fsdp_compile.explain.report
from fsdp_compile import explain
assert explain is fsdp_compile.explain is fsdp_compile.api.explain, explain
"""


def test_passes_are_loaded_by_the_first_trace() -> None:
    """`fully_shard` is imported and called without the passes, the planner and the part of Inductor that compiles.

    Dynamo itself loads some of Inductor, and torch.distributed.fsdp some of `torch.testing`. Tracing loads the passes.
    """
    before, loaded, sharded, traced, _ = loaded_after(
        "import torch._dynamo, torch.distributed.fsdp",
        "from fsdp_compile import FSDPModule, FullyShardedDataParallel, fully_shard",
        SHARD,
        TRACE,
        EXPLAIN,
    )
    assert "fsdp_compile.api" in loaded
    assert not [name for name in loaded if name.startswith("fsdp_compile.explain.")]
    for each in (loaded, sharded):
        assert not [name for name in each if name.startswith(("fsdp_compile.passes", "torch._inductor.graph"))]
        assert "torch._inductor.compile_fx" not in each
    assert "fsdp_compile.passes.inductor" in traced
    assert not [name for name in loaded - before if name.startswith(("torch._inductor", "torch.testing"))]


def test_numbers_load_no_torch() -> None:
    """Torch is not loaded where numbers alone are computed: by plans, costs, and options of the command line."""
    (loaded,) = loaded_after(
        "import contextlib, io, fsdp_compile.passes.plan.schedule\n"
        "from fsdp_compile.tools.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['explain', '--hardware', 'list'])"
    )
    assert {"fsdp_compile.explain.prediction", "fsdp_compile.passes.cost.hardware"} <= loaded
    assert not [name for name in loaded if name.split(".")[0] == "torch"]


MISTAKES = {
    "explain model.py:mkae": "expected a function mkae() without arguments, found none; did you mean make?",
    "explain none.py:make": "none.py: expected a Python file, found none",
    "explain model.py:make --hardware h1000": "hardware: expected one of a100-40, ",
    "explain model.py:make --strategy HYBRID_SHARD --shard-size 3": "shard_size: expected a divisor of world_size 8",
    "plan model.py:make --link ethernet --world-size 8": "link: expected one of h100-nvlink, ",
    "plan broken.py:make --link h100-nvlink --world-size 8": "expected a file that runs, found SyntaxError",
    "check model.py:make --ways eager,aot_eagre": "did you mean aot_eager?",
    "check imports.py:make": "found ModuleNotFoundError: No module named 'transformerz'",
    "compare model.py:make --json none/x": "none/x: expected its folder to exist",
}


def test_mistakes_need_no_torch(tmp_path: Path) -> None:
    """A name or option that is wrong is told at once: the file is read, and nothing that it imports is imported."""
    for name, text in {
        "model": "import torch\nif torch.ones(1):\n    def make(): ...\n",
        "broken": "def make(:",
        "imports": "import torch, transformerz\ndef make(): ...\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    script = """if True:
        import sys
        from fsdp_compile.tools.cli import main
        for line in sys.stdin:
            try: status = main(line.split())
            except SystemExit as error: status = error.code
            print("status", status, "torch" in sys.modules, file=sys.stderr)
    """
    asked = "\n".join(MISTAKES)
    done = subprocess.run([sys.executable, "-c", script], input=asked, cwd=tmp_path, capture_output=True, text=True)
    answers = done.stderr.split("status 2 False\n")
    assert len(answers) == len(MISTAKES) + 1 and not done.stdout, done.stderr
    for answer, expected in zip(answers, MISTAKES.values(), strict=False):
        assert expected in answer.splitlines()[-1]


def test_all_names() -> None:
    """Each public name can be imported and is listed by `dir`; other names are errors as of any module."""
    assert all(getattr(fsdp_compile, name) is not None for name in fsdp_compile.__all__)
    assert set(fsdp_compile.__all__) <= set(dir(fsdp_compile))
    with pytest.raises(AttributeError, match="module 'fsdp_compile' has no attribute 'shard'"):
        fsdp_compile.shard  # noqa: B018  (looking it up raises)


def test_formats() -> None:
    """The command knows the formats without importing what writes them."""
    assert set(FORMATS) == set(TARGETS)


@pytest.mark.nightly
def test_graphs_of_other_shardings_find_what_they_call() -> None:
    """Who only compiles with our backend, and shards nothing, has the bodies of the operators that passes insert."""
    script = """if True:
        import torch
        import fsdp_compile.passes.inductor
        print(torch.ops.fsdp_flat.check_ranks([], "", [], 1.0, torch.device("cpu")).numel())
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "0\n", run.stderr[-2000:]


def test_it_runs_without_an_installation(tmp_path: Path) -> None:
    """A checkout that is only on the path has a version that says so, and no file asks for that in another way."""
    package = Path(fsdp_compile.__file__).parent
    (tmp_path / "fsdp_compile").symlink_to(package)
    command = [sys.executable, "-S", "-m", "fsdp_compile", "--version"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "fsdp-compile 0+unknown\n", done.stderr
    asking = [path.name for path in package.rglob("*.py") if "importlib.metadata" in path.read_text()]
    assert asking == ["__init__.py"]
