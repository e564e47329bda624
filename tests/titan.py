"""torchtitan's trainer on gloo ranks: cells of a matrix, each a system, a feature and a layout of ranks.

All systems have the same config, the same batches, and the weights that the unsharded model draws from seed 0.

torchrun --nproc-per-node 2 tests/titan.py '{"system": "whole", "feature": "bf16"}' OUT          # one cell
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

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
    failed: str = ""


# --- the side that starts ranks ---------------------------------------------------------------------------------------


def run(cell: Cell) -> Result:
    """Run a cell in processes of its own."""
    ranks = cell.ranks or LAYOUTS[cell.layout][0]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, __file__, json.dumps(asdict(cell)), str(out)]
        done = subprocess.run(command, env=os.environ | environment, cwd=folder, capture_output=True, text=True,
                              timeout=280)  # fmt: skip
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
    assert found.losses
    print(f"{cell}: losses differ by {loss:.1e}, norms by {norm:.1e}")
    return "" if loss <= of_loss and norm <= of_norm else f"losses differ by {loss:.1e}, norms by {norm:.1e}"


def reference(feature: str, layout: str) -> Result:
    """What FSDP2 shows in this layout, or, because torch 2.13's refuses spmd_types, in the same one without them."""
    return run(Cell("fsdp2", feature, UNTYPED.get(layout, layout)))


def rows() -> Iterator[tuple[str, str, Sequence[str]]]:
    """Feature, layout and systems of each line of the table."""
    yield from ((feature, "2 ranks", SYSTEMS) for feature in FEATURES)
    yield from (("moe" if layout == "EP" else "plain", layout, SYSTEMS[:3]) for layout in [*LAYOUTS][1:])


# --- the side of a rank -----------------------------------------------------------------------------------------------


def use_cpu() -> None:
    """Let torchtitan compute on the CPU in this process, before anything else of it is imported."""
    utils: Any = import_module("torchtitan.tools.utils")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    asked = {  # of an accelerator, beside what torch.cpu has
        "get_device_name": lambda _=None: "cpu",
        "get_device_properties": lambda _=None: SimpleNamespace(name="cpu", total_memory=memory),
        "current_device": lambda: 0,
        "memory_stats": lambda _=None: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | asked)


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
    config.metrics.log_freq, config.metrics.disable_color_printing, config.dump_folder = 1, True, os.getcwd()
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


def configured(config: Any, system: str) -> Any:
    """A `Trainer.Config` for one of the systems."""
    from fsdp_compile.integrations.torchtitan import WHOLE, sharded

    os.environ[WHOLE] = "1" if system.startswith("whole") else "0"
    config.compile.enable = system not in ("fsdp2", "eager")
    if system != "fsdp2":
        return sharded(config)
    spec = config.model_spec

    def parallelize(model: Any, **options: Any) -> Any:
        model = spec.parallelize_fn(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # torchtitan's factor of 1.0 is a product before the sum: gloo has none
                module.set_force_sum_reduction_for_comms(True)
        return model

    return replace(config, model_spec=replace(spec, parallelize_fn=parallelize))


@torch.no_grad()
def set_values(trainer: Any) -> None:
    """Give the models the weights that the unsharded model draws on the CPU from seed 0, however they are sharded."""
    torch.manual_seed(0)
    whole = trainer.model_config.build()
    whole.init_weights(buffer_device=None)
    values = dict(whole.named_parameters())
    for part in trainer.model_parts:
        for name, param in part.named_parameters():
            value = values[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")].to(param.dtype)
            is_theirs = type(param.data) is DTensor
            param.copy_(distribute_tensor(value, param.device_mesh, param.placements) if is_theirs else value)


def train(cell: Cell) -> Result:
    """One rank of a cell."""
    trainer = configured(make(cell), cell.system).build()
    set_values(trainer)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.checkpointer.load()
    with mock.patch.object(trainer.metrics_processor, "log") as log:  # of a step: its mean loss, its norm
        while trainer.step < cell.steps:
            trainer.step += 1
            trainer.train_step(batches)
            if not cell.resumes:
                trainer.checkpointer.save(trainer.step, last_step=False)
    dist.barrier()
    trainer.close()
    return Result([each.args[1] for each in log.mock_calls], [each.args[3] for each in log.mock_calls])


def main() -> None:
    """A rank."""
    use_cpu()
    try:
        result = train(Cell(**json.loads(sys.argv[1])))
    except Exception as error:
        traceback.print_exc()
        result = Result(failed=f"{type(error).__name__}: {error}")
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(asdict(result)))
    if result.failed:
        os._exit(1)  # other ranks may wait for this one


if __name__ == "__main__":
    main()
