"""torchtitan's trainer on gloo ranks: cells of a matrix, each a system, a feature and a layout of ranks.

python tests/titan.py                    # all cells, as a table; needs torchtitan 0.3.0 and torchao
torchrun --nproc-per-node 2 tests/titan.py '{"system": "whole", "feature": "bf16"}' OUT          # one of them
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
VOCABULARY, LENGTH, ROWS = 2048, 64, 4  # of tokens, of sequences, and of a step's global batch
SYSTEMS = ("eager", "blocks", "whole", "whole-inductor")
FEATURES = ("plain", "selective", "full", "chunked", "accumulation", "bf16", "tied", "float8")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 rank": (1, {}),
    "spmd_types": (2, {"spmd_backend": "spmd_types"}),
    "spmd_types, 1 rank": (1, {"spmd_backend": "spmd_types"}),
    "full_dtensor": (2, {"spmd_backend": "full_dtensor"}),
    "HSDP": (4, {"data_parallel_replicate_degree": 2}),
    "HSDP, full_dtensor": (4, {"data_parallel_replicate_degree": 2, "spmd_backend": "full_dtensor"}),
    "TP": (4, {"tensor_parallel_degree": 2}),
    "TP, full_dtensor": (4, {"tensor_parallel_degree": 2, "spmd_backend": "full_dtensor"}),
    "TP, spmd_types": (4, {"tensor_parallel_degree": 2, "spmd_backend": "spmd_types"}),
    "EP": (2, {"expert_parallel_degree": 2}),
}
UNTYPED = {"spmd_types": "2 ranks", "spmd_types, 1 rank": "1 rank", "TP, spmd_types": "TP"}


@dataclass(frozen=True)
class Cell:
    """A run.

    Attributes:
        system: one of `SYSTEMS`, which compile by aot_eager unless their name says otherwise, or fsdp2.
        feature: one of `FEATURES`, or moe.
        layout: one of `LAYOUTS`.
        steps: the last step.
        ranks: other than the layout's; 0: those.
        saves: the folder for a checkpoint after each second step, or, with `resumes`, where one is read; empty: none.
        resumes: whether it begins with that and saves nothing.
        asynchronous: whether it is written in the background.
    """

    system: str
    feature: str = "plain"
    layout: str = "2 ranks"
    steps: int = 4
    ranks: int = 0
    saves: str = ""
    resumes: bool = False
    asynchronous: bool = False


@dataclass
class Result:
    """What a run has shown; `failed`: the last line of its error, and nothing else is known."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)  # of absolute values of each parameter
    failed: str = ""


# --- the side that starts ranks ---------------------------------------------------------------------------------------


def environment(*paths: str) -> dict[str, str]:
    """Variables of processes that compute on the CPU; `paths`: for imports."""
    paths = (str(ROOT), *paths, os.environ.get("PYTHONPATH", ""))
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)}


def run(cell: Cell) -> Result:
    """Run a cell in processes of its own."""
    ranks = cell.ranks or LAYOUTS[cell.layout][0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, __file__, json.dumps(asdict(cell)), str(out)]
        done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=280)
        if not out.exists():
            return Result(failed=f"the ranks ended: {done.stderr[-3000:]}")
        return Result(**json.loads(out.read_text()))


BARS = {  # feature: of losses, of norms; where weights are tied, norms of fp32 round, and clipping acts by them
    "bf16": (1e-4, 1e-3),
    "tied": (2.0**-21, 2.0**-19),
    # All gradients of two steps are equal bits, the norm of the second one has another last digit, and so has what is
    # clipped by it; from then on the router amplifies that.
    "moe": (2.0**-21, 2.0**-17),
}
INDUCTOR = {"float8": (1e-5, 1e-4)}  # a product that rounds otherwise may become the next number of float8


def difference(cell: Cell, found: Result, expected: Result) -> str:
    """What differs from FSDP2's result by more than the bar allows, or nothing; why a cell failed."""
    if found.failed or expected.failed:
        return found.failed or f"fsdp2: {expected.failed}"
    of_loss, of_norm = BARS.get(cell.feature, (0.0, 2**-23))
    if cell.system == "whole-inductor":
        least = INDUCTOR.get(cell.feature, (1e-5, 1e-5))
        of_loss, of_norm = max(of_loss, least[0]), max(of_norm, least[1])
    loss, norm = (max(abs(a - b) / abs(b) for a, b in zip(*both, strict=True))
                  for both in ((found.losses, expected.losses), (found.norms, expected.norms)))  # fmt: skip
    assert found.losses and found.sums.keys() == expected.sums.keys()
    is_equal = loss <= of_loss and norm <= of_norm
    return "" if is_equal else f"{cell.system}: losses differ by {loss:.1e}, norms by {norm:.1e}"


def reference(feature: str, layout: str) -> Result:
    """What FSDP2 shows in this layout, or, because torch 2.13's refuses spmd_types, in the same one without them."""
    return run(Cell("fsdp2", feature, UNTYPED.get(layout, layout)))


def rows() -> Iterator[tuple[str, str, Sequence[str]]]:
    """Feature, layout and systems of each line of the table."""
    yield from ((feature, "2 ranks", SYSTEMS) for feature in FEATURES)
    yield from (("moe" if layout == "EP" else "plain", layout, SYSTEMS[:3]) for layout in [*LAYOUTS][1:])


def table() -> Iterator[str]:
    """A line for each feature and layout: `=` where a system is FSDP2's equal, else `*`, and below it why not."""
    yield f"{'':24}" + "".join(f"{system:>16}" for system in SYSTEMS)
    for feature, layout, systems in rows():
        expected = reference(feature, layout)
        cells = [Cell(system, feature, layout) for system in systems]
        found = [difference(cell, run(cell), expected) for cell in cells]
        yield f"{feature if layout == '2 ranks' else layout:24}" + "".join(
            f"{'*' if each else '=':>16}" for each in found
        )
        yield from sorted({f"    * {each}" for each in found if each})


# --- the side of a rank -----------------------------------------------------------------------------------------------


class _Cpu:
    """`torch.cpu`, and what torchtitan asks of an accelerator beside that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, _device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, _device: Any = None) -> Any:
        return SimpleNamespace(name="cpu", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def current_device(self) -> int:
        return 0

    def memory_stats(self, _device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, _device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...


def use_cpu() -> None:
    """Let torchtitan compute on the CPU in this process, before anything else of it is imported."""
    utils: Any = import_module("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", _Cpu()


def make(cell: Cell) -> Any:
    """The `Trainer.Config` of a cell."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3 import config_registry, model_registry
    from torchtitan.models.qwen3 import config_registry as qwen3

    if cell.feature == "moe":
        config = qwen3.qwen3_moe_debug()
    else:
        config = config_registry.llama3_debugmodel()
        float8 = [Float8LinearConverter.Config(emulate=True)] if cell.feature == "float8" else None
        config.model_spec = model_registry("debugmodel", converters=float8)
    model, training = config.model_spec.model, config.training
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex_attention does not train on a CPU
    if cell.feature == "tied":
        model.enable_weight_tying = True
        model.tok_embeddings.param_init = {"weight": skip_param_init}
    if cell.feature != "chunked":
        config.loss = CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    config.activation_checkpoint = {"selective": SelectiveAC.Config(), "full": FullAC.Config()}.get(cell.feature)
    ranks, options = LAYOUTS[cell.layout]
    config.parallelism.spmd_backend = "partial_dtensor"
    for name, value in options.items():
        assert hasattr(config.parallelism, name)
        setattr(config.parallelism, name, value)
    beside = options.get("tensor_parallel_degree", 1)
    training.local_batch_size = ROWS * beside // (cell.ranks or ranks)
    training.seq_len, training.steps, training.disable_cuda_graphs = LENGTH, 8, True
    if cell.feature == "accumulation":
        training.global_batch_size, training.local_batch_size = ROWS, training.local_batch_size // 2
    training.mixed_precision_param = "bfloat16" if cell.feature == "bf16" else "float32"
    config.optimizer.implementation = "foreach"
    config.compile.components = ["model"]
    config.compile.backend = "inductor" if cell.system == "whole-inductor" else "aot_eager"
    config.dataloader, config.tokenizer = parts()
    config.validator.enable = config.debug.enable_structured_logging = False
    config.checkpoint.enable, config.checkpoint.interval = bool(cell.saves), 2
    config.checkpoint.folder = cell.saves or "checkpoint"
    config.checkpoint.async_mode = "async" if cell.asynchronous else "disabled"
    return config


def parts() -> tuple[Any, Any]:
    """Configs of a loader, whose global batch does not depend on the number of ranks, and of a tokenizer."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Drawn(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.rows, self.rank, self.size, self.done = dp_world_size * local_batch_size, dp_rank, local_batch_size, 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                tokens = torch.randint(VOCABULARY, (self.rows, LENGTH + 1),
                                       generator=torch.Generator().manual_seed(self.done))  # fmt: skip
                self.done += 1
                mine = tokens[self.rank * self.size : (self.rank + 1) * self.size]
                positions = torch.arange(LENGTH).expand(self.size, -1).contiguous()
                yield {"input": mine[:, :-1].contiguous(), "positions": positions}, mine[:, 1:].contiguous()

        def state_dict(self) -> dict[str, int]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.done = state["done"]

    class Bytes(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

        def get_vocab_size(self) -> int:
            return VOCABULARY

    return Drawn.Config(), Bytes.Config()


def train(cell: Cell, folder: str) -> Result:
    """One rank of a cell."""
    from titan_steps import Steps, configured, set_values

    system = {"whole-inductor": "whole"}.get(cell.system, cell.system)
    trainer = configured(make(cell), system, folder).build()
    set_values(trainer)
    step = Steps(trainer)
    trainer.checkpointer.load()
    while trainer.step < cell.steps:
        step()
        if not cell.resumes:
            trainer.checkpointer.save(trainer.step, last_step=False)
    sums = {}
    for part in trainer.model_parts:
        for name, param in part.named_parameters():
            whole = param.full_tensor() if hasattr(param, "full_tensor") else param
            sums[name] = whole.detach().double().abs().sum().item()
    dist.barrier()
    trainer.close()
    return Result([each.loss for each in step.records], [each.norm for each in step.records], sums)


def main() -> None:
    """A rank, if a cell is given; else the table."""
    if not sys.argv[1:]:
        for line in table():
            print(line, flush=True)
        return
    use_cpu()
    try:
        result = train(Cell(**json.loads(sys.argv[1])), os.getcwd())
    except Exception as error:
        traceback.print_exc()
        result = Result(failed=f"{type(error).__name__}: {error}")
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(asdict(result)))
    if result.failed:
        os._exit(1)  # other ranks may wait for this one


if __name__ == "__main__":
    main()
