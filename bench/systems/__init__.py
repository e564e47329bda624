"""The systems that are compared: functions `(model, blocks, setup) -> Prepared`.

bench/README.md says how each is configured and why that is fair to it.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Setup:
    """What a system is told."""

    device: torch.device
    mesh: DeviceMesh  # all ranks, one dimension
    bf16: bool = False  # compute in bfloat16, reduce in float32; parameters and the optimizer stay in float32
    blocking: bool = False  # collectives block the host unless asked not to: the emulated link on the CPU
    ends: tuple[str, list[str]] = ("", [])  # names of the modules before the blocks and after them
    block_names: list[str] = field(default_factory=list)
    option: str = ""  # what stands behind ":" in the system's name


@dataclass
class Prepared:
    """A model that is ready to train."""

    model: nn.Module
    forward: Callable[..., Tensor]  # from a batch to the loss
    after_backward: Callable[[], None] = lambda: None  # called before the optimizer's step
    scale: float = 1.0  # of the loss before backward, so that gradients are the mean over ranks

    def whole_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor] | None:
        """A batch to the loss, with backward, update and zero_grad, if the system has such a call."""
        return None

    def configured(self, link: str, batch: Sequence[Tensor]) -> None:
        """The link is another one from here on: for systems that plan for it, which may run steps on `batch`."""


@dataclass(frozen=True)
class System:
    """A row of the tables."""

    label: str
    prepare: str  # file and function
    colour: str  # in pictures
    graphs: str = ""  # what is compiled: "", "blocks" or "whole"


SYSTEMS = {
    "unsharded": System("unsharded, torch.compile", "replicated.unsharded", "#9aa5b1", "whole"),
    "ddp": System("DDP, torch.compile", "replicated.ddp", "#8c6d46", "whole"),
    "fsdp1": System("FSDP1", "replicated.fsdp1", "#d4b106"),
    "fsdp2": System("FSDP2", "fsdp2.eager", "#f0a830"),
    "fsdp2_compile": System("FSDP2, blocks compiled", "fsdp2.by_block", "#c8501e", "blocks"),
    "simple_fsdp": System("SimpleFSDP", "simple_fsdp.prepare", "#b0529a", "whole"),
    "ours": System("ours, eager", "ours.eager", "#6db6e8"),
    "ours_blocks": System("ours, blocks compiled", "ours.by_block", "#2f6fbf", "blocks"),
    "ours_compiled": System("ours, compiled", "ours.compiled", "#1fa187", "whole"),
    "ours_planned": System("ours, compiled, planned for the link", "ours.planned", "#0b4f4a", "whole"),
    "ours_step": System("ours, compile_step, planned for the link", "ours.step", "#062b28", "whole"),
}


def find(name: str) -> System:
    """The system `name`, which may carry an option: `ours_compiled:autocast`."""
    return SYSTEMS[name.partition(":")[0]]


def label(name: str) -> str:
    """What a system is called in tables."""
    option = name.partition(":")[2]
    if not option:
        return find(name).label
    kind, _, disabled = option.partition("+")
    return f"{find(name).label}, {kind}" + (f", without {disabled}" if disabled else "")


def prepare(name: str, model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """Let a system take `model` over. Its file is imported only now: some of them need packages of their own."""
    file, function = find(name).prepare.split(".")
    prepared: Prepared = getattr(importlib.import_module(f"bench.systems.{file}"), function)(model, blocks, setup)
    return prepared
